"""What the tests of the cut's kernels share: rows of every kind, and the cut by a sort over the kernels' own masses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.sample import kernels
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.row_sampling import MASS_ONE, NO_CUT

# (top_k, mass limit, min_p)
FILTERS = [
    (NO_CUT, NO_CUT, 0.0),
    (1, NO_CUT, 0.0),
    (20, MASS_ONE * 19 // 20, 0.0),
    (300, NO_CUT, 0.0),
    (NO_CUT, MASS_ONE // 2, 0.0),
    (NO_CUT, MASS_ONE - (MASS_ONE >> 20), 0.0),
    (NO_CUT, NO_CUT, 0.05),
    (NO_CUT, MASS_ONE * 9 // 10, 1.0),
    (4500, NO_CUT, 1e-9),
    (NO_CUT - 1, MASS_ONE * 2, 0.0),
]
KINDS = ("normal", "flat", "wide", "rounded", "equal", "masked", "clustered", "special", "nan")


def rows_of_kind(kind: str, rows: int, vocabulary: int, device: str = "cpu") -> Tensor:
    """Logits [rows, vocabulary], contiguous or (of odd kinds) not."""
    random = torch.Generator(device).manual_seed(vocabulary)
    x = torch.randn(rows, vocabulary + 1, device=device, generator=random)[:, 1:]
    if kind == "clustered":  # closer together than the rounds can part, among others far away
        x = torch.where(torch.arange(vocabulary, device=device) % 97 == 0, 5 * x, 1 + 1e-6 * x)
    if kind == "masked":  # fewer tokens than most filters keep
        x = x.masked_fill(torch.arange(vocabulary, device=device) % 4001 > 2, -torch.inf)
    if kind == "equal":
        x = torch.zeros_like(x)
        x[::2] = -3.0
    if kind == "rounded":
        x = (4 * x).bfloat16().float()
    if kind in ("special", "nan"):
        x[:, ::7] = -0.0
        x[:, 1::7] = 0.0
        x[:, 2::7] = -torch.inf
        x[:, 3::7] = -300.0
    if kind == "nan":
        x[:, 5::7] = torch.nan
    return {"normal": 4 * x, "flat": 0.04 * x, "wide": 400 * x}.get(kind, x)


def filters_of(rows: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    columns = zip(*(FILTERS[r % len(FILTERS)] for r in range(rows)), strict=True)
    types = (torch.int64, torch.int64, torch.float32)
    return tuple(torch.tensor(c, dtype=t, device=device) for c, t in zip(columns, types, strict=True))  # type: ignore[return-value]


@triton.jit
def _masses_kernel(logits, lse_R, p_RV, mass_RV, width, BLOCK: tl.constexpr):
    r = tl.program_id(1).to(tl.int64)
    column, key = kernels._keys(logits + r * width, tl.program_id(0) * BLOCK, width, BLOCK)
    p, mass = kernels.probability_and_mass(key, tl.load(lse_R + r))
    tl.store(p_RV + r * width + column, p, mask=column < width)
    tl.store(mass_RV + r * width + column, mass, mask=column < width)


def ranked(logits_RV: Tensor, lse_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, ids, probabilities, masses), each [R, V], by descending logit, lower id first; numbers as the kernels make them."""
    x = logits_RV.contiguous()
    p = torch.empty_like(x)
    mass = torch.empty_like(x, dtype=torch.int64)
    _masses_kernel[(triton.cdiv(x.shape[1], 1024), x.shape[0])](x, lse_R, p, mass, x.shape[1], BLOCK=1024, **EXACT)
    x = torch.where(x.isnan(), -torch.inf, x + 0.0)
    x, order = torch.sort(x, dim=1, descending=True, stable=True)
    return x, order, p.gather(1, order), mass.gather(1, order)


def cut_by_sort(logits_RV: Tensor, lse_R: Tensor, top_k_R: Tensor, mass_limit_R: Tensor, min_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's cut, of the kernels' masses; (-inf, V) of a row without filters."""
    width = logits_RV.shape[1]
    x, order, p, mass = ranked(logits_RV, lse_R)
    rank = torch.arange(width, device=x.device)
    kept = (rank < top_k_R[:, None]) & (mass.cumsum(1) - mass <= mass_limit_R[:, None])
    likely = p >= min_p_R[:, None] * p.amax(1, keepdim=True)
    last = torch.minimum(kept.sum(1) - 1, torch.where(likely, rank, 0).amax(1)).clamp(min=0)[:, None]
    unfiltered = (top_k_R >= width) & (mass_limit_R >= NO_CUT) & (min_p_R <= 0)
    return torch.where(unfiltered, -torch.inf, x.gather(1, last)[:, 0]), torch.where(unfiltered, width, order.gather(1, last)[:, 0])
