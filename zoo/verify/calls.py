"""An observed op call as data: its named arguments, the shape its provider was chosen for, and the same call cut to one row."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.common.history import ConvCarry, DeltaState, KeyValues, PackedDelta, TokenRows
from zoo.common.ops import CONTRACTS, Provider
from zoo.common.ops.contract import Contract
from zoo.common.program import Program
from zoo.common.row_sampling import RowSampling
from zoo.common.rows import Rows
from zoo.testing import as_integers, tensors

# ops whose provider is chosen by shape; every other op has one choice per program
_SHAPES: dict[str, Callable[[dict[str, Any]], tuple[int, ...]]] = {
    "linear": lambda a: (*a["weight_NK"].shape, a["k_parts"]),
    "experts": lambda a: (a["gate_up_X2FD"].shape[0], a["gate_up_X2FD"].shape[2], a["gate_up_X2FD"].shape[1] // 2),
    "gated_delta": lambda a: (a["q_RHK"].shape[1], a["v_RVE"].shape[1], a["q_RHK"].shape[2], a["v_RVE"].shape[2]),
    "head_linear": lambda a: (*a["weight_HNK"].shape,),
    "sparse_attention": lambda a: (a["q_RHC"].shape[2], a["values"], a["q_RHC"].shape[1]),
    "attention": lambda a: (a["q_RHE"].shape[2], a["q_RHE"].shape[1], a["history"].k.shape[-2]),
}

RECURRENT = ("causal_conv", "gated_delta")  # in serving they change their slots: `held` before the call is their history


@dataclass(frozen=True)
class Call:
    """One op call. `arguments` are by name, defaults filled in; `row` is the output row that matters, the last by default."""

    contract: Contract
    function: Callable[..., Any]
    arguments: dict[str, Any]
    result: Any
    row: int = -1

    @classmethod
    def of(cls, contract: Contract, seen: dict[str, Any], result: Any) -> Call:
        """From what `zoo.common.ops.watch` hands its observer."""
        named = {k: v for k, v in seen.items() if k not in ("args", "function")}
        bound = _signature(seen["function"]).bind(*seen["args"], **named)
        bound.apply_defaults()
        return cls(contract, seen["function"], dict(bound.arguments), result)

    @property
    def name(self) -> str:
        """The public op's name: log_prob has three functions under one contract."""
        return str(self.function.__name__)

    @property
    def program(self) -> Program:
        program = self.arguments["program"]
        assert isinstance(program, Program)
        return program

    @property
    def shape(self) -> tuple[int, ...]:
        """What the op asked its contract for."""
        found = _SHAPES.get(self.contract.name)
        return tuple(int(n) for n in found(self.arguments)) if found else ()

    @property
    def provider(self) -> Provider:
        return CONTRACTS[self.contract.name].provider(self.program, self.shape)

    def outputs(self) -> list[tuple[str, Tensor]]:
        """The result's tensors, named out[0], out[1], ...: an op that also returns its residual sum keeps the first name."""
        return outputs_of(self.result)

    def at_row(self, row: int, rows: int) -> Call:
        """The same call on one of its `rows` rows, and on the history that this row reads; all tensors copied."""
        arguments = dict(self.arguments)
        batch = arguments.get("rows")
        if isinstance(batch, Rows):
            if self.contract.name in RECURRENT:
                return self._recurrent_at(row)
            listed = next((name for name, value in arguments.items() if isinstance(value, TokenRows)), None)
            return self._attention_at(row) if listed is None else self._listed_at(row, listed)
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                mine = value[row : row + 1] if _has_rows(name, value, rows) else value
                arguments[name] = mine.detach().clone()
            elif isinstance(value, RowSampling):
                arguments[name] = value[slice(row, row + 1)]
        return replace(self, arguments=arguments, result=_rows_of(self.result, row, row + 1))

    def shrunk(self, row: int, rows: int) -> Call:
        """`at_row` if that gives the row's bytes again; else the whole batch, since its shape is then part of the fault."""
        small = self.at_row(row, rows)
        state = {k: _copied(v) for k, v in small.arguments.items() if isinstance(v, DeltaState | ConvCarry)}  # it moves on
        again = outputs_of(self.function(**{**small.arguments, **state}))
        pairs = zip(again, self.outputs(), strict=True)
        if all(torch.equal(as_integers(a[-1]), as_integers(b[row])) for (_, a), (_, b) in pairs):
            return small
        return replace(self, arguments={name: _copied(value) for name, value in self.arguments.items()}, row=row)

    def _attention_at(self, row: int) -> Call:
        batch, history = self.arguments["rows"], self.arguments["history"]
        n, position = int(batch.sequence_R[row]), int(batch.positions_R[row])
        device = batch.positions_R.device
        if history.page_table_NB is None:  # packed keys are the rows pushed: the whole document up to this row goes along
            first = int(batch.starts_N1[n])
            mine = slice(first, row + 1)
            small = KeyValues(history.k[mine].detach().clone(), history.v[mine].detach().clone())
            rows = Rows.pushed([row + 1 - first], None, device)
        else:
            mine = slice(row, row + 1)
            pages = history.page_table_NB[n, : position // history.k.shape[1] + 1].long()
            table = torch.arange(len(pages), dtype=torch.int32, device=device)[None]
            small = KeyValues(history.k[pages].clone(), history.v[pages].clone(), table)
            rows = Rows.pushed([1], [position], device)
        queries = {k: v[mine].detach().clone() for k, v in self.arguments.items() if isinstance(v, Tensor) and k.endswith("RHE")}
        arguments = {**self.arguments, **queries, "history": small, "rows": rows}
        return replace(self, arguments=arguments, result=_rows_of(self.result, mine.start, mine.stop))

    def _listed_at(self, row: int, name: str) -> Call:
        """Likewise where the history is one row a token, in the argument `name`."""
        batch, history = self.arguments["rows"], self.arguments[name]
        n, position = int(batch.sequence_R[row]), int(batch.positions_R[row])
        device = batch.positions_R.device
        if history.page_table_NB is None:
            mine = slice(int(batch.starts_N1[n]), row + 1)
            small, rows = TokenRows(history.rows[mine].detach().clone()), Rows.pushed([row + 1 - mine.start], None, device)
        else:
            mine = slice(row, row + 1)
            pages = history.page_table_NB[n, : position // history.rows.shape[1] + 1].long()
            table = torch.arange(len(pages), dtype=torch.int32, device=device)[None]
            small, rows = TokenRows(history.rows[pages].clone(), table), Rows.pushed([1], [position], device)
        arguments: dict[str, Any] = {**self.arguments, name: small, "rows": rows}
        for other, value in self.arguments.items():
            if isinstance(value, Tensor) and _has_rows(other, value, batch.count):
                arguments[other] = value[mine].detach().clone()
        return replace(self, arguments=arguments, result=_rows_of(self.result, mine.start, mine.stop))

    def _recurrent_at(self, row: int) -> Call:
        """The rows of one sequence in this push up to the row, after the state before the push."""
        batch, history = self.arguments["rows"], self.arguments["history"]
        n = int(batch.sequence_R[row])
        first = int(batch.starts_N1[n])
        mine = slice(first, row + 1)
        rows = Rows.pushed([row + 1 - first], [int(batch.positions_R[first])], batch.positions_R.device)
        arguments: dict[str, Any] = {**self.arguments, "rows": rows}
        for name, value in self.arguments.items():
            if isinstance(value, Tensor):
                arguments[name] = (value[mine] if _has_rows(name, value, batch.count) else value).detach().clone()
        if history is not None:
            arguments["history"] = held(history, slice(n, n + 1))
        return replace(self, arguments=arguments, result=_rows_of(self.result, mine.start, mine.stop))


def held(history: Any, sequences: slice = slice(None)) -> Any:
    """A copy of what a recurrent op reads of its sequences, in slots of their own: 0, 1, ... in the order of the batch."""
    parts = {f.name: getattr(history, f.name) for f in fields(history)}
    if isinstance(history, PackedDelta):
        return PackedDelta(**{k: None if v is None else v[sequences].detach().clone() for k, v in parts.items()})
    slot_N = parts.pop("slot_N")[sequences]
    return replace(history, slot_N=torch.arange(len(slot_N), device=slot_N.device), **{k: v[slot_N] for k, v in parts.items()})


def outputs_of(result: Any) -> list[tuple[str, Tensor]]:
    """A result's tensors, named by their order."""
    return [(f"out[{i}]", tensor) for i, (_, tensor) in enumerate(tensors(result))]


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _has_rows(name: str, value: Tensor, rows: int) -> bool:
    """Whether dim 0 of an argument is rows, by its shape suffix, or by its length where the name has none."""
    suffix = re.search(r"_([A-Z][A-Z0-9]*)$", name)
    return suffix[1].startswith("R") if suffix else value.dim() > 0 and value.shape[0] == rows


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, KeyValues | TokenRows | Rows | RowSampling | DeltaState | ConvCarry | PackedDelta):
        return replace(value, **{f.name: _copied(getattr(value, f.name)) for f in fields(value) if f.compare})
    return value


def _rows_of(value: Any, begin: int, end: int) -> Any:
    if isinstance(value, Tensor):
        return value[begin:end].detach().clone()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _rows_of(getattr(value, f.name), begin, end) for f in fields(value)})
    if isinstance(value, tuple):
        parts = [_rows_of(item, begin, end) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    assert value is None, f"an op returned a {type(value).__name__}"
    return None
