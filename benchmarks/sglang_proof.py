"""Stock SGLang serves, another process trains: every returned log-probability against `ForRL.score`, byte by byte.

    python -m benchmarks.sglang_proof qwen3 --size 8b [--layers N] [--no-http] [--out rows.jsonl]

Four processes one after another: random weights of realistic scale as a published checkpoint; `sglang.Engine` with too few pages for
its requests (chunked prefill, retraction), asked again (cache hits), then again after a weight update; the HTTP server with a client's
concurrent calls; the trainer on the recorded token ids. Compared: output log-probabilities after temperature alone and after the
filters, prompt log-probabilities, and routed experts. Exit status 1 if a byte differs or a phase is missing.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Recorder, about, geometry, table
from zoo.verify.subject import SIZES

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
SHORT, LONG = (1, 7, 63, 127, 128, 129, 255, 300, 511, 640, 777), (1990, 2040, 2300, 4200)
CONTEXT = 6144
SQUEEZE = 0.45  # of the pages that all requests need at once: the others are retracted or wait
HTTP_REQUESTS = 16
TOGETHER = 8  # records scored in one packed batch
SEEDS = (1, 2)  # of the weights served first, and of those pushed later
STEPS = ("make", "engine", "http", "score")
Request = tuple[list[int], dict[str, Any]]


def requests(count: int, tokens: int, vocabulary: int, hybrid: bool) -> list[Request]:
    """(prompt, sampling parameters): mixed lengths, greedy and every filter; some of a hybrid model's may stop early."""
    draw = random.Random(5)
    out = []
    for i in range(count):
        length = draw.choice(LONG if i % 16 == 3 else SHORT)
        params = {**KINDS[i % len(KINDS)], "max_new_tokens": tokens, "ignore_eos": not hybrid}
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
        self.hybrid = "full" in vars(self.config)
        if self.hybrid:
            self.config = _wrapped(self.config)
        self.page = 80 if self.config.head_dim > 128 else 128

    def update(self) -> list[tuple[str, Tensor]]:
        """Other weights for the first layers: published names."""
        few = 4 if self.hybrid else 1
        small = geometry(self.arch, self.size, few)[0]
        made = self.server.from_config(_wrapped(small) if self.hybrid else small, seed=SEEDS[1], device="cuda")
        parameters = dict(made.named_parameters())
        pieces = [(entry, piece) for entry, piece in made.table_of().pieces() if not entry.optional_alias]
        return [(p.published, p.of(parameters[e.ours]).clone()) for e, p in pieces if "embed" not in p.published]


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


def make(model: Model, folder: Path) -> None:
    model.server.from_config(model.config, seed=SEEDS[0], device="cuda").save_pretrained(folder / "weights")


def _keep(folder: Path, phase: str, asked: list[Request], answers: list[Any], fingerprint: Any, updated: bool) -> None:
    """Appends a phase's records; a run that dies later keeps them."""
    from zoo.sglang_plugin import record

    with (folder / "records.jsonl").open("a") as file:
        for (ids, params), answer in zip(asked, answers, strict=True):
            meta = answer["meta_info"]
            line = {"phase": phase, "updated": updated, "record": record(answer, ids, params, fingerprint).to_dict()}
            line |= {"cached": meta["cached_tokens"], "retracted": meta["num_retractions"], "experts": meta.get("routed_experts")}
            file.write(json.dumps(line) + "\n")
    say(f"{phase}: {len(answers)} requests, weights {fingerprint.weights[:8]}")


def engine(model: Model, folder: Path, count: int, tokens: int) -> None:
    """`sglang.Engine` in this process: fresh with prompt log-probabilities, from the cache, and after a weight update."""
    import sglang

    from zoo.sglang_plugin import fingerprint

    asked = requests(count, tokens, model.config.vocabulary, model.hybrid)
    prompts, params = [ids for ids, _ in asked], [p for _, p in asked]
    page = model.page
    needed = sum(-(-(len(ids) + tokens) // page) * page for ids in prompts)
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
        enable_return_routed_experts=bool(model.config.experts),
        log_level="warning",
    )
    say("engine up")
    more: dict[str, Any] = {"return_logprob": True, **({"return_routed_experts": True} if model.config.experts else {})}

    def generate(**also: Any) -> list[Any]:
        return list(server.generate(input_ids=prompts, sampling_params=params, **more, **also))

    _keep(folder, "fresh, prompts too", asked, generate(logprob_start_len=0), fingerprint(server), False)
    _keep(folder, "from the cache", asked, generate(), fingerprint(server), False)
    server.update_weights_from_tensor(model.update())
    _keep(folder, "after an update", asked, generate(logprob_start_len=0), fingerprint(server), True)
    server.shutdown()


def http(model: Model, folder: Path, tokens: int) -> None:
    """The HTTP server as a client calls it, many calls at once."""
    from zoo.sglang_plugin import fingerprint

    asked = requests(HTTP_REQUESTS, tokens, model.config.vocabulary, model.hybrid)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url, port = f"http://127.0.0.1:{free.getsockname()[1]}", str(free.getsockname()[1])
    options = ["--model-path", str(folder / "weights"), "--attention-backend", "zoo", "--skip-tokenizer-init", "--port", port]
    options += ["--context-length", str(CONTEXT), "--mem-fraction-static", "0.85", "--max-total-tokens", "65600", "--log-level", "warning"]
    options += ["--cuda-graph-bs-decode", "1", "8", "32", "--skip-server-warmup"]

    def post(request: Request) -> Any:
        ids, params = request
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        sent = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(sent, timeout=120) as answer:
            return json.load(answer)

    with (folder / "http.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "sglang.launch_server", *options], stdout=log, stderr=log)
    try:
        while not _healthy(url):
            if process.poll() is not None:
                raise ValueError(f"the server ended: {(folder / 'http.log').read_text()[-1500:]}")
            time.sleep(0.5)
        say("server up")
        with ThreadPoolExecutor(HTTP_REQUESTS) as pool:
            answers = list(pool.map(post, asked))
        _keep(folder, "over HTTP", asked, answers, fingerprint(url), False)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


@dataclass
class Count:
    """Entries compared and bytes that differ, by what was compared; where the first differing entry is."""

    compared: dict[str, int] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    first: str = ""

    def add(self, what: str, trained: Tensor, served: Tensor, where: str) -> None:
        """Equal shapes and dtypes. ValueError otherwise: a shorter answer is no proof."""
        if trained.shape != served.shape or trained.dtype != served.dtype:
            raise ValueError(f"{what}, {where}: {trained.dtype} {list(trained.shape)} against {served.dtype} {list(served.shape)}")
        a, b = (t.contiguous().view(torch.uint8) for t in (trained, served))
        self.compared[what] = self.compared.get(what, 0) + trained.numel()
        self.differing[what] = self.differing.get(what, 0) + int((a != b).sum())
        if not self.first and not torch.equal(a, b):
            entry = (a != b).nonzero()[0].tolist()
            self.first = f"{what}, {where}, byte {entry}"


def score(model: Model, folder: Path) -> dict[str, tuple[Count, list[dict[str, Any]]]]:
    """phase -> (counts, its records), by a trainer that loads the same files and, for the last phase, takes the same update."""
    trainer = model.trainer.from_pretrained(folder / "weights", device="cuda")
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    phases = sorted(dict.fromkeys(line["phase"] for line in lines), key=lambda p: any(x["updated"] for x in lines if x["phase"] == p))
    updated, found = False, {}
    for phase in phases:
        mine = [line for line in lines if line["phase"] == phase]
        if mine[0]["updated"] and not updated:
            trainer.load_weights(model.update())
            updated = True
        count = Count()
        for first in range(0, len(mine), TOGETHER):
            for what, trained, served, where in _compared(trainer, mine[first : first + TOGETHER], first):
                count.add(what, trained, served, where)
        found[phase] = (count, mine)
    return found


@torch.no_grad()
def _compared(trainer: Any, lines: list[dict[str, Any]], first: int) -> Iterator[tuple[str, Tensor, Tensor, str]]:
    """(what, the trainer's, the server's, where) of some records in one packed batch."""
    from zoo.common import ops
    from zoo.common.engine import Completion

    records = [Completion.from_dict(line["record"]) for line in lines]
    trainer.fingerprint().check(records[0].fingerprint)
    documents = [[*r.prompt_ids, *r.output_ids] for r in records]
    device = next(trainer.parameters()).device
    ids = torch.tensor([token for d in documents for token in d], device=device)
    starts = torch.tensor([0, *(len(d) for d in documents)], device=device).cumsum(0)
    chosen: list[Tensor] = []

    def watch(contract: Any, seen: Any, result: Any) -> None:
        if contract.name == "route":
            chosen.append(result[1].int().cpu())

    alone = [replace(r.sampling, top_k=0, top_p=1.0, min_p=0.0) for r in records]
    with ops.watch(watch):
        own = trainer.score(ids, starts).cpu()
    temperature, filtered = (trainer.score(ids, starts, sampling=s).cpu() for s in (alone, [r.sampling for r in records]))
    for n, (record, line) in enumerate(zip(records, lines, strict=True)):
        begin, end, prompt = int(starts[n]), int(starts[n + 1]), len(record.prompt_ids)
        where = f"request {first + n}, prompt of {prompt}, {line['cached']} cached, {record.sampling.to_dict()}"
        drawn = slice(begin + prompt - 1, end - 1)
        yield "temperature", temperature[drawn], torch.tensor(record.log_probs), where
        yield "filtered", filtered[drawn], torch.tensor(record.filtered_log_probs), where
        if record.prompt_log_probs:
            yield "prompt", own[begin : begin + prompt - 1], torch.tensor(record.prompt_log_probs), where
        if line["experts"] and chosen:
            wanted = torch.stack([layer[begin : end - 1] for layer in chosen], 1)
            served = torch.frombuffer(bytearray(base64.b64decode(line["experts"])), dtype=torch.int32)
            yield "experts", wanted, served.view(wanted.shape), where


def report(found: dict[str, tuple[Count, list[dict[str, Any]]]], model: Model, expected: Sequence[str], record: Recorder) -> int:
    """Prints and records a row per phase; 1 if a byte differs, nothing was compared or a phase is missing."""
    body, bad = [], [phase for phase in expected if phase not in found]
    for phase, (count, lines) in found.items():
        values = [value for line in lines for value in _distinct(line)]
        row = {
            "kind": "sglang proof", "arch": model.arch, "size": model.size, "layers": model.config.layers, "phase": phase,
            "requests": len(lines), "compared": count.compared, "differing_bytes": count.differing,
            "cached_tokens": sum(line["cached"] for line in lines), "retractions": sum(line["retracted"] for line in lines),
            "distinct_log_probs": len(set(values)), "first": count.first,
        }  # fmt: skip
        record.add(row)
        compared, differing = sum(count.compared.values()), sum(count.differing.values())
        body.append([phase, len(lines), compared, differing, row["cached_tokens"], row["retractions"], row["distinct_log_probs"]])
        if differing or not compared or len(set(values)) * 2 < len(values):
            bad.append(phase)
            print(f"{phase}: {count.first or 'nothing worth comparing'}", flush=True)
    print(table(body, (f"{model.arch} {model.size}, phase", "requests", "compared", "differing", "cached", "retracted", "distinct")))
    print("every phase equal" if not bad else f"NOT PROVEN: {', '.join(dict.fromkeys(bad))}", flush=True)
    return 1 if bad else 0


def _distinct(line: dict[str, Any]) -> tuple[float, ...]:
    """Log-probabilities that say something: of draws that were not forced."""
    from zoo.common.engine import Completion

    completion = Completion.from_dict(line["record"])
    return () if completion.sampling.is_greedy else completion.log_probs


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.sglang_proof", description=__doc__)
    made.add_argument("arch", choices=tuple(SIZES))
    made.add_argument("--size", default="8b")
    made.add_argument("--layers", type=int, help="the first layers only")
    made.add_argument("--requests", type=int, default=64)
    made.add_argument("--tokens", type=int, default=96, help="drawn by each request")
    made.add_argument("--no-http", action="store_true")
    made.add_argument("--folder", type=Path, help="weights, records and logs; a temporary one by default")
    made.add_argument("--out", type=Path, help="append JSON rows to this file")
    made.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    try:
        model = Model(given.arch, given.size, given.layers)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if given.step is None:
        with tempfile.TemporaryDirectory() as folder:
            return _all(given, given.folder or Path(folder))
    if given.step == "make":
        make(model, given.folder)
    elif given.step == "engine":
        engine(model, given.folder, given.requests, given.tokens)
    elif given.step == "http":
        http(model, given.folder, given.tokens)
    else:
        expected = ["fresh, prompts too", "from the cache", "after an update", *([] if given.no_http else ["over HTTP"])]
        record = Recorder(given.out, about(torch.device("cuda"), smoke=False))
        return report(score(model, given.folder), model, expected, record)
    return 0


def _all(given: argparse.Namespace, folder: Path) -> int:
    """Every step in a process of its own, so that each finds the GPU empty. What was recorded is scored whatever came after it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").unlink(missing_ok=True)
    shared = [given.arch, "--size", given.size, "--folder", str(folder), "--requests", str(given.requests), "--tokens", str(given.tokens)]
    shared += [] if given.layers is None else ["--layers", str(given.layers)]
    shared += [*(["--no-http"] if given.no_http else []), *([] if given.out is None else ["--out", str(given.out)])]
    status = 0
    for step in STEPS:
        if step == "http" and given.no_http:
            continue
        status = subprocess.run([sys.executable, "-m", "benchmarks.sglang_proof", *shared, "--step", step], check=False).returncode
        say(f"{step}: exit status {status}")
        if status and (step == "make" or not (folder / "records.jsonl").exists()):
            return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
