"""Stock SGLang as it comes, with deterministic inference, and with the zoo's backend: tokens/s on one machine, in turns.

    python -m benchmarks.sglang qwen3 --size 8b [--layers N] [--backends fa3,triton] [--json rows.jsonl]

Each contender is an `sglang.Engine` in a process of its own. All start together, one measures at a time while the others idle, so
that they share the machine's clock and heat. Weights are SGLang's dummy ones: near zero, which moves no launch of a dense model.
Prompts are random and never shared, and the prefix cache is flushed between calls. Log-probabilities are returned. Prefill graphs are
off for all: the plugin has none, stock takes over two minutes to capture them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

PROMPT = 512
# batch, new tokens
LOADS = ((1, 128), (32, 128), (64, 128), (64, 1024))
GRAPHS = (1, 8, 32, 64)
MARGIN = 4096  # slots beyond what the largest load holds
START_SECONDS = 400


def contenders(backends: list[str]) -> dict[str, dict[str, Any]]:
    """Name -> engine arguments."""
    found: dict[str, dict[str, Any]] = {}
    for backend in backends:
        found[f"stock {backend}"] = {"attention_backend": backend, "cuda_graph_backend_prefill": "disabled"}
        found[f"deterministic {backend}"] = {**found[f"stock {backend}"], "enable_deterministic_inference": True}
    return {**found, "zoo": {"attention_backend": "zoo"}}


def engine_arguments(path: str, loads: list[tuple[int, int]], context: int | None) -> dict[str, Any]:
    """What all contenders share."""
    slots = max(batch * (PROMPT + new) for batch, new in loads) + MARGIN
    return {
        "model_path": path,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_total_tokens": -(-slots // 128) * 128,
        "max_running_requests": max(batch for batch, _ in loads),
        "cuda_graph_bs_decode": [n for n in GRAPHS if n <= max(batch for batch, _ in loads)],
        "mem_fraction_static": 0.9,
        "context_length": context,
        "log_level": "error",
    }


def worker(arguments: dict[str, Any], loads: list[tuple[int, int]], vocabulary: int) -> None:
    """One contender: says READY, then answers each line on stdin with one JSON line of measurements."""
    import sglang

    engine = sglang.Engine(**arguments)
    draw = random.Random(1)

    def call(batch: int, new: int) -> float:
        prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(batch)]
        engine.flush_cache()
        params = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
        begin = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        took = time.perf_counter() - begin
        for answer in answers:
            if answer["meta_info"]["completion_tokens"] != new:
                raise ValueError(f"{answer['meta_info']['completion_tokens']} tokens came back, {new} were asked for")
        return took

    for batch in sorted({batch for batch, _ in loads}):
        call(batch, 8)
    say("READY")
    for _ in sys.stdin:
        found: dict[str, Any] = {}
        for batch, new in loads:
            found[f"{batch}x{new}"] = batch * new / call(batch, new)
        largest = max(batch for batch, _ in loads)
        found["prefill_tokens_per_s"] = largest * PROMPT / min(call(largest, 1) for _ in range(2))
        found["first_token_ms"] = 1e3 * min(call(1, 1) for _ in range(3))
        say(json.dumps(found))
    engine.shutdown()


def say(line: str) -> None:
    print(f"\n@@ {line}", flush=True)


def heard(stream: TextIO, name: str) -> str:
    """The worker's next message; ValueError with its last lines if it ended without one."""
    tail: list[str] = []
    for line in stream:
        if line.startswith("@@ "):
            return line[3:].strip()
        tail = [*tail[-14:], line.rstrip()]
    raise ValueError(f"{name} ended: " + " | ".join(tail)[-1500:])


def measure(path: str, loads: list[tuple[int, int]], backends: list[str], turns: int, context: int | None) -> dict[str, Any]:
    """Contender -> measurements, or the reason why it did not run."""
    vocabulary = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    shared = engine_arguments(path, loads, context)
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sglang", "worker", json.dumps([{**shared, **mine}, loads, vocabulary])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, mine in contenders(backends).items()
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, process in started.items():
        assert process.stdout is not None
        try:
            heard(process.stdout, name)
        except ValueError as error:
            found[name] = str(error)
    for _ in range(turns):
        for name, process in started.items():
            if isinstance(found.get(name), str):
                continue
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            try:
                now = json.loads(heard(process.stdout, name))
            except ValueError as error:
                found[name] = str(error)
                continue
            found[name] = {k: best(k, v, found.get(name, {}).get(k)) for k, v in now.items()}
    for process in started.values():
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
    return found


def best(name: str, value: float, before: float | None) -> float:
    if before is None:
        return value
    return min(value, before) if name.endswith("_ms") else max(value, before)


def write_config(arch: str, size: str, layers: int | None, folder: Path) -> str:
    """A folder with config.json only: dummy weights need no more."""
    from zoo.qwen3 import MOE_SIZES, SIZES

    sizes = {"qwen3": SIZES, "qwen3_moe": MOE_SIZES}
    if arch not in sizes or size not in sizes[arch]:
        raise ValueError(f"{arch} {size} is not a model of the plugin; there are {', '.join(f'{a} {s}' for a in sizes for s in sizes[a])}")
    config = sizes[arch][size]
    config = config if layers is None else replace(config, layers=layers)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return str(folder)


def main(argv: list[str]) -> int:
    if argv[:1] == ["worker"]:
        arguments, loads, vocabulary = json.loads(argv[1])
        worker(arguments, [(b, n) for b, n in loads], vocabulary)
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang")
    parser.add_argument("arch")
    parser.add_argument("--size", default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--backends", default="fa3", help="stock attention backends, by commas")
    parser.add_argument("--loads", default=",".join(f"{b}x{n}" for b, n in LOADS), help="batch x new tokens, by commas")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--context", type=int, help="the servers' context length; the model's by default")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    loads = [(int(b), int(n)) for b, n in (load.split("x") for load in given.loads.split(","))]
    import torch

    from benchmarks.common import Recorder, about, table

    with tempfile.TemporaryDirectory() as folder:
        path = write_config(given.arch, given.size, given.layers, Path(folder))
        found = measure(path, loads, given.backends.split(","), given.turns, given.context)
    recorder = Recorder(given.json, about(torch.device("cuda"), smoke=False))
    shared = {"kind": "sglang", "arch": given.arch, "size": given.size, "layers": given.layers, "prompt": PROMPT}
    for name, values in found.items():
        recorder.add({**shared, "contender": name, **(values if isinstance(values, dict) else {"failed": values})})
    ran = {name: values for name, values in found.items() if isinstance(values, dict)}
    for name in found.keys() - ran.keys():
        print(f"{name} did not run: {found[name]}")
    if ran:
        columns = list(next(iter(ran.values())))
        print(table(([name, *values.values()] for name, values in ran.items()), ["contender", *columns]))
        stock = [name for name in ran if name.startswith("stock")]
        if "zoo" in ran and stock:
            rate = max(loads, key=lambda load: load[0] * load[1])
            key = f"{rate[0]}x{rate[1]}"
            rival = max(stock, key=lambda name: ran[name][key])
            parts = (f"{key} {100 * ran['zoo'][key] / ran[rival][key]:.1f} %" for key in columns if "x" in key)
            print(f"zoo against {rival}: " + ", ".join(parts))
    return 0 if "zoo" in ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
