"""The parts of a model's benchmark: the ladder that proves its bytes, then decode, prefill, score and train against the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import first_line, has_slots, table
from benchmarks.models_bench import Bench, fill, free, place_sequences, turns, twin
from zoo.common import ops
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.serving import DecodeGraph, ForServing


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
    bench.record.add(
        {
            "kind": "model",
            "arch": bench.arch,
            "size": bench.size,
            "layers": bench.config.layers,
            "what": "ladder",
            "lengths": list(lengths),
            "compared": compared,
            "differing": differing,
            "providers": bench.providers,
        }
    )


class Decoder:
    """Steps of a batch under one program, by graph where there is a GPU; every turn walks the same positions."""

    def __init__(self, bench: Bench, program: Program, memory: Any, pages: Tensor, context: int) -> None:
        self.model = twin(bench.source, bench.server, program).eval()
        self.memory = memory
        self.pages = pages
        self.context = context
        self.steps = bench.steps
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

    def profile(self) -> list[dict[str, Any]]:
        """The kernels of one step."""
        assert self.graph is not None
        return profile_of(self.graph.graph.replay)


def profile_of(call: Callable[[], Any], most: int = 15) -> list[dict[str, Any]]:
    """The kernels of one call by their time: microseconds, launches, share of all kernels' time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
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


def decoders(bench: Bench, programs: Mapping[str, Program], batch: int, context: int) -> dict[str, Decoder]:
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
            made = decoders(bench, bench.programs, batch, context)
            times = turns({name: d.turn for name, d in made.items()}, bench.rounds, bench.device)
            steps = bench.steps if bench.device.type == "cuda" else 1
            more: dict[str, Any] = {"batch": batch, "context": context, "steps": steps, "graph": bench.device.type == "cuda"}
            if profiled and bench.device.type == "cuda":
                more["profile"] = {name: d.profile() for name, d in made.items()}
                for name, kernels in more["profile"].items():
                    print(f"{name}, one decode step of {batch} at {context}\n" + _kernels(kernels), flush=True)
            bench.row("decode", {name: us / steps for name, us in times.items()}, batch, **more)
            del made
            free(bench)


def _kernels(kernels: Sequence[dict[str, Any]]) -> str:
    return table([[k["kernel"], k["us"], k["launches"], k["share"]] for k in kernels], ("kernel", "us", "launches", "share"))


@torch.no_grad()
def prefill(bench: Bench, documents: int, length: int) -> None:
    if not bench.budget.allows("prefill", 10.0):
        return
    servers = {name: twin(bench.source, bench.server, program).eval() for name, program in bench.programs.items()}
    memory, pages = place_sequences(servers["aligned"], [length] * documents)
    ids = bench.ids(documents * length)
    slots = range(1, documents + 1) if has_slots(bench.config) else ()
    starts = torch.arange(0, documents * length + 1, length, device=bench.device)
    wanted = starts[1:] - 1

    def run(server: ForServing) -> Callable[[], Any]:
        def call() -> None:
            if slots:
                memory.clear([], slots)
            server.logits(server.prefill(ids, Rows.packed(starts), memory, pages, wanted))

        return call

    times = turns({name: run(server) for name, server in servers.items()}, min(4, bench.rounds), bench.device)
    bench.row("prefill", times, documents * length, documents=documents, length=length)
    free(bench)


@torch.no_grad()
def score(bench: Bench, documents: int, length: int) -> None:
    if not bench.budget.allows("score", 10.0):
        return
    trainers = {name: twin(bench.source, bench.trainer, program).eval() for name, program in bench.programs.items()}
    ids = bench.ids(documents * length)
    starts = torch.arange(0, documents * length + 1, length, device=bench.device)
    times = turns({name: lambda t=t: t.score(ids, starts) for name, t in trainers.items()}, min(4, bench.rounds), bench.device)
    bench.row("score", times, documents * length, documents=documents, length=length)
    free(bench)


def train(
    bench: Bench,
    documents: int,
    length: int,
    what: str = "train",
    modes: Sequence[bool] = (False, True),
    rounds: int = 4,
    profiled: bool = False,
) -> None:
    """Forward and backward of -score.sum() / N. Peak memory is that of the step with parameters and gradients."""
    ids = bench.ids(documents * length)
    starts = torch.arange(0, documents * length + 1, length, device=bench.device)
    for checkpointed in modes:
        if not bench.budget.allows(f"{what}, checkpointing {'on' if checkpointed else 'off'}", 10.0):
            continue
        more: dict[str, Any] = {"documents": documents, "length": length, "checkpointing": checkpointed}
        try:
            _train(bench, what, more, ids, starts, min(rounds, bench.rounds), profiled)
        except torch.OutOfMemoryError as error:
            bench.record.add({"kind": "model", "arch": bench.arch, "size": bench.size, "what": what, **more, "error": first_line(error)})
            print(f"{what}, checkpointing {checkpointed}: {first_line(error)}", flush=True)
        free(bench)


def _train(bench: Bench, what: str, more: dict[str, Any], ids: Tensor, starts: Tensor, rounds: int, profiled: bool) -> None:
    """A row of one turn before the rival compiles, then one of `rounds` turns beside it; `failed` names a rival that can't."""
    peaks: dict[str, float] = {}
    calls = {name: _step(bench, program, ids, starts, more["checkpointing"], peaks, name) for name, program in bench.programs.items()}

    def row(times: Mapping[str, float], count: int) -> None:
        memory = {f"{name}_peak_gib": peak for name, peak in peaks.items() if name in times}
        bench.row(what, times, len(ids), **more, turns=count, **memory)

    first = turns({"aligned": calls["aligned"]}, 1, bench.device)
    if bench.rival is not None:
        row(first, 1)
        if not bench.budget.allows(f"{what}, its rival", 10.0):
            return
        try:
            calls["unaligned"]()
            free(bench)  # waits: an error on the device shows here
        except Exception as error:  # whatever a rival fails with
            more["failed"] = {"unaligned": first_line(error)}
            del calls["unaligned"]
    row(turns(calls, rounds, bench.device, warm=0), rounds)
    if profiled and bench.device.type == "cuda":
        found = {name: profile_of(call, 25) for name, call in calls.items()}
        shared = {"kind": "model", "arch": bench.arch, "size": bench.size, "layers": bench.config.layers}
        bench.record.add({**shared, "what": f"{what} profile", **more, "profile": found})


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
