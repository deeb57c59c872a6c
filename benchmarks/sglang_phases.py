"""What stock SGLang is asked to do for the proof, phase by phase. A phase that fails is noted, and the others still run.

`Engine` in this process: `ENGINE_PHASES`; the HTTP server: `SERVER_PHASES`. Every phase leaves records in the folder for the trainer to
score.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import first_line, geometry, has_slots

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "sampling_seed": 11},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.3, "top_p": 0.37},
)
PLAIN: tuple[dict[str, Any], ...] = tuple({"temperature": t} for t in (0, 1.0, 0.7, 1.3))  # a batch without filters draws otherwise
SHORT = (1, 7, 63, 127, 128, 129, 255, 300, 511, 640, 777)
LONG = (1990, 2040, 2300, 4200)
CONTEXT = 6144
SQUEEZE = 0.45  # of the pages that all requests need at once: the others are retracted or wait
HTTP_REQUESTS = 64
FEW = 12  # requests of a phase that proves one event
# a server, a phase, or one of few requests that takes longer has failed
START_SECONDS = 200
PHASE_SECONDS = 200
EVENT_SECONDS = 60
SEEDS = (1, 2)  # of the weights served first, and of those pushed later
DEVICE = "cuda"
GROUP = "zoo"
LAUNCH = (sys.executable, "-m", "sglang.launch_server")

# phase -> whether the weights pushed later answer in it
ENGINE_PHASES = {
    "fresh, prompts too": False,
    "from the cache": False,
    "without filters": False,
    "after an update": True,
    "paused and continued": True,
    "paused, retracted, continued": True,
    "updated from disk": False,
    "updated by a process group": True,
}
PLAIN_PHASES = ("without filters", "without filters, over HTTP")
SERVER_PHASES = {
    "over HTTP": False,
    "without filters, over HTTP": False,
    "pages released and resumed": False,
    "all released and resumed": False,
}
Request = tuple[list[int], dict[str, Any]]


def requests(count: int, tokens: int, vocabulary: int, hybrid: bool, kinds: Sequence[dict[str, Any]] = KINDS) -> list[Request]:
    """(prompt, sampling parameters): mixed lengths, `kinds` in turn; some of a hybrid model's may stop early.

    Of requests without filters every third draws twice as much, so that batches shrink between steps.
    """
    draw = random.Random(5)
    out = []
    for i in range(count):
        length = draw.choice(LONG if i % 16 == 3 else SHORT)
        drawn = 2 * tokens if kinds is PLAIN and i % 3 == 0 else tokens
        params = {**kinds[i % len(kinds)], "max_new_tokens": drawn, "ignore_eos": not hybrid}
        out.append(([draw.randrange(vocabulary) for _ in range(length)], params))
    return out


@dataclass
class Model:
    """The model that is proven, as the steps need it."""

    arch: str
    size: str
    layers: int | None
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        self.config, self.trainer, self.server = geometry(self.arch, self.size, self.layers)
        self.hybrid = has_slots(self.config)
        if self.hybrid:
            self.config = _wrapped(self.config)
        self.page = 80 if self.config.head_dim > 128 else 128

    def update(self, device: str | None = None) -> list[tuple[str, Tensor]]:
        """Other weights for the first layers: published names."""
        few = 4 if self.hybrid else 1
        small = geometry(self.arch, self.size, few)[0]
        made = self.server.from_config(_wrapped(small) if self.hybrid else small, seed=SEEDS[1], device=device or DEVICE)
        return [(name, tensor.clone()) for name, tensor in made.published_tensors(aliases=False) if "embed" not in name]


def _wrapped(config: Any) -> Any:
    """A text model under its published vision-language config.json and names."""
    kind = config.model_type
    published = {
        "model_type": kind,
        "architectures": [f"Qwen3_5{'Moe' if config.experts else ''}ForConditionalGeneration"],
        "text_config": replace(config, published={}, wrapped=False).to_hf(),
        "vision_config": {"model_type": kind, "depth": 1},
        "image_token_id": 5,
        "video_token_id": 6,
        "tie_word_embeddings": config.tied,
    }
    return replace(config, wrapped=True, published=published)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Late(KeyboardInterrupt):
    """A phase waited too long. SGLang's event loop lets no other exception of a signal out."""


@dataclass
class Diary:
    """What the phases leave behind: records.jsonl, and phases.jsonl with a line of notes or an error per phase."""

    folder: Path

    def keep(self, phase: str, updated: bool, asked: Sequence[Request], answers: Sequence[Any], fingerprint: Any) -> None:
        from zoo.sglang_plugin import ROUTING_WEIGHTS, record

        with (self.folder / "records.jsonl").open("a") as file:
            for (ids, params), answer in zip(asked, answers, strict=True):
                meta = answer["meta_info"]
                line = {"phase": phase, "updated": updated, "record": record(answer, ids, params, fingerprint).to_dict()}
                line |= {"cached": meta["cached_tokens"], "retracted": meta["num_retractions"], "experts": meta.get("routed_experts")}
                file.write(json.dumps(line | {"weights": (meta.get(ROUTING_WEIGHTS) or [None])[-1]}) + "\n")
        say(f"{phase}: {len(answers)} requests, weights {fingerprint.weights[:8]}")

    def note(self, phase: str, **notes: Any) -> None:
        with (self.folder / "phases.jsonl").open("a") as file:
            file.write(json.dumps({"phase": phase, **notes}) + "\n")

    @contextmanager
    def phase(self, name: str, seconds: int) -> Iterator[dict[str, Any]]:
        """Notes for a phase's row. An exception, or too long a wait, becomes its error and ends here."""
        notes: dict[str, Any] = {}

        def late(*_: Any) -> None:
            raise Late(f"no end after {seconds} s")

        before = signal.signal(signal.SIGALRM, late)
        begun = time.monotonic()
        signal.alarm(seconds)
        try:
            yield notes
        except (Exception, Late) as error:
            notes["error"] = first_line(error)
            say(f"{name}: {notes['error']}")
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            self.note(name, seconds=time.monotonic() - begun, **notes)


def engine(model: Model, folder: Path, count: int, tokens: int) -> None:
    """`sglang.Engine` in this process, with too few pages for its requests: chunked prefill and retraction."""
    import sglang

    from zoo.sglang_plugin import fingerprint

    diary = Diary(folder)
    asked = requests(count, tokens, model.config.vocabulary, model.hybrid)
    page = model.page
    moe = bool(model.config.experts)
    needed = sum(-(-(len(ids) + tokens) // page) * page for ids, _ in asked)
    server = sglang.Engine(
        model_path=str(folder / "weights"),
        attention_backend="zoo",
        skip_tokenizer_init=True,
        chunked_prefill_size=560 if page == 80 else 512,
        context_length=CONTEXT,
        max_running_requests=count,
        schedule_conservativeness=0.05,
        max_total_tokens=max(int(needed * SQUEEZE) // page * page, 8192),
        cuda_graph_bs_decode=[1, 8, 32, 64],
        mem_fraction_static=0.85,
        enable_return_routed_experts=moe,
        log_level="warning",
    )
    say("engine up")
    more: dict[str, Any] = {"return_logprob": True, **({"return_routed_experts": True} if moe else {})}

    def phase(name: str, before: Callable[[], Any] = lambda: None, sent: Sequence[Request] = asked[:FEW], **also: Any) -> None:
        with diary.phase(name, EVENT_SECONDS if len(sent) == FEW else PHASE_SECONDS) as notes:
            notes |= before() or {}
            prompts = [ids for ids, _ in sent]
            params = [p for _, p in sent]
            with _replays(server, notes):
                answers = server.generate(input_ids=prompts, sampling_params=params, **more, **also)
            diary.keep(name, ENGINE_PHASES[name], sent, list(answers), fingerprint(server))
            _drawn(name, answers, notes)

    phase("fresh, prompts too", sent=asked, logprob_start_len=0)
    phase("from the cache", sent=asked)
    phase("without filters", sent=requests(count, tokens, model.config.vocabulary, model.hybrid, PLAIN))
    phase("after an update", lambda: _push(server, model), asked, logprob_start_len=0)
    for name, mode in (("paused and continued", "in_place"), ("paused, retracted, continued", "retract")):
        with diary.phase(name, EVENT_SECONDS) as notes:
            wanted = asked[:FEW]
            with _replays(server, notes):
                answers, seen = server.loop.run_until_complete(_paused(server, wanted, more, mode, tokens))
            notes |= seen
            diary.keep(name, ENGINE_PHASES[name], wanted, answers, fingerprint(server))
    phase("updated from disk", lambda: _succeeded(server.update_weights_from_disk(str(folder / "weights"))))
    phase("updated by a process group", lambda: _broadcast(server, model))
    server.shutdown()


@contextmanager
def _replays(server: Any, notes: dict[str, Any]) -> Iterator[None]:
    """Notes how many prompt rows graphs served in the block, and tokens they drew: where they are none, nothing of them was proven."""
    from zoo.sglang_plugin.client import states

    def counts() -> dict[str, int]:
        said = states(server)
        return {name: sum(state[name] for state in said) for name in ("prefill_graph_rows", "drawn_in_graphs")}

    before = counts()
    yield
    notes |= {name: count - before[name] for name, count in counts().items()}


def _drawn(name: str, answers: Sequence[Any], notes: dict[str, Any]) -> None:
    """ValueError if decode graphs drew less than half the tokens of a phase without filters: their draws are not proven then."""
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    if name in PLAIN_PHASES and 2 * notes["drawn_in_graphs"] < tokens:
        raise ValueError(f"decode graphs drew {notes['drawn_in_graphs']} of {tokens} tokens")


def _succeeded(answer: Sequence[Any]) -> None:
    """ValueError with the message of an engine call that failed: (success, message, ...)."""
    if not answer[0]:
        raise ValueError(str(answer[1]))


async def _paused(server: Any, asked: Sequence[Request], more: dict[str, Any], mode: str, tokens: int) -> tuple[list[Any], dict[str, Any]]:
    """Streams requests and pauses all of them in the middle, through what the routes of the HTTP server call.

    ValueError if nothing was running by then, or a token came while the engine was paused.
    """
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    answers: list[Any] = [None] * len(asked)
    middle = asyncio.Event()

    def drawn() -> int:
        return sum(answer["meta_info"]["completion_tokens"] for answer in answers if answer is not None)

    async def one(i: int) -> None:
        ids, params = asked[i]
        stream = await server.async_generate(input_ids=ids, sampling_params=params, stream=True, **more)
        async for answers[i] in stream:
            if drawn() >= len(asked) * tokens // 3:
                middle.set()

    tasks = [asyncio.create_task(one(i)) for i in range(len(asked))]
    await middle.wait()
    await server.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
    await asyncio.sleep(0.5)  # what was on its way arrives
    running = sum(not task.done() for task in tasks)
    before = drawn()
    await asyncio.sleep(0.5)
    after = drawn()
    await server.tokenizer_manager.continue_generation(ContinueGenerationReqInput())
    await asyncio.gather(*tasks)
    if not running or after != before:
        raise ValueError(f"not paused in the middle: {running} requests running, {after - before} tokens came meanwhile")
    return answers, {"paused_requests": running, "paused_after_tokens": before}


def _push(server: Any, model: Model) -> None:
    from zoo.sglang_plugin import updating

    with updating(server):
        _succeeded(server.update_weights_from_tensor(model.update()))


def _broadcast(server: Any, model: Model) -> dict[str, Any]:
    """Rank 0 sends, as a trainer does. NCCL wants a GPU for each of the two; on one GPU the group is Gloo's."""
    from sglang.srt.utils import init_custom_process_group

    from zoo.sglang_plugin import updating

    several = DEVICE == "cuda" and torch.cuda.device_count() > 1
    backend = "nccl" if several else "gloo"
    tensors = model.update("cuda:1" if several else None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    joined: list[Any] = []

    def join() -> None:
        where = f"tcp://127.0.0.1:{port}"
        wait = timedelta(seconds=EVENT_SECONDS)
        joined.append(init_custom_process_group(backend, where, wait, world_size=2, rank=0, group_name=GROUP))

    def send() -> None:
        for _, tensor in tensors:
            torch.distributed.broadcast(tensor, src=0, group=joined[0])

    with _beside(join):
        _succeeded(server.init_weights_update_group("127.0.0.1", port, 1, 2, GROUP, backend=backend))
    names = [name for name, _ in tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    with updating(server), _beside(send):
        _succeeded(server.update_weights_from_distributed(names, dtypes, [list(t.shape) for _, t in tensors], group_name=GROUP))
    with _beside(lambda: torch.distributed.destroy_process_group(joined[0])):
        _succeeded(server.destroy_weights_update_group(GROUP))
    return {"group": backend}


@contextmanager
def _beside(call: Callable[[], None]) -> Iterator[None]:
    """Runs `call` in a thread during the block, and raises what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join()
    if raised:
        raise raised[0]


@dataclass
class Server:
    """A running HTTP server, and calls of its routes."""

    url: str

    def post(self, route: str, body: dict[str, Any]) -> Any:
        """The route's JSON answer; None if it has no body."""
        sent = urllib.request.Request(f"{self.url}/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(sent, timeout=PHASE_SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False


@contextmanager
def _serving(model: Model, folder: Path, *more: str) -> Iterator[Server]:
    """ValueError with the end of its log if the server does not come up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--model-path", str(folder / "weights"), "--attention-backend", "zoo", "--skip-tokenizer-init", "--port", port]
    options += ["--context-length", str(CONTEXT), "--mem-fraction-static", "0.85", "--max-total-tokens", "65600", "--log-level", "warning"]
    options += ["--cuda-graph-bs-decode", "1", "8", "64", "--skip-server-warmup", *more]
    options += ["--enable-return-routed-experts"] if model.config.experts else []
    with (folder / "http.log").open("a") as log:
        process = subprocess.Popen([*LAUNCH, *options], stdout=log, stderr=log)
    try:
        server = Server(f"http://127.0.0.1:{port}")
        latest = time.monotonic() + START_SECONDS
        while not server.healthy():
            if process.poll() is not None or time.monotonic() > latest:
                said = [line for line in (folder / "http.log").read_text().splitlines() if line.strip()]
                raise ValueError(f"the server did not start: {said[-1] if said else 'it said nothing'}")
            time.sleep(0.5)
        say("server up")
        yield server
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def http(model: Model, folder: Path, tokens: int) -> None:
    """The HTTP server as clients call it, many calls at once; its memory is released and resumed where a server with that starts."""
    from zoo.sglang_plugin import fingerprint

    diary = Diary(folder)
    asked = requests(HTTP_REQUESTS, tokens, model.config.vocabulary, model.hybrid)

    def phase(server: Server, name: str, sent: Sequence[Request], before: Callable[[], dict[str, Any]]) -> None:
        def generate(request: Request) -> Any:
            body = {"input_ids": request[0], "sampling_params": request[1], "return_logprob": True, "logprob_start_len": 0}
            return server.post("generate", body | ({"return_routed_experts": True} if model.config.experts else {}))

        with diary.phase(name, EVENT_SECONDS if len(sent) == FEW else PHASE_SECONDS) as notes:
            notes |= before()
            with _replays(server.url, notes), ThreadPoolExecutor(HTTP_REQUESTS) as pool:
                answers = list(pool.map(generate, sent))
            diary.keep(name, SERVER_PHASES[name], sent, answers, fingerprint(server.url))
            _drawn(name, answers, notes)

    def released(server: Server, tags: Sequence[str] | None) -> dict[str, Any]:
        """Hands memory back and takes it again; released weights then come from the files."""
        free = [_free_gib()]
        server.post("release_memory_occupation", {"tags": tags})
        free.append(_free_gib())
        if tags is None and "released" not in _refused(lambda: fingerprint(server.url)):
            raise ValueError("a server whose weights are released gave a fingerprint")
        server.post("resume_memory_occupation", {"tags": tags})
        if tags is None:
            stale = fingerprint(server.url).weights
            answer = server.post("update_weights_from_disk", {"model_path": str(folder / "weights")})
            _succeeded((answer["success"], answer["message"]))
            return {"released_gib": free[1] - free[0], "weights_before_update": stale}
        return {"released_gib": free[1] - free[0]}

    def all_phases(server: Server, saver: bool) -> None:
        phase(server, "over HTTP", asked, dict)
        phase(server, "without filters, over HTTP", requests(FEW, tokens, model.config.vocabulary, model.hybrid, PLAIN), dict)
        if saver:
            phase(server, "pages released and resumed", asked[:FEW], lambda: released(server, ["kv_cache"]))
            phase(server, "all released and resumed", asked[:FEW], lambda: released(server, None))

    try:
        with _serving(model, folder, "--enable-memory-saver") as server:
            all_phases(server, saver=True)
    except ValueError as error:
        for name in (name for name in SERVER_PHASES if "released" in name):
            diary.note(name, error=f"with --enable-memory-saver {error}")
        say(f"again without --enable-memory-saver: {error}")
        with _serving(model, folder) as server:
            all_phases(server, saver=False)


def _refused(call: Callable[[], Any]) -> str:
    """The ValueError's sentence, or nothing."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if DEVICE == "cuda" else 0.0
