"""How the token of one row is drawn, and the same as row tensors: every row of a batch carries its own parameters.

Nothing here makes a number of the model; `zoo.common.ops.sample` does, from a `RowSampling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from zoo.common.reading import shown
from zoo.common.rows import is_whole

# a probability of 1 in the integer fixed point of the top_p cut: FP32 probabilities down to 2^-36 are held without loss, and a
# row's mass (about 1) is far from the end of int64. It is at most e^2 of a log-sum-exp below 2^26, which FP32 rounds by at
# most 2. Beyond, sums may wrap: eight logits of 2^26 have that for a log-sum-exp, and a probability of 1 each
MASS_ONE = 1 << 60
# a top_k or a top_p mass that no row reaches
NO_CUT = 1 << 62
SEEDS = 1 << 64
# outside of these the FP32 reciprocal would not be a useful scale
TEMPERATURES = (1e-5, 1e5)


@dataclass(frozen=True)
class DrawParams:
    """How one token is drawn; filters act jointly on the distribution after the temperature.

    temperature     0 is greedy: the highest logit, lower id among equals, scored at temperature 1, unfiltered; else 1e-5 .. 1e5
    top_k           tokens kept at most, by descending logit, lower id first; 0 or -1: all
    top_p           a token stays while the mass before it is at most top_p; in (0, 1], 1 keeps all
    min_p           a token stays if its probability is at least min_p times the largest; in [0, 1]
    seed            0 .. 2^64 - 1, the noise of a draw together with its position; a draw that is not greedy needs one, a score none

    Numbers may be numpy's; they become Python's. ValueError, naming the number, for anything else.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        low, high = TEMPERATURES
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            number = _finite(value)
            if number is None:
                raise ValueError(f"{name} must be a finite number, not {shown(value)}")
            object.__setattr__(self, name, number)
        self._whole("top_k", least=-1)
        if self.seed is not None:
            self._whole("seed", least=0)
        if self.temperature != 0.0 and not low <= self.temperature <= high:
            raise ValueError(f"temperature must be 0 (greedy) or between {low:g} and {high:g}, not {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, not {self.min_p!r}")
        if self.top_k >= 1 << 63:
            raise ValueError(f"top_k must be below 2^63 = {1 << 63}, not {shown(self.top_k)}")
        if self.seed is not None and self.seed >= SEEDS:
            raise ValueError(f"seed must be below 2^64 = {SEEDS}, not {shown(self.seed)}")

    def _whole(self, name: str, least: int) -> None:
        """A field as Python's integer. ValueError for anything else, and for one below `least`."""
        value = getattr(self, name)
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, not {shown(value)}")
        object.__setattr__(self, name, int(value))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p can take a token away (never under greedy, which scores unfiltered)."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def scales(self) -> bool:
        """Whether the temperature changes a logit."""
        return self.inverse_temperature != 1.0

    @property
    def is_identity(self) -> bool:
        """Whether the reported log-probabilities are the model's own: greedy, or temperature 1 without filters."""
        return self.is_greedy or (self.temperature == 1.0 and not self.filters)

    @property
    def inverse_temperature(self) -> float:
        """1 / temperature; it becomes FP32 in the row tensor. 1.0 under greedy."""
        return 1.0 if self.is_greedy else 1.0 / self.temperature

    @property
    def mass_limit(self) -> int:
        """top_p in fixed point: floor(top_p * 2^60), exact since the scale is a power of two.

        Masses are integers, so `mass <= floor(top_p * 2^60)` decides exactly as `mass <= top_p * 2^60` would.
        """
        return NO_CUT if self.is_greedy or self.top_p >= 1.0 else int(self.top_p * float(MASS_ONE))


def _finite(value: object) -> float | None:
    """A number, Python's or numpy's, as a float; None for anything else, an infinity, a NaN and an integer too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class RowSampling:
    """The sampling program of R rows, one entry each.

    inverse_temperature_R  FP32, multiplies the logits; 1.0 changes no byte
    top_k_R                int64, NO_CUT: all
    mass_limit_R           int64, top_p in fixed point (`DrawParams.mass_limit`)
    min_p_R                FP32
    seed_R                 int64, the bits of the unsigned seed; 0 where there is none
    position_R             int64, index in its sequence of the token to be drawn (the row's own position plus one)
    greedy_R               bool
    scales, filters        host bounds: False promises that no row has a temperature other than 1, or a filter. They choose which
                           kernels are launched, never a byte; a captured graph's hold for every batch that it will serve
    seeded                 False: a row that is not greedy has no seed, so the rows can score tokens and draw none
    """

    inverse_temperature_R: Tensor
    top_k_R: Tensor
    mass_limit_R: Tensor
    min_p_R: Tensor
    seed_R: Tensor
    position_R: Tensor
    greedy_R: Tensor
    scales: bool = True
    filters: bool = True
    seeded: bool = True

    @property
    def count(self) -> int:
        return self.seed_R.shape[0]

    @classmethod
    def of(cls, params: Sequence[DrawParams], positions_R: Tensor | Sequence[int], device: torch.device | str) -> RowSampling:
        """Row r draws the token at `positions_R[r]` of its sequence under `params[r]`. ValueError if the counts differ."""
        if len(params) != len(positions_R):
            raise ValueError(f"{len(params)} sampling parameters for {len(positions_R)} positions")

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        return cls(
            column([p.inverse_temperature for p in params], torch.float32),
            column([p.top_k if p.filters and p.top_k > 0 else NO_CUT for p in params], torch.int64),
            column([p.mass_limit for p in params], torch.int64),
            column([p.min_p if p.filters else 0.0 for p in params], torch.float32),
            column([seed - SEEDS if seed >= 1 << 63 else seed for seed in (p.seed or 0 for p in params)], torch.int64),
            torch.as_tensor(positions_R, dtype=torch.int64).to(device),
            column([p.is_greedy for p in params], torch.bool),
            scales=any(p.scales for p in params),
            filters=any(p.filters for p in params),
            seeded=all(p.is_greedy or p.seed is not None for p in params),
        )

    @classmethod
    def buffer(cls, count: int, device: torch.device | str) -> RowSampling:
        """`count` greedy rows that `copy_` may overwrite with any others: a graph's static buffers."""
        return replace(cls.of([DrawParams(temperature=0.0)] * count, [0] * count, device), scales=True, filters=True)

    def inverse_temperature_or_none(self) -> Tensor | None:
        """What log_prob takes: None where no row has a temperature other than 1."""
        return self.inverse_temperature_R if self.scales else None

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._columns())

    @classmethod
    def _columns(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name.endswith("_R")]

    def copy_(self, rows: RowSampling) -> RowSampling:
        """Overwrites the first `rows.count` rows in place. ValueError if there are more than fit, or bounds do not allow them."""
        if rows.count > self.count:
            raise ValueError(f"{rows.count} rows do not fit into a buffer of {self.count}")
        if rows.filters > self.filters or rows.scales > self.scales:
            raise ValueError("the buffer was built without filters or temperature, the rows have them")
        if not rows.seeded:
            raise ValueError("the buffer is drawn from, and one of the rows has no seed")
        for mine, theirs in zip(self.tensors(), rows.tensors(), strict=True):
            mine[: rows.count].copy_(theirs)
        return self

    def __getitem__(self, rows: slice | Tensor) -> RowSampling:
        """The rows of a slice or of an int64 index."""
        return replace(self, **{name: getattr(self, name)[rows] for name in self._columns()})

    def at(self, sequence_R: Tensor, positions_R: Tensor) -> RowSampling:
        """One entry per sequence, spread over packed rows: row r draws position `positions_R[r]` of sequence `sequence_R[r]`."""
        return replace(self[sequence_R], position_R=positions_R.to(self.position_R))
