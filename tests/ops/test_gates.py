"""The small ops of Gated DeltaNet layers and gates: textbook formulas in float64, accuracy, saturation, strides, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from op_formulas import relative_error
from torch import Tensor
from torch.nn import functional

from zoo.common import ops
from zoo.common.history import ConvCarry, PackedDelta
from zoo.common.ops.cases import Case, Trial, cases_of
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.testing import LawBroken, assert_same_bytes, gradients, tensors
from zoo.verify.accuracy import promoted

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
FLOAT64 = replace(ALIGNED, dtype="float64")
FP32 = resolve("transformers", "cpu", torch.float32)
OPS = ("causal_conv", "l2_norm", "delta_gate", "gated_rms_norm", "output_gate")
BF16_BOUND = 2.0**-8  # one rounding
FP32_BOUND = 2.0**-20


def _conv(x_RC: Tensor, weight_C4: Tensor, history: PackedDelta, rows: Rows, *, program: Any) -> Tensor:
    """torch's own convolution of each document."""
    starts = rows.starts_N1.tolist()
    out = []
    for n, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        before = x_RC.new_zeros(3, x_RC.shape[1]) if history.carry_NWC is None else history.carry_NWC[n]
        padded = torch.cat([before, x_RC[begin:end]]).T[None]
        out.append(functional.conv1d(padded, weight_C4[:, None], groups=weight_C4.shape[0])[0].T)
    return functional.silu(torch.cat(out))


def _gate(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, program: Any) -> Any:
    x = a + dt_bias
    return -a_log.exp() * torch.logaddexp(x, torch.zeros_like(x)), b.sigmoid()


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, program: Any) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight * functional.silu(gate)


TEXTBOOK: dict[str, Any] = {
    "causal_conv": _conv,
    "l2_norm": lambda x, *, program: x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6),
    "delta_gate": _gate,
    "gated_rms_norm": _gated_norm,
    "output_gate": lambda x, gate, *, program: x * gate.sigmoid(),
}


def _cases(device: str = "cpu") -> list[Any]:
    found = [case for name in OPS for case in cases_of(name, ALIGNED) if case.runs_on(device)]
    return [pytest.param(case, id=f"{case.op}-{case.name}".replace(" ", "_")) for case in found]


def case_named(op: str, name: str) -> Case:
    return next(case for case in cases_of(op, ALIGNED) if case.name == name)


@pytest.mark.parametrize("case", _cases())
def test_reference_is_the_textbook(case: Case) -> None:
    args = case.make(0, "cpu", torch.float64)
    pairs = zip(tensors(Trial(case, FLOAT64, args).call()), tensors(Trial(case, FLOAT64, args, TEXTBOOK).call()), strict=True)
    for (name, found), (_, exact) in pairs:
        assert relative_error(found, exact) <= 1e-12, name


@pytest.mark.parametrize("case", _cases())
def test_backward_is_the_textbooks_gradient(case: Case) -> None:
    """Closed form against autograd, both float64."""
    args = case.make(1, "cpu", torch.float64)
    _, found = gradients(Trial(case, FLOAT64, args).call, args, case.gradients)
    _, exact = gradients(Trial(case, FLOAT64, args, TEXTBOOK).call, args, case.gradients)
    for name in case.gradients:
        assert relative_error(found[name], exact[name]) <= 1e-11, name


def _accuracy(case: Case, device: str) -> None:
    program = resolve("aligned", device, torch.bfloat16)
    args = case.make(1, device, torch.bfloat16)
    wide = promoted(case.make(1, "cpu", torch.bfloat16))
    exact = tensors(Trial(case, FLOAT64, wide, TEXTBOOK).call())
    for (name, found), (_, value) in zip(tensors(Trial(case, program, args).call()), exact, strict=True):
        assert relative_error(found.cpu(), value) <= (FP32_BOUND if found.dtype == torch.float32 else BF16_BOUND), name


@pytest.mark.parametrize("case", _cases())
def test_accuracy_in_bf16(case: Case) -> None:
    _accuracy(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", _cases("cuda"))
def test_accuracy_on_cuda(case: Case) -> None:
    _accuracy(case, "cuda")


@pytest.mark.parametrize("case", _cases())
def test_bf16_backward_errs_by_its_rounding_only(case: Case) -> None:
    args = case.make(2, "cpu", torch.bfloat16)
    wide = promoted(args)
    _, found = gradients(Trial(case, ALIGNED, args).call, args, case.gradients)
    _, exact = gradients(Trial(case, FLOAT64, wide, TEXTBOOK).call, wide, case.gradients)
    for name, gradient in found.items():
        assert gradient.dtype == args[name].dtype
        assert relative_error(gradient, exact[name]) <= BF16_BOUND, name


FAULTS: dict[str, Any] = {  # right to within a little, or right but for one term of the gradient
    "causal_conv": lambda x, w, history, rows, *, program: _conv(x, w.flip(1), history, rows, program=program),
    "l2_norm": lambda x, *, program: x / torch.sqrt(x.square().sum(-1, keepdim=True).detach() + 1e-6),
    "delta_gate": lambda a, b, a_log, dt_bias, *, program: _gate(a, b, a_log.detach(), dt_bias, program=program),
    "gated_rms_norm": lambda x, gate, w, eps, *, program: _gated_norm(x, gate, 1 + w, eps, program=program),
    "output_gate": lambda x, gate, *, program: x * gate.clamp(-4, 4).sigmoid(),
}


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_formula_is_seen(op: str) -> None:
    """The controls of the two comparisons above."""
    case = cases_of(op, ALIGNED)[0]
    args = case.make(1, "cpu", torch.float64)
    fault = {op: FAULTS[op]}
    wrong, exact = (
        gradients(Trial(case, FLOAT64, args, how).call, {**args}, [n for n in case.gradients if (op, n) != ("delta_gate", "a_log_V")])
        for how in (fault, TEXTBOOK)
    )
    values = [relative_error(a, b) for (_, a), (_, b) in zip(tensors(wrong[0]), tensors(exact[0]), strict=True)]
    slopes = [relative_error(wrong[1][name], exact[1][name]) for name in exact[1]]
    if op == "delta_gate":  # its fault has no slope in A_log at all
        with pytest.raises(RuntimeError, match="not have been used"):
            gradients(Trial(case, FLOAT64, args, fault).call, args, case.gradients)
    else:
        assert max(values + slopes) > BF16_BOUND


# saturation


def test_gates_saturate_without_overflow() -> None:
    a = torch.tensor([[-1e30, -200.0, -30.0, 0.0, 30.0, 200.0, 1e30]]).T.bfloat16()
    zero = torch.zeros(1)
    log_decay, beta = ops.delta_gate(a, a, zero, zero, program=ALIGNED)
    assert log_decay.dtype == beta.dtype == torch.float32
    assert log_decay[:2].abs().max() == 0 and log_decay[2] == -torch.log1p(torch.exp(torch.tensor(-30.0)))
    assert_same_bytes(log_decay[4:], -a[4:].float())
    assert beta[:, 0].tolist()[:2] == [0.0, 0.0] and beta[3] == 0.5 and (beta[4:] > 1 - 1e-6).all() and (beta <= 1).all()
    strong = ops.delta_gate(a[3:4], a[3:4], torch.tensor([5.0]), torch.tensor([20.0]), program=ALIGNED)[0]
    assert strong.isfinite() and strong < -2900 and strong.exp() == 0
    leaves = [t.clone().requires_grad_() for t in (a, a, zero, zero)]
    for out in ops.delta_gate(*leaves, program=ALIGNED):
        finite = torch.autograd.grad(out[1:6].sum(), leaves, allow_unused=True, retain_graph=True)
        assert all(g.isfinite().all() for g in finite)


@pytest.mark.parametrize("a", [-20.0, -8.0, 8.0, 60.0])
@pytest.mark.parametrize("b", [-60.0, -8.0, 8.0, 20.0])
def test_gradients_of_saturated_gates(a: float, b: float) -> None:
    """Each decay near 0 or near 1 and each beta near 0 or near 1 alone, so that no other one hides its error."""
    rows = {"a": a + torch.randn(9, 3), "b": b + torch.randn(9, 3)}
    args = {name: x.bfloat16() for name, x in rows.items()} | {"a_log": torch.randn(3), "dt_bias": torch.randn(3)}

    def of(op: Any, args: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradients(lambda given: op(*given.values(), program=ALIGNED), args, list(args))[1]

    found = of(ops.delta_gate, args)
    wanted = of(_gate, {name: x.double() for name, x in args.items()})
    moved = of(_gate, {name: x.double() + (1 if name in rows else 0) for name, x in args.items()})
    for name, bound in {"a": BF16_BOUND, "b": BF16_BOUND, "a_log": FP32_BOUND, "dt_bias": FP32_BOUND}.items():
        assert relative_error(found[name], wanted[name]) < bound, name
        if name == "b" or (a < 0 and name != "a_log"):  # the control; where all is forgotten these hardly depend on the gate
            assert relative_error(moved[name], wanted[name]) > 2 * bound, name


SIGMOIDS: dict[str, Any] = {
    "delta_gate": lambda g: ops.delta_gate(zeros(g.shape), g, zeros(1), zeros(1), program=FP32)[1],
    "output_gate": lambda g: ops.output_gate(torch.ones_like(g), g, program=FP32),
}


@pytest.mark.parametrize("op", SIGMOIDS)
def test_a_sigmoids_slope_keeps_its_digits(op: str) -> None:
    """Each gate alone, in FP32, against exp(-|g|) / (1 + exp(-|g|))^2 in float64: s (1 - s), as torch has it, has none left near 1."""
    gate = torch.linspace(-80, 80, 641)[:, None]
    wide = torch.exp(-gate.double().abs())
    wanted = wide / (1 + wide) ** 2

    def errs(sigmoid: Any) -> Tensor:
        leaf = gate.clone().requires_grad_()
        return (torch.autograd.grad(sigmoid(leaf).sum(), leaf)[0].double() - wanted).abs() > FP32_BOUND * wanted

    assert not errs(SIGMOIDS[op]).any()
    control = errs(torch.sigmoid)
    assert control[gate > 18].all() and not control[gate < 0].any()


@pytest.mark.parametrize("gate", [-1e30, -120.0, 0.0, 120.0, 1e30])
def test_output_gate_saturates(gate: float) -> None:
    x = torch.tensor([[3.0, -1e30, 0.0]]).bfloat16().requires_grad_()
    g = torch.full((1, 1), gate).bfloat16().requires_grad_()
    out = ops.output_gate(x, g, program=ALIGNED)
    expected = x.detach() * {True: 1.0, False: 0.0}[gate > 0] if gate else x.detach() * 0.5
    assert_same_bytes(out.detach(), expected if gate else expected.bfloat16())
    grads = torch.autograd.grad(out.sum(), (x, g))
    assert all(t.isfinite().all() for t in grads)


@pytest.mark.parametrize("gate", [-80.0, 0.0, 80.0, 300.0])
def test_gated_norm_saturates(gate: float) -> None:
    x = torch.randn(5, 2, 16).bfloat16().requires_grad_()
    weight = torch.ones(16)
    z = torch.full((5, 2, 16), gate).bfloat16().requires_grad_()
    out = ops.gated_rms_norm(x, z, weight, 1e-6, program=ALIGNED)
    assert out.isfinite().all() and (gate > 0) == bool(out.abs().max() > 1)
    assert all(t.isfinite().all() for t in torch.autograd.grad(out.sum(), (x, z)))


def test_zeros_have_no_length() -> None:
    """A zero row stays zero, forward and backward finite: eps lies inside the root."""
    x = torch.zeros(2, 1, 16).bfloat16().requires_grad_()
    out = ops.l2_norm(x, program=ALIGNED)
    assert not out.any()
    grad = torch.autograd.grad(out.sum(), x)[0]
    assert_same_bytes(grad, torch.full_like(grad, 1e3))
    assert ops.l2_norm(torch.full((1, 1, 16), 1e15), program=FP32).sum() == 4.0
    gated = ops.gated_rms_norm(torch.zeros(1, 1, 16), torch.ones(1, 1, 16), torch.ones(16), 1e-6, program=FP32)
    assert not gated.any()


def test_fp32_vectors_are_not_rounded() -> None:
    """A_log, dt_bias and the norm's weight stay FP32 beside BF16 rows."""
    rows = torch.randn(9, 4).bfloat16()
    vectors = [torch.randn(4) for _ in range(2)]
    exact = ops.delta_gate(rows, rows, *vectors, program=ALIGNED)
    assert_same_bytes(exact, ops.delta_gate(rows.float(), rows.float(), *vectors, program=FP32))
    with pytest.raises(LawBroken):
        assert_same_bytes(ops.delta_gate(rows, rows, *(v.bfloat16().float() for v in vectors), program=ALIGNED), exact)
    x = torch.randn(3, 2, 64).bfloat16()
    weight = 1 + 2**-9 * torch.ones(64)
    normed = [ops.gated_rms_norm(x, x, w, 1e-6, program=ALIGNED) for w in (weight, torch.ones(64))]
    with pytest.raises(LawBroken):
        assert_same_bytes(*normed)


# places


def test_rows_of_a_fused_projection() -> None:
    """Heads that are columns of a wider row: strided views give what copies give."""
    row = torch.randn(11, 3 * 64 + 8).bfloat16()
    heads = row[:, 64:128].unflatten(1, (4, 16))
    gates = row[:, 128:192].unflatten(1, (4, 16))
    a = row[:, 192:196]
    b = row[:, 196:200]
    weight = torch.randn(64, 4).bfloat16()
    vectors = torch.randn(2, 4)
    packed = PackedDelta()
    rows = Rows.packed(torch.tensor([0, 5, 11]))
    for call in (
        lambda f: ops.l2_norm(f(heads), program=ALIGNED),
        lambda f: ops.gated_rms_norm(f(heads), f(gates), vectors[0].repeat(4), 1e-6, program=ALIGNED),
        lambda f: ops.output_gate(f(heads), f(gates), program=ALIGNED),
        lambda f: ops.delta_gate(f(a), f(b), *vectors, program=ALIGNED),
        lambda f: ops.causal_conv(f(row[:, :64]), weight, packed, rows, program=ALIGNED),
    ):
        found = call(lambda t: t)
        assert all(t.is_contiguous() for _, t in tensors(found))
        assert_same_bytes(found, call(lambda t: t.contiguous()))
    with pytest.raises(LawBroken):
        assert_same_bytes(ops.l2_norm(heads, program=ALIGNED), ops.l2_norm(gates, program=ALIGNED))


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 64, 68, 69])
def test_a_rank_goes_on_from_carried_rows(cut: int) -> None:
    """Context parallelism: three rows before a part are handed on, and their gradient is handed back."""
    x = torch.randn(70, 8).bfloat16().requires_grad_()
    weight = torch.randn(8, 4).bfloat16().requires_grad_()
    whole = ops.causal_conv(x, weight, PackedDelta(), Rows.packed(torch.tensor([0, 70])), program=ALIGNED)
    before = torch.cat([torch.zeros(3, 8).bfloat16(), x[:cut]])[-3:][None]
    part = ops.causal_conv(x[cut:], weight, PackedDelta(carry_NWC=before), Rows.packed(torch.tensor([0, 70 - cut])), program=ALIGNED)
    alone = ops.causal_conv(x[cut:], weight, PackedDelta(), Rows.packed(torch.tensor([0, 70 - cut])), program=ALIGNED)
    upstream = torch.randn(70 - cut, 8).bfloat16()
    grads = [torch.autograd.grad(y, (x, weight), upstream) for y in (part, whole[cut:], alone)]
    assert_same_bytes(part, whole[cut:])
    assert_same_bytes(grads[0][0], grads[1][0])
    assert relative_error(grads[0][1], grads[1][1].double()) < BF16_BOUND
    assert grads[1][0][:cut].any() and not grads[2][0][:cut].any()
    assert relative_error(grads[2][1], grads[1][1].double()) > BF16_BOUND
    with pytest.raises(LawBroken):
        assert_same_bytes(alone, whole[cut:])


def test_slots_advance_and_neighbours_stay() -> None:
    x = torch.randn(6, 8).bfloat16()
    weight = torch.randn(8, 4).bfloat16()
    pool = torch.randn(5, 3, 8).bfloat16()
    before = pool.clone()
    carry = ConvCarry(pool, torch.tensor([4, 2]))
    out = ops.causal_conv(x, weight, carry, Rows.pushed([5, 1], [9, 3], "cpu"), program=ALIGNED)
    assert_same_bytes(pool[4], x[2:5])
    assert_same_bytes(pool[2], torch.cat([before[2, 1:], x[5:]]))
    assert_same_bytes(pool[[0, 1, 3]], before[[0, 1, 3]])
    wide = _conv(
        x.double(),
        weight.double(),
        PackedDelta(carry_NWC=before[[4, 2]].double()),
        Rows.packed(torch.tensor([0, 5, 6])),
        program=None,
    )
    assert relative_error(out, wide) < BF16_BOUND


IDS = torch.zeros(2, dtype=torch.int64)
zeros = torch.zeros


def _conv_of(history: PackedDelta | ConvCarry, rows: int = 5) -> Tensor:
    """Two sequences of 8 channels, 5 rows in all."""
    x = zeros(rows, 8, dtype=torch.bfloat16)
    weight = zeros(8, 4, dtype=torch.bfloat16)
    return ops.causal_conv(x, weight, history, Rows.pushed([2, 3], [4, 4], "cpu"), program=ALIGNED)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.causal_conv(zeros(2, 8), zeros(8, 3), PackedDelta(), Rows.pushed([2], None, "cpu"), program=FP32),
            r"rows of 8 channels, a weight of shape \(8, 3\)",
        ),
        (
            lambda: ops.causal_conv(zeros(2, 8), zeros(6, 4), PackedDelta(), Rows.pushed([2], None, "cpu"), program=FP32),
            r"rows of 8 channels, a weight of shape \(6, 4\)",
        ),
        (lambda: _conv_of(PackedDelta(), rows=4), "x has 4 rows, there are 5"),
        (
            lambda: _conv_of(ConvCarry(zeros(4, 3, 8, dtype=torch.bfloat16), torch.tensor([1, 2, 3]))),
            r"slots \(3,\) for 2 sequences",
        ),
        (lambda: ops.delta_gate(zeros(2, 4), zeros(2, 3), zeros(4), zeros(4), program=FP32), "4, 3, 4 and 4 heads differ"),
        (
            lambda: ops.gated_rms_norm(zeros(2, 3, 8), zeros(2, 3, 8), zeros(7), 1e-6, program=FP32),
            r"x \(2, 3, 8\), gate \(2, 3, 8\), weight \(7,\) disagree",
        ),
        (lambda: ops.output_gate(zeros(2, 4), zeros(2, 3), program=FP32), r"rows \(2, 4\), gate \(2, 3\)"),
    ],
)
def test_refusals_name_both_numbers(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ((0, 0, -7), None),
        ((0, 0, 1), None),
        ((0, 1, 0), None),
        ((0, -1, 0), None),
        ((0, 0, 0), torch.float32),
        ((-1, 0, 0), None),
        ((1, 0, 0), None),
    ],
)
def test_carried_rows_must_fit(slots: bool, change: tuple[int, int, int], dtype: torch.dtype | None) -> None:
    """One channel for all, transformers' four columns, another count of sequences: each gave numbers. Spare slots are none of these."""
    needed = (4 if slots else 2, 3, 8)

    def call(change: tuple[int, int, int], dtype: torch.dtype | None) -> Tensor:
        carry = zeros(*(n + c for n, c in zip(needed, change, strict=True)), dtype=dtype or torch.bfloat16)
        return _conv_of(ConvCarry(carry, torch.tensor([1, 2])) if slots else PackedDelta(carry_NWC=carry))

    assert call((0, 0, 0), None).shape == (5, 8)
    if slots and change[0]:
        assert call(change, dtype).shape == (5, 8)
        return
    with pytest.raises(ValueError) as refused:
        call(change, dtype)
    shape = tuple(n + c for n, c in zip(needed, change, strict=True))
    wanted = f"carried rows {shape} of {dtype or torch.bfloat16}, the rows need {needed} of torch.bfloat16"
    assert str(refused.value) == f"causal_conv: {wanted}"
