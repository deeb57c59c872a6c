"""Kernels of the dense and routing ops on a GPU: equal bytes over row counts, launches, providers and against the references.

References without an exp run on the GPU or the CPU and must give equal bytes; where an exp is taken, one ulp of the output
passes, for a GPU's fast exp is not torch's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from zoo.common.ops import rope_table
from zoo.common.ops.combine import kernels as combine_kernels
from zoo.common.ops.combine import reference as combine_reference
from zoo.common.ops.linear import kernels as linear_kernels
from zoo.common.ops.log_prob import kernels as log_prob_kernels
from zoo.common.ops.log_prob import reference as log_prob_reference
from zoo.common.ops.norm_rope import kernels as norm_rope_kernels
from zoo.common.ops.norm_rope.reference import Heads, split_heads
from zoo.common.ops.rms_norm import kernels as norm_kernels
from zoo.common.ops.rms_norm import reference as norm_reference
from zoo.common.ops.rope import kernels as rope_kernels
from zoo.common.ops.rope import reference as rope_reference
from zoo.common.ops.route import kernels as route_kernels
from zoo.common.ops.route import reference as route_reference
from zoo.common.ops.swiglu import kernels as swiglu_kernels
from zoo.common.ops.swiglu import reference as swiglu_reference
from zoo.testing import as_integers, ulp_distance

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 7, 16, 17, 32, 33, 64, 65, 128, 129, 300, 4096)
BF16 = torch.bfloat16
FP32 = torch.float32
# N, K, k_parts
LINEAR = [(6144, 4096, 1), (4096, 12288, 1), (24576, 4096, 1), (576, 6144, 1), (2048, 768, 1), (128, 2048, 1), (128, 2048, 4)]
LINEAR += [(100, 1000, 1), (24, 768, 3)]
needs_deepgemm = pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="needs deep_gemm")


def made(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0, seed: int = 0) -> Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=random) * scale).to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(as_integers(one.contiguous()), as_integers(other.contiguous()))


def row_law(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Any number of leading rows gives the whole run's rows, and a second run its bytes; two swapped rows are noticed."""
    whole = call(x)
    assert same(call(x), whole)
    assert not same(call(x.flip(0)), whole)
    for rows in ROWS:
        if rows < x.shape[0]:
            assert same(call(x[:rows]), whole[:rows]), f"{rows} rows differ from {x.shape[0]}"
            assert same(call(x[-rows:]), whole[-rows:]), f"the last {rows} rows differ from {x.shape[0]}"


@pytest.mark.parametrize(("columns", "depth", "parts"), LINEAR)
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_linear_rows(columns: int, depth: int, parts: int, out: torch.dtype) -> None:
    wide = made(4096, depth + 64)
    w = made(columns, depth, scale=depth**-0.5, seed=1)
    x = wide[:, :depth]
    row_law(lambda x: linear_kernels.linear_triton(x, w, out, parts), x)
    exact = x[:64].double() @ w.double().T
    tolerance = 2**-8 if out == BF16 else 1e-4
    torch.testing.assert_close(linear_kernels.linear_triton(x[:64], w, out, parts).double(), exact, rtol=tolerance, atol=1e-3)


@needs_deepgemm
@pytest.mark.parametrize(("columns", "depth"), [(n, k) for n, k, parts in LINEAR if parts == 1 and n % 8 == 0 and k % 8 == 0])
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_deepgemm_gives_tritons_bytes(columns: int, depth: int, out: torch.dtype) -> None:
    x = made(4096, depth)
    w = made(columns, depth, scale=depth**-0.5, seed=1)
    for rows in (0, *ROWS):
        got, wanted = (f(x[:rows], w, out, 1) for f in (linear_kernels.linear_deepgemm, linear_kernels.linear_triton))
        assert same(got, wanted), f"{rows} rows"
    if out == FP32:  # control: another order of K gives other bytes
        halves = [linear_kernels.linear_triton(a, b, out, 1) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
        assert not same(halves[0] + halves[1], wanted)


@pytest.mark.parametrize("width", [64, 100, 2560, 4096, 7168, 16384])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(width: int, offset: float) -> None:
    x = made(4096, width)
    residual = made(4096, width, seed=1)
    weight = made(width, seed=2)
    row_law(lambda x: norm_kernels.rms_norm(x, None, weight, 1e-6, offset)[0], x)
    for added in (None, residual):
        args = (x, added, weight, 1e-6, offset)
        got = norm_kernels.rms_norm(*args)
        split = norm_kernels.rms_norm_split(*args)
        wanted = norm_reference.rms_norm(*args)
        for g, w, s in zip(got, wanted, split, strict=True):
            assert same(g, w)
            assert same(s, w)
    assert not same(norm_kernels.rms_norm(x, residual, weight, 1e-2, offset)[0], wanted[0])


@pytest.mark.parametrize("shape", [(300, 4096), (300, 9, 128)], ids=str)
def test_rms_norm_backward(shape: tuple[int, ...]) -> None:
    total = made(*shape)
    grad = made(*shape, seed=1)
    carried = made(*shape, seed=2)
    weight = made(shape[-1], seed=3)
    args = (grad, carried, total, weight, 1e-6, 0.0)
    got, again = (norm_kernels.rms_norm_backward(*args) for _ in range(2))
    wanted = norm_reference.rms_norm_backward(*args)
    for g, a, w in zip(got, again, wanted, strict=True):
        assert same(g, a)
        torch.testing.assert_close(g.float(), w.float(), rtol=2**-7, atol=2**-7 * w.float().abs().max().item())


@pytest.mark.parametrize("heads", [Heads(32, 8, 128, 128), Heads(16, 4, 256, 512), Heads(5, 1, 64, 64)], ids=str)
@pytest.mark.parametrize("share", [1, 4])
def test_norm_rope_is_the_composition(heads: Heads, share: int) -> None:
    qkv = made(4096, heads.columns)
    weights = (made(heads.width, seed=1), made(heads.width, seed=2))
    table = rope_table(4096, heads.width // share, 1e6).cuda()
    positions = torch.arange(4096, device="cuda")
    fused = norm_rope_kernels.norm_rope(qkv, *weights, table, positions, heads, 1e-6, 0.0)
    swapped = norm_rope_kernels.norm_rope(qkv, *reversed(weights), table, positions, heads, 1e-6, 0.0)
    for got, wrong, x, weight in zip(fused, swapped, split_heads(qkv, heads)[:2], weights, strict=True):
        normed = norm_kernels.rms_norm(x, None, weight, 1e-6, 0.0)[0]
        rotated = rope_kernels.rope(normed, table, positions, False)
        assert same(normed, norm_reference.rms_norm(x, None, weight, 1e-6, 0.0)[0])
        assert same(rotated, rope_reference.rope(normed, table, positions, False))
        assert same(got, rotated)
        assert not same(wrong, rotated)
    for rows in ROWS:
        part = norm_rope_kernels.norm_rope(qkv[:rows], *weights, table, positions[:rows], heads, 1e-6, 0.0)
        assert same(part[0], fused[0][:rows])
        assert same(part[1], fused[1][:rows])


@pytest.mark.parametrize("inverse", [False, True])
def test_rope(inverse: bool) -> None:
    x = made(4096, 9, 256)
    x[:, :, ::3] = 0.0
    x[:, :, 1::5] = -0.0
    table = rope_table(4096, 64, 1e6).cuda()
    positions = torch.arange(4096, device="cuda") // 2
    wanted = rope_reference.rope(x, table, positions, inverse)
    assert same(rope_kernels.rope(x, table, positions, inverse), wanted)
    assert not same(rope_kernels.rope(x, table, positions, not inverse), wanted)


@pytest.mark.parametrize("inner", [12288, 768, 37])
def test_swiglu(inner: int) -> None:
    x = made(4096, 2 * inner, scale=3.0)
    row_law(swiglu_kernels.swiglu, x)
    row_law(lambda z: swiglu_kernels.swiglu_backward(z[:, 2 * inner :], z[:, : 2 * inner]), made(4096, 3 * inner))
    got = swiglu_kernels.swiglu(x)
    assert ulp_distance(got, swiglu_reference.swiglu(x)).max() <= 1
    assert ulp_distance(got, swiglu_reference.swiglu(x * 1.02)).max() > 1


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (512, 10), (6, 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_route(experts: int, top_k: int, ties: bool) -> None:
    x = made(4096, experts, dtype=FP32, scale=2.0)
    x = x.round() if ties else x
    for which in (0, 1):
        row_law(lambda x, which=which: route_kernels.route(x, top_k, True)[which], x)
    for renormalise in (False, True):
        weights, chosen = route_kernels.route(x, top_k, renormalise)
        wanted, ids = route_reference.route(x, top_k, renormalise)
        assert torch.equal(chosen, ids)
        torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("contributors", "shared"), [(8, False), (8, True), (6, False), (6, True), (1, False), (1, True), (16, True)])
def test_combine(contributors: int, shared: bool) -> None:
    slots = made(4096, 8, 300)
    weights = torch.rand(4096, 8, device="cuda")
    chosen = torch.rand(4096, 128, device="cuda").argsort(1)[:, :8].contiguous()
    extra = made(4096, 300, seed=1) if shared else None
    slots[:8] = -(2.0**-133)  # leaves that round to -0: padding the tree with +0 would show
    weights[:8] = 0.1
    chosen[:8] = torch.arange(8, device="cuda") * 16
    if extra is not None:
        extra[:8] = -0.0
    block = -(-128 // contributors)

    def call(rows: slice) -> Tensor:
        part = None if extra is None else extra[rows]
        return combine_kernels.combine(slots[rows], weights[rows], chosen[rows], part, block, contributors)

    whole = call(slice(None))
    on_cpu = (t if t is None else t.cpu() for t in (slots, weights, chosen, extra))
    cpu = combine_reference.combine(*on_cpu, block, contributors)
    assert same(whole.cpu(), cpu)
    assert not same(whole.cpu(), cpu.flip(0))
    for rows in ROWS:
        assert same(call(slice(0, rows)), whole[:rows])
    got, wanted = (m.combine_backward(whole, slots, weights) for m in (combine_kernels, combine_reference))
    assert same(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("width", [151936, 1000, 255])
def test_log_prob(width: int) -> None:
    x = made(129, width, dtype=FP32, scale=4.0)
    got = log_prob_kernels.group_stats(x, 256)
    wanted = log_prob_reference.group_stats(x, 256)
    assert same(got[0], wanted[0])
    merged = log_prob_kernels.merge_groups(*got), log_prob_reference.merge_groups(*wanted)
    for g, w in zip((*got[1:], *merged[0]), (*wanted[1:], *merged[1]), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
    for which in (0, 1):
        row_law(lambda x, which=which: log_prob_kernels.merge_groups(*log_prob_kernels.group_stats(x, 256))[which], x)
    lse, mean = log_prob_kernels.merge_groups(*got)
    row = made(129, dtype=FP32, seed=1)
    local = torch.arange(129, device="cuda") * 3 - 5
    args = (x, lse, mean, local, row, row, row, None, FP32)
    torch.testing.assert_close(log_prob_kernels.logit_grad(*args), log_prob_reference.logit_grad(*args), rtol=1e-4, atol=1e-6)
