"""What the references mean: the textbook's formulas in float64, the roundings that the contracts name, refusals of public calls."""

from __future__ import annotations

import decimal
import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from op_formulas import TEXTBOOK, relative_error, tensor_core_product
from torch import Tensor

from zoo.common import ops
from zoo.common.history import KeyValues
from zoo.common.ops.attention.reference import merge
from zoo.common.ops.biased_route import Choice
from zoo.common.ops.cases import Case, Trial, cases_of
from zoo.common.ops.combine.reference import contributor_tree, round_double
from zoo.common.ops.experts.reference import experts_backward
from zoo.common.ops.log_prob.reference import group_stats, merge_groups
from zoo.common.ops.rope.table import cosine_and_sine
from zoo.common.ops.trees import padded_width, pair_tree
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.testing import LawBroken, assert_same_bytes, tensors
from zoo.verify.accuracy import promoted

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
FLOAT64 = replace(ALIGNED, dtype="float64")
FP32 = resolve("transformers", "cpu", torch.float32)

# a value rounded to BF16 is off by at most 2^-8; half that on average, so a tensor's error stays below it even after two
BF16_BOUND = 2.0**-8
# FP32 outputs: at most 2^-24 a step over sums of 2048 terms, errors of random sign
FP32_BOUND = 2.0**-20


def _limit(case: Case, args: Any, device: str, dtype: torch.dtype) -> float:
    """The relative error that an output of `dtype` may have."""
    if dtype != torch.float32:
        return BF16_BOUND
    if device == "cuda" and case.op == "linear":
        # a tensor core cuts its sum after every 16 products, towards zero: each cut loses 2^-24 of it on average, and they add up
        return max(FP32_BOUND, args["weight_NK"].shape[1] / 16 * 2.0**-24)
    return FP32_BOUND


def _cases(device: str = "cpu") -> list[Any]:
    found = [case for name in sorted(TEXTBOOK) if name in ops.CONTRACTS for case in cases_of(name, ALIGNED) if case.runs_on(device)]
    return [pytest.param(case, id=f"{case.op}-{case.name}".replace(" ", "_")) for case in found]


@pytest.mark.parametrize("case", _cases())
def test_reference_is_the_textbook(case: Case) -> None:
    """In float64 the two differ by the order of additions only."""
    args = case.make(0, "cpu", torch.float64)
    pairs = zip(tensors(Trial(case, FLOAT64, args).call()), tensors(Trial(case, FLOAT64, args, TEXTBOOK).call()), strict=True)
    for (name, found), (_, exact) in pairs:
        assert relative_error(found, exact) <= 1e-12, name


def _accuracy(case: Case, device: str) -> None:
    args = case.make(1, device, torch.bfloat16)
    program = resolve("aligned", device, torch.bfloat16)
    wide = promoted(case.make(1, "cpu", torch.bfloat16))
    exact = tensors(Trial(case, FLOAT64, wide, TEXTBOOK).call())
    for (name, found), (_, value) in zip(tensors(Trial(case, program, args).call()), exact, strict=True):
        limit = _limit(case, args, device, found.dtype)
        error = relative_error(found.cpu(), value)
        assert error <= limit, f"{name}: {error:.1e} > {limit:.1e}"


@pytest.mark.parametrize("case", [p for p in _cases() if p.values[0].kind != "subnormal"])
def test_accuracy_in_bf16(case: Case) -> None:
    _accuracy(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [p for p in _cases() if p.values[0].kind != "subnormal" and p.values[0].runs_on("cuda")])
def test_accuracy_on_cuda(case: Case) -> None:
    _accuracy(case, "cuda")


@pytest.mark.parametrize(("name", "seen"), [("K 1024, float32 out", 1.11e-6), ("K 1030, cancelling", 9.73e-7)])
def test_a_tensor_core_errs_more_than_a_chain(name: str, seen: float) -> None:
    """Why CUDA's products have a limit of their own: the model of one gives the error seen on an H200, to a percent."""
    case = next(c for c in cases_of("linear", ALIGNED) if c.name == name)
    args = case.make(1, "cpu", torch.bfloat16)
    x = args["x_RK"].double()
    weight = args["weight_NK"].double()
    error = relative_error(tensor_core_product(x, weight), x @ weight.T)
    limit = _limit(case, args, "cuda", torch.float32)
    assert abs(error - seen) < 0.01 * seen and FP32_BOUND == _limit(case, args, "cpu", torch.float32) < error < limit / 3
    # the control: an accumulator of 14 significant bits, as FP8 products have, misses the limit
    assert relative_error(tensor_core_product(x, weight, sum_bits=14), x @ weight.T) > 100 * limit


@pytest.mark.parametrize("op", ["linear", "rms_norm", "swiglu", "attention"])
def test_one_more_rounding_is_seen(op: str) -> None:
    """The control: operands cut to 6 bits of mantissa miss the bound."""
    case = next(c for c in cases_of(op, ALIGNED) if c.kind == "normal" and c.name not in ("one by one", "one row", "tiny"))
    args = case.make(1, "cpu", torch.bfloat16)
    coarse = {
        k: (v.view(torch.int16) & ~7).view(torch.bfloat16) if isinstance(v, Tensor) and v.dtype == torch.bfloat16 else v
        for k, v in args.items()
    }
    exact = tensors(Trial(case, FLOAT64, promoted(args), TEXTBOOK).call())
    found = tensors(Trial(case, ALIGNED, coarse).call())
    assert max(relative_error(a, b) for (_, a), (_, b) in zip(found, exact, strict=True)) > BF16_BOUND


def test_pair_tree_is_adjacent_pairs() -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert_same_bytes(pair_tree(x), ((x[:, 0] + x[:, 1]) + (x[:, 2] + x[:, 3])) + x[:, 4])
    assert [padded_width(n) for n in (1, 2, 3, 64, 65, 257)] == [1, 2, 4, 64, 128, 512]
    wide = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert pair_tree(wide) == 0 and wide.sum() != 2, "pairs (1e8 + 1) and (-1e8 + 1) lose both ones"


def _nearest_bf16(exact: Fraction) -> set[float]:
    """The BF16 values nearest to a rational (two at a tie)."""
    near = torch.tensor(float(exact)).bfloat16()
    bits = int(near.view(torch.int16))
    around = torch.tensor([bits - 1, bits, bits + 1], dtype=torch.int16).view(torch.bfloat16).tolist()
    distances = {value: abs(Fraction(value) - exact) for value in around}
    return {value for value, distance in distances.items() if distance == min(distances.values())}


def test_round_double_rounds_once() -> None:
    """Against exact rationals, at and around the halves where a stop at FP32 would round twice."""
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(3 + 2**-7), 2**-120 * (1 + 2**-8), 7e37 * 1.0])
    values = [float(h) * (1 + sign * 2.0**-k) for h, sign, k in itertools.product(halves.double(), (-1, 0, 1), (25, 26, 30, 40, 52))]
    for value, rounded in zip(values, round_double(torch.tensor(values, dtype=torch.float64), torch.bfloat16).tolist(), strict=True):
        assert rounded in _nearest_bf16(Fraction(value)), value
    trap = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert trap.float().bfloat16() == 1.0, "the trap: through FP32 the tie goes to even"
    assert round_double(trap, torch.bfloat16) == 1 + 2**-7
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e300, -1e-300, 1e-300], dtype=torch.float64)
    assert_same_bytes(round_double(special, torch.bfloat16), special.bfloat16())
    assert round_double(torch.tensor([torch.nan], dtype=torch.float64), torch.bfloat16).isnan().all()


def test_contributor_tree_carries_the_odd_leaf() -> None:
    leaves = [torch.tensor(float(n), dtype=torch.float64) for n in (1e17, 1, -1e17, 1, 3)]
    assert contributor_tree(leaves) == 3.0, "(1e17 + 1) + (-1e17 + 1) loses both ones; the fifth comes last"


def test_combine_rounds_each_leaf_and_only_then_the_row() -> None:
    """Two slots of one contributor meet in FP32; slots of two contributors are rounded apart."""
    slots = torch.tensor([[[1.0], [1.0]]]).bfloat16()
    weights = torch.tensor([[1.0, 2.0**-8]])
    together = ops.combine(slots, weights * (1 + 2.0**-9), torch.tensor([[0, 1]]), 16, program=ALIGNED)
    exact = (1 + 2.0**-8) * (1 + 2.0**-9)
    assert float(together) == float(torch.tensor(exact).bfloat16())
    apart = ops.combine(slots, weights * (1 + 2.0**-9), torch.tensor([[0, 2]]), 16, program=ALIGNED)
    leaves = [float(torch.tensor(float(w)).bfloat16()) for w in weights[0] * (1 + 2.0**-9)]
    assert float(apart) == float(round_double(torch.tensor(sum(leaves), dtype=torch.float64), torch.bfloat16))
    assert float(apart) != float(together)


def test_add_rms_norm_norms_the_rounded_sum() -> None:
    x = torch.full((1, 4), 1.0).bfloat16()
    residual = torch.tensor([[2.0**-9, 0, 0, 0]]).bfloat16()
    normed, total = ops.add_rms_norm(x, residual, torch.ones(4).bfloat16(), 0.0, program=ALIGNED)
    assert_same_bytes(total, x)
    assert_same_bytes(normed, x)


def test_route_breaks_ties_by_id() -> None:
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0], [-0.0, 0.0, -0.0, 0.0, -1.0]])
    weights, chosen = ops.route(logits, 4, True, program=ALIGNED)
    assert chosen.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert weights[1].tolist() == [0.25] * 4


def test_biased_route_of_scores_that_vanish() -> None:
    """Scores of e^-60 are far below the 1e-20 that their sum gets: the weights are small, where a plain division gives a half each."""
    logits = torch.full((1, 4), -60.0)
    weights, _ = ops.biased_route(logits, torch.zeros(4), Choice(2), program=ALIGNED)
    score = math.exp(-60)
    for weight in weights[0].tolist():
        assert abs(weight / (score / (2 * score + 1e-20)) - 1) < 1e-5
    usual, _ = ops.biased_route(torch.zeros(1, 4), torch.zeros(4), Choice(2), program=ALIGNED)
    assert usual.tolist() == [[0.5, 0.5]]  # where scores are of any size the term is nothing


def test_log_prob_is_at_most_zero_and_masks() -> None:
    logits = torch.full((2, 300), -torch.inf)
    logits[0, 7] = 5.0
    logits[1, 299] = -3e38
    scores = ops.log_prob_of_logits(logits, torch.tensor([7, 298]), program=ALIGNED)
    assert scores.log_prob_R.tolist() == [0.0, -math.inf]
    assert scores.entropy_R is not None and scores.entropy_R.tolist() == [0.0, 0.0]
    certain = torch.tensor([[80.0] + [-80.0] * 511]).repeat(9, 1) * torch.linspace(0.9, 1.1, 9)[:, None]
    assert (ops.log_prob_of_logits(certain, torch.zeros(9, dtype=torch.int64), program=ALIGNED).log_prob_R <= 0).all()


def test_groups_merge_like_shards() -> None:
    """(max, sum) pairs of two vocabulary shards side by side are those of the whole; groups of 128 are not."""
    logits = torch.randn(9, 1100, generator=torch.Generator().manual_seed(1)) * 4
    whole = merge_groups(*group_stats(logits, 256))
    shards = [group_stats(part.contiguous(), 256) for part in logits.split(512, 1)]
    assert_same_bytes(merge_groups(*(torch.cat(parts, 1) for parts in zip(*shards, strict=True))), whole)
    with pytest.raises(LawBroken):
        assert_same_bytes(merge_groups(*group_stats(logits, 128)), whole)


def test_entropy_and_lse_of_a_uniform_row() -> None:
    scores = ops.log_prob_of_logits(torch.zeros(1, 1024), torch.tensor([3]), program=ALIGNED)
    assert scores.entropy_R is not None
    for value in (-scores.log_prob_R, scores.lse_R, scores.entropy_R):
        assert abs(float(value) - math.log(1024)) < 1e-6


def test_rope_tables() -> None:
    table = ops.rope_table(4097, 128, 1e6)
    assert table.dtype == torch.float32 and table.shape == (4097, 64, 2)
    assert_same_bytes(table[0], torch.tensor([1.0, 0.0]).expand(64, 2).contiguous())
    exponent = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    angle = torch.arange(4097, dtype=torch.float64)[:, None] * 1e6**-exponent
    # an FP32 angle of up to 4096 radians is off by half an ulp of 4096 (2^-12), the frequency by 2^-24 of it, twice
    assert (table[..., 0].double() - angle.cos()).abs().max() < 3 * 2**-12
    assert_same_bytes(ops.rope_table(100, 128, 1e6), table[:100].contiguous())
    assert ops.table_hash(table) == ops.table_hash(table.clone()) != ops.table_hash(table.flip(0))


@pytest.mark.parametrize(("positions", "theta"), [(1 << 23, 1e6), (64, 1e-38), (5000, 1e-6)])
def test_rope_table_refuses_angles_that_it_cannot_reduce(positions: int, theta: float) -> None:
    with pytest.raises(ValueError, match=f"{positions} positions .* at most 4194304"):
        ops.rope_table(positions, 8, theta)


def _nearest(function: Any, angle: Tensor) -> Tensor:
    """The FP32 numbers nearest to cosines or sines. NumPy's FP64 ones are good to a bit; none may lie so near to a halfway point that
    more than that would matter."""
    exact = torch.from_numpy(function(angle.double().numpy()))
    near = exact.float()
    ulp = torch.from_numpy(numpy.spacing(exact.abs().numpy()))
    for way in (-2.0, 2.0):
        halfway = (near.double() + torch.nextafter(near, torch.full_like(near, way)).double()) / 2
        assert ((halfway - exact).abs() > 8 * ulp).all()
    return near


def _frequencies(rotated: int, theta: float) -> Tensor:
    """1 / theta^(2i / rotated) with a rounding to FP32 after the power and one after the division."""
    with decimal.localcontext(prec=50):
        powers = [decimal.Decimal(theta) ** (decimal.Decimal(2 * i) / rotated) for i in range(rotated // 2)]
    return 1 / torch.tensor([float(p) for p in powers], dtype=torch.float64).float()


def _nearest_table(positions: int, frequency_C: Tensor) -> Tensor:
    angle_PC = torch.arange(positions, dtype=torch.float32)[:, None] * frequency_C
    return torch.stack([_nearest(numpy.cos, angle_PC), _nearest(numpy.sin, angle_PC)], -1)


@pytest.mark.parametrize(("rotated", "theta"), [(128, 1e6), (64, 1e7)])
def test_rope_tables_are_rounded_correctly_on_any_number_of_threads(rotated: int, theta: float) -> None:
    frequency = _frequencies(rotated, theta)
    before = torch.get_num_threads()
    expected = _nearest_table(4096, frequency)
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            assert_same_bytes(ops.rope_table(4096, rotated, theta), expected, f"{threads} threads")
    finally:
        torch.set_num_threads(before)
    table = ops.rope_table(4096, rotated, theta)
    for i, way in itertools.product((0, 1, rotated // 4, rotated // 2 - 1), (0.0, 2.0)):  # the control: one frequency off by one ulp
        nudged = frequency.clone()
        nudged[i] = torch.nextafter(nudged[i], torch.tensor(way))
        with pytest.raises(LawBroken):
            assert_same_bytes(table, _nearest_table(4096, nudged))


def test_cosines_and_sines_of_large_angles_are_rounded_correctly() -> None:
    """Up to 2^22, beyond the longest published table, and beside the multiples of pi / 2, where one of the two nearly vanishes."""
    random = torch.Generator().manual_seed(0)
    anywhere = torch.rand(100_000, generator=random, dtype=torch.float64) * 2.0 ** torch.randint(23, (100_000,), generator=random)
    multiples = torch.arange(1, 2_670_000, 29, dtype=torch.float64) * (math.pi / 2)
    angle = torch.cat([anywhere, multiples]).float()
    expected = _nearest(numpy.cos, angle), _nearest(numpy.sin, angle)
    assert_same_bytes(cosine_and_sine(angle), expected)
    with pytest.raises(LawBroken):  # the control: FP64's pi alone, without the two smaller parts
        rest = angle.double() - (angle.double() * (2 / math.pi)).round() * (math.pi / 2)
        assert_same_bytes(rest.sin().abs().float(), torch.minimum(*(t.abs() for t in expected)))


def test_rope_keeps_what_it_does_not_rotate() -> None:
    x = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = ops.rope(x, ops.rope_table(9, 4, 1e4), torch.tensor([0, 3, 8]), program=ALIGNED)
    assert_same_bytes(out[..., 4:], x[..., 4:])
    assert_same_bytes(out[0], x[0])


def test_merge_of_an_empty_part_changes_nothing() -> None:
    out = torch.randn(2, 3, 4)
    lse = torch.randn(2, 3)
    assert_same_bytes(merge(out, lse, torch.zeros_like(out), torch.full_like(lse, -torch.inf)), (out, lse))


def test_experts_backward_adds_slots_in_slot_order() -> None:
    """One row, eight experts, an odd width: torch's own sum over the slots takes another order."""
    case = next(c for c in cases_of("experts", ALIGNED) if c.name == "odd")
    generator = torch.Generator().manual_seed(0)
    args = case.make(0, "cpu", torch.float32)
    weights = [torch.randn(8, *args[name].shape[1:], generator=generator) for name in ("gate_up_X2FD", "down_XDF")]
    x = args["x_RD"][:1]
    chosen = torch.arange(8)[None]
    grad = torch.randn(1, 8, 33, generator=generator)
    each = [experts_backward(grad[:, slot : slot + 1], x, chosen[:, slot : slot + 1], *weights)[0] for slot in range(8)]
    in_order = each[0]
    for part in each[1:]:
        in_order = in_order + part
    assert_same_bytes(experts_backward(grad, x, chosen, *weights)[0], in_order)
    with pytest.raises(LawBroken):
        assert_same_bytes(pair_tree(torch.stack(each, -1)), in_order, "the control: another order of the same slots")


IDS = torch.zeros(2, dtype=torch.int64)
zeros = torch.zeros


def _keys(heads: int) -> KeyValues:
    return KeyValues(zeros(2, heads, 8), zeros(2, heads, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.linear(zeros(2, 5), zeros(3, 4), program=FP32), "x has 5 columns, the weight takes 4"),
        (lambda: ops.linear(zeros(2, 6), zeros(3, 6), program=FP32, k_parts=4), "K = 6 does not divide into 4"),
        (lambda: ops.rms_norm(zeros(2, 5), zeros(4), 1e-6, program=FP32), "rows of 5 columns, a weight of shape \\(4,\\)"),
        (
            lambda: ops.add_rms_norm(zeros(2, 4), zeros(3, 4), zeros(4), 1e-6, program=FP32),
            r"x \(2, 4\) and residual \(3, 4\) differ",
        ),
        (lambda: ops.swiglu(zeros(2, 5), program=FP32), "even width together, got 5"),
        (
            lambda: ops.rope(zeros(2, 1, 4), zeros(9, 4, 2), IDS, program=FP32),
            "a table for 8 columns, heads of 4",
        ),
        (lambda: ops.route(zeros(2, 4), 5, True, program=FP32), "top 5 of 4 experts"),
        (
            lambda: ops.experts(zeros(2, 4), IDS[:, None], zeros(3, 4, 4), zeros(3, 4, 3), program=FP32),
            r"needs down \(3, 4, 2\), got \(3, 4, 3\)",
        ),
        (
            lambda: ops.combine(zeros(2, 3, 4), zeros(2, 2), IDS.expand(2, 2), 8, program=FP32),
            r"slots \(2, 3\), weights \(2, 2\)",
        ),
        (
            lambda: ops.attention(zeros(2, 3, 8), _keys(2), Rows.pushed([2], None, "cpu"), 1.0, program=FP32),
            "3 query heads are not a multiple of 2 key heads",
        ),
    ],
)
def test_refusals_name_both_numbers(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
