"""The embedded engine: requests batched continuously over a ForServing model. It chooses rows and makes no number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from zoo.common.compilations import watch
from zoo.common.engine.changes import Changes, driving
from zoo.common.engine.pages import PagePool
from zoo.common.engine.request import Request, kind_of, params_of_sample
from zoo.common.engine.requests import Requests
from zoo.common.engine.runner import Runner
from zoo.common.engine.scheduler import Scheduler
from zoo.common.engine.sizing import MAX_BATCH, check_size, default_sizes
from zoo.common.engine.text import Increments, Texts, is_chat
from zoo.common.engine.weights import WeightsWatch, check_model, read_weights
from zoo.common.fingerprint import Fingerprint
from zoo.common.memory import ServingMemory
from zoo.common.program import parse_dtype
from zoo.common.reading import shown
from zoo.common.rehearsal import rehearse
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.rows import is_whole
from zoo.common.serving import ForServing
from zoo.common.threads import suited

MODES = ("recompute", "keep")
Prompt = Sequence[int] | Tensor | str | Sequence[Mapping[str, str]]  # token ids, a text, or the messages of a chat
RELEASED = (2, 1)  # pages and slots of an engine that has handed its memory back: the least that there can be


@dataclass
class Stats:
    """Counts since the engine was made. Rows are pushed tokens; `graph_rows` are those of `prefill_rows` that a CUDA graph served.

    compilations  kernel variants that were compiled, or loaded for the first time, in this process after `rehearse`; without one 0
    """

    steps: int = 0
    graph_steps: int = 0
    decode_rows: int = 0
    prefill_rows: int = 0
    graph_rows: int = 0
    reused_rows: int = 0
    preemptions: int = 0
    compilations: int = 0


@dataclass(frozen=True)
class DrawnToken:
    """One token of a stream.

    prompt, sample     which of the prompts, and which of its `n` samples
    index              its place among the drawn tokens of its request
    token              its id
    log_prob, filtered_log_prob
                       as in the completion
    text               what it adds; "" while a character is incomplete, None for a prompt of token ids without stop strings. A stop string
                       that ends the request is among what was said, the completion's text leaves it out
    completion         on the last token of its request: the whole record
    """

    prompt: int
    sample: int
    index: int
    token: int
    log_prob: float
    filtered_log_prob: float
    text: str | None
    completion: Completion | None


class Engine:
    """Continuous batching with paged memory, chunked prefill, prefix reuse and preemption; none of them moves a byte.

    pages         of memory, one of them reserved; by default what fits beside the slots (80 % of free GPU memory, 2 GiB on a CPU)
    page_size     tokens per page; by default the model's
    max_batch     requests that hold memory at once; with `pages` left out and state beside them (recurrent layers) only so many
                  that what the others than the first take, slots and snapshots, leaves half of the room for pages
    chunk_rows    prompt rows pushed per step, over all requests; sequences that decode push one row each besides
    prefix_cache  full pages stay readable for requests that begin with the same tokens under the same weights
    snapshot_stride
                  where sequences hold state beside their pages (recurrent layers), a prefix is reused up to a snapshot of it:
                  one is taken every so many tokens and at the end of a prompt's last whole chunk; a push ends there
    graphs        decode by CUDA graph, and prefills of up to a chunk, of sequences within one key segment; by default on a GPU
    seed          where the fresh seeds of samples without one come from: engines with one seed, asked the same, answer the same.
                  By default the system's randomness
    progress      `run` and `generate` show a bar
    tokenizer     a folder with tokenizer.json, for prompts that are text or chats and for stop strings; by default the folder that the
                  model was loaded from

    ValueError, naming the number, for a size below 1, a stride that isn't whole chunks, graphs without a GPU, a model that is no
    ForServing, weights whose writes torch does not count (those that want gradients, for fused optimizers, or were made under
    inference mode), or, where `pages` is left out, no room for a single request's state and page.

    An engine is for one thread at a time: a call from a second one while the first is inside is refused (ValueError).
    Whatever a call is interrupted by, Ctrl-C included, the next one finds every request in a queue and every page free or owned:
    requests then push their rows again, an `add` or `generate` that broke off has left nothing queued.

    Weights that were written or replaced behind the engine are refused at the next step, by identity, address and torch's
    version counter. A write that moves none of them (through `.data`, or by a kernel of yours) can't be seen: call
    `model.weights_changed()` and `update_weights([])` after it.
    """

    def __init__(
        self,
        model: ForServing,
        *,
        pages: int | None = None,
        page_size: int | None = None,
        max_batch: int = MAX_BATCH,
        chunk_rows: int = 2048,
        prefix_cache: bool = True,
        snapshot_stride: int = 1024,
        graphs: bool | None = None,
        seed: int | None = None,
        progress: bool = False,
        tokenizer: str | Path | None = None,
    ) -> None:
        sizes = {"pages": pages, "page_size": page_size, "max_batch": max_batch, "chunk_rows": chunk_rows}
        for name, size in {**sizes, "snapshot_stride": snapshot_stride}.items():
            if size is not None or name not in ("pages", "page_size"):
                check_size(name, size)
        if not isinstance(prefix_cache, bool):
            raise ValueError(f"prefix_cache must be True or False, not {shown(prefix_cache)}")
        check_model(model)
        self.model = model
        self.progress = progress
        self.device = next(model.parameters()).device
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        if self.graphs and self.device.type != "cuda":
            raise ValueError(f"graphs=True needs a CUDA device, the model is on {self.device}")
        self.stats = Stats()
        self.changes = Changes()
        self.requests = Requests(seed)
        source = model._source
        self.texts = Texts(Path(tokenizer) if tokenizer is not None else None if source is None else source.folder)
        self._page_size = page_size
        self._pages, slots = (pages, max_batch) if pages is not None else default_sizes(model, page_size, max_batch)
        memory = model.make_memory(self._pages, page_size, slots)
        if snapshot_stride % memory.grain:
            raise ValueError(f"snapshot_stride must be a multiple of {memory.grain}, not {snapshot_stride}")
        self._released = False
        self._rehearsed: int | None = None  # what this process had compiled then
        self.weights = WeightsWatch(model)
        self.scheduler = Scheduler(memory, _empty_pool(memory), self.version, slots, chunk_rows, prefix_cache, snapshot_stride)
        self.runner = Runner(model, memory, self.graphs, chunk_rows)

    @driving
    def rehearse(self) -> int:
        """Compiles what this engine can launch before anybody waits for it; returns how many variants there were.

        Rows of every count are pushed over memory of their own, which is given back. From then on `stats.compilations` counts, and
        each compilation is logged with the rows that caused it. On a CPU nothing compiles.
        """
        found = rehearse(
            self.model,
            chunk_rows=self.scheduler.chunk_rows,
            max_batch=self.scheduler.max_batch,
            page_size=self._page_size,
            progress=self.progress,
        )
        self._rehearsed = len(watch().found)
        self.stats.compilations = 0
        return found

    @property
    def version(self) -> str:
        """Content hash of the weights that are served."""
        return self.weights.version

    def fingerprint(self) -> Fingerprint:
        return self.weights.fingerprint

    @driving
    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_log_probs: bool = False,
        top_log_probs: int = 0,
    ) -> str:
        """Queues a request and returns its id. ValueError, and nothing changed, for a request that can't be served.

        That is: an empty prompt or one that is no row of integers, a token id outside the vocabulary, a context longer than the
        position table or all pages, an id in use. While the memory is released the request waits.
        """
        request = self._request(prompt, params, request_id, prompt_log_probs, top_log_probs)
        with self.changes.change(request):
            self._enqueue(request)
        return request.request_id

    @property
    def busy(self) -> bool:
        """Whether a request is still running or waiting."""
        return bool(self.requests.active)

    @driving
    def step(self) -> list[Completion]:
        """Pushes the next rows, draws tokens, and returns the requests that ended.

        ValueError if the weights were written without `update_weights`. Whatever else is raised: no byte of the step is kept, all
        requests wait and push their rows again, and the next step goes on as if it had not been.
        """
        self._step()
        return self.requests.taken()

    @driving
    def run(self) -> list[Completion]:
        """Steps until nothing is left; completions in the order in which they ended."""
        self._until(list(self.requests.active.values()))
        return self.requests.taken()

    @driving
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        prompt_log_probs: bool = False,
        top_log_probs: int = 0,
    ) -> list[Completion]:
        """Completions of `prompts`, in their order, `n` of each side by side; `params` one for all or one each.

        A prompt is token ids, a text, or a chat: a list of {"role": ..., "content": ...}, behind which the assistant speaks. A text or a
        chat may stand alone; its completion has the text too. Sample i of a prompt has the seed `seed_of_sample(params.seed, i)`, which is
        the seed itself for sample 0, or a fresh one where `params` name none. `top_log_probs` notes so many of the most likely tokens at
        each drawn one. All requests are checked before one is queued. If a step raises, none of them stays queued.
        """
        requests = self._asked(prompts, params, n, prompt_log_probs, top_log_probs)
        self._check_ready()
        with self.changes.change(*requests):
            for request in requests:
                self._enqueue(request)
            self._until(requests)
            records = self.requests.taken_of(requests)
        return records

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        prompt_log_probs: bool = False,
        top_log_probs: int = 0,
    ) -> Iterator[DrawnToken]:
        """The tokens of `generate` as they are drawn, those of several requests mixed; the last of a request brings its completion.

        The same requests are drawn as by `generate`, to the same bytes; others that wait are served beside them. They are queued when the
        first token is asked for. Whoever stops listening (`break`, or `close()`) drops what is left of them. If a step raises, so does
        this, and the rest is dropped.
        """
        mine = self._queued(prompts, params, n, prompt_log_probs, top_log_probs)
        heard = [0] * len(mine)
        pieces = [None if request.texts is None else Increments(request.texts) for request in mine]
        try:
            while any(not request.ended for request in mine) or any(len(r.output) > count for r, count in zip(mine, heard, strict=True)):
                records = self._step_for(mine)
                for place, request in enumerate(mine):
                    record = records.get(request.order)
                    drawn = request.output[: len(request.filtered_log_probs)]
                    for i in range(heard[place], len(drawn)):
                        last = record is not None and i == len(drawn) - 1
                        piece = pieces[place]
                        yield DrawnToken(
                            prompt=place // n,
                            sample=place % n,
                            index=i,
                            token=drawn[i],
                            log_prob=request.log_probs[i],
                            filtered_log_prob=request.filtered_log_probs[i],
                            text=None if piece is None else piece.next(drawn[: i + 1], last=last),
                            completion=record if last else None,
                        )
                    heard[place] = len(drawn)
        finally:
            self._drop(mine)

    @driving
    def abort(self, request_id: str) -> Completion:
        """Ends a request now and returns what it has. ValueError for an id that is not in progress."""
        request = self.requests.find(request_id)
        with self.changes.change():
            self.scheduler.release(request)
            record = self.requests.complete(request, "abort", self.fingerprint())
        return record

    @driving
    def preempt(self, request_id: str) -> None:
        """Takes a running request's memory; its rows are pushed again later and no byte changes. ValueError for an unknown id."""
        request = self.requests.find(request_id)
        if request in self.scheduler.running:
            with self.changes.change():
                self.scheduler.preempt(request)

    @driving
    def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | str | Path,
        mode: str = "recompute",
        version: str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> str:
        """Loads weights between two steps, from (published name, tensor) pairs or a checkpoint; returns their content hash.

        "recompute": requests in progress push their rows again, so all that follows equals a fresh engine on these weights given
        the same tokens. "keep": they go on with the old rows and their records say `exact=False`. An empty list adopts weights
        written in place; an iterator that was used up is refused. `version` is a label, reported as `weights_label` in the
        fingerprint's `realisation`; `dtype` rounds a checkpoint's weights once, as in `from_pretrained`, to the same bytes.
        ValueError, and nothing changed, for a wrong mode, name, shape, dtype or value.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
        if isinstance(weights, str | Path):
            pairs: Iterable[tuple[str, Tensor]] = read_weights(self.model, weights, parse_dtype(dtype))
        elif dtype is not None:
            raise ValueError(f"dtype={dtype} rounds the weights of a checkpoint; tensors are taken as they are")
        else:
            pairs = weights
        self.model.load_weights(pairs, version)
        found = self.model.weights_version
        fingerprint = self.model.fingerprint()
        with self.changes.change():
            for request in list(self.scheduler.running) if found != self.version else ():
                if mode == "recompute":
                    self.scheduler.preempt(request)
                elif request.computed:
                    request.exact = False
                    request.pure = False
            self.scheduler.version = found
        if self.weights.moved:  # captured graphs read the old addresses
            self.runner = self._made_runner()
        self.weights.take(found, fingerprint)  # last: before, a step is refused
        return found

    @driving
    def release_memory(self) -> None:
        """Frees pages, slots, snapshots and graphs, for a trainer on the same GPU. Requests wait and lose no token."""
        with self.changes.change():
            for request in list(self.scheduler.running):
                self.scheduler.preempt(request)
            self._released = True
            self._use_memory(*RELEASED)

    @driving
    def resume_memory(self) -> None:
        """Takes as many pages and slots as before. Where they do not fit, the memory stays released, and may be resumed later."""
        if self._released:
            with self.changes.change():
                self._use_memory(self._pages, self.scheduler.max_batch)
                self._released = False

    # requests

    def _asked(self, prompts: Any, params: Any, n: int, prompt_log_probs: bool, top_log_probs: int) -> list[Request]:
        """The requests of `generate`, not queued yet."""
        if isinstance(prompts, str) or is_chat(prompts):
            prompts = [prompts]
        if not isinstance(prompts, Sequence | Tensor):
            raise ValueError(f"prompts must be a sequence of prompts, token ids or text each, not {kind_of(prompts)}")
        if not is_whole(n) or n < 1:
            raise ValueError(f"n must be an integer of at least 1, not {shown(n)}")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts")
        asked = [(prompt, params_of_sample(p, i)) for prompt, p in zip(prompts, each, strict=True) for i in range(n)]
        return [self._request(prompt, p, None, prompt_log_probs, top_log_probs, ahead) for ahead, (prompt, p) in enumerate(asked)]

    @driving
    def _queued(self, prompts: Any, params: Any, n: int, prompt_log_probs: bool, top_log_probs: int) -> list[Request]:
        requests = self._asked(prompts, params, n, prompt_log_probs, top_log_probs)
        self._check_ready()
        with self.changes.change(*requests):
            for request in requests:
                self._enqueue(request)
        return requests

    @driving
    def _step_for(self, mine: Sequence[Request]) -> dict[int, Completion]:
        """A step, and the records of those of `mine` that ended and whose record nobody took, by their order."""
        if any(not request.ended for request in mine):
            self._step()
        done = [request for request in mine if request.order in self.requests.finished]
        return dict(zip([request.order for request in done], self.requests.taken_of(done), strict=True))

    @driving
    def _drop(self, mine: Sequence[Request]) -> None:
        """Ends those of `mine` that are in progress; nobody wants their records."""
        with self.changes.change():
            for request in mine:
                if not request.ended:
                    self.scheduler.release(request)
                    self.requests.complete(request, "abort", self.fingerprint())
                self.requests.finished.pop(request.order, None)

    def _request(
        self,
        prompt: Any,
        params: SamplingParams | None,
        request_id: str | None,
        scores: bool,
        top: int,
        ahead: int = 0,
    ) -> Request:
        config = self.model.config
        memory = self.scheduler.memory
        speaks = isinstance(prompt, str) or is_chat(prompt)
        ids = self.texts.ids_of(prompt) if speaks else prompt
        if not is_whole(top) or not 0 <= top <= config.vocabulary:
            raise ValueError(f"top_log_probs must be between 0 and the vocabulary of {config.vocabulary}, not {shown(top)}")
        request = self.requests.made(ids, params, request_id, scores, config.vocabulary, self.model.end_tokens, ahead)
        request.top = int(top)
        if speaks or request.params.stop:
            self.texts.tokenizer  # noqa: B018, read now: a request that can't be served is refused before it is queued
            request.texts = self.texts
        most = request.params.max_new_tokens
        longest = request.prompt_length + most
        if longest > config.positions:
            raise ValueError(
                f"{request.prompt_length} prompt tokens and {most} to draw are longer than the position table of {config.positions}"
            )
        pages = memory.pages_for(longest - 1)  # the last drawn token is never pushed
        if pages > self._pages - 1:  # while memory is released, those that it will have again
            raise ValueError(f"the request needs {pages} pages of {memory.page_size} tokens, there are {self._pages - 1}")
        return request

    def _enqueue(self, request: Request) -> None:
        self.requests.enter(request)
        self.scheduler.add(request)

    def _until(self, mine: Sequence[Request]) -> None:
        """Steps until all of `mine` have ended; the bar counts tokens, a request that ends early skips its rest."""
        with Progress() if self.progress else nullcontext() as bar:
            task = bar.add_task("drawing tokens", total=sum(r.params.max_new_tokens for r in mine)) if bar else None
            while not all(request.ended for request in mine):
                self._step()
                if bar and task is not None:
                    bar.update(task, completed=sum(r.params.max_new_tokens if r.ended else len(r.log_probs) for r in mine))

    # rows

    @torch.no_grad()
    def _step(self) -> None:
        self._check_ready()
        with suited(self.model), self.changes.change():
            self._push()

    def _check_ready(self) -> None:
        """ValueError where a step would be refused."""
        if self._released:
            raise ValueError("the engine's memory is released; call resume_memory first")
        if self.weights.written:
            raise ValueError(f"the weights were written since version {self.version}; update_weights([]) takes them over")

    def _push(self) -> None:
        self.scheduler.admit()
        work = self.scheduler.schedule()
        active = len(self.requests.active)
        if active and not work:  # else `run` would step for ever
            running = len(self.scheduler.running)
            waiting = len(self.scheduler.waiting)
            raise RuntimeError(f"{active} requests are in progress and none has a row to push: {running} run, {waiting} wait")
        single = [request for request, _ in work if request.pending == 1]
        chunks = [(request, count) for request, count in work if request.pending > 1]
        drawn = self.runner.push(single, chunks)
        for request, count in work:
            self.scheduler.advance(request, count)
        for requests, result, tops in drawn:
            plain, filtered = torch.stack((result.log_prob_R, result.filtered_log_prob_R)).tolist()
            for row, (request, token, a, b) in enumerate(zip(requests, result.token_R.tolist(), plain, filtered, strict=True)):
                request.tokens.append(token)
                if row in tops:
                    request.top_ids.append(tops[row][0])
                    request.top_log_probs.append(tops[row][1])
                request.log_probs.append(a)
                request.filtered_log_probs.append(b)
                reason = request.finish_reason()
                if reason is not None:
                    self.scheduler.release(request)
                    self.requests.complete(request, reason, self.fingerprint())
        self.stats.steps += 1
        self.stats.graph_steps += bool(single) and self.graphs
        self.stats.decode_rows += len(single)
        self.stats.prefill_rows += sum(count for _, count in chunks)
        self.stats.graph_rows += self.runner.replayed
        self.stats.reused_rows = self.scheduler.reused_rows
        self.stats.preemptions = self.scheduler.preemptions
        if self.device.type == "cuda":
            seen = watch()
            seen.look(f"{len(single)} decode rows and {sum(count for _, count in chunks)} prompt rows of {len(chunks)} sequences")
            self.stats.compilations = 0 if self._rehearsed is None else len(seen.found) - self._rehearsed

    # memory

    def recover(self, dropped: tuple[Request, ...]) -> None:
        """After a change that broke off anywhere: nothing in memory is trusted, so all requests wait and nothing stays cached.

        `driving` calls it. The pool is replaced before anything else, and the mark is cleared last. This may itself break off, and
        then runs again.
        """
        if self._released:
            self._use_memory(*RELEASED)
        elif not all(hasattr(owner, name) for owner, name in self._held()):
            self._use_memory(self._pages, self.scheduler.max_batch)
        else:
            self.scheduler.pool = _empty_pool(self.scheduler.memory)
        self.requests.rewind(dropped)
        self.scheduler.start_over(self.requests.active.values())
        self.stats.preemptions = self.scheduler.preemptions
        self.changes.unfinished = None

    def _use_memory(self, pages: int, slots: int) -> None:
        for owner, name in self._held():
            vars(owner).pop(name, None)  # before the next one is made: both may not fit
        memory = self.model.make_memory(pages, self._page_size, slots)
        self.scheduler.memory = memory
        self.scheduler.pool = _empty_pool(memory)
        self.runner = self._made_runner()

    def _held(self) -> list[tuple[object, str]]:
        """What stands on the engine's memory: its owner and its name there."""
        return [(self, "runner"), (self.scheduler, "memory"), (self.scheduler, "pool")]

    def _made_runner(self) -> Runner:
        return Runner(self.model, self.scheduler.memory, self.graphs, self.scheduler.chunk_rows)


def _empty_pool(memory: ServingMemory) -> PagePool:
    return PagePool(memory.pages, memory.slots, memory.page_size, memory.snapshots)
