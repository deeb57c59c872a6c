"""What the benchmarks share: a time budget, rows, interleaved timers and the arithmetic of a comparison."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import zoo
from zoo.common.registry import architectures, find, model_class
from zoo.verify.subject import config_of

COLD_BYTES = 128 << 20  # more than twice an H200's L2: weights rotate through so much before one is read again
MOST_SETS = 256
PACKAGES = ("triton", "flash-attn-4", "sgl-deep-gemm", "flash-linear-attention", "tilelang", "sglang", "sglang-kernel", "transformers")
# where none is asked for
USUAL_SIZES = {name: architecture.usual_size for name, (_, architecture) in architectures().items()}
USUAL_HELP = ", ".join(f"{size} for {arch}" for arch, size in USUAL_SIZES.items()) + " by default"
Calls = Sequence[Callable[[], Any]]


class Budget:
    """Seconds that a process may spend. What does not fit is skipped and said so."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.end = clock() + seconds
        self.skipped = list[str]()

    @property
    def left(self) -> float:
        return self.end - self.clock()

    def allows(self, what: str, seconds: float = 0.0) -> bool:
        """Whether `seconds` more fit; if not it prints and notes that `what` was skipped."""
        if self.left > seconds:
            return True
        self.skipped.append(what)
        print(f"{what}: skipped: budget", flush=True)
        return False


@dataclass
class Recorder:
    """Rows as they come: appended to `path` (JSON lines, flushed) with what all of them share. Smoke rows are never written."""

    path: Path | None
    about: dict[str, Any]
    smoke: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.smoke and self.path is not None:
            raise ValueError(f"smoke rows prove plumbing, not speed: they are not written to {self.path}")

    def add(self, row: dict[str, Any]) -> None:
        whole = {**{key: _short(value) for key, value in row.items()}, **self.about}
        self.rows.append(whole)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(whole) + "\n")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value


def about(device: torch.device, smoke: bool) -> dict[str, Any]:
    """Device, versions, date and sources of a run, on every row. ValueError for a CUDA device where there is none."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} sees no GPU here; --device cpu --smoke proves the plumbing")
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
        "sources": sources(),
        **({"smoke": True} if smoke else {}),
    }


@functools.cache
def sources() -> str:
    """A hash of the package's files: which code a row is of."""
    root = Path(zoo.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def table(rows: Iterable[Sequence[Any]], header: Sequence[str]) -> str:
    """A compact text table; None is a dash."""
    cells = [list(header)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join(" | ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:.0f}" if isinstance(value, float) else str(value)


class Timer(Protocol):
    """`compare` gives the median microseconds of a call of each contender; contenders take turns."""

    def compare(self, contenders: Mapping[str, Calls]) -> dict[str, float]: ...


@dataclass(frozen=True)
class GraphTimer:
    """CUDA-graph replays. A contender is one or more calls, e.g. on rotated weights; a graph holds whole turns of them."""

    rounds: int = 7
    graph_us: float = 1500.0

    def compare(self, contenders: Mapping[str, Calls]) -> dict[str, float]:
        graphs = {name: self._capture(calls) for name, calls in contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(self.rounds + 1):
            for name, (graph, count) in graphs.items():
                took = _events(graph.replay) / count
                if turn:  # the first replay uploads the graph
                    times[name].append(took)
        return {name: statistics.median(found) for name, found in times.items()}

    def _capture(self, calls: Calls) -> tuple[Any, int]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
            once = min(_events(lambda: [call() for call in calls[:4]]) for _ in range(2)) / len(calls[:4])
        torch.cuda.current_stream().wait_stream(side)
        turns = max(1, min(math.ceil(self.graph_us / (once * len(calls))), 64 // len(calls)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(turns):
                for call in calls:
                    call()
        return graph, turns * len(calls)


def launches_of(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernel launches of one call, the longest first: microseconds, blocks, threads, and what limits blocks per multiprocessor."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return launches_in(json.loads(path.read_text())["traceEvents"])


def launches_in(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`launches_of` from a trace's events."""
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") == "kernel"]
    return [
        {
            "kernel": e["name"][:90],
            "us": e["dur"],
            "blocks": math.prod(e["args"].get("grid", ())),
            "threads": math.prod(e["args"].get("block", ())),
            "registers": e["args"].get("registers per thread"),
            "shared_bytes": e["args"].get("shared memory"),
        }
        for e in sorted(found, key=lambda e: -e["dur"])
    ]


@dataclass(frozen=True)
class EventTimer:
    """Eager calls in a row between two events, for calls that a graph can't hold; long enough that launches hide."""

    rounds: int = 5
    queue_us: float = 3000.0
    most: int = 20

    def compare(self, contenders: Mapping[str, Calls]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in contenders}
        counts = {}
        for name, calls in contenders.items():
            calls[0]()
            counts[name] = max(1, min(self.most, math.ceil(self.queue_us / max(_events(calls[0]), 1.0))))
        for _ in range(self.rounds):
            for name, calls in contenders.items():
                many = [calls[i % len(calls)] for i in range(counts[name])]
                times[name].append(_events(lambda: [call() for call in many]) / len(many))
        return {name: statistics.median(found) for name, found in times.items()}


@dataclass(frozen=True)
class WallClock:
    """For smoke runs on a CPU."""

    rounds: int = 1

    def compare(self, contenders: Mapping[str, Calls]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(self.rounds):
            for name, calls in contenders.items():
                start = time.perf_counter()
                calls[0]()
                times[name].append((time.perf_counter() - start) * 1e6)
        return {name: statistics.median(found) for name, found in times.items()}


def _events(run: Callable[[], Any]) -> float:
    """Microseconds of device time."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def sets_for(nbytes: float) -> int:
    """Copies of a weight that keep its next read out of the cache."""
    return max(1, min(MOST_SETS, math.ceil(COLD_BYTES / max(nbytes, 1))))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| over all entries, in float64."""
    return float((found.double() - exact).norm() / exact.norm())


def verdict(us: float, rivals: Mapping[str, float], broken: str) -> dict[str, Any]:
    """The comparison's part of a row: the fastest rival and ours over it. No ratio where a byte check failed."""
    out: dict[str, Any] = {
        "us": us,
        "rival": None,
        "rival_us": None,
        "ratio": None,
        "bytes": f"red: {broken}" if broken else "equal",
    }
    if rivals:
        rival = min(rivals, key=lambda name: rivals[name])
        out |= {"rival": rival, "rival_us": rivals[rival], "ratio": None if broken else us / rivals[rival]}
    return out


def rates(us: float, flops: float, nbytes: float) -> dict[str, float | None]:
    """TFLOP/s and GB/s of a call of `us` microseconds."""
    return {"tflops": flops / us * 1e-6 if flops else None, "gbps": nbytes / us * 1e-3}


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def geometry(arch: str, size: str, layers: int | None = None) -> tuple[Any, type[Any], type[Any]]:
    """(config, trainer class, server class). ValueError for an architecture, size or layer count that there is not."""
    config = config_of(arch, size, layers)
    fields = config.to_hf()
    return config, model_class(fields, "rl"), model_class(fields, "serving")


def check_served(arch: str) -> None:
    """ValueError for an architecture that the SGLang plugin doesn't serve."""
    if not find(arch)[0].sglang:
        raise ValueError(f"the SGLang plugin does not serve {arch} yet")


def check_server(device: str) -> None:
    """ValueError where SGLang can't be started: it is not installed, or the `device` is cuda and there is no GPU."""
    if importlib.util.find_spec("sglang") is None:
        raise ValueError(
            "sglang is not installed: pip install -c constraints/sglang.txt '.[sglang]' in a checkout, on a machine with a CUDA GPU"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"SGLang serves on a CUDA GPU here: torch {torch.__version__} sees none")


def has_slots(config: Any) -> bool:
    """Whether the model has recurrent layers: a sequence's state then lies in a slot beside its pages."""
    return "value_heads" in vars(config)


def in_parallel(module: str, arguments: Sequence[Sequence[str]], seconds: float) -> None:
    """Runs `python -m module ...` once per argument list, all at once: kernels compile and libraries fill their disk caches."""
    started = [
        subprocess.Popen([sys.executable, "-m", module, *map(str, a)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for a in arguments
    ]
    end = time.monotonic() + seconds
    for process, given in zip(started, arguments):
        try:
            text, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            if process.returncode:
                print(f"# {module} {' '.join(map(str, given))}: {' / '.join(text.strip().splitlines()[-2:])}", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            print(f"# {module} {' '.join(map(str, given))}: stopped after {seconds:.0f} s", flush=True)


def numbers(text: str) -> list[int]:
    """ "1,8,64" as a list; ValueError naming what is no positive integer."""
    out = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            raise ValueError(f"{part!r} in {text!r} is not a positive integer")
        out.append(int(part))
    return out
