"""Columns of a batch: joined on the device, or on their way to the host."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.common.row_sampling import RowSampling


class HostColumn:
    """A device column whose entry i is a Python number; the copy starts now, the first read waits for it.

    FP32 becomes Python's float without rounding.
    """

    def __init__(self, column: Tensor) -> None:
        self._values: list[float] | None = None
        self._column = column
        self._event = None
        if column.is_cuda:
            self._column = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
            self._column.copy_(column, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def __len__(self) -> int:
        return self._column.shape[0]

    def __getitem__(self, i: int) -> float:
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._column.tolist()
        return self._values[i]


class SharedColumn:
    """Entry i of an output's `next_token_logprobs`, which SGLang itself brings to the host: under overlap scheduling no copy of its own.

    A list after a prefill, a tensor after a decode step. The output holds this column: a reference that counts would be a cycle, and
    keep the output's logits until the garbage collector comes.
    """

    def __init__(self, output: Any) -> None:
        self._values: list[float] | None = None
        self._output = weakref.ref(output)

    def __getitem__(self, i: int) -> float:
        if self._values is None:
            output = self._output()
            if output is None:
                raise RuntimeError("a step's log-probabilities are read, but SGLang let its output go: it handed on a copy of it")
            values = output.next_token_logprobs
            self._values = values if isinstance(values, list) else values.tolist()
        return self._values[i]


class WeightsState:
    """Which weights a server has: how often they were written, what they are, and whether SGLang emptied its cache since (it can
    while no request runs).

    version  the content hash's first digits, asked for once after a write: by the first step whose result may name it
    """

    def __init__(self, version: Callable[[], str]) -> None:
        self.writes = 0
        self.flushed = True
        self.found: str | None = None
        self._version = version

    def written(self) -> None:
        self.writes = self.writes + 1
        self.flushed = False
        self.found = None

    def find(self) -> str:
        self.found = self._version()
        return self.found


class WeightsColumn:
    """Every entry: the weights' name if this step read rows of its own weights only, else None. Asked when the result is
    read: weights that were written after a step's launch may have reached it."""

    def __init__(self, state: WeightsState) -> None:
        self._state = state
        self._writes = state.writes
        self._flushed = state.flushed

    def __getitem__(self, i: int) -> str | None:
        state = self._state
        return (state.found or state.find()) if self._flushed and self._writes == state.writes else None


class Uncut(list[Any]):
    """A request's entries under a name of `customized_info`, all of which SGLang's cut to the output tokens keeps: for a request
    without any."""

    def __getitem__(self, index: Any) -> Any:
        return list(self) if isinstance(index, slice) else super().__getitem__(index)


def joined(left: RowSampling, right: RowSampling) -> RowSampling:
    """The rows of two batches, one after the other."""
    columns = {
        field.name: torch.cat([getattr(left, field.name), getattr(right, field.name)])
        for field in dataclasses.fields(RowSampling)
        if field.name.endswith("_R")
    }
    return RowSampling(
        **columns, scales=left.scales or right.scales, filters=left.filters or right.filters, seeded=left.seeded and right.seeded
    )


def on_device(column: Tensor, device: torch.device | str) -> Tensor:
    """A host column's copy, without waiting for it where that is possible."""
    if torch.device(device).type == "cuda":
        column = column.pin_memory()
    return column.to(device, non_blocking=True)
