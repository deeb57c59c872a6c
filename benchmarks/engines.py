"""SGLang engines as contenders of a benchmark: a process each, which says how far it is and answers one measurement at a time.

A process starts its imports at once, builds its engine on the line `start`, then answers one JSON line per measurement. Everything
else that it and its children print goes to its log; the log's tail is printed if it ends.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import first_line

PROMPT = 512
MARK = "@@ "
TAIL = 25  # lines of a log that are shown when its process ends
PROFILED_STEPS = 8
# lines of a server's log that say how far it is
MILESTONES = re.compile(r"Load weight (begin|end)|KV Cache is allocated|Capture .*(begin|end)|max_total_num_tokens|zoo: |Error")


@dataclass(frozen=True)
class Measure:
    """kind: `load` (batch x new tokens), `prefill` (whole prompts, one token each), `first` (one request, one token), or a profile.

    `decode profile` is of decode steps, `prefill profile` of the batches that prompts are cut into. `top_p` below 1 filters each draw of
    the requests.
    """

    kind: str
    batch: int
    new: int = 1
    top_p: float = 1.0

    @property
    def label(self) -> str:
        filtered = "" if self.top_p == 1.0 else f"@{self.top_p:g}"
        return f"{self.batch}x{self.new}{filtered}" if self.kind == "load" else {"first": "first token"}.get(self.kind, self.kind)

    @property
    def unit(self) -> str:
        return "ms" if self.kind == "first" else "tokens_per_s"

    @property
    def seconds(self) -> float:
        """What it takes on an 8B model, compilation left out; only a first guess for the time budget."""
        once = 0.01 * self.new + self.batch * PROMPT / 3e4
        return once * {"load": 1, "prefill": 2, "first": 3, "decode profile": 4, "prefill profile": 4}[self.kind] + 2


class Contender:
    """A process and what it said. `state`: starting, ready or failed; `why` names the reason and the log's last line."""

    def __init__(self, name: str, command: Sequence[str], log: Path, say: Callable[[str], None], env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self.say = say
        self.why = ""
        self.ready: dict[str, Any] | None = None
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=env,
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def state(self) -> str:
        return "failed" if self.why else "starting" if self.ready is None else "ready"

    def start(self) -> None:
        """Builds the engine: what it needs is there now."""
        self._send("start")

    def ask(self, measure: Measure, seconds: float) -> dict[str, Any]:
        """ValueError if it fails, ends or takes longer."""
        self._send(json.dumps(asdict(measure)))
        try:
            answer = self.answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            self._failed(f"no answer to {measure.label} in {seconds:.0f} s")
            answer = None
        if answer is None:
            raise ValueError(self.why)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def pause(self) -> None:
        """Stops the process, so that it takes no time from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self, seconds: float = 8) -> None:
        """Ends the process and its children."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            if self.state == "ready":  # one that still starts does not listen
                self.process.wait(seconds)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-TAIL:])

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            self._failed("it ended")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _failed(self, why: str) -> None:
        lines = [line for line in self.tail().splitlines() if line.strip()]
        self.why = self.why or f"{why}: {lines[-1][-300:] if lines else 'it printed nothing'}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("w") as log:
            for line in self.process.stdout:
                if not line.startswith(MARK):
                    log.write(line)
                    log.flush()
                    if MILESTONES.search(line):
                        self.say(f"{self.name}: {line.strip()[:160]}")
                    continue
                message = json.loads(line[len(MARK) :])
                if "progress" in message:
                    self.say(f"{self.name}: {message['progress']}")
                elif "ready" in message:
                    self.ready = message
                else:
                    self.answers.put(message)
        self._failed("it ended")
        self.answers.put(None)


def tell(message: dict[str, Any]) -> None:
    print("\n" + MARK + json.dumps(message), flush=True)


def serve(make: Callable[[], Any], vocabulary: int, lines: Iterable[str], batches: Sequence[int] = ()) -> None:
    """A contender's side: `make` builds the engine at the line `start`; every further line is a measurement.

    It is ready when it has run each of `batches` once, so that contenders compile side by side.
    """
    asked = iter(lines)
    if next(asked, "").strip() != "start":
        return
    begin = time.perf_counter()
    engine = make()
    tell({"progress": f"engine built in {time.perf_counter() - begin:.0f} s"})
    bench = Bench(engine, vocabulary)
    for batch in batches:
        tell({"progress": f"batch {batch} warm in {bench.heat(batch):.0f} s"})
    tell({"ready": True, "start_s": time.perf_counter() - begin, **served_by(engine)})
    for line in asked:
        try:
            tell(bench.measure(Measure(**json.loads(line))))
        except (ValueError, RuntimeError) as error:
            tell({"error": first_line(error)})
    engine.shutdown()


def served_by(engine: Any) -> dict[str, Any]:
    """What a server with the zoo's backend says of its providers; nothing for another server."""
    info = engine.get_server_info()
    backend = str(info.get("attention_backend"))
    if not backend.startswith("zoo"):
        return {"backend": backend}
    from zoo.common.fingerprint import products
    from zoo.sglang_plugin import fingerprint

    made = fingerprint(engine).realisation
    return {"backend": backend, "qualification": made["qualification"], "providers": products(made)}


class Bench:
    """Measurements of one engine. Prompts are random and never shared; the first call at a batch size is not timed."""

    def __init__(self, engine: Any, vocabulary: int) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.draw = random.Random(1)
        self.warm: set[tuple[int, float]] = set()

    def measure(self, measure: Measure) -> dict[str, Any]:
        batch = measure.batch
        new = measure.new
        warm = self.heat(batch, measure.top_p)
        begin = time.perf_counter()
        found: dict[str, Any]
        if measure.kind == "load":
            found = {"tokens_per_s": batch * new / self.call(batch, new, measure.top_p)}
        elif measure.kind == "prefill":
            found = {"tokens_per_s": batch * PROMPT / min(self.call(batch, 1) for _ in range(2))}
        elif measure.kind == "first":
            found = {"ms": 1e3 * min(self.call(batch, 1) for _ in range(3))}
        else:
            found = self.profile(batch, measure.kind == "prefill profile")
        return {**found, "warm_s": warm, "took_s": time.perf_counter() - begin}

    def heat(self, batch: int, top_p: float = 1.0) -> float:
        """Seconds of the first call at a batch size and filter, compilation included; 0 if it has been."""
        if (batch, top_p) in self.warm:
            return 0.0
        self.warm.add((batch, top_p))
        return self.call(batch, 8, top_p)

    def call(self, batch: int, new: int, top_p: float = 1.0) -> float:
        """Seconds of one call."""
        prompts = [[self.draw.randrange(self.vocabulary) for _ in range(PROMPT)] for _ in range(batch)]
        self.engine.flush_cache()
        params = {"temperature": 1.0, "top_p": top_p, "max_new_tokens": new, "ignore_eos": True}
        begin = time.perf_counter()
        answers = self.engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        took = time.perf_counter() - begin
        for answer in answers:
            if answer["meta_info"]["completion_tokens"] != new:
                raise ValueError(f"{answer['meta_info']['completion_tokens']} tokens came back, {new} were asked for")
        return took

    def profile(self, batch: int, prefill: bool) -> dict[str, Any]:
        """Kernels of decode steps, or of all batches of a prefill (as one step), by SGLang's own profiler."""
        stage = "EXTEND" if prefill else "DECODE"
        with tempfile.TemporaryDirectory() as folder:
            self.engine.start_profile(
                output_dir=folder,
                num_steps=PROFILED_STEPS,
                activities=["CPU", "GPU"],
                profile_by_stage=True,
                with_stack=False,
                record_shapes=False,
                profile_id="decode",
            )
            self.call(batch, 4 * PROFILED_STEPS)
            traces = sorted(Path(folder).glob(f"*{stage}*.trace.json.gz"))
            if not traces:
                raise ValueError(f"the profiler left no trace of {stage}")
            with gzip.open(traces[0], "rt") as file:
                return kernels_of(json.load(file)["traceEvents"], 1 if prefill else PROFILED_STEPS)


def kernels_of(events: Iterable[dict[str, Any]], steps: int, most: int = 16) -> dict[str, Any]:
    """Microseconds and launches per step by kernel, the longest first, and how much of the time the GPU was busy."""
    times: dict[str, list[float]] = {}
    spans = []
    calls = 0
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            times.setdefault(event["name"][:80], []).append(event["dur"])
            spans.append((event["ts"], event["ts"] + event["dur"]))
        elif event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]:
            calls += 1
    if not spans:
        raise ValueError("the trace has no kernels")
    busy = 0.0
    end = spans[0][0]
    for begin, stop in sorted(spans):  # kernels of two streams may overlap
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    whole = end - min(begin for begin, _ in spans)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {
        "step_us": whole / steps,
        "busy": busy / whole,
        "launches": len(spans) / steps,
        "synchronisations": calls / steps,
        "kernels": [{"kernel": name, "us": sum(t) / steps, "launches": len(t) / steps} for name, t in ordered[:most]],
    }


def main(argv: Sequence[str]) -> int:
    """`python -m benchmarks.engines ARGUMENTS VOCABULARY BATCHES`: a contender's process; ARGUMENTS and BATCHES are JSON."""
    arguments = json.loads(argv[0])
    vocabulary = int(argv[1])
    batches = json.loads(argv[2])
    import sglang

    tell({"progress": "imported SGLang"})
    serve(lambda: sglang.Engine(**arguments), vocabulary, sys.stdin, batches)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
