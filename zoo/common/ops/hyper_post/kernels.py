"""hyper_post on CUDA: one program a row and block of columns, all streams of it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.tree_kernels import EXACT, pair_tree_first
from zoo.common.ops.trees import padded_width


@triton.jit
def _hyper_post(branch_ptr, x_ptr, post_ptr, comb_ptr, out_ptr, width, STREAMS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    """out[k] = the adjacent-pair tree over j of x[j] comb[j, k], plus branch post[k]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, BLOCK_S)
    inside = column < width
    mask = (stream[:, None] < STREAMS) & inside[None, :]
    x = tl.load(x_ptr + (row * STREAMS + stream[:, None]) * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    branch = tl.load(branch_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(STREAMS):
        comb = tl.load(comb_ptr + (row * STREAMS + stream) * STREAMS + k, mask=stream < STREAMS, other=0.0)
        out = pair_tree_first(x * comb[:, None], BLOCK_S, BLOCK) + branch * tl.load(post_ptr + row * STREAMS + k)
        tl.store(out_ptr + (row * STREAMS + k) * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def hyper_post(branch_RD: Tensor, streams_RSD: Tensor, post_RS: Tensor, comb_RSS: Tensor) -> Tensor:
    """The next streams_RSD."""
    rows, streams, width = streams_RSD.shape
    out = streams_RSD.new_empty(rows, streams, width)
    if out.numel():
        block = min(256, padded_width(width))
        _hyper_post[(rows, triton.cdiv(width, block))](
            branch_RD.contiguous(),
            streams_RSD.contiguous(),
            post_RS.contiguous(),
            comb_RSS.contiguous(),
            out,
            width,
            STREAMS=streams,
            BLOCK=block,
            BLOCK_S=padded_width(streams),
            **EXACT,
        )
    return out
