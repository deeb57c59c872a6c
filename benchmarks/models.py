"""`python -m benchmarks.models ARCH`: a whole model on the `aligned` program against the `unaligned` one.

Same drivers, same parameters (one copy), same GPU, same run, turn by turn. A few documents are first scored, prefilled and
decoded by CUDA graph: if those bytes differ, times are shown and no ratio is.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.admit import admit
from benchmarks.common import Budget, Recorder, about, first_line, geometry, in_parallel, numbers, table
from zoo.common import ops
from zoo.common.hybrid_memory import HybridMemory
from zoo.common.layers import RotaryTable
from zoo.common.ops import CONTRACTS
from zoo.common.program import ALIGNED_CUDA, KEY_SEGMENTS, UNALIGNED_CUDA, Program, resolve
from zoo.common.rows import Rows
from zoo.common.serving import DecodeGraph, ForServing
from zoo.common.training import ForRL
from zoo.verify.qualify import targets_of
from zoo.verify.subject import SIZES

PARTS = ("ladder", "decode", "prefill", "score", "train", "long")
LONG = 32768
CHUNK_STEPS = 64  # decode steps in a turn of a model with chunks: every row of a chunk, its closing too
STEPS = 16
PROOF = (130, 65, 600)
# what --smoke takes where nothing else is asked for: on one core the references need seconds for it, hours for a published size
SMOKE = {"size": "tiny", "batches": "1,2", "contexts": "100", "documents": 2, "length": 130, "lengths": "70,33"}


@dataclass(frozen=True)
class Mixed(Program):
    """For measurements only: the unaligned program with the ops of `switched` taken from the aligned one."""

    switched: tuple[str, ...] = ()

    def byte_class(self, op: str) -> str:
        return (ALIGNED_CUDA if op in self.switched else UNALIGNED_CUDA)[op]


def mixed(switched: Sequence[str]) -> Mixed:
    segments = KEY_SEGMENTS["cuda"] if "attention" in switched else ()
    return Mixed("unaligned", "cuda", "bfloat16", key_segments=segments, switched=tuple(sorted(switched)))


def switchable(names: Sequence[str]) -> list[str]:
    """The ops of `names` whose byte class the two programs do not share: what --ablate can switch one by one."""
    return [name for name in names if ALIGNED_CUDA[name] != UNALIGNED_CUDA[name]]


def shares(base_us: float, alone_us: Mapping[str, float], whole_us: float) -> list[dict[str, Any]]:
    """Added microseconds per switched op, and its share of what all of them add; the rest is their interaction."""
    whole = whole_us - base_us
    out = [{"op": op, "added_us": us - base_us, "share": (us - base_us) / whole if whole else None} for op, us in alone_us.items()]
    rest = whole - sum(us - base_us for us in alone_us.values())
    return [*out, {"op": "together beyond the sum", "added_us": rest, "share": rest / whole if whole else None}]


def twin(source: nn.Module, made: type[Any], program: Program) -> Any:
    """Another model over the same parameters and RoPE tables."""
    with torch.device("meta"):
        model = made(source.config, program)
    model.load_state_dict(source.state_dict(), assign=True)
    model.requires_grad_(made.trainable)
    tables = {name: part.table_PC2 for name, part in source.named_modules() if isinstance(part, RotaryTable)}
    for name, part in model.named_modules():
        if isinstance(part, RotaryTable):
            part.table_PC2 = tables[name]
    return model


@dataclass
class Bench:
    """A model on a device, its programs, and where rows go. `rival` None: a CPU, where there is nothing to compare with."""

    arch: str
    size: str
    config: Any
    aligned: Program
    rival: Program | None
    source: ForRL
    trainer: type[Any]
    server: type[Any]
    budget: Budget
    record: Recorder
    rounds: int = 5
    broken: str = ""
    providers: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.source.parameters()).device

    @property
    def programs(self) -> dict[str, Program]:
        return {"aligned": self.aligned, **({} if self.rival is None else {"unaligned": self.rival})}

    @property
    def steps(self) -> int:
        return CHUNK_STEPS if "full" in vars(self.config) else STEPS

    def row(self, what: str, times: Mapping[str, float], tokens: int, **more: Any) -> None:
        """Times in microseconds of `tokens` tokens under each program."""
        us, rival_us = times["aligned"], times.get("unaligned")
        ratio = None if rival_us is None or self.broken else us / rival_us
        per_second = {f"{name}_tokens_per_s": tokens / t * 1e6 for name, t in times.items()}
        row = {
            "kind": "model", "arch": self.arch, "size": self.size, "layers": self.config.layers, "what": what, "us": us,
            "rival": None if rival_us is None else "unaligned", "rival_us": rival_us, "ratio": ratio, **per_second,
            "bytes": f"red: {self.broken}" if self.broken else "equal", "providers": self.providers, **more,
        }  # fmt: skip
        self.record.add(row)
        print(lines([row]).splitlines()[1], flush=True)

    def ids(self, count: int) -> Tensor:
        return torch.randint(self.config.vocabulary, (count,), device=self.device)


def place_sequences(model: ForServing, counts: Sequence[int]) -> tuple[Any, Tensor]:
    """Memory for sequences of these lengths and their table: pages one after another, slot n + 1 for sequence n."""
    probe = model.make_memory(2, **({"slots": 1} if "full" in vars(model.config) else {}))
    size = probe.page_size
    del probe
    blocks = [-(-count // size) for count in counts]
    slots = {"slots": len(counts)} if "full" in vars(model.config) else {}
    memory = model.make_memory(sum(blocks) + 1, **slots)
    pages, first = [], 1
    for count in blocks:
        pages.append(list(range(first, first + count)))
        first += count
    return memory, memory.table(pages, list(range(1, len(counts) + 1)), max(blocks))


def fill(memory: Any) -> None:
    """Caches as a long run leaves them: finite numbers of ordinary size."""
    pages = memory.paged if isinstance(memory, HybridMemory) else memory
    for pool in (pages.k_LPSGE, pages.v_LPSGE):
        pool.normal_()
    if isinstance(memory, HybridMemory):
        for name, pool in memory.delta.pools.items():
            if "beta" in name or "decay" in name:
                pool.fill_(0.5 if "beta" in name else -0.5)
            else:
                pool.normal_(0, 0.05)
        memory.delta.carry_LSWC.normal_()


def prove(bench: Bench, lengths: Sequence[int], tail: int = 4) -> tuple[int, int]:
    """(compared, differing) log-probabilities: trainer against prefill, and against decode of the last tokens."""
    trainer = twin(bench.source, bench.trainer, bench.aligned).eval()
    server = twin(bench.source, bench.server, bench.aligned).eval()
    starts = torch.tensor([0, *lengths], device=bench.device).cumsum(0)
    ids = bench.ids(int(starts[-1]))
    with torch.no_grad():
        expected = trainer.score(ids, starts)
        targets = torch.roll(ids, -1)
        last = set((starts[1:] - 1).tolist())
        memory, pages = place_sequences(server, lengths)
        hidden = server.prefill(ids, Rows.packed(starts), memory, pages)
        kept = torch.tensor([r not in last for r in range(len(ids))], device=bench.device)
        differing = int((server.log_prob(hidden, targets).view(torch.int32) != expected.view(torch.int32))[kept].sum())
        compared = int(kept.sum())
        memory, pages = place_sequences(server, lengths)
        heads = [length - tail - 1 for length in lengths]
        index = torch.cat([torch.arange(s, s + h) for s, h in zip(starts.tolist(), heads)]).to(bench.device)
        server.prefill(ids[index], Rows.pushed(heads, None, bench.device), memory, pages)
        graph = None
        if bench.device.type == "cuda":
            blocks = pages.shape[1] - (memory.columns(1) - 1)
            graph = DecodeGraph(server, memory, len(lengths), blocks)
        for step in range(tail):
            positions = torch.tensor([h + step for h in heads], device=bench.device)
            at = starts[:-1] + positions
            if graph is None:
                logits = server.decode(ids[at], Rows.pushed([1] * len(heads), positions.tolist(), bench.device), memory, pages)
            else:
                logits = graph.replay(ids[at], positions, pages)
            found = ops.log_prob_of_logits(logits, targets[at], program=server.program).log_prob_R
            differing += int((found.view(torch.int32) != expected[at].view(torch.int32)).sum())
            compared += len(heads)
    return compared, differing


def ladder(bench: Bench, lengths: Sequence[int]) -> None:
    compared, differing = prove(bench, lengths)
    bench.broken = f"{differing} of {compared} log-probabilities differ between engines" if differing else ""
    print(f"bytes: {compared} log-probabilities of trainer, prefill and decode compared, {differing} differ", flush=True)
    bench.record.add({
        "kind": "model", "arch": bench.arch, "size": bench.size, "layers": bench.config.layers, "what": "ladder",
        "lengths": list(lengths), "compared": compared, "differing": differing, "providers": bench.providers,
    })  # fmt: skip


def turns(contenders: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median microseconds of each contender's turn; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


class Decoder:
    """Steps of a batch under one program, by graph where there is a GPU; every turn walks the same positions."""

    def __init__(self, bench: Bench, program: Program, memory: Any, pages: Tensor, context: int) -> None:
        self.model = twin(bench.source, bench.server, program).eval()
        self.memory, self.pages, self.context, self.steps = memory, pages, context, bench.steps
        batch = pages.shape[0]
        self.ids = bench.ids(batch)
        self.positions = torch.full((batch,), context, device=bench.device)
        self.graph = None
        if bench.device.type == "cuda":
            self.graph = DecodeGraph(self.model, memory, batch, pages.shape[1] - (memory.columns(1) - 1))
            self.graph.replay(self.ids, self.positions, pages)

    def turn(self) -> None:
        if self.graph is None:
            rows = Rows.pushed([1] * len(self.ids), [self.context] * len(self.ids), self.ids.device)
            self.model.decode(self.ids, rows, self.memory, self.pages)
            return
        self.graph.positions_N.fill_(self.context)
        self.graph.lengths_N.fill_(self.context + 1)
        for _ in range(self.steps):
            self.graph.graph.replay()
            self.graph.positions_N.add_(1)
            self.graph.lengths_N.add_(1)

    def profile(self, most: int = 15) -> list[dict[str, Any]]:
        """The kernels of one step by their time: microseconds and launches."""
        from torch.profiler import ProfilerActivity, profile

        assert self.graph is not None
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.graph.graph.replay()
            torch.cuda.synchronize()
        found = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in found)
        return [
            {
                "kernel": e.key[:90],
                "us": e.self_device_time_total,
                "launches": e.count,
                "share": e.self_device_time_total / max(total, 1e-9),
            }
            for e in found[:most]
        ]


def _decoders(bench: Bench, programs: Mapping[str, Program], batch: int, context: int) -> dict[str, Decoder]:
    any_server = twin(bench.source, bench.server, bench.aligned)
    memory, pages = place_sequences(any_server, [context + bench.steps + 1] * batch)
    fill(memory)
    return {name: Decoder(bench, program, memory, pages, context) for name, program in programs.items()}


@torch.no_grad()
def decode(bench: Bench, batches: Sequence[int], contexts: Sequence[int], profiled: bool) -> None:
    for context in contexts:
        for batch in batches:
            if not bench.budget.allows(f"decode, batch {batch} at {context}", 8.0):
                continue
            made = _decoders(bench, bench.programs, batch, context)
            times = turns({name: d.turn for name, d in made.items()}, bench.rounds, bench.device)
            steps = bench.steps if bench.device.type == "cuda" else 1
            more: dict[str, Any] = {"batch": batch, "context": context, "steps": steps, "graph": bench.device.type == "cuda"}
            if profiled and bench.device.type == "cuda":
                more["profile"] = {name: d.profile() for name, d in made.items()}
                for name, kernels in more["profile"].items():
                    print(f"{name}, one decode step of {batch} at {context}\n" + _kernels(kernels), flush=True)
            bench.row("decode", {name: us / steps for name, us in times.items()}, batch, **more)
            del made
            _free(bench)


@torch.no_grad()
def prefill(bench: Bench, documents: int, length: int) -> None:
    if not bench.budget.allows("prefill", 10.0):
        return
    servers = {name: twin(bench.source, bench.server, program).eval() for name, program in bench.programs.items()}
    memory, pages = place_sequences(servers["aligned"], [length] * documents)
    ids, slots = bench.ids(documents * length), list(range(1, documents + 1)) if "full" in vars(bench.config) else []
    starts = torch.arange(0, documents * length + 1, length, device=bench.device)
    wanted = starts[1:] - 1

    def run(server: ForServing) -> Callable[[], Any]:
        def call() -> None:
            if slots:
                memory.clear([], slots)
            server.logits(server.prefill(ids, Rows.packed(starts), memory, pages, wanted))

        return call

    times = turns({name: run(server) for name, server in servers.items()}, min(3, bench.rounds), bench.device)
    bench.row("prefill", times, documents * length, documents=documents, length=length)
    _free(bench)


@torch.no_grad()
def score(bench: Bench, documents: int, length: int) -> None:
    if not bench.budget.allows("score", 10.0):
        return
    trainers = {name: twin(bench.source, bench.trainer, program).eval() for name, program in bench.programs.items()}
    ids, starts = bench.ids(documents * length), torch.arange(0, documents * length + 1, length, device=bench.device)
    times = turns({name: lambda t=t: t.score(ids, starts) for name, t in trainers.items()}, min(3, bench.rounds), bench.device)
    bench.row("score", times, documents * length, documents=documents, length=length)
    _free(bench)


def train(bench: Bench, documents: int, length: int, what: str = "train", modes: Sequence[bool] = (False, True), rounds: int = 3) -> None:
    """Forward and backward of -score.sum() / N. Peak memory is that of the step with parameters and gradients."""
    ids, starts = bench.ids(documents * length), torch.arange(0, documents * length + 1, length, device=bench.device)
    for checkpointed in modes:
        if not bench.budget.allows(f"{what}, checkpointing {'on' if checkpointed else 'off'}", 10.0):
            continue
        peaks: dict[str, float] = {}
        calls = {name: _step(bench, program, ids, starts, checkpointed, peaks, name) for name, program in bench.programs.items()}
        more = {"documents": documents, "length": length, "checkpointing": checkpointed}
        try:
            times = turns(calls, min(rounds, bench.rounds), bench.device)
        except torch.OutOfMemoryError as error:
            bench.record.add({"kind": "model", "arch": bench.arch, "size": bench.size, "what": what, **more, "error": first_line(error)})
            print(f"{what}, checkpointing {checkpointed}: {first_line(error)}", flush=True)
        else:
            bench.row(what, times, documents * length, **more, **{f"{name}_peak_gib": peak for name, peak in peaks.items()})
        del calls
        _free(bench)


def _step(
    bench: Bench, program: Program, ids: Tensor, starts: Tensor, checkpointed: bool, peaks: dict[str, float], name: str
) -> Callable[[], None]:
    model = twin(bench.source, bench.trainer, program).train()
    if checkpointed:
        model.gradient_checkpointing_enable()

    def call() -> None:
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        (-model.score(ids, starts).sum() / ids.shape[0]).backward()
        if bench.device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated() / 2**30
        for parameter in model.parameters():
            parameter.grad = None

    return call


def ablate(bench: Bench, batches: Sequence[int], context: int, documents: int, length: int, parts: Sequence[str]) -> None:
    """Switches one op at a time from the unaligned to the aligned class, in a decode step and in scoring."""
    assert bench.rival is not None
    base = bench.rival.switched if isinstance(bench.rival, Mixed) else ()
    names = [op for op in switchable(_ops_of(bench)) if op not in base]
    programs: dict[str, Program] = {
        "unaligned": bench.rival,
        **{op: mixed([*base, op]) for op in names},
        "aligned": bench.aligned,
    }
    with torch.no_grad():
        for batch in batches if "decode" in parts else ():
            if bench.budget.allows(f"ablation, decode {batch}", 15.0):
                made = _decoders(bench, programs, batch, context)
                times = turns({name: d.turn for name, d in made.items()}, bench.rounds, bench.device)
                _shares(bench, "decode", {n: us / bench.steps for n, us in times.items()}, batch=batch, context=context)
                del made
                _free(bench)
        if "score" in parts and bench.budget.allows("ablation, score", 15.0):
            ids, starts = bench.ids(documents * length), torch.arange(0, documents * length + 1, length, device=bench.device)
            trainers = {name: twin(bench.source, bench.trainer, program).eval() for name, program in programs.items()}
            times = turns({name: lambda t=t: t.score(ids, starts) for name, t in trainers.items()}, min(2, bench.rounds), bench.device)
            _shares(bench, "score", times, documents=documents, length=length)


def _shares(bench: Bench, what: str, times: dict[str, float], **more: Any) -> None:
    alone = {name: us for name, us in times.items() if name not in ("aligned", "unaligned")}
    found = shares(times["unaligned"], alone, times["aligned"])
    bench.record.add({
        "kind": "ablation", "arch": bench.arch, "size": bench.size, "layers": bench.config.layers, "what": what, **more,
        "us": times["aligned"], "rival": "unaligned", "rival_us": times["unaligned"], "ops": found, "providers": bench.providers,
    })  # fmt: skip
    where = ", ".join(f"{key} {value}" for key, value in more.items())
    print(f"{what} ({where}): unaligned {times['unaligned']:.1f} us, aligned {times['aligned']:.1f} us")
    print(table([[f["op"], f["added_us"], f["share"]] for f in found], ("switched to aligned", "added us", "share")), flush=True)


def _ops_of(bench: Bench) -> list[str]:
    names = ["linear", "attention"]
    return names + (["experts"] if bench.config.experts else []) + (["gated_delta"] if "full" in vars(bench.config) else [])


def _rival(arch: str) -> Program:
    """`unaligned`, or, where a library that it needs is missing, the same with our own kernel for that op, and said so."""
    program = resolve("unaligned", "cuda", torch.bfloat16)
    if arch.startswith("qwen3_5"):
        provider = next(p for p in CONTRACTS["gated_delta"].providers if p.byte_class == UNALIGNED_CUDA["gated_delta"])
        try:
            provider.function("serve")
        except (ImportError, AttributeError) as error:
            print(f"rival: gated_delta stays aligned ({first_line(error)})", flush=True)
            return mixed(["gated_delta"])
    return program


def _free(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _kernels(kernels: Sequence[dict[str, Any]]) -> str:
    return table([[k["kernel"], k["us"], k["launches"], k["share"]] for k in kernels], ("kernel", "us", "launches", "share"))


KEYS = ("batch", "context", "documents", "length", "checkpointing")


def lines(rows: Sequence[dict[str, Any]]) -> str:
    body = [
        [
            row["what"], " ".join(f"{key}={row[key]}" for key in KEYS if key in row), row.get("us"), row.get("rival_us"),
            row.get("ratio"),
            row.get("aligned_tokens_per_s"), row.get("aligned_peak_gib"), row.get("unaligned_peak_gib"),
            row.get("bytes", row.get("error", "")),
        ]
        for row in rows if row["kind"] == "model" and row["what"] != "ladder"
    ]  # fmt: skip
    return table(body, ("what", "of", "us", "unaligned us", "ratio", "tokens/s", "peak GiB", "unaligned GiB", "bytes"))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    made.add_argument("arch", choices=tuple(SIZES))
    made.add_argument("--size", default="8b")
    made.add_argument("--layers", type=int)
    made.add_argument("--what", default="ladder,decode,prefill,score", help=f"of {','.join(PARTS)}")
    made.add_argument("--batches", help="sequences of a decode step; 1,8,64, for qwen3_5 1,8,32")
    made.add_argument("--contexts", default="600,4096")
    made.add_argument("--documents", type=int, default=8, help="documents scored, prefilled and trained at once")
    made.add_argument("--length", type=int, default=4096, help="tokens of each")
    made.add_argument("--lengths", help="documents whose bytes are compared before anything is timed")
    made.add_argument("--ablate", action="store_true", help="added time per aligned op, of decode and score where asked for")
    made.add_argument("--profile", action="store_true", help="the kernels of a decode step")
    made.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, help="append JSON rows to this file")
    made.add_argument("--budget", type=float, default=600, help="seconds in all")
    made.add_argument("--warm", action="store_true", help="first compile everything with few layers, part by part in parallel")
    made.add_argument("--compile-only", action="store_true", help="run everything once with few layers, untimed")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--smoke", action="store_true", help="for the CPU: a tiny model and few tokens; proves plumbing, writes nothing")
    return made


def _warm(arch: str, given: argparse.Namespace, parts: Sequence[str], batches: Sequence[int], seconds: float) -> None:
    """A process per part and decode batch, so that compilers run side by side."""
    shared = [arch, "--size", given.size, "--documents", str(given.documents), "--length", str(given.length), "--compile-only"]
    calls = [[*shared, "--what", part] for part in parts if part not in ("decode", "long")]
    if "decode" in parts:
        calls += [[*shared, "--what", "decode", "--batches", str(b), "--contexts", given.contexts] for b in batches]
    in_parallel("benchmarks.models", calls, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parser()
    given = options.parse_args(argv)
    if given.smoke:
        options.set_defaults(**SMOKE)
        given = options.parse_args(argv)
    if given.engine == "sglang":  # a server of its own: its own program
        layers = [] if given.layers is None else ["--layers", str(given.layers)]
        out = [] if given.out is None else ["--out", str(given.out)]
        profile = ["--profile"] if given.profile else []
        passed = [given.arch, "--size", given.size, "--budget", str(given.budget), *layers, *profile, *out]
        return int(importlib.import_module("benchmarks.sglang").main(passed) or 0)
    parts = given.what.split(",")
    try:
        unknown = [part for part in parts if part not in PARTS]
        if unknown:
            raise ValueError(f"--what {unknown[0]}: there are {', '.join(PARTS)}")
        if given.device == "cpu" and not given.smoke:
            raise ValueError("--device cpu runs references on a wall clock: add --smoke")
        few = 4 if given.arch.startswith("qwen3_5") else 2
        config, trainer, server = geometry(given.arch, given.size, few if given.compile_only else given.layers)
        batches = numbers(given.batches or ("1,8,32" if given.arch.startswith("qwen3_5") else "1,8,64"))
        contexts = numbers(given.contexts)
        lengths = numbers(given.lengths) if given.lengths else PROOF
        record = Recorder(given.out, about(torch.device(given.device), given.smoke), given.smoke)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    budget, device = Budget(given.budget), torch.device(given.device)
    aligned, cuda = resolve("aligned", device, torch.bfloat16), device.type == "cuda"
    bench_rival = _rival(given.arch) if cuda else None
    providers: dict[str, str] = {}
    if cuda:
        with torch.device("meta"):
            targets = targets_of(server(config, aligned))
        if not given.compile_only:
            found = admit(targets, aligned, budget.left / 3)
            print("\n".join(found), flush=True)
            providers = dict(line.split(": ", 1) for line in found)
            if given.warm:
                _warm(given.arch, given, parts, batches, budget.left / 2)
    torch.manual_seed(given.seed)
    source = trainer.from_config(config, seed=given.seed, device=device, program="aligned")
    bench = Bench(given.arch, given.size, config, aligned, bench_rival, source, trainer, server, budget, record, providers=providers)
    if given.compile_only or not cuda:
        bench.rounds = 1
    for what, run in _plan(bench, given, parts, batches, contexts, lengths):
        try:
            run()
        except Exception as error:  # one part that fails leaves the others their rows
            record.add({"kind": "model", "arch": given.arch, "size": given.size, "what": what, "error": first_line(error)})
            print(f"{what}: {first_line(error)}", flush=True)
            _free(bench)
    print(("smoke run: these times mean nothing\n" if given.smoke else "") + lines(record.rows))
    return 1 if bench.broken else 0


def _plan(
    bench: Bench, given: argparse.Namespace, parts: Sequence[str], batches: list[int], contexts: list[int], lengths: Sequence[int]
) -> Iterator[tuple[str, Callable[[], None]]]:
    size = (given.documents, given.length)
    if not given.compile_only or "ladder" in parts:
        crossing = (4096, 2100) if "ladder" in parts and not given.lengths and not given.smoke else ()
        yield "ladder", lambda: ladder(bench, (*lengths, *crossing))
    if "decode" in parts:
        yield "decode", lambda: decode(bench, batches, contexts, given.profile)
    if "prefill" in parts:
        yield "prefill", lambda: prefill(bench, *size)
    if "score" in parts:
        yield "score", lambda: score(bench, *size)
    if given.ablate and bench.rival is not None:
        yield "ablate", lambda: ablate(bench, sorted({batches[0], batches[-1]}), contexts[0], *size, parts)
    if "train" in parts:
        yield "train", lambda: train(bench, *size)
    if "long" in parts:
        yield "long", lambda: train(bench, 1, LONG, "long", (True,), rounds=1)


if __name__ == "__main__":
    raise SystemExit(main())
