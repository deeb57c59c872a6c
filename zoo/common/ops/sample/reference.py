"""sample in plain torch: the cut by a stable sort, the draw by Gumbel-max over Philox4x32-10."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.common.row_sampling import MASS_ONE

# token id t takes output word (t >> 10) & 3 of the call whose first counter word is t without these two bits
LANES = 1024
WORDS = 4

_LOW = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def cut(logits_RV: Tensor, lse_R: Tensor, top_k_R: Tensor, mass_limit_R: Tensor, min_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """(logit, id) of the last token that stays, in the order by descending logit, lower id first."""
    x = torch.where(logits_RV.isnan(), -torch.inf, logits_RV)
    x, order = torch.sort(x, dim=1, descending=True, stable=True)
    p = torch.exp(x - lse_R[:, None])
    p = torch.where(p >= 0, p, 0.0)
    mass = (p * float(MASS_ONE)).to(torch.int64)
    before = mass.cumsum(1) - mass
    rank = torch.arange(x.shape[1])
    kept = (rank < top_k_R[:, None]) & (before <= mass_limit_R[:, None])
    likely = p >= min_p_R[:, None] * p[:, :1]
    last = torch.minimum(kept.sum(1) - 1, torch.where(likely, rank, 0).amax(1)).clamp(min=0)[:, None]
    return x.gather(1, last)[:, 0], order.gather(1, last)[:, 0]


def restrict(logits_RC: Tensor, logit_R: Tensor, last_R: Tensor, first: int, fill: float) -> Tensor:
    """Logits of columns first .. first + C with `fill` behind the cut; a NaN stays."""
    column = torch.arange(first, first + logits_RC.shape[1])
    tied = logits_RC == logit_R[:, None]
    outside = (logits_RC < logit_R[:, None]) | (tied & (column > last_R[:, None]))
    return logits_RC.masked_fill(outside, fill)


def draw(logits_RV: Tensor, seed_R: Tensor, position_R: Tensor, greedy_R: Tensor) -> Tensor:
    """int64 [R]: argmax of logit plus noise (of the logit alone in greedy rows), lower id among equals; NaN counts as -inf."""
    width = logits_RV.shape[1]
    x = torch.where(logits_RV.isnan(), -torch.inf, logits_RV)
    x = torch.where(greedy_R[:, None], x, x + gumbel(seed_R, position_R, width).to(x.dtype))
    return torch.where(x == x.amax(1, keepdim=True), torch.arange(width), width).amin(1)


def gumbel(seed_R: Tensor, position_R: Tensor, width: int) -> Tensor:
    """FP32 [R, width] noise -log(-log(u)), u an odd 24-bit integer over 2^24, so 0 < u < 1 without rounding."""
    lanes = torch.arange(min(width, LANES))
    block = torch.arange(-(-width // (LANES * WORDS))) * LANES
    counter = (block[:, None] + lanes).expand(seed_R.shape[0], -1, -1)
    key = seed_R[:, None, None]
    position = position_R[:, None, None]
    words = philox((counter, position & _LOW, (position >> 32) & _LOW, torch.zeros_like(position)), (key & _LOW, (key >> 32) & _LOW))
    bits = torch.stack(words, 2).flatten(1)[:, :width]
    u = ((bits >> 8) | 1).to(torch.float32) * 2.0**-24
    return -torch.log(-torch.log(u))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words (in int64 tensors) from a counter of four words and a key of two."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, which leaves their 64 bits as the unsigned product's
        a = c0 * _ROUND[0]
        b = c2 * _ROUND[1]
        c0 = ((b >> 32) & _LOW) ^ c1 ^ k0
        c1 = b & _LOW
        c2 = ((a >> 32) & _LOW) ^ c3 ^ k1
        c3 = a & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
