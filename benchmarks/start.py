"""How long a model needs until nothing more compiles: `python -m benchmarks.start ARCH --size SIZE`, a process for each case.

`alone` compiles in one process into empty caches, `side by side` in several into empty ones, and `again` finds what the latter left.
Then requests of odd lengths, batches and filters are served, and what is compiled for them is counted: it should be nothing. With
`--engine sglang` it is a stock SGLang with the plugin, from the call that starts it to its first answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import USUAL_HELP, USUAL_SIZES, Recorder, about, geometry, table
from benchmarks.serve import LATE
from zoo.common.compilations import watch
from zoo.common.engine import Engine
from zoo.common.registry import architectures
from zoo.common.rehearsal import rehearse
from zoo.common.rollouts import SamplingParams

CASES = {"alone": 1, "side by side": None, "again": None}
FOLDERS = {"TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention"}
# tokens of a prompt, requests of it, how they draw
ODD: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (1, 1, {}),
    (5, 7, {"top_p": 0.9}),
    (77, 3, {"top_k": 20}),
    (301, 9, {"min_p": 0.1, "temperature": 0.7}),
    (2100, 1, {"temperature": 0.0}),
    (1000, 13, {"top_p": 0.95, "top_k": 50}),
)
TOKENS = 65536  # that a server holds
COLUMNS = ("case", "processes", "seconds", "variants", "served_seconds", "compiled_after")


def measure(given: argparse.Namespace, processes: int | None) -> dict[str, Any]:
    """In this process: the rehearsal, then the odd requests."""
    config, _, server_class = geometry(given.arch, given.size or USUAL_SIZES[given.arch], given.layers)
    model = server_class.from_config(config, seed=1, device=given.device)
    engine = Engine(model, pages=400, max_batch=given.batch, chunk_rows=given.chunk, seed=0)
    begin = time.monotonic()
    found = rehearse(model, chunk_rows=given.chunk, max_batch=given.batch, processes=processes)
    seconds = time.monotonic() - begin
    draw = torch.Generator().manual_seed(0)
    begin = time.monotonic()
    for length, requests, how in ODD:
        prompt = torch.randint(3, config.vocabulary, (length,), generator=draw).tolist()
        params = SamplingParams(max_new_tokens=9, ignore_eos=True, **how)
        engine.generate([prompt], params, n=min(requests, given.batch), prompt_log_probs=True)
    watch().look("the odd requests")
    after = watch().after_ready
    late = [f"{one.compiler} {one.kernel}: {one.doing}" for one in watch().found[len(watch().found) - after :]]
    return {
        "processes": processes,
        "seconds": seconds,
        "variants": found,
        "served_seconds": time.monotonic() - begin,
        "compiled_after": after,
        "late": late,
    }


def measure_server(given: argparse.Namespace) -> dict[str, Any]:
    """The same of an `sglang.Engine`, whose weights are written first."""
    import sglang

    config, _, server_class = geometry(given.arch, given.size or USUAL_SIZES[given.arch], given.layers)
    with tempfile.TemporaryDirectory(prefix="zoo-start-") as work:
        folder = Path(work) / "weights"
        server_class.from_config(config, seed=1, device=given.device).save_pretrained(folder)
        torch.cuda.empty_cache()
        begin = time.monotonic()
        engine = sglang.Engine(
            model_path=str(folder),
            attention_backend="zoo",
            skip_tokenizer_init=True,
            chunked_prefill_size=given.chunk,
            max_running_requests=given.batch,
            max_total_tokens=TOKENS,
            log_level="warning",
        )
        try:
            engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2})
            seconds = time.monotonic() - begin
            before = _compiled(engine)
            begin = time.monotonic()
            draw = torch.Generator().manual_seed(0)
            for length, requests, how in ODD:
                prompt = torch.randint(3, config.vocabulary, (length,), generator=draw).tolist()
                engine.generate(
                    input_ids=[prompt] * min(requests, given.batch),
                    sampling_params={"max_new_tokens": 9, "ignore_eos": True, **how},
                    return_logprob=True,
                    logprob_start_len=0,
                )
            served = time.monotonic() - begin
            after = _compiled(engine)
        finally:
            engine.shutdown()
    return {"processes": None, "seconds": seconds, "variants": before, "served_seconds": served, "compiled_after": after, "late": []}


def _compiled(engine: Any) -> int:
    """Kernel variants that the server has compiled since it takes requests."""
    from zoo.sglang_plugin.client import states

    return sum(state["compilations"] for state in states(engine))


def in_a_process(words: Sequence[str], case: str, folder: Path) -> dict[str, Any]:
    """The case's numbers, with the compilers' caches under `folder`. ValueError with the process's last line if it fails."""
    environment = {**os.environ, **{name: str(folder / place) for name, place in FOLDERS.items()}}
    command = [sys.executable, "-m", "benchmarks.start", *words, "--case", case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{case}: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["compiled_after"] and not found["late"]:  # a server logs them
        found["late"] = [line for line in done.stderr.splitlines() if LATE in line]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("arch", choices=sorted(architectures()))
    parser.add_argument("--size", help=USUAL_HELP)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--chunk", type=int, default=8192, help="prompt rows of a push at most")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a push at most")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    if given.case:
        print(json.dumps(measure_server(given) if given.engine == "sglang" else measure(given, CASES[given.case])))
        return 0
    recorder = Recorder(given.out, about(torch.device(given.device), False))
    shared = {
        "kind": "start",
        "engine": given.engine,
        "arch": given.arch,
        "size": given.size or USUAL_SIZES[given.arch],
        "chunk": given.chunk,
        "batch": given.batch,
    }
    rows = []
    with tempfile.TemporaryDirectory(prefix="zoo-start-") as folder:
        for case in given.cases:
            place = Path(folder) / ("alone" if case == "alone" else "side by side")
            row = {**shared, "case": case, **in_a_process(words, case, place)}
            recorder.add(row)
            rows.append(row)
            for line in row["late"]:
                print(f"{case}: compiled after the rehearsal: {line}")
    print(table([[row[column] for column in COLUMNS] for row in rows], COLUMNS))
    return int(any(row["compiled_after"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
