"""Numbers of a training step as curves: how far trainer and sampler are apart, how old what was drawn is, and who writes them down.

The names are those under which trainers in the field report the same: `train/is_approx_k3_kl`, `train/is_clip_ratio`,
`train/is_nan_ratio`, `rollout/partial_ratio`, `rollout/partial_span_max`. A loop makes one dictionary a step and gives it to whoever
has `on_step`; `TensorBoard` is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from zoo.common.rollouts.completion import Completion
from zoo.common.rollouts.packing import Packed

BOUNDS = (0.8, 1.2)  # of a ratio of probabilities, trainer over sampler: where objectives clip by default


class Listener(Protocol):
    """Whoever is told of a step."""

    def on_step(self, row: Mapping[str, float]) -> None:
        """`row["step"]` counts the steps; every other entry is the value of a curve by its name."""


def mismatch(batch: Packed, scored_R: Tensor, bounds: tuple[float, float] = BOUNDS) -> dict[str, float]:
    """Of packed records and what `score` with their sampling made of them, drawn tokens alone, in FP64 from the FP32 numbers.

    train/differing_bytes    bytes in which trainer and sampler differ
    train/is_approx_k3_kl    mean of expm1(d) - d, d the trainer's log-probability less the sampler's, where that is finite
    train/is_clip_ratio      share of tokens whose ratio exp(d) lies outside `bounds`, or is no number
    train/is_nan_ratio       share of tokens whose d is NaN or infinite

    All are 0 where both are one program on the same weights. Source of the estimate: Schulman 2020, "Approximating KL divergence".
    ValueError for scores of another count or dtype, or bounds that do not hold 1 between them.
    """
    lower, upper = bounds
    if not 0 <= lower < 1 < upper:
        raise ValueError(f"bounds of a ratio hold 1 between them, not {lower:g} and {upper:g}")
    differing = batch.differing_bytes(scored_R)
    drawn_R = batch.drawn_R
    apart = scored_R.detach()[drawn_R].double() - batch.sampled_R[drawn_R].double()
    known = apart[apart.isfinite()]
    count = len(apart)
    inside = int(((known.exp() >= lower) & (known.exp() <= upper)).sum())
    return {
        "train/differing_bytes": float(differing),
        "train/is_approx_k3_kl": float((known.expm1() - known).mean()) if len(known) else math.nan,
        "train/is_clip_ratio": (count - inside) / count,
        "train/is_nan_ratio": (count - len(known)) / count,
    }


def partial(records: Iterable[Completion]) -> dict[str, float]:
    """Of records that drew tokens: how many of them stand on several versions of the weights.

    rollout/partial_ratio     share of records whose tokens more than one version drew
    rollout/partial_span_max  updates inside one record, at most

    ValueError for no such record.
    """
    spans = [_updates(record.output_versions) for record in records if record.output_ids]
    if not spans:
        raise ValueError("there is no record that drew a token")
    return {"rollout/partial_ratio": sum(span > 0 for span in spans) / len(spans), "rollout/partial_span_max": float(max(spans))}


def _updates(versions: tuple[str, ...]) -> int:
    return sum(before != after for before, after in zip(versions, versions[1:], strict=False))


class TensorBoard:
    """Writes every number of a step into event files under `folder`, which `tensorboard --logdir` draws. A context that closes them.

    ValueError where tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]
        except ImportError as error:
            raise ValueError(f"curves for TensorBoard need its package (pip install tensorboard): {error}") from error
        self._writer: Any = SummaryWriter(str(folder))

    def on_step(self, row: Mapping[str, float]) -> None:
        """ValueError for a row without its step."""
        if "step" not in row:
            raise ValueError(f"a row of curves has the entry 'step', this one {', '.join(row) or 'nothing'}")
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()  # a run that is killed leaves its curves

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
