"""How random weights are drawn: realistic scale by the role that a published name tells."""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD_SPREAD = 2.5  # standard deviation of random logits: entropy about ln V - 3, no token near certainty


@dataclass(frozen=True)
class Draw:
    """How a random tensor is drawn: near-normal with this mean and standard deviation."""

    std: float
    mean: float = 0.0


def usual_recipe(published: str, shape: tuple[int, ...], tied: bool) -> Draw:
    """Norms near 1, other vectors 0.3, matrices 1/sqrt(fan in), the head a little wider."""
    if len(shape) == 1:
        return Draw(0.1, 1.0) if "norm" in published else Draw(0.3)
    if re.search(r"embed", published) and not tied:
        return Draw(1.0)
    if re.search(r"embed|(^|\.)(lm_)?head\.", published):
        return Draw(HEAD_SPREAD * shape[-1] ** -0.5)
    return Draw(shape[-1] ** -0.5)
