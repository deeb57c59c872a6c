"""The adjacent-pair tree inside a Triton kernel, and the sizes kernels share.

Each level adds pairs only. A sum of two operands has one possible value, so neither a layout, nor the number of warps, nor the
compiler can move a byte. Launch every kernel that uses it with `enable_fp_fusion=False` (as `EXACT` does).
"""

from __future__ import annotations

import triton
import triton.language as tl

# launch options of element-wise and tree kernels: products are rounded before they are added
EXACT = {"enable_fp_fusion": False}


@triton.jit
def pair_tree(x, N: tl.constexpr):
    """x [N] -> a scalar, or x [ROWS, N] -> [ROWS]; N, a power of two, is the whole last axis."""
    for level in tl.static_range(N.bit_length() - 1):
        if len(x.shape) == 1:
            x = tl.sum(tl.reshape(x, (N >> (level + 1), 2)), axis=1)
        else:
            x = tl.sum(tl.reshape(x, (x.shape[0], N >> (level + 1), 2)), axis=2)
    # one value is left on the axis: this drops the axis and adds nothing
    x = tl.sum(x, axis=len(x.shape) - 1)
    if len(x.shape) == 1 and x.shape[0] == 1:
        # through a scalar, so that the tree's layout doesn't spread to what follows (and multiply the compile time)
        x = tl.full((1,), tl.sum(x, axis=0), x.dtype)
    return x


@triton.jit
def pair_tree_first(x, N: tl.constexpr, COLUMNS: tl.constexpr):
    """x [N, COLUMNS] -> [COLUMNS]: the tree down the first axis; N is a power of two."""
    for level in tl.static_range(N.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (N >> (level + 1), 2, COLUMNS)), axis=1)
    return tl.sum(x, axis=0)
