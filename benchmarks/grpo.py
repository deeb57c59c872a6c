"""`python -m benchmarks.grpo ARCH --size 0.6b --sampler embedded unaligned`: examples/grpo.py at a published geometry, a row for each run.

Random weights of realistic scale, and the same seeds whoever samples: the embedded engine (`embedded`), the same with the `unaligned`
program (`unaligned`, what ordinary kernels do), a stock SGLang with the plugin in another process (`sglang`, weights by tensors; `http`, a
server with an address, weights by files). The row has a number for each step: reward, differing bytes, K3, share of clipped tokens. So an
aligned run has the same rewards in every engine. Exit status 1 if a byte differs under an aligned sampler, or if a run fails; others go on.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import USUAL_HELP, USUAL_SIZES, Recorder, about, check_served, check_server, first_line, geometry
from benchmarks.serve import end_group
from zoo.common.engine import Engine
from zoo.common.registry import architectures
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.rollouts.params import hashed_seed
from zoo.common.threads import suited
from zoo.sglang_plugin import Server
from zoo.sglang_plugin.requests import SENT_SEEDS

ROOT = Path(__file__).resolve().parents[1]
SAMPLERS = ("embedded", "unaligned", "sglang", "http")
COLUMNS = ("reward", "differing_bytes", "k3", "clip_ratio")
PROMPTS = 8
PROMPT_TOKENS = 12
START_SECONDS = 120


def example() -> Any:
    """examples/grpo.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("grpo_example", ROOT / "examples" / "grpo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Seeded:
    """A sampler whose every request has a seed of its own, below 2^63, that nothing but `seed` and the requests' count decides."""

    def __init__(self, inner: Any, seed: int) -> None:
        self.inner = inner
        self._seed = seed
        self._count = 0

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, n: int) -> list[Completion]:
        asked = [list(prompt) for prompt in prompts for _ in range(n)]
        each = [replace(params, seed=hashed_seed("grpo", self._seed, self._count + i) % SENT_SEEDS) for i in range(len(asked))]
        self._count += len(asked)
        return self.inner.generate(asked, each)

    def update_weights(self, tensors: Any) -> str:
        return self.inner.update_weights(tensors)


def engine_options(requests: int, longest: int) -> dict[str, Any]:
    """SGLang's options for so many short requests at once beside a trainer."""
    tokens = (requests + 1) * -(-longest // 128) * 128
    return {
        "attention_backend": "zoo",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "context_length": -(-longest // 128) * 128,
        "max_total_tokens": tokens,
        "max_running_requests": requests + 1,
        "cuda_graph_bs_decode": [1, requests],
        "mem_fraction_static": 0.85,
        "log_level": "warning",
    }


@contextmanager
def sampler_of(kind: str, trainer: Any, server_class: Any, device: str, requests: int, longest: int) -> Iterator[Any]:
    """Whoever samples, with the trainer's weights of now."""
    if kind in ("embedded", "unaligned"):
        program = "aligned" if kind == "embedded" else "unaligned"
        server = server_class.from_config(trainer.config, device=device, program=program)
        server.load_weights(trainer.published_tensors())
        page = server.make_memory(2, slots=1).page_size
        pages = 1 + requests * -(-longest // page)
        yield Engine(server, pages=pages, max_batch=requests)
        return
    with tempfile.TemporaryDirectory(prefix="zoo-grpo-") as work:
        folder = Path(work) / "weights"
        trainer.save_pretrained(folder)
        options = engine_options(requests, longest)
        if kind == "sglang":
            engine = importlib.import_module("sglang").Engine(model_path=str(folder), **options)
            try:
                yield Server(engine)
            finally:
                engine.shutdown()
        else:
            with launched(folder, options) as url:
                yield Server(url)


@contextmanager
def launched(folder: Path, options: dict[str, Any]) -> Iterator[str]:
    """A server's address. ValueError with the end of its log if it does not come up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model-path", str(folder), "--port", str(port)]
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(item) for item in (value if isinstance(value, list) else [value])]
    log = folder.parent / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "sglang.launch_server", *words], stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"the server did not come up: {log.read_text()[-600:]}")
            time.sleep(0.5)
        yield url
    finally:
        end_group(process)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def run(given: argparse.Namespace, sampler: str, recorder: Recorder) -> dict[str, Any]:
    """One run; its row is written whatever ends it, with the steps that it came to."""
    config, trainer_class, server_class = geometry(given.arch, given.size or USUAL_SIZES[given.arch], given.layers)
    masters = None if given.bf16 else torch.float32
    trainer = trainer_class.from_config(config, seed=1, device=given.device, master_dtype=masters)
    page = example()
    draw = torch.Generator().manual_seed(given.seed)
    prompts = torch.randint(3, config.vocabulary, (PROMPTS, PROMPT_TOKENS), generator=draw).tolist()
    params = SamplingParams(max_new_tokens=given.tokens, ignore_eos=True)
    row: dict[str, Any] = {
        "kind": "grpo",
        "arch": given.arch,
        "size": given.size or USUAL_SIZES[given.arch],
        "layers": config.layers,
        "sampler": sampler,
        "masters": not given.bf16,
        "rate": given.rate,
        "group": given.group,
        "tokens": given.tokens,
        "seed": given.seed,
        "compared_bytes": 0,
        **{name: [] for name in COLUMNS},
    }
    begin = time.monotonic()
    try:
        with ExitStack() as stack:
            stack.enter_context(suited(trainer))
            requests = PROMPTS * given.group
            longest = PROMPT_TOKENS + given.tokens + 8
            inner = stack.enter_context(sampler_of(sampler, trainer, server_class, given.device, requests, longest))
            row["start_seconds"] = time.monotonic() - begin
            begin = time.monotonic()
            steps = page.train(
                trainer,
                Seeded(inner, given.seed),
                prompts,
                page.even_tokens,
                steps=given.steps,
                group=given.group,
                rate=given.rate,
                params=params,
            )
            for step in steps:
                print(page.told(step), flush=True)
                for name in COLUMNS:
                    row[name].append(step[name])
                row["compared_bytes"] += 4 * requests * given.tokens
                if time.monotonic() - begin > given.seconds:
                    break
    finally:
        row["steps"] = len(row["reward"])
        row["seconds"] = time.monotonic() - begin
        recorder.add(row)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("arch", choices=sorted(architectures()))
    parser.add_argument("--size", help=USUAL_HELP)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sampler", choices=SAMPLERS, nargs="+", default=["embedded"], help="one run after the other, each anew")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9, help="no step begins after so many")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="drawn by each request")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="BF16 parameters without FP32 masters, where memory wants it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if {"sglang", "http"} & set(given.sampler):
        check_served(given.arch)
        check_server(given.device)
    if "unaligned" in given.sampler and given.device == "cpu":
        parser.error("--sampler unaligned: a CPU has no unaligned program")
    recorder = Recorder(given.out, about(torch.device(given.device), False))
    failed = [sampler for sampler in given.sampler if not _right(given, sampler, recorder)]
    return int(bool(failed))


def _right(given: argparse.Namespace, sampler: str, recorder: Recorder) -> bool:
    """One run, told in a line; whether it came to a step and, under an aligned sampler, no byte differs."""
    try:
        row = run(given, sampler, recorder)
    except Exception as error:
        print(f"{sampler}: {type(error).__name__}: {first_line(error)}", flush=True)
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    differing = int(sum(row["differing_bytes"]))
    seconds = f"{row['start_seconds']:.0f} s to start, {row['seconds']:.0f} s"
    print(f"{sampler}: {row['steps']} steps, {row['compared_bytes']:,} bytes compared, {differing:,} differ, {seconds}", flush=True)
    return row["steps"] > 0 and (sampler == "unaligned" or not differing)


if __name__ == "__main__":
    sys.exit(main())
