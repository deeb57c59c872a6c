"""Kernels of the dense and routing ops in Triton's interpreter, against the CPU references.

Bytes must be equal wherever no exp is taken: numpy's exp and torch's differ in the last bits, so there a few ulp of FP32 pass.
The interpreter's products of bf16 tiles are wrong, so `linear` is run in FP32. Its cast from FP32 to BF16 cuts off where a GPU
rounds to nearest even, and its sums start from +0 where a GPU adds the operands alone: these tests mend both.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
import triton.runtime.interpreter as interpreter  # noqa: E402

from zoo.common.ops import rope_table  # noqa: E402
from zoo.common.ops.combine import kernels as combine_kernels  # noqa: E402
from zoo.common.ops.combine import reference as combine_reference  # noqa: E402
from zoo.common.ops.linear import kernels as linear_kernels  # noqa: E402
from zoo.common.ops.linear import reference as linear_reference  # noqa: E402
from zoo.common.ops.log_prob import kernels as log_prob_kernels  # noqa: E402
from zoo.common.ops.log_prob import reference as log_prob_reference  # noqa: E402
from zoo.common.ops.norm_rope import kernels as norm_rope_kernels  # noqa: E402
from zoo.common.ops.norm_rope import reference as norm_rope_reference  # noqa: E402
from zoo.common.ops.rms_norm import kernels as norm_kernels  # noqa: E402
from zoo.common.ops.rms_norm import reference as norm_reference  # noqa: E402
from zoo.common.ops.rope import kernels as rope_kernels  # noqa: E402
from zoo.common.ops.rope import reference as rope_reference  # noqa: E402
from zoo.common.ops.route import kernels as route_kernels  # noqa: E402
from zoo.common.ops.route import reference as route_reference  # noqa: E402
from zoo.common.ops.swiglu import kernels as swiglu_kernels  # noqa: E402
from zoo.common.ops.swiglu import reference as swiglu_reference  # noqa: E402
from zoo.common.ops.tree_kernels import pair_tree, pair_tree_first  # noqa: E402
from zoo.common.ops.trees import pair_tree as reference_tree  # noqa: E402

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
BF16 = torch.bfloat16
FP32 = torch.float32


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32 to BF16 and back as torch does it; sums that keep the sign of a zero."""
    convert = interpreter._convert_float

    def cast(data: numpy.ndarray, source: Any, target: Any, rounding: Any) -> numpy.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(numpy.array(data, dtype=numpy.float32, ndmin=1))
            return values.to(BF16).view(torch.int16).numpy().view(numpy.uint16).reshape(data.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(numpy.uint16).astype(numpy.uint32) << 16).reshape(data.shape)
        return convert(data, source, target, rounding)

    def total(reduction: Any, operand: Any) -> Any:
        data = operand.handle.data
        start = -0.0 if data.dtype.kind == "f" else 0
        return reduction.to_tensor(numpy.sum(data, axis=reduction.axis, keepdims=reduction.keep_dims, initial=start), operand.dtype)

    monkeypatch.setattr(interpreter, "_convert_float", cast)
    monkeypatch.setattr(interpreter.ReduceOps, "sum", total)


def same(got: Tensor, wanted: Tensor) -> bool:
    """Equal bytes, signs of zeros included."""
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return got.dtype == wanted.dtype and torch.equal(got.contiguous().view(as_integers), wanted.contiguous().view(as_integers))


def close(got: Tensor, wanted: Tensor, ulps: int) -> None:
    step = {BF16: 2**-8, FP32: 2**-23}[wanted.dtype]
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=ulps * step, atol=ulps * step)


@triton.jit
def _trees(x_ptr, flat_ptr, row_ptr, column_ptr, ROWS: tl.constexpr, N: tl.constexpr):
    column = tl.arange(0, N)
    x = tl.load(x_ptr + tl.arange(0, ROWS)[:, None] * N + column[None, :])
    tl.store(flat_ptr, pair_tree(tl.load(x_ptr + column), N))
    tl.store(row_ptr + tl.arange(0, ROWS), pair_tree(x, N))
    tl.store(column_ptr + column, pair_tree_first(x, ROWS, N))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 2), (2, 64), (8, 1024)])
def test_trees(rows: int, width: int) -> None:
    x = torch.randn(rows, width)
    flat = torch.empty(1)
    row = torch.empty(rows)
    column = torch.empty(width)
    _trees[(1,)](x, flat, row, column, ROWS=rows, N=width)
    assert same(row, reference_tree(x))
    assert same(flat, reference_tree(x[:1]))
    assert same(column, reference_tree(x.T.contiguous()))
    if width == 1024:  # control: another order of the same numbers gives other bytes
        assert not same(row, reference_tree(x.view(rows, 2, -1).transpose(1, 2).reshape(rows, -1)))


@pytest.mark.parametrize(("columns", "depth", "parts"), [(48, 128, 1), (40, 72, 1), (24, 192, 3), (16, 256, 4)])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_linear(rows: int, columns: int, depth: int, parts: int) -> None:
    wide = torch.randn(rows, depth + 8)
    w = torch.randn(columns, depth)
    x = wide[:, :depth]  # rows with a stride of their own
    got = linear_kernels.linear_triton(x, w, FP32, parts)
    wanted = linear_reference.linear(x, w, FP32, parts)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, wanted + 1e-3, rtol=1e-5, atol=1e-4)
    assert linear_kernels.linear_triton(x[:0], w, FP32, parts).shape == (0, columns)


def test_linear_parts_are_the_tree_of_their_products() -> None:
    x = torch.randn(5, 192)
    w = torch.randn(24, 192)
    got = linear_kernels.linear_triton(x, w, FP32, 3)
    parts = [linear_kernels.linear_triton(x[:, i : i + 64], w[:, i : i + 64], FP32, 1) for i in (0, 64, 128)]
    assert same(got, (parts[0] + parts[1]) + parts[2])
    assert not same(got, parts[0] + (parts[1] + parts[2]))


def test_linear_backward() -> None:
    x = torch.randn(5, 24)
    w = torch.randn(7, 24)
    grad = torch.randn(5, 7)
    got, wanted = (m.linear_backward(grad, x, w, True, True) for m in (linear_kernels, linear_reference))
    for g, r in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, r)
    assert linear_kernels.linear_backward(grad, x, w, False, False) == (None, None)


def _norm_operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)[..., : shape[-1]]
    return x, torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)


@pytest.mark.parametrize("shape", [(3, 64), (9, 100), (2, 3000), (5, 3, 128), (1, 8192)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, added: bool, offset: float) -> None:
    x, residual, weight = _norm_operands(shape, dtype)
    args = (x, residual if added else None, weight, 1e-6, offset)
    wanted = norm_reference.rms_norm(*args)
    for function in (norm_kernels.rms_norm, norm_kernels.rms_norm_whole, norm_kernels.rms_norm_split):
        got = function(*args)
        assert same(got[0], wanted[0])
        assert same(got[1], wanted[1])
    assert not same(norm_kernels.rms_norm(x, residual if added else None, weight, 1e-1, offset)[0], wanted[0])
    assert norm_kernels.rms_norm(x[:0], None, weight, 1e-6, offset)[0].shape == x[:0].shape


def test_rms_norm_keeps_the_sign_of_a_zero() -> None:
    x = torch.randn(2, 64).to(BF16)
    weight = torch.full((64,), -0.0, dtype=BF16)
    got = norm_kernels.rms_norm(x, None, weight, 1e-6, 0.0)[0]
    assert same(got, norm_reference.rms_norm(x, None, weight, 1e-6, 0.0)[0])
    assert torch.equal(got.signbit(), ~x.signbit()) and not same(got, got.abs())  # the control: zeros without their signs


@pytest.mark.parametrize("shape", [(70, 64), (3, 3000), (5, 3, 128)], ids=str)
@pytest.mark.parametrize("carried", [False, True])
def test_rms_norm_backward(shape: tuple[int, ...], carried: bool) -> None:
    total, grad_total, weight = _norm_operands(shape, FP32)
    grad = torch.randn(shape)
    args = (grad, grad_total if carried else None, total, weight, 1e-6, 1.0)
    for got, wanted in zip(norm_kernels.rms_norm_backward(*args), norm_reference.rms_norm_backward(*args), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(got.flip(0), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(70, 64), (5, 9, 128)], ids=str)
def test_rms_norm_backward_of_several_programs(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient is a sum over programs, each with its own rows; here two tiles of rows make one."""
    monkeypatch.setattr(norm_kernels, "GRAD_STEPS", 2)
    total, _, weight = _norm_operands(shape, FP32)
    args = (torch.randn(shape), None, total, weight, 1e-6, 0.0)
    got = norm_kernels.rms_norm_backward(*args)
    wanted = norm_reference.rms_norm_backward(*args)
    for found, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    fewer = norm_reference.rms_norm_backward(args[0][:-1], None, total[:-1], weight, 1e-6, 0.0)[1]
    assert (fewer - wanted[1]).abs().max() > 1e-2  # the control: a gradient that lacks the last rows


@pytest.mark.parametrize(("heads", "width", "rotated"), [(1, 64, 64), (5, 128, 128), (9, 256, 64), (2, 96, 32)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope(heads: int, width: int, rotated: int, inverse: bool) -> None:
    x = torch.randn(7, heads * width + 40).to(BF16)[:, : heads * width].unflatten(1, (heads, width))
    x[:, :, ::3] = 0.0
    x[:, :, 1::5] = -0.0
    table = rope_table(50, rotated, 1e4)
    positions = torch.randint(0, 50, (7,))
    positions[:2] = 0  # a sine of zero: signs of zeros must come out right
    wanted = rope_reference.rope(x, table, positions, inverse)
    assert same(rope_kernels.rope(x, table, positions, inverse), wanted)
    assert not same(rope_kernels.rope(x, table, (positions + 1) % 50, inverse), wanted)
    assert rope_kernels.rope(x[:0], table, positions[:0], inverse).shape == (0, heads, width)


@pytest.mark.parametrize(
    ("queries", "keys", "width", "query_width", "rotated"), [(4, 2, 64, 64, 64), (9, 3, 128, 256, 32), (1, 1, 96, 96, 64)]
)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_rope(queries: int, keys: int, width: int, query_width: int, rotated: int, offset: float) -> None:
    heads = norm_rope_reference.Heads(queries, keys, width, query_width)
    qkv = torch.randn(6, heads.columns + 8).to(BF16)[:, : heads.columns]
    weights = torch.randn(width).to(BF16), torch.randn(width).to(BF16)
    table = rope_table(50, rotated, 1e4)
    positions = torch.tensor([0, 0, 7, 3, 49, 21])
    got = norm_rope_kernels.norm_rope(qkv, *weights, table, positions, heads, 1e-6, offset)
    wanted = norm_rope_reference.norm_rope(qkv, *weights, table, positions, heads, 1e-6, offset)
    composed = [
        rope_kernels.rope(norm_kernels.rms_norm(x, None, weight, 1e-6, offset)[0], table, positions, False)
        for x, weight in zip(norm_rope_reference.split_heads(qkv, heads)[:2], weights, strict=True)
    ]
    swapped = norm_rope_kernels.norm_rope(qkv, *reversed(weights), table, positions, heads, 1e-6, offset)
    for one, other, third, wrong in zip(got, wanted, composed, swapped, strict=True):
        assert same(one, other)
        assert same(third, other)
        assert not same(wrong, other)


# NumPy, where the hardware says nothing: exp(200) is infinite on purpose, and silu then 0
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("shape", [(3, 2 * 8), (2, 3, 2 * 1030), (5, 2 * 37)], ids=str)
def test_swiglu(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape[:-1], shape[-1] + 6)[..., : shape[-1]] * 4
    close(swiglu_kernels.swiglu(x), swiglu_reference.swiglu(x), 4)
    close(swiglu_kernels.swiglu(x.to(BF16)), swiglu_reference.swiglu(x.to(BF16)), 1)
    grad = torch.randn(*shape[:-1], shape[-1] // 2)
    torch.testing.assert_close(swiglu_kernels.swiglu_backward(grad, x), swiglu_reference.swiglu_backward(grad, x), rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        close(swiglu_kernels.swiglu(x + 1e-3), swiglu_reference.swiglu(x), 4)
    extreme = torch.tensor([[-200.0, -0.0, 0.0, 90.0, 1.0, 2.0, 3.0, -4.0]])
    close(swiglu_kernels.swiglu(extreme), swiglu_reference.swiglu(extreme), 4)


def test_swiglu_cut_to_a_limit() -> None:
    """The gate from above alone; a limit that is reached lets the gradient through, one that cuts does not; a NaN stays one."""
    x = torch.randn(5, 2 * 33) * 3
    grad = torch.randn(5, 33)
    x[0, 0] = 2.0
    x[0, 1] = -50.0
    x[1, 33] = torch.nan
    x[2, 40] = -2.0
    got = swiglu_kernels.swiglu(x, limit=2.0)
    torch.testing.assert_close(got, swiglu_reference.swiglu(x, 2.0), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert got.isnan().nonzero().tolist() == [[1, 0]]
    back = swiglu_kernels.swiglu_backward(grad, x, limit=2.0)
    torch.testing.assert_close(back, swiglu_reference.swiglu_backward(grad, x, 2.0), rtol=1e-5, atol=1e-6, equal_nan=True)
    cut = torch.cat([x[:, :33] > 2, x[:, 33:].abs() > 2], 1)
    assert bool(cut.any()) and not back[cut].any() and bool((back[0, :2] != 0).all()) and bool(back[2, 40] != 0)
    assert not torch.allclose(swiglu_kernels.swiglu(x).nan_to_num(), got.nan_to_num())  # control: without it


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("rows", "inner"), [(1, 5), (9, 300), (6, 512), (3, 1024)])
def test_swiglu_of_some_rows(rows: int, inner: int) -> None:
    """Rows whose pair is negative stay as memory was; the others' bytes don't change."""
    x = torch.randn(rows, 2 * inner).to(BF16)
    grad = torch.randn(rows, inner).to(BF16)
    pairs = torch.where(torch.arange(rows) % 8 < 3, torch.arange(rows), -1).int()
    live = pairs >= 0
    got = swiglu_kernels.swiglu(x, pair_P=pairs)
    whole = swiglu_kernels.swiglu(x)
    assert same(got[live], whole[live])
    back = swiglu_kernels.swiglu_backward(grad, x, pair_P=pairs)
    assert same(back[live], swiglu_kernels.swiglu_backward(grad, x)[live])
    assert bool(got[~live].isnan().all()) and bool(back[~live].isnan().all())
    assert not same(swiglu_kernels.swiglu(x + 1, pair_P=pairs)[live], whole[live])


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (100, 10), (6, 6), (512, 4), (1, 1)])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "infinite"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route(experts: int, top_k: int, kind: str, renormalise: bool) -> None:
    x = torch.randn(4, experts + 3)[:, :experts] * 3
    if kind == "ties":
        x = x.round()
    if kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    if kind == "infinite":
        x = torch.where(x > 0, x, -torch.inf)
        x[:, 0] = 1.0
    weights, chosen = route_kernels.route(x, top_k, renormalise)
    wanted, ids = route_reference.route(x, top_k, renormalise)
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen, ids)
    close(weights, wanted, 8)
    if kind == "normal" and experts > top_k:  # control: the last expert is not the first
        assert not torch.equal(route_kernels.route(x.flip(1), top_k, renormalise)[1], ids)


# NumPy, about NaN in comparisons and casts, which is what the test is about
@pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, -0x400000, -1], ids=lambda bits: f"{bits & 0xFFFFFFFF:08x}")
def test_route_takes_any_nan_first(bits: int) -> None:
    """A NaN of either sign is chosen first, as the reference's sort has it; equal ones by id, and the other rows are as they were."""
    x = torch.randn(3, 12)
    before = route_kernels.route(x, 4, True)[1]
    x.view(torch.int32)[1, [2, 9]] = bits
    assert x[1].isnan().sum() == 2
    weights, chosen = route_kernels.route(x, 4, True)
    assert torch.equal(chosen, route_reference.route(x, 4, True)[1])
    assert chosen[1, :2].tolist() == [2, 9] != before[1, :2].tolist() and torch.equal(chosen[::2], before[::2])
    assert weights[1].isnan().all() and not weights[::2].isnan().any()


# NumPy, where the hardware says nothing: the numbers beyond FP32's largest become infinite on purpose, and so is their error
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning:triton.runtime.interpreter")
def test_round_double_rounds_once() -> None:
    """Bytes of every awkward kind: halfway cases that FP32 hides, subnormals, zeros, infinities, the largest numbers."""
    half = 1.0 + 2**-8  # halfway between two BF16 numbers
    tiny = 2.0**-133
    big = 3.3895313892515355e38
    kinds = [half, half + 2**-40, half - 2**-40, 1 + 3 * 2**-8 - 2**-45, tiny / 2, tiny / 2 + 2**-190, tiny * 1.5, 2.0**-160]
    kinds += [2.0**-300, 0.0, big, big * 1.01, 3.4028235677973366e38, 1e300, torch.inf]
    x = torch.tensor(kinds + [-k for k in kinds], dtype=torch.float64)
    x = torch.cat([x, torch.randn(300, dtype=torch.float64)])
    slots = x.to(BF16)  # only a carrier for the output's dtype
    got = torch.empty_like(slots)
    _round[(1,)](x, got, N=x.numel(), BLOCK=512)
    wanted = combine_reference.round_double(x, BF16)
    assert same(got, wanted)
    assert not same(x.float().to(BF16), wanted)  # control: the two plain hops round twice


@triton.jit
def _round(x_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < N, other=0.0)
    tl.store(y_ptr + place, combine_kernels.round_double(x, y_ptr.dtype.element_ty), mask=place < N)


@pytest.mark.parametrize("contributors", [1, 2, 3, 5, 6, 8, 16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_combine(contributors: int, shared: bool, dtype: torch.dtype) -> None:
    rows = 4
    slots = 5
    width = 300
    experts = 20
    x = torch.randn(rows, slots, width + 4).to(dtype)[..., :width]
    x[:, :, :3] *= 1e-39  # leaves that round to a signed zero
    weights = torch.rand(rows, slots)
    chosen = torch.rand(rows, experts).argsort(1)[:, :slots]
    extra = torch.randn(rows, width).to(dtype) if shared else None
    if extra is not None:
        extra[:, :6] = -0.0
    args = (x, weights, chosen, extra, -(-experts // contributors), contributors)
    got = combine_kernels.combine(*args)
    wanted = combine_reference.combine(*args)
    assert same(got, wanted)
    if contributors > 1:  # control: other owners add in another order
        other = combine_kernels.combine(x, weights, chosen.flip(1), extra, *args[4:])
        assert not same(other, wanted)
    assert combine_kernels.combine(x[:0], weights[:0], chosen[:0], None, *args[4:]).shape == (0, width)


@pytest.mark.parametrize("shared", [False, True])
def test_combine_keeps_the_sign_of_a_zero(shared: bool) -> None:
    """Three leaves that round to -0, and no fourth: padding the tree with +0 would turn the sum into +0."""
    x = torch.full((2, 3, 8), -(2.0**-133)).to(BF16)
    weights = torch.full((2, 3), 0.1)
    chosen = torch.tensor([[0, 4, 8], [9, 5, 1]])
    extra = torch.full((2, 8), -0.0, dtype=BF16) if shared else None
    got = combine_kernels.combine(x, weights, chosen, extra, 4, 3)
    assert same(got, combine_reference.combine(x, weights, chosen, extra, 4, 3))
    assert bool(got.signbit().all())


@pytest.mark.parametrize(("rows", "width"), [(1, 257), (3, 1), (65, 70)])
@pytest.mark.parametrize("contributors", [1, 2, 8, 11])
def test_combine_of_few_and_many_rows(rows: int, width: int, contributors: int) -> None:
    """Both launch shapes give the reference's bytes, many slots of one contributor and of one expert included."""
    x = torch.randn(rows, 4, width + 3)[..., 1 : width + 1]  # FP32, where an order shows in the leaves
    weights = torch.randn(rows, 4)
    chosen = torch.randint(0, 22, (rows, 4))
    chosen[0] = 21
    args = (x, weights, chosen, torch.randn(rows, width), -(-22 // contributors), contributors)
    wanted = combine_reference.combine(*args)
    assert same(combine_kernels.combine(*args), wanted)
    if rows > 60:  # control: slots in another order
        assert not same(combine_kernels.combine(x.flip(1), weights.flip(1), chosen.flip(1), *args[3:]), wanted)


# NumPy, about sums of the infinities that the test is about
@pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("contributors", [1, 2, 8])
def test_combine_of_slots_that_are_not_finite(contributors: int) -> None:
    """An infinite slot makes its own leaf infinite; only infinities of two signs, or a NaN, make a NaN."""
    x = torch.randn(70, 4, 16).to(BF16)
    weights = torch.rand(70, 4) + 0.1
    chosen = torch.arange(70)[:, None] * 3 % 13 + torch.arange(4)
    x[0::4, 1, :5] = torch.inf
    x[1::4, 2, 3:9] = -torch.inf
    x[2::4, 3, 8:] = torch.nan
    x[3::4, 0, :4] = torch.inf
    x[3::4, 2, 2:7] = -torch.inf
    args = (x, weights, chosen, None, -(-16 // contributors), contributors)
    got = combine_kernels.combine(*args)
    wanted = combine_reference.combine(*args)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert same(got.nan_to_num(7.0, torch.inf, -torch.inf), wanted.nan_to_num(7.0, torch.inf, -torch.inf))
    assert bool(got.isinf().any()) and not torch.equal(got.isnan(), ~x.isfinite().all(1))  # control: an infinity is no NaN


def test_combine_backward() -> None:
    grad = torch.randn(3, 300).to(BF16)
    x = torch.randn(3, 5, 300).to(BF16)
    weights = torch.rand(3, 5)
    got = combine_kernels.combine_backward(grad, x, weights)
    wanted = combine_reference.combine_backward(grad, x, weights)
    assert same(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=1e-4)
    assert same(got[1], reference_tree(x.float() * grad.float()[:, None]))
    other = combine_kernels.combine_backward(grad.flip(1), x.flip(2), weights.flip(1))  # controls: other weights, another order
    assert not same(other[0].flip(2), wanted[0]) and not same(other[1], got[1])
    torch.testing.assert_close(other[1], wanted[1], rtol=1e-5, atol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(other[1].flip(1), wanted[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("width", "group"), [(1000, 256), (256, 256), (3, 256), (5000, 256), (70, 8), (50, 12)])
def test_log_prob_reductions(width: int, group: int) -> None:
    x = torch.randn(3, width + 5)[:, :width] * 5
    x[0, : min(width - 1, 300)] = -torch.inf  # whole groups of nothing
    got = log_prob_kernels.group_stats(x, group)
    wanted = log_prob_reference.group_stats(x, group)
    assert same(got[0], wanted[0])
    for g, w in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(g, w, rtol=2e-6, atol=1e-6)
    for g, w in zip(log_prob_kernels.merge_groups(*wanted), log_prob_reference.merge_groups(*wanted), strict=True):
        torch.testing.assert_close(g, w, rtol=2e-6, atol=2e-6)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(g + 1e-4, w, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_logit_grad(scaled: bool) -> None:
    x = torch.randn(4, 1100)
    lse = x.logsumexp(1)
    mean = torch.randn(4)
    grad = torch.randn(4)
    grad_lse = torch.randn(4)
    grad_entropy = torch.randn(4)
    local = torch.tensor([0, 1099, -3, 1100])
    temperature = torch.rand(4) + 0.5 if scaled else None
    args = (x, lse, mean, local, grad, grad_lse, grad_entropy, temperature, FP32)
    got = log_prob_kernels.logit_grad(*args)
    wanted = log_prob_reference.logit_grad(*args)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(log_prob_kernels.logit_grad(*args[:3], local + 1, *args[4:]), wanted)
    assert log_prob_kernels.logit_grad(*args[:-1], BF16).dtype == BF16
