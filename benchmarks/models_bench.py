"""What a model's benchmark stands on: the model under each program, its rows, sequences in memory, and turns on a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Budget, Recorder, has_slots, table
from zoo.common.layers import RotaryTable
from zoo.common.program import Program
from zoo.common.serving import ForServing
from zoo.common.training import ForRL

CHUNK_STEPS = 64  # decode steps in a turn of a model with chunks: every row of a chunk, its closing too
STEPS = 16
KEYS = ("batch", "context", "documents", "length", "checkpointing", "turns")


def twin(source: nn.Module, made: type[Any], program: Program) -> Any:
    """Another model over the same parameters and RoPE tables."""
    with torch.device("meta"):
        model = made(source.config, program)
    model.load_state_dict(source.state_dict(), assign=True)
    entries = model.table_of().parameters
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(made.trainable and entries[name].trainable)
    tables = {name: part.table_PC2 for name, part in source.named_modules() if isinstance(part, RotaryTable)}
    for name, part in model.named_modules():
        if isinstance(part, RotaryTable):
            part.table_PC2 = tables[name]
    return model


@dataclass
class Bench:
    """A model on a device, its programs, and where rows go. `rival` None: a CPU, where there is nothing to compare with.

    errors  relative errors against float64, once measured: part of every later row
    """

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
    rounds: int = 6
    broken: str = ""
    providers: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.source.parameters()).device

    @property
    def programs(self) -> dict[str, Program]:
        return {"aligned": self.aligned, **({} if self.rival is None else {"unaligned": self.rival})}

    @property
    def steps(self) -> int:
        return CHUNK_STEPS if has_slots(self.config) else STEPS

    def row(self, what: str, times: Mapping[str, float], tokens: int, **more: Any) -> None:
        """Times in microseconds of `tokens` tokens under each program."""
        us = times["aligned"]
        rival_us = times.get("unaligned")
        ratio = None if rival_us is None or self.broken else us / rival_us
        per_second = {f"{name}_tokens_per_s": tokens / t * 1e6 for name, t in times.items()}
        row = {
            "kind": "model",
            "arch": self.arch,
            "size": self.size,
            "layers": self.config.layers,
            "what": what,
            "us": us,
            "rival": None if rival_us is None else "unaligned",
            "rival_us": rival_us,
            "ratio": ratio,
            **per_second,
            "bytes": f"red: {self.broken}" if self.broken else "equal",
            "providers": self.providers,
            **self.errors,
            **more,
        }
        self.record.add(row)
        print(lines([row]).splitlines()[1], flush=True)

    def ids(self, count: int) -> Tensor:
        return torch.randint(self.config.vocabulary, (count,), device=self.device)


def lines(rows: Sequence[dict[str, Any]]) -> str:
    body = [
        [
            row["what"],
            " ".join(f"{key}={row[key]}" for key in KEYS if key in row),
            row.get("us"),
            row.get("rival_us"),
            row.get("ratio"),
            row.get("aligned_tokens_per_s"),
            row.get("aligned_peak_gib"),
            row.get("unaligned_peak_gib"),
            "; ".join([row.get("bytes", row.get("error", "")), *(f"{name} failed: {why}" for name, why in row.get("failed", {}).items())]),
        ]
        for row in rows
        if row["kind"] == "model" and ("us" in row or "error" in row)
    ]
    return table(body, ("what", "of", "us", "unaligned us", "ratio", "tokens/s", "peak GiB", "unaligned GiB", "bytes"))


def place_sequences(model: ForServing, counts: Sequence[int]) -> tuple[Any, Tensor]:
    """Memory for sequences of these lengths and their table: pages one after another, slot n + 1 for sequence n."""
    size = model.make_memory(2, slots=1).page_size
    blocks = [-(-count // size) for count in counts]
    memory = model.make_memory(sum(blocks) + 1, slots=len(counts))
    pages = []
    first = 1
    for count in blocks:
        pages.append(list(range(first, first + count)))
        first += count
    return memory, memory.table(pages, list(range(1, len(counts) + 1)), max(blocks))


def fill(memory: Any) -> None:
    """Caches as a long run leaves them: finite numbers of ordinary size."""
    for name, tensor in memory.tensors().items():
        if "beta" in name or "decay" in name:
            tensor.fill_(0.5 if "beta" in name else -0.5)
        elif name.endswith(("_SVKE", "_SHJK", "_SVJE", "_SVJJ")):  # of recurrent layers
            tensor.normal_(0, 0.05)
        else:
            tensor.normal_()


def turns(contenders: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device, warm: int = 1) -> dict[str, float]:
    """Median microseconds of each contender's turn after `warm` rounds. Every other round runs backwards: a turn heats the next."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm + rounds):
        for name, call in list(contenders.items())[:: -1 if turn % 2 else 1]:
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= warm:
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def free(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
