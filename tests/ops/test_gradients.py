"""Every op's closed-form backward: against autograd through its reference in float64, by finite differences, and in BF16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from op_formulas import REFERENCES, TEXTBOOK, relative_error
from torch import Tensor

from zoo.common.ops import CONTRACTS
from zoo.common.ops.cases import Case, Trial, cases_of
from zoo.common.program import resolve
from zoo.testing import gradients, tensors
from zoo.verify.accuracy import promoted

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
FLOAT64 = replace(ALIGNED, dtype="float64")

# one rounding to BF16 is off by at most 2^-8 of a value; gradients round once ...
ROUNDED_ONCE = 2.0**-8
# ... or read something that was itself rounded: attention's saved output, rms_norm's residual sum, the experts' inner rows,
# log_prob's d logits
ROUNDED_TWICE = 2.0**-7
BF16_BOUND = dict.fromkeys(
    ("attention", "compressed_attention", "rms_norm", "norm_rope", "experts", "packed_experts", "log_prob", "fp8_linear", "fp8_experts"),
    ROUNDED_TWICE,
)
# two float64 computations of one formula: sums of at most some 10,000 terms
FLOAT64_BOUND = 1e-11


def unstable(case: Case) -> bool:
    """Gradients that are differences of equal numbers: a saturated softmax, x / |x| of a single column."""
    return (case.op, case.kind) in {("attention", "wide"), ("route", "wide")} or (case.op, case.name) == (
        "rms_norm",
        "one by one",
    )


def rounds_across_a_limit(case: Case) -> bool:
    """Inner rows are rounded before they are cut: one may reach the limit in BF16 and not in float64, and a slope is all or nothing."""
    return case.op in ("experts", "packed_experts", "fp8_experts") and case.name.startswith("cut")


def differentiable(bf16: bool = False, device: str = "cpu") -> list[Any]:
    """Small cases as parameters; with `bf16` those whose gradient BF16 can show."""
    found = [
        case
        for name in sorted(CONTRACTS)
        for case in cases_of(name, ALIGNED)
        if case.gradients and case.runs_on(device) and name in REFERENCES
    ]
    found = [case for case in found if not unstable(case) and not (bf16 and (case.kind == "subnormal" or rounds_across_a_limit(case)))]
    return [pytest.param(case, id=f"{case.op}-{case.name}".replace(" ", "_")) for case in found]


def test_every_op_has_a_gradient_or_a_reason() -> None:
    without = {name for name in CONTRACTS if not any(case.gradients for case in cases_of(name, ALIGNED))}
    # sample draws tokens; its replay, score_filtered, is differentiated in its own tests. select chooses positions, codes are steps.
    assert without <= {"sample", "select", "compressed_select", "fp8_select", "fp8_quantise"}


@pytest.mark.parametrize("case", differentiable())
def test_backward_is_the_references_gradient(case: Case) -> None:
    """Closed form against autograd, both float64. On wide data autograd meets inf * 0 in silu's exp(-x): the textbook judges."""
    args = case.make(1, "cpu", torch.float64)
    judge = TEXTBOOK if case.kind == "wide" else REFERENCES
    _, found = gradients(Trial(case, FLOAT64, args).call, args, case.gradients)
    _, exact = gradients(Trial(case, FLOAT64, args, judge).call, args, case.gradients)
    for name in exact:
        error = relative_error(found[name], exact[name])
        assert error <= FLOAT64_BOUND, f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", differentiable(bf16=True))
def test_bf16_backward_errs_by_its_roundings_only(case: Case) -> None:
    args = case.make(2, "cpu", torch.bfloat16)
    wide = promoted(args)
    _, found = gradients(Trial(case, ALIGNED, args).call, args, case.gradients)
    _, exact = gradients(Trial(case, FLOAT64, wide).call, wide, case.gradients)
    for name, gradient in found.items():
        assert gradient.dtype == args[name].dtype
        error = relative_error(gradient, exact[name])
        bound = BF16_BOUND.get(case.op, ROUNDED_ONCE)
        assert error <= bound, f"{name}: {error:.1e} > {bound:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", differentiable(bf16=True, device="cuda"))
def test_cuda_backward_errs_by_its_roundings_only(case: Case) -> None:
    """The CUDA kernels against the float64 reference on the CPU. FA4's backward rounds its probabilities too: once more."""
    cuda = resolve("aligned", "cuda", torch.bfloat16)
    wide = promoted(case.make(2, "cpu", torch.bfloat16))
    args = case.make(2, "cuda", torch.bfloat16)
    _, found = gradients(Trial(case, cuda, args).call, args, case.gradients)
    _, exact = gradients(Trial(case, FLOAT64, wide).call, wide, case.gradients)
    for name in found:
        error = relative_error(found[name].cpu(), exact[name])
        bound = BF16_BOUND.get(case.op, ROUNDED_ONCE) * (2 if case.op == "attention" else 1)
        assert error <= bound, f"{name}: {error:.1e} > {bound:.1e}"


def _along_a_direction(case: Case, factor: float = 1.0) -> float:
    """|slope by finite differences - gradient . direction| over the gradient's size, for a fixed sum of the outputs."""
    args = case.make(6, "cpu", torch.float64)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.Generator().manual_seed(0)
    outputs, found = gradients(Trial(case, FLOAT64, args).call, args, case.gradients)
    # each number moves in proportion to itself, so that one step suits all of a wide range
    direction = {name: args[name] * torch.randn(g.shape, generator=generator, dtype=g.dtype) for name, g in found.items()}
    live = [i for i, (_, t) in enumerate(tensors(outputs)) if t.requires_grad]
    # the same numbers as `gradients` draws
    weights = [torch.randn(tensors(outputs)[i][1].shape, generator=upstream).bfloat16().double() for i in live]

    def loss(step: float) -> float:
        moved = {**args, **{name: args[name] + step * d for name, d in direction.items()}}
        values = tensors(Trial(case, FLOAT64, moved).call())
        return sum(float((values[i][1] * w).sum()) for i, w in zip(live, weights, strict=True))

    slope = sum(float((found[name] * d).sum()) for name, d in direction.items())
    step = 1e-5
    size = sum(float((found[name] * d).square().sum()) for name, d in direction.items()) ** 0.5
    return abs((loss(step) - loss(-step)) / (2 * step) - factor * slope) / size


def _others() -> list[Any]:
    names = sorted(set(CONTRACTS) - set(REFERENCES) - {"sample"})
    found = [case for name in names for case in cases_of(name, ALIGNED) if case.gradients and case.kind == "normal"]
    return [pytest.param(case, id=f"{case.op}-{case.name}".replace(" ", "_")) for case in found]


@pytest.mark.parametrize("case", _others())
def test_backward_along_a_direction(case: Case) -> None:
    """Ops without a plain reference above: the whole gradient along one random direction."""
    assert _along_a_direction(case) < 1e-6


def test_a_gradient_off_by_a_thousandth_is_seen() -> None:
    assert _along_a_direction(CASES["linear", "odd K 257"]) < 1e-6 < _along_a_direction(CASES["linear", "odd K 257"], 1.001)


def _tiny() -> dict[str, tuple[str, dict[str, Any]]]:
    """(case whose call is used, float64 arguments small enough for finite differences) by op."""
    generator = torch.Generator().manual_seed(3)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    chosen = torch.tensor([[0, 2], [2, 1], [1, 0]])
    table = CASES["rope", "tiny"].make(0, "cpu", torch.float64)["table_PC2"]
    return {
        "embed": ("odd", {"ids_R": torch.tensor([1, 0, 1]), "weight_VD": floats(3, 2)}),
        "linear": ("tiny", {"x_RK": floats(3, 4), "weight_NK": floats(2, 4)}),
        "rms_norm": ("odd, added", {"x": floats(2, 5), "residual": floats(2, 5), "weight_D": floats(5)}),
        "rope": ("tiny", {"x_RHE": floats(3, 2, 4), "table_PC2": table, "positions_R": torch.tensor([0, 7, 500])}),
        "swiglu": ("odd", {"gate_up": floats(3, 6)}),
        "route": ("ties", {"logits_RX": floats(3, 5)}),
        "experts": (
            "odd",
            {"x_RD": floats(3, 4), "experts_RK": chosen, "gate_up_X2FD": floats(3, 4, 4), "down_XDF": floats(3, 4, 2)},
        ),
        "combine": (
            "an empty last contributor",
            {"slots_RKD": floats(3, 2, 2), "weights_RK": floats(3, 2), "experts_RK": chosen, "shared_RD": floats(3, 2)},
        ),
        "log_prob": (
            "a group",
            {
                "hidden_RD": floats(3, 4),
                "weight_VD": floats(7, 4),
                "targets_R": torch.tensor([0, 6, 3]),
                "inverse_temperature_R": torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64),
            },
        ),
        "attention": (
            "ratio 3",
            {"q_RHE": floats(5, 3, 2), "k_RGE": floats(5, 1, 2), "v_RGE": floats(5, 1, 2), "lengths": [3, 2], "scale": 0.7},
        ),
    }


CASES = {(p.values[0].op, p.values[0].name): p.values[0] for p in differentiable()}


@pytest.mark.parametrize("op", sorted(_tiny()))
def test_finite_differences(op: str) -> None:
    """gradcheck: no formula of ours on either side."""
    name, args = _tiny()[op]
    case = CASES[op, name]
    names = [n for n in case.gradients if args[n] is not None]

    def call(*values: Tensor) -> Any:
        outputs = Trial(case, FLOAT64, args).call({**args, **dict(zip(names, values, strict=True))})
        return tuple(t for _, t in tensors(outputs) if t.is_floating_point())

    assert torch.autograd.gradcheck(call, [args[n].requires_grad_() for n in names])


def test_both_routes_renormalise() -> None:
    """gradcheck of the route that keeps plain softmax weights."""
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    case = CASES["route", "not renormalised"]
    assert torch.autograd.gradcheck(lambda x: Trial(case, FLOAT64, {}).op("route")(x, 3, False, program=FLOAT64)[0], [logits])


def _norm_without_mean(x: Tensor, weight: Tensor, eps: float, *, program: Any, zero_centred: bool = False) -> Tensor:
    scale = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + eps)
    return x * scale * (weight + float(zero_centred))


def _silu_without_slope(gate_up: Tensor, *, program: Any) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate.detach()) * up


def _score_without_lse(hidden: Tensor, weight: Tensor, targets: Tensor, **names: Any) -> Any:
    return TEXTBOOK["log_prob"](hidden, weight.detach() + 0.5 * (weight - weight.detach()), targets, **names)


def _attention_without_keys(q: Tensor, history: Any, *args: Any, **names: Any) -> Tensor:
    halved = type(history)(history.k.detach() + 0.98 * (history.k - history.k.detach()), history.v)
    return TEXTBOOK["attention"](q, halved, *args, **names)


@pytest.mark.parametrize(
    ("op", "name", "fault"),
    [
        ("rms_norm", "1536 wide, zero-centred", _norm_without_mean),
        ("swiglu", "odd 65", _silu_without_slope),
        ("log_prob", "a group", _score_without_lse),
        ("attention", "ratio 3", _attention_without_keys),
    ],
)
def test_a_wrong_gradient_is_seen(op: str, name: str, fault: Any) -> None:
    """The controls: right outputs, a term missing in the gradient; even the loose BF16 bound sees it."""
    case = CASES[op, name]
    args = case.make(4, "cpu", torch.float64)
    _, exact = gradients(Trial(case, FLOAT64, args, REFERENCES).call, args, case.gradients)
    _, wrong = gradients(Trial(case, FLOAT64, args, {op: fault}).call, args, case.gradients)
    assert max(relative_error(wrong[n], exact[n]) for n in exact) > ROUNDED_TWICE


def test_only_what_asks_gets_a_gradient() -> None:
    """Frozen weights cost no gradient, and the other gradient keeps its bytes."""
    for op, kept in (("linear", "x_RK"), ("linear", "weight_NK"), ("log_prob", "hidden_RD"), ("log_prob", "weight_VD")):
        case = CASES[op, {"linear": "odd", "log_prob": "a group"}[op]]
        args = case.make(5, "cpu", torch.bfloat16)
        call = Trial(case, ALIGNED, args).call
        both = gradients(call, args, case.gradients)[1]
        alone = gradients(call, args, (kept,))[1]
        assert torch.equal(both[kept], alone[kept])


def test_paged_keys_carry_no_gradient() -> None:
    """Serving's attention runs under no_grad; asking it for a gradient must not give a wrong one silently."""
    from zoo.common.history import KeyValues
    from zoo.common.ops import attention
    from zoo.common.rows import Rows

    pages = torch.randn(2, 16, 1, 8).bfloat16()
    table = torch.tensor([[1]], dtype=torch.int32)
    q = torch.randn(3, 1, 8).bfloat16().requires_grad_()
    out = attention(q, KeyValues(pages, pages, table), Rows.pushed([3], None, "cpu"), 1.0, program=ALIGNED)
    with pytest.raises(Exception, match=r"\S"):
        out.float().sum().backward()
