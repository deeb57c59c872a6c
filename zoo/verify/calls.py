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

from zoo.common.history import History
from zoo.common.ops import CONTRACTS, Provider
from zoo.common.ops.contract import Contract
from zoo.common.program import Program
from zoo.common.row_sampling import RowSampling
from zoo.common.rows import Rows
from zoo.testing import as_integers, tensors


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
        return tuple(int(n) for n in self.contract.shape(self.arguments))

    @property
    def history(self) -> History | None:
        """What came before the call's rows; None for an op that reads rows alone, and where there is nothing before."""
        found: History | None = self.arguments.get(self.contract.history)
        return found

    @property
    def provider(self) -> Provider:
        return CONTRACTS[self.contract.name].provider(self.program, self.shape)

    def outputs(self) -> list[tuple[str, Tensor]]:
        """The result's tensors, named out[0], out[1], ...: an op that also returns its residual sum keeps the first name."""
        return outputs_of(self.result)

    def at_row(self, row: int, rows: int) -> Call:
        """The same call on one of its `rows` rows, and on the history that this row reads; all tensors copied.

        Where a history is read through the call's other arguments, the rows of the row's sequence before it come along.
        """
        arguments = dict(self.arguments)
        mine = slice(row, row + 1)
        batch = arguments.get("rows")
        if self.contract.history and isinstance(batch, Rows):
            history = self.history
            n = int(batch.sequence_R[row])
            position = int(batch.positions_R[row])
            first = int(batch.starts_N1[n])
            if history is None or history.takes_push:
                mine = slice(first, row + 1)
            context = int(batch.positions_R[mine.start])
            arguments["rows"] = Rows.pushed([row + 1 - mine.start], [context], batch.positions_R.device)
            if history is not None:
                arguments[self.contract.history] = history.of_row(n, first, row, position)
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                arguments[name] = (value[mine] if _has_rows(name, value, rows) else value).detach().clone()
            elif isinstance(value, RowSampling):
                arguments[name] = value[mine]
        return replace(self, arguments=arguments, result=_rows_of(self.result, mine.start, mine.stop))

    def shrunk(self, row: int, rows: int) -> Call:
        """`at_row` if that gives the row's bytes again; else the whole batch, since its shape is then part of the fault."""
        small = self.at_row(row, rows)
        moved = {} if small.history is None else {self.contract.history: small.history.copied()}  # slots move on in the call
        again = outputs_of(self.function(**{**small.arguments, **moved}))
        pairs = zip(again, self.outputs(), strict=True)
        if all(torch.equal(as_integers(a[-1]), as_integers(b[row])) for (_, a), (_, b) in pairs):
            return small
        return replace(self, arguments={name: _copied(value) for name, value in self.arguments.items()}, row=row)


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
    if is_dataclass(value) and not isinstance(value, type):
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
