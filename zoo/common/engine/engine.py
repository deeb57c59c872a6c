"""The embedded engine: requests batched continuously over a ForServing model. It chooses rows and makes no number."""

from __future__ import annotations

import functools
import operator
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from rich.progress import Progress
from torch import Tensor

from zoo.common.checkpoint import Checkpoint, check_dtypes
from zoo.common.config import differences
from zoo.common.engine.pages import PagePool
from zoo.common.engine.runner import Runner
from zoo.common.engine.scheduler import Request, Scheduler
from zoo.common.fingerprint import Fingerprint
from zoo.common.memory import ServingMemory
from zoo.common.program import parse_dtype
from zoo.common.reading import shown
from zoo.common.rollouts import Completion, SamplingParams, seed_of_sample
from zoo.common.rollouts.completion import has_nan
from zoo.common.rollouts.params import hashed_seed
from zoo.common.row_sampling import SEEDS
from zoo.common.rows import check_dense, check_id, is_whole
from zoo.common.serving import ForServing

PERCENT = 80  # of the memory that is free when the engine starts; the rest is for activations and graphs
CPU_BYTES = 2 << 30
MAX_BATCH = 64
MODES = ("recompute", "keep")
RELEASED = (2, 1)  # pages and slots of an engine that has handed its memory back: the least that there can be

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def driving(method: Callable[Concatenate[Engine, Arguments], Result]) -> Callable[Concatenate[Engine, Arguments], Result]:
    """Makes a method of the engine one that changes it: for one thread at a time, and whole or not at all.

    A change that broke off, by Ctrl-C say, left its mark (`Engine._change`). It is mended at once, or, where that was interrupted
    too, before the next call does anything.
    """

    @functools.wraps(method)
    def call(self: Engine, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            try:
                self._enter()
                self._settle()
                return method(self, *args, **kwargs)
            except BaseException:
                self._settle()
                raise
            finally:
                self._leave()
        finally:
            self._leave()  # again: the first may have been interrupted before it did anything

    return call


@dataclass
class Stats:
    """Counts since the engine was made. Rows are pushed tokens; `graph_rows` are those of `prefill_rows` that a CUDA graph served."""

    steps: int = 0
    graph_steps: int = 0
    decode_rows: int = 0
    prefill_rows: int = 0
    graph_rows: int = 0
    reused_rows: int = 0
    preemptions: int = 0


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
    ) -> None:
        sizes = {"pages": pages, "page_size": page_size, "max_batch": max_batch, "chunk_rows": chunk_rows}
        for name, value in {**sizes, "snapshot_stride": snapshot_stride}.items():
            if value is not None and not is_whole(value):
                raise ValueError(f"{name} must be an integer, not {shown(value)}")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if seed is not None and not (is_whole(seed) and 0 <= seed < SEEDS):
            raise ValueError(f"seed must be an integer of at least 0 and below 2^64, not {shown(seed)}")
        if not isinstance(prefix_cache, bool):
            raise ValueError(f"prefix_cache must be True or False, not {prefix_cache!r}")
        _check_model(model)
        self.model, self.progress = model, progress
        self.device = next(model.parameters()).device
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        if self.graphs and self.device.type != "cuda":
            raise ValueError(f"graphs=True needs a CUDA device, the model is on {self.device}")
        self.stats = Stats()
        self._page_size = page_size
        self._pages, slots = (pages, max_batch) if pages is not None else self._default_sizes(page_size, max_batch)
        memory = model.make_memory(self._pages, page_size, slots)
        if snapshot_stride % memory.grain:
            raise ValueError(f"snapshot_stride must be a multiple of {memory.grain}, not {snapshot_stride}")
        self._released = False
        self._seed = secrets.randbits(64) if seed is None else int(seed)
        self._take_version(model.weights_version, model.fingerprint())
        self.scheduler = Scheduler(memory, _empty_pool(memory), self.version, slots, chunk_rows, prefix_cache, snapshot_stride)
        self.runner = Runner(model, memory, self.graphs, chunk_rows)
        self._requests: dict[str, Request] = {}
        self._finished: dict[int, Completion] = {}
        self._count = 0
        self._driver: dict[str, int] = {}
        self._unfinished: tuple[Request, ...] | None = None

    @driving
    def add(
        self,
        prompt_ids: Sequence[int] | Tensor,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_log_probs: bool = False,
    ) -> str:
        """Queues a request and returns its id. ValueError, and nothing changed, for a request that can't be served.

        That is: an empty prompt or one that is no row of integers, a token id outside the vocabulary, a context longer than the
        position table or all pages, an id in use. While the memory is released the request waits.
        """
        request = self._request(prompt_ids, params, request_id, prompt_log_probs)
        with self._change(request):
            self._enqueue(request)
        return request.request_id

    @property
    def busy(self) -> bool:
        """Whether a request is still running or waiting."""
        return bool(self._requests)

    @driving
    def step(self) -> list[Completion]:
        """Pushes the next rows, draws tokens, and returns the requests that ended.

        ValueError if the weights were written without `update_weights`. Whatever else is raised: no byte of the step is kept, all
        requests wait and push their rows again, and the next step goes on as if it had not been.
        """
        self._step()
        finished, self._finished = list(self._finished.values()), {}
        return finished

    @driving
    def run(self) -> list[Completion]:
        """Steps until nothing is left; completions in the order in which they ended."""
        self._until(list(self._requests.values()))
        finished, self._finished = list(self._finished.values()), {}
        return finished

    @driving
    def generate(
        self,
        prompts: Sequence[Sequence[int] | Tensor],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        prompt_log_probs: bool = False,
    ) -> list[Completion]:
        """Completions of `prompts`, in their order, `n` of each side by side; `params` one for all or one each.

        Sample i of a prompt has the seed `seed_of_sample(params.seed, i)`, which is the seed itself for sample 0, or a fresh one where
        `params` name none. All requests are checked before one is queued. If a step raises, none of them stays queued.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence | Tensor):
            raise ValueError(f"prompts must be a sequence of prompts, each of them token ids, not {_kind(prompts)}")
        if not is_whole(n) or n < 1:
            raise ValueError(f"n must be an integer of at least 1, not {shown(n)}")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts")
        asked = [(prompt, _of_sample(p, i)) for prompt, p in zip(prompts, each, strict=True) for i in range(n)]
        requests = [self._request(prompt, p, None, prompt_log_probs, ahead) for ahead, (prompt, p) in enumerate(asked)]
        self._check_ready()
        with self._change(*requests):
            for request in requests:
                self._enqueue(request)
            self._until(requests)
            records = [self._finished[request.order] for request in requests]
            for request in requests:
                del self._finished[request.order]
        return records

    @driving
    def abort(self, request_id: str) -> Completion:
        """Ends a request now and returns what it has. ValueError for an id that is not in progress."""
        request = self._find(request_id)
        with self._change():
            self.scheduler.release(request)
            record = self._complete(request, "abort")
        return record

    @driving
    def preempt(self, request_id: str) -> None:
        """Takes a running request's memory; its rows are pushed again later and no byte changes. ValueError for an unknown id."""
        request = self._find(request_id)
        if request in self.scheduler.running:
            with self._change():
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
            pairs: Iterable[tuple[str, Tensor]] = self._stored(weights, parse_dtype(dtype))
        elif dtype is not None:
            raise ValueError(f"dtype={dtype} rounds the weights of a checkpoint; tensors are taken as they are")
        else:
            pairs = weights
        self.model.load_weights(pairs, version)
        found, fingerprint = self.model.weights_version, self.model.fingerprint()
        with self._change():
            for request in list(self.scheduler.running) if found != self.version else ():
                if mode == "recompute":
                    self.scheduler.preempt(request)
                elif request.computed:
                    request.exact = False
                    request.pure = False
            self.scheduler.version = found
        addresses = [address for address, _ in self._seen]
        self._take_version(found, fingerprint)  # last: before, a step is refused
        if addresses != [address for address, _ in self._seen]:  # captured graphs read the old ones
            self.runner = Runner(self.model, self.scheduler.memory, self.graphs, self.scheduler.chunk_rows)
        return found

    @driving
    def release_memory(self) -> None:
        """Frees pages, slots, snapshots and graphs, for a trainer on the same GPU. Requests wait and lose no token."""
        with self._change():
            for request in list(self.scheduler.running):
                self.scheduler.preempt(request)
            self._released = True
            self._use_memory(*RELEASED)

    @driving
    def resume_memory(self) -> None:
        """Takes as many pages and slots as before. Where they do not fit, the memory stays released, and may be resumed later."""
        if self._released:
            with self._change():
                self._use_memory(self._pages, self.scheduler.max_batch)
                self._released = False

    def _use_memory(self, pages: int, slots: int) -> None:
        for owner, name in self._held():
            vars(owner).pop(name, None)  # before the next one is made: both may not fit
        memory = self.model.make_memory(pages, self._page_size, slots)
        self.scheduler.memory = memory
        self.scheduler.pool = _empty_pool(memory)
        self.runner = Runner(self.model, memory, self.graphs, self.scheduler.chunk_rows)

    def _held(self) -> list[tuple[object, str]]:
        """What stands on the engine's memory: its owner and its name there."""
        return [(self, "runner"), (self.scheduler, "memory"), (self.scheduler, "pool")]

    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    # requests

    def _request(
        self,
        prompt_ids: Sequence[int] | Tensor,
        params: SamplingParams | None,
        request_id: str | None,
        scores: bool,
        ahead: int = 0,
    ) -> Request:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id must be text, not {shown(request_id)}")
        if not isinstance(scores, bool):
            raise ValueError(f"prompt_log_probs must be True or False, not {shown(scores)}")
        config, memory = self.model.config, self.scheduler.memory
        tokens = _token_ids(prompt_ids)
        for token in (*tokens, *params.stop_token_ids):
            check_id(token, config.vocabulary)
        longest = len(tokens) + params.max_new_tokens
        if longest > config.positions:
            raise ValueError(
                f"{len(tokens)} prompt tokens and {params.max_new_tokens} to draw are longer than the position table of {config.positions}"
            )
        pages = memory.pages_for(longest - 1)  # the last drawn token is never pushed
        if pages > self._pages - 1:  # while memory is released, those that it will have again
            raise ValueError(f"the request needs {pages} pages of {memory.page_size} tokens, there are {self._pages - 1}")
        if request_id is None:
            request_id = str(self._count + ahead)
            while request_id in self._requests:  # somebody chose this name
                request_id += "+"
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use")
        order = self._count + ahead
        if not params.ignore_eos:
            params = replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *self.model.end_tokens))))
        if params.seed is None and not params.is_greedy:
            params = replace(params, seed=hashed_seed("request", self._seed, order))
        return Request(request_id, order, len(tokens), params, scores, tokens)

    def _enqueue(self, request: Request) -> None:
        self._count += 1
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def _find(self, request_id: str) -> Request:
        if not isinstance(request_id, str) or request_id not in self._requests:
            raise ValueError(f"no request {request_id!r} is in progress ({len(self._requests)} are)")
        return self._requests[request_id]

    def _complete(self, request: Request, reason: str) -> Completion:
        record = Completion(
            request.request_id,
            tuple(request.tokens[: request.prompt_length]),
            tuple(request.tokens[request.prompt_length :]),
            tuple(request.log_probs),
            tuple(request.filtered_log_probs),
            tuple(request.prompt_log_probs) if request.scores_prompt else None,
            request.params,
            tuple(request.versions),
            request.exact and not has_nan(request.log_probs, request.filtered_log_probs, request.prompt_log_probs),
            reason,
            self._fingerprint,
        )
        if reason != "abort":
            self._finished[request.order] = record
        request.ended = True
        del self._requests[request.request_id]
        return record

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
        with self._change():
            self._push()

    def _check_ready(self) -> None:
        """ValueError where a step would be refused."""
        if self._released:
            raise ValueError("the engine's memory is released; call resume_memory first")
        if self._written():
            raise ValueError(f"the weights were written since version {self.version}; update_weights([]) takes them over")

    def _push(self) -> None:
        self.scheduler.admit()
        work = self.scheduler.schedule()
        if self._requests and not work:  # else `run` would step for ever
            running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
            raise RuntimeError(f"{len(self._requests)} requests are in progress and none has a row to push: {running} run, {waiting} wait")
        single = [request for request, _ in work if request.pending == 1]
        chunks = [(request, count) for request, count in work if request.pending > 1]
        drawn = self.runner.push(single, chunks)
        for request, count in work:
            self.scheduler.advance(request, count)
        for requests, result in drawn:
            plain, filtered = torch.stack((result.log_prob_R, result.filtered_log_prob_R)).tolist()
            for request, token, a, b in zip(requests, result.token_R.tolist(), plain, filtered, strict=True):
                request.tokens.append(token)
                request.log_probs.append(a)
                request.filtered_log_probs.append(b)
                reason = request.finish_reason()
                if reason is not None:
                    self.scheduler.release(request)
                    self._complete(request, reason)
        self.stats.steps += 1
        self.stats.graph_steps += bool(single) and self.graphs
        self.stats.decode_rows += len(single)
        self.stats.prefill_rows += sum(count for _, count in chunks)
        self.stats.graph_rows += self.runner.replayed
        self.stats.reused_rows, self.stats.preemptions = self.scheduler.reused_rows, self.scheduler.preemptions

    # changes that break off, and threads

    @contextmanager
    def _change(self, *requests: Request) -> Iterator[None]:
        """Around every change of requests, queues, pages and memory: the mark is set before it and cleared behind it.

        Where it broke off, `_recover` drops `requests`: their caller learns of none of them.
        """
        outer = self._unfinished
        self._unfinished = (*(outer or ()), *requests)
        yield
        self._unfinished = outer

    def _settle(self) -> None:
        if self._unfinished is not None and self._driver.get("thread") == threading.get_ident():
            self._recover(self._unfinished)

    def _recover(self, dropped: tuple[Request, ...]) -> None:
        """After a change that broke off anywhere: nothing in memory is trusted, so all requests wait and nothing stays cached.

        The pool is replaced before anything else, and the mark is cleared last. This may itself break off, and then runs again.
        """
        if self._released:
            self._use_memory(*RELEASED)
        elif not all(hasattr(owner, name) for owner, name in self._held()):
            self._use_memory(self._pages, self.scheduler.max_batch)
        else:
            self.scheduler.pool = _empty_pool(self.scheduler.memory)
        for request in dropped:
            self._finished.pop(request.order, None)
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
        for request in list(self._requests.values()):
            if request.order in self._finished:
                request.ended = True
                del self._requests[request.request_id]
            else:
                request.rewind()
        self.scheduler.start_over(self._requests.values())
        self.stats.preemptions = self.scheduler.preemptions
        self._unfinished = None

    def _enter(self) -> None:
        mine = threading.get_ident()
        if self._driver.setdefault("thread", mine) != mine:
            raise ValueError("another thread is inside this engine: give each an engine of its own, or let one of them drive it")

    def _leave(self) -> None:
        if self._driver.get("thread") == threading.get_ident():
            self._driver.clear()

    # weights and memory

    def _written(self) -> bool:
        """Whether a parameter, or a module that has some, was replaced, or a parameter moved or written."""
        if any(own.get(name) is not value for own, name, value in self._places):
            return True
        return [(p.data_ptr(), p._version) for p in self._parameters] != self._seen

    def _take_version(self, version: str, fingerprint: Fingerprint) -> None:
        self.version, self._fingerprint = version, fingerprint
        # `model.parameters()` takes milliseconds in a deep model, this walk once
        self._places = [(own, n, v) for m in self.model.modules() for own in (m._parameters, m._modules) for n, v in own.items()]
        self._parameters = list(self.model.parameters())
        self._seen = [(p.data_ptr(), p._version) for p in self._parameters]

    def _stored(self, path: str | Path, dtype: torch.dtype | None) -> list[tuple[str, Tensor]]:
        """A checkpoint's tensors on the CPU in the parameters' dtypes; geometry and dtypes are checked as at a load."""
        program = self.model.program
        if dtype is not None and dtype != program.torch_dtype:
            raise ValueError(f"dtype={dtype} for a model whose weights are {program.torch_dtype}")
        source = Checkpoint.open(path)
        config = self.model.family.config.from_hf(source.config)
        if other := differences(config, self.model.config):
            raise ValueError(f"{path} is of another geometry: {', '.join(other)}")
        table = self.model.table_of()
        match = source.match(table)
        check_dtypes(source, match, self.model, convert=dtype is not None)
        kinds, stored = {name: p.dtype for name, p in self.model.named_parameters()}, source.tensors
        return [(name, stored[name].read().to(entry.stored(kinds[entry.ours]))) for name, (entry, _) in match.places.items()]

    def _default_sizes(self, page_size: int | None, max_batch: int) -> tuple[int, int]:
        """Pages, and how many of `max_batch` requests may hold memory, by default.

        Sizes are taken from memories of a page or a slot more than the least, which is held against the room first.
        """
        room = CPU_BYTES
        if self.device.type == "cuda":
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            room = (torch.cuda.mem_get_info(self.device)[0] + cached) * PERCENT // 100
        try:
            probe = self.model.make_memory(2, page_size, 1)
        except torch.OutOfMemoryError as full:
            raise ValueError(f"the memory of one request of one page does not fit, there is room for {room:,} bytes") from full
        least, longest = probe.nbytes, probe.pages_for(self.model.config.positions)
        del probe
        if least > room:
            raise ValueError(f"the memory of one request of one page takes {least:,} bytes, there is room for {room:,}")
        page = self.model.make_memory(3, page_size, 1).nbytes - least
        batch, slot, beside = 1, 0, least - 2 * page  # slot 0 and the first request's, which takes no less
        if room - least >= beside:  # else half of it is no second request's, and may not hold one to be measured
            slot = self.model.make_memory(2, page_size, 2).nbytes - least
            batch = min(max_batch, 1 + (room - least) // 2 // slot) if slot else max_batch
        return min(batch * longest + 1, (room - beside - (batch - 1) * slot) // page), batch


def _empty_pool(memory: ServingMemory) -> PagePool:
    return PagePool(memory.pages, memory.slots, memory.page_size, memory.snapshots)


def _of_sample(params: SamplingParams | None, index: int) -> SamplingParams | None:
    """What sample `index` of a prompt is asked: the same under a seed of its own. What is no SamplingParams is refused elsewhere."""
    if not isinstance(params, SamplingParams) or params.seed is None:
        return params
    return replace(params, seed=seed_of_sample(params.seed, index))


def _check_model(model: ForServing) -> None:
    if not isinstance(model, ForServing):
        raise ValueError(f"an engine takes a ForServing model, not {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ValueError(f"{name} was made under torch.inference_mode(), where torch does not count writes; make the model outside")
        if parameter.requires_grad:
            raise ValueError(f"{name} wants gradients, and its optimizer may write uncounted; call requires_grad_(False) on the model")


def _token_ids(prompt_ids: Sequence[int] | Tensor) -> list[int]:
    """A prompt as a list. ValueError for what is no row of integers, or empty."""
    if isinstance(prompt_ids, Tensor):
        check_dense("a prompt", prompt_ids)
        if prompt_ids.dim() != 1:
            raise ValueError(f"a prompt must be one row of token ids, not a tensor of shape {list(prompt_ids.shape)}")
    # sets and mappings have no order
    if isinstance(prompt_ids, str | bytes | Set | Mapping) or not hasattr(prompt_ids, "__len__"):
        raise ValueError(f"a prompt must be a sequence of token ids, not {_kind(prompt_ids)}")
    values = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else prompt_ids
    if not len(values):
        raise ValueError("the prompt is empty: at least one token must be read before one can be drawn")
    tokens = []
    for token in values:
        try:
            if isinstance(token, bool):
                raise TypeError
            tokens.append(operator.index(token))
        except TypeError:
            raise ValueError(f"token ids are integers, not {shown(token)}") from None
    return tokens


def _kind(given: object) -> str:
    """What was given where token ids belong, with a hint where they are inside it: `apply_chat_template` gives such a mapping."""
    if isinstance(given, Mapping) and "input_ids" in given:
        return f'a {type(given).__name__}: its ["input_ids"] are the token ids'
    return shown(given)
