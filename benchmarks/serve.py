"""Servers under SGLang's own benchmark, on your checkpoint and GPU: stock SGLang as it comes, and with the zoo's backend.

    python -m benchmarks.serve --checkpoint PATH [--loads LOADS] [--contenders stock,zoo] [--out rows.jsonl]

One server at a time, `python -m sglang.launch_server`, everything but `--attention-backend` as it comes. As soon as it says that it is
ready, every load is measured twice by `python -m sglang.benchmark.serving` (random ids, prompts and answers of half to the whole length,
log-probabilities returned): `first`, when nothing has been asked for yet, and `again`. A load is CONCURRENCYxINxOUT, with a top-p behind an
@. Rows: tokens/s, milliseconds to the first token and between tokens (median and 99th percentile), seconds from the start to ready, and for
the zoo's server the kernel variants that were compiled after it was ready. The zoo's rows carry their ratio over stock's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Recorder, about, check_server, table

LOADS = "1x1024x512,64x1024x512,256x512x256,64x1024x512@0.95,16x8192x1024,1x32768x256,4x32768x256"
CONTENDERS = {"stock": (), "zoo": ("--attention-backend", "zoo")}
TURNS = ("first", "again")
WAVES = 3  # prompts of a load: so many times its concurrency
READY = 900.0  # seconds that a server may take
LATE = "after ready"  # in a line of the server's log: what was compiled, and the rows that caused it
HALF = "0.5"  # of a load's lengths: the shortest prompt and answer
# what a row keeps of the benchmark's answer, and under which name
KEPT = {
    "output_throughput": "tokens_per_s",
    "median_ttft_ms": "first_token_ms_p50",
    "p99_ttft_ms": "first_token_ms_p99",
    "median_itl_ms": "between_tokens_ms_p50",
    "p99_itl_ms": "between_tokens_ms_p99",
    "completed": "completed",
}


@dataclass(frozen=True)
class Load:
    """Requests at once, tokens of a prompt and of an answer at most, top-p."""

    concurrency: int
    prompt: int
    answer: int
    top_p: float = 1.0

    @property
    def label(self) -> str:
        return f"{self.concurrency}x{self.prompt}x{self.answer}" + ("" if self.top_p == 1.0 else f"@{self.top_p:g}")


def parse_loads(text: str) -> list[Load]:
    """ValueError naming what is no load."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:@(0?\.\d*[1-9]\d*))?", part)
        if not match:
            raise ValueError(
                f"--loads {part!r} is not CONCURRENCYxINxOUT, like 64x1024x512, or with a top-p behind it, like 64x1024x512@0.95"
            )
        found.append(Load(int(match[1]), int(match[2]), int(match[3]), float(match[4] or 1)))
    return found


def check_checkpoint(path: Path) -> None:
    """ValueError for a folder without a config or a tokenizer: SGLang's benchmark asks for both."""
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ValueError(f"--checkpoint {path} has no {name}")


def server_command(path: Path, port: int, extra: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(path), "--port", str(port), *extra]


def client_command(path: Path, port: int, load: Load, out: Path) -> list[str]:
    given = {
        "--backend": "sglang",
        "--base-url": f"http://127.0.0.1:{port}",
        "--model": path,
        "--dataset-name": "random-ids",
        "--random-input-len": load.prompt,
        "--random-output-len": load.answer,
        "--random-range-ratio": HALF,
        "--num-prompts": WAVES * load.concurrency,
        "--max-concurrency": load.concurrency,
        "--warmup-requests": 0,
        "--top-p": load.top_p,
        "--temperature": 1.0,
        "--output-file": out,
    }
    flags = ["--tokenize-prompt", "--return-logprob", "--flush-cache", "--disable-tqdm"]
    return [sys.executable, "-m", "sglang.benchmark.serving", *(str(word) for pair in given.items() for word in pair), *flags]


def answer_of(line: str) -> dict[str, Any]:
    """What a row keeps of the benchmark's output line. ValueError where something is missing from it."""
    said = json.loads(line)
    missing = [name for name in KEPT if name not in said]
    if missing:
        raise ValueError(f"SGLang's benchmark says nothing of {', '.join(missing)}")
    return {ours: said[theirs] for theirs, ours in KEPT.items()}


@contextmanager
def serving(path: Path, extra: Sequence[str], log: Path, most: float) -> Iterator[tuple[int, float]]:
    """A server that is ready: its port, and the seconds that it took. RuntimeError if it ends or is not ready within `most` seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(server_command(path, port, extra), stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while not _answers(port):
                if process.poll() is not None or time.monotonic() - began > most:
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                    raise RuntimeError(f"the server was not ready after {time.monotonic() - began:.0f} s; its log ends:\n{tail}")
                time.sleep(0.5)
            yield port, time.monotonic() - began
        finally:
            end_group(process)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health_generate", timeout=30) as answer:
            return answer.status == 200
    except OSError:
        return False


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and its children, which are a process group of their own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def measure(path: Path, name: str, loads: Sequence[Load], folder: Path, record: Recorder, shared: dict[str, Any], most: float) -> None:
    """One contender's rows, as they come. What fails is a row with its error, and the next load goes on."""
    try:
        with serving(path, CONTENDERS[name], folder / f"{name}.log", READY) as (port, seconds):
            print(f"{name}: ready after {seconds:.0f} s", flush=True)
            before = compiled(port) if name == "zoo" else None
            for turn in TURNS:
                for load in loads:
                    row = {**shared, "kind": "serve", "contender": name, "load": load.label, "turn": turn, "ready_s": seconds}
                    row |= _asked(client_command(path, port, load, folder / f"{name}-{load.label}-{turn}.jsonl"), most)
                    if before is not None:
                        after = compiled(port)
                        row["compilations"] = after - before
                        before = after
                    record.add(row)
                    print(f"{name} {load.label} {turn}: {row.get('tokens_per_s', row.get('error'))}", flush=True)
    except (RuntimeError, ValueError) as error:  # ValueError: the zoo's server no longer says what it compiled
        record.add({**shared, "kind": "serve", "contender": name, "error": str(error)[:400]})
        print(f"{name}: {error}", flush=True)
    log = folder / f"{name}.log"
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if LATE in line:
            print(f"{name}: {line}", flush=True)


def _asked(command: list[str], most: float) -> dict[str, Any]:
    out = Path(command[command.index("--output-file") + 1])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=most, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {most:.0f} s"}
    if done.returncode or not out.exists():
        return {"error": f"exit status {done.returncode}: {(done.stderr or done.stdout)[-300:]}"}
    lines = out.read_text().splitlines()
    try:
        return answer_of(lines[-1] if lines else "")
    except ValueError as error:
        return {"error": f"SGLang's benchmark gave no answer: {error}"}


def compiled(port: int) -> int:
    """Kernel variants that the zoo's server has compiled since it was ready."""
    from zoo.sglang_plugin.client import states

    return sum(state["compilations"] for state in states(f"http://127.0.0.1:{port}"))


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The zoo's rows with their tokens/s over stock's of the same load and turn, where both were measured."""
    stock = {(row["load"], row["turn"]): row["tokens_per_s"] for row in rows if row.get("contender") == "stock" and "tokens_per_s" in row}
    found = []
    for row in rows:
        rival = stock.get((row.get("load"), row.get("turn")))
        if row.get("contender") == "zoo" and rival and "tokens_per_s" in row:
            found.append({**row, "over_stock": row["tokens_per_s"] / rival})
        else:
            found.append(row)
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--checkpoint", type=Path, required=True, help="a folder as published, its tokenizer beside the weights")
    made.add_argument("--loads", default=LOADS, help="comma-separated, each CONCURRENCYxINxOUT with @top-p behind it; %(default)s")
    made.add_argument("--contenders", default=",".join(CONTENDERS), help="%(default)s")
    made.add_argument("--seconds", type=float, default=600, help="of one load at most")
    made.add_argument("--out", type=Path, help="append JSON rows to this file")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    names = given.contenders.split(",")
    try:
        loads = parse_loads(given.loads)
        unknown = [name for name in names if name not in CONTENDERS]
        if unknown:
            raise ValueError(f"--contenders {unknown[0]!r}: there are {', '.join(CONTENDERS)}")
        check_checkpoint(given.checkpoint)
        check_server("cuda")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = Recorder(None, about(torch.device("cuda"), smoke=False))
    shared = {"checkpoint": given.checkpoint.name}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            measure(given.checkpoint, name, loads, Path(folder), record, shared, given.seconds)
    rows = with_ratios(record.rows)
    if given.out is not None:
        with given.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    header = ("contender", "load", "turn", "tokens/s", "over stock", "first token ms p50", "p99", "between p50", "p99", "compiled")
    columns = ("contender", "load", "turn", "tokens_per_s", "over_stock", *list(KEPT.values())[1:5], "compilations")
    print(table([[row.get(column) for column in columns] for row in rows], header))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
