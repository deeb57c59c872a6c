"""The backward of gated_delta on CUDA: `backward` with its two scans as kernels, whose products have operands in q's dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common.ops.gated_delta import backward, kernels
from zoo.common.ops.gated_delta.kernels import J
from zoo.common.ops.tree_kernels import EXACT
from zoo.common.rows import Rows


@triton.jit
def _scan_back(w_ptr, leave_ptr, decay_ptr, chunk_ptr, sequence_ptr, own_u_ptr, own_start_ptr, final_ptr, grad_u_ptr,
               grad_next_ptr, initial_ptr, heads, K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The states' gradients of one sequence and head for BLOCK columns, its last chunk first."""
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, key, column = tl.arange(0, J), tl.arange(0, K), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first, count = tl.load(sequence_ptr + n * 2).to(tl.int64), tl.load(sequence_ptr + n * 2 + 1)
    tile = key[:, None] * E + column[None, :]
    state = tl.load(final_ptr + (n * heads + head) * K * E + tile)
    for step in range(count):
        c = first + count - 1 - step
        at = c * heads + head
        whole = tl.load(chunk_ptr + c * 4 + 2) == J
        after = tl.where(whole, state, 0.0)
        tl.store(grad_next_ptr + at * K * E + tile, after)
        leave = tl.load(leave_ptr + at * J * K + lane[:, None] * K + key[None, :])
        rows = at * J * E + lane[:, None] * E + column[None, :]
        news = tl.load(own_u_ptr + rows) + tl.dot(leave, after.to(leave.dtype), input_precision="ieee")
        tl.store(grad_u_ptr + rows, news)
        w = tl.load(w_ptr + at * J * K + lane[:, None] * K + key[None, :])
        before = after * tl.exp(tl.load(decay_ptr + at * J + J - 1)) + tl.load(own_start_ptr + at * K * E + tile)
        before -= tl.dot(tl.trans(w), news.to(w.dtype), input_precision="ieee")
        state = tl.where(whole, before, before + state)
    tl.store(initial_ptr + (n * heads + head) * K * E + tile, state)


class ScanKernels:
    """`backward.Scans` on CUDA."""

    def __init__(self, rows: Rows, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.chunk, self.sequence = kernels.plan(rows)

    def _launch(self, x_NVKE: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
        sequences, heads, key_dim, value_dim = x_NVKE.shape
        narrow = min(value_dim, 32)
        return (sequences, heads, value_dim // narrow), {"K": key_dim, "E": value_dim, "BLOCK": narrow, "num_warps": 4}

    def states(self, w: Tensor, own: Tensor, leave: Tensor, decay: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        w, leave, own, decay = (
            w.to(self.dtype).contiguous(),
            leave.to(self.dtype).contiguous(),
            own.contiguous(),
            decay.contiguous(),
        )
        grid, sizes = self._launch(initial)
        image = torch.zeros(w.shape[0], *initial.shape[1:], dtype=self.dtype, device=w.device)
        u, final, initial = torch.zeros_like(own, dtype=self.dtype), torch.empty_like(initial), initial.contiguous()
        spare = self.chunk  # never read
        kernels._scan[grid](
            w, own, leave, decay, self.chunk, self.sequence, initial, spare, u, image, final, spare, spare, initial.shape[1],
            **sizes, CACHED=False, INITIAL=True, num_stages=2, **EXACT,
        )  # fmt: skip
        return image.to(own.dtype), u.to(own.dtype)

    def gradients(
        self, w: Tensor, leave: Tensor, decay: Tensor, own_u: Tensor, own_start: Tensor, grad_final: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        w, leave, decay = w.to(self.dtype).contiguous(), leave.to(self.dtype).contiguous(), decay.contiguous()
        own_u, own_start, grad_final = own_u.contiguous(), own_start.contiguous(), grad_final.contiguous()
        grid, sizes = self._launch(grad_final)
        grad_u, grad_next, grad_initial = torch.zeros_like(own_u), torch.zeros_like(own_start), torch.empty_like(grad_final)
        _scan_back[grid](
            w, leave, decay, self.chunk, self.sequence, own_u, own_start, grad_final, grad_u, grad_next, grad_initial,
            grad_final.shape[1], **sizes, num_stages=2, **EXACT,
        )  # fmt: skip
        return grad_u, grad_next, grad_initial


def gated_delta_backward(
    grad_RVE: Tensor,
    grad_final_NVKE: Tensor | None,
    q_RHK: Tensor,
    k_RHK: Tensor,
    v_RVE: Tensor,
    log_decay_RV: Tensor,
    beta_RV: Tensor,
    initial_NVKE: Tensor | None,
    rows: Rows,
) -> tuple[Tensor, ...]:
    """As `backward.gated_delta_backward`."""
    operands = (grad_RVE, grad_final_NVKE, q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, initial_NVKE, rows)
    return backward.gated_delta_backward(*operands, scans=ScanKernels(rows, q_RHK.dtype))
