"""Faults that the ladder must catch and the trace must name. Each is planted in the server alone, or in a test-only provider."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.history import KeyValues
from zoo.common.layers import Linear, RMSNorm
from zoo.common.memory import PagedKeyValues, Pages, SlotPart
from zoo.common.ops.contract import Provider, choices_changed
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.common.serving import ForServing
from zoo.qwen3.modeling_serve import Qwen3ForServing
from zoo.qwen3_5.model import GatedDeltaNet


def four_warp_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """rms_norm whose squares are added by four warps, a quarter of the row each, one after another inside it."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    value = total.float()
    quarters = [(part * part).cumsum(-1)[..., -1] for part in value.chunk(4, -1)]
    mean = (quarters[0] + quarters[1] + quarters[2] + quarters[3]) * torch.tensor(1.0 / value.shape[-1])
    return (value * torch.rsqrt(mean + eps)[..., None] * (weight.float() + offset)).to(x.dtype), total


class FourWarps(Program):
    """A program whose norms belong to the planted class."""

    def byte_class(self, op: str, shape: tuple[int, ...] = ()) -> str:
        return "four_warps" if op == "rms_norm" else super().byte_class(op, shape)


@contextmanager
def four_warps(server: ForServing) -> Iterator[None]:
    """The server's norms by the planted provider, inside the block."""
    contract = ops.CONTRACTS["rms_norm"]
    usual = contract.providers[0].functions
    planted = Provider("four_warps", "four_warps", "cpu", lambda: usual._replace(forward=four_warp_norm), defining=True)
    replace(contract, providers=(*contract.providers, planted))
    choices_changed()
    try:
        for module in server.modules():
            if isinstance(module, RMSNorm):
                module.program = FourWarps(**vars(module.program))
        yield
    finally:
        ops.CONTRACTS["rms_norm"] = contract
        choices_changed()


@dataclass(frozen=True)
class OtherOp(Program):
    """A program whose op `other` belongs to the planted class."""

    other: str = ""

    def byte_class(self, op: str, shape: tuple[int, ...] = ()) -> str:
        return "planted" if op == self.other else super().byte_class(op, shape)


@contextmanager
def recurrent(server: ForServing, op: str, module: str) -> Iterator[None]:
    """The server's `op` by the functions of a module, inside the block."""
    contract = ops.CONTRACTS[op]
    first = contract.providers[0]
    theirs = importlib.import_module(module)
    others = [name for name in first.functions._fields if name not in ("forward", "backward")]
    functions = first.functions._replace(forward=getattr(theirs, op), **{name: getattr(theirs, name) for name in others})
    planted = replace(first, name="planted", byte_class="planted", load=lambda: functions)
    replace(contract, providers=(*contract.providers, planted))
    choices_changed()
    mixers = [m for m in server.modules() if isinstance(m, GatedDeltaNet)]
    plain = [m.program for m in mixers]
    try:
        for mixer in mixers:
            mixer.program = OtherOp(**vars(mixer.program), other=op)
        yield
    finally:
        for mixer, program in zip(mixers, plain, strict=True):
            mixer.program = program
        ops.CONTRACTS[op] = contract
        choices_changed()


def narrow_vocabulary_group(server: ForServing) -> None:
    """The server reduces the vocabulary in groups of 128, the trainer in groups of 256."""
    server.program = replace(server.program, vocab_group=128)


def late_rope_table(server: Qwen3ForServing) -> None:
    """The server's rotary table is off by one position."""
    table = server.model.rotary.table_PC2
    server.model.rotary.table_PC2 = torch.cat([table[1:], table[-1:]])


def other_k_parts(server: Qwen3ForServing) -> None:
    """The server adds K in two halves in the second layer's projections."""
    for module in server.model.layers[1].modules():
        if isinstance(module, Linear):
            module.k_parts = 2


class TwiceRounded(RMSNorm):
    """A norm whose residual sum is rounded to FP16 before it is rounded to BF16."""

    def forward(self, residual_RD: Tensor, branch_RD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert branch_RD is not None
        total = (residual_RD.float() + branch_RD.float()).to(torch.float16).to(residual_RD.dtype)
        return super().forward(total)


def twice_rounded_residual(server: Qwen3ForServing) -> None:
    """The second layer's residual sum is rounded once more on its way."""
    server.model.layers[1].post_norm.__class__ = TwiceRounded


STALE = (1, 64)  # layer and position whose slot is not written


@dataclass
class StaleSlot(PagedKeyValues):
    """Skips the write of one position, so that attention reads what the slot held before."""

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
        size = self.k_PSGE.shape[1]
        old = self.k_PSGE.clone()
        history = super().append(k_RGE, v_RGE, rows)
        for sequence in rows.sequence_R[rows.positions_R == STALE[1]].tolist():
            page = int(self.pager.page_table_NB[sequence, STALE[1] // size])
            self.k_PSGE[page, STALE[1] % size] = old[page, STALE[1] % size]
        return history


class StaleServer(Qwen3ForServing):
    def layer_views(self, pages: Sequence[Pages], slots: Sequence[SlotPart]) -> list[Any]:
        makers = super().layer_views(pages, slots)
        makers[STALE[0]] = lambda pager, slot_N: StaleSlot(*pages[0].layer(STALE[0]), pager)
        return makers


def stale_page(server: Qwen3ForServing) -> None:
    """One slot of the server's pages keeps its old bytes."""
    server.__class__ = StaleServer
