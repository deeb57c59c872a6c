"""The backward's kernels of gated_delta in Triton's interpreter, in FP32 and BF16, against the backward by chunk in float64.

The interpreter multiplies the bits of BF16 operands and cuts off where a GPU rounds to nearest even: these tests mend both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from zoo.common.ops.gated_delta import backward, cases, kernels, kernels_backward, kernels_chunks  # noqa: E402
from zoo.common.ops.gated_delta.cases import OPERANDS, packed_rows  # noqa: E402
from zoo.testing import Args  # noqa: E402

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

NAMES = (*OPERANDS, "initial")
LENGTHS = [1, 63, 64, 65, 130]
FP32_FAR = 1e-5
BF16_FAR = 0.005  # one rounding of a gradient is 0.0017, those of the operands are several such
FORGETFUL_FAR = 2**-24  # of all that is added and taken away again: a rounding of FP32
SUM_FAR = 0.01  # of log_decay's and the initial states', which a few sums that nearly cancel can decide


@pytest.fixture
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def widened(x: Any) -> Any:
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast = builder.cast_impl

    def rounded(self: Any, x: Any, kind: Any) -> Any:
        found = x.dtype.scalar
        wanted = kind.scalar
        if (found, wanted) == (tl.bfloat16, tl.float32):
            return handle(widened(x), wanted)
        if (found, wanted) == (tl.float32, tl.bfloat16):
            bits = x.data.view(np.uint32).astype(np.uint64)
            return handle(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), wanted)
        return cast(self, x, kind)

    def dot(self: Any, a: Any, b: Any, start: Any, *_: Any) -> Any:
        return handle(np.matmul(widened(a), widened(b)) + start.data, start.dtype.scalar)

    monkeypatch.setattr(builder, "cast_impl", rounded)
    monkeypatch.setattr(builder, "create_fp_to_fp", lambda self, x, kind, _: rounded(self, x, kind))
    monkeypatch.setattr(builder, "create_dot", dot)


def made(lengths: list[int], heads: tuple[int, int], width: int, decay: float, dtype: torch.dtype) -> tuple[Args, list[Tensor]]:
    """(a case, upstream gradients of its outputs and final states, and its initial states)."""
    args = cases._case("made", lengths, *heads, width, width, decay).make(0, "cpu", dtype)
    random = torch.Generator().manual_seed(2)
    grad = torch.randn(args["v_RVE"].shape, generator=random).to(dtype)
    final, initial = (torch.randn(len(lengths), heads[1], width, width, generator=random) for _ in range(2))
    return args, [grad, final, 0.3 * initial]


def by(module: Any, args: Args, grad: Tensor, final: Tensor | None, initial: Tensor | None) -> tuple[Tensor, ...]:
    return module.gated_delta_backward(grad, final, *(args[n] for n in OPERANDS), initial, packed_rows(args))


def in_float64(args: Args, *states: Tensor | None) -> tuple[Tensor, ...]:
    wide = {name: t.double() if isinstance(t, Tensor) else t for name, t in args.items()}
    return by(backward, wide, *(None if t is None else t.double() for t in states))


def far(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> dict[str, float]:
    """The distance of each gradient, in the size of the wanted one."""
    assert all(t.isfinite().all() for t in found)
    return {n: float((f.double() - w).norm() / w.norm().clamp(min=1e-30)) for n, f, w in zip(NAMES, found, wanted, strict=True)}


@pytest.mark.parametrize(
    ("lengths", "heads", "width", "decay"),
    [
        (LENGTHS, (1, 2), 32, 0.3),
        ([130, 3], (2, 2), 64, 0.05),
        ([66, 64], (1, 3), 16, 0),
        ([70], (1, 2), 128, 0.002),
        ([128], (1, 2), 16, 0.3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("mended_interpreter", "poisoned_empty")
def test_backward_is_the_float64_one(lengths: list[int], heads: tuple[int, int], width: int, decay: float, dtype: torch.dtype) -> None:
    """Decay 0: heads that keep everything and that forget at once, beta near 0 and near 1."""
    args, (grad, final, initial) = made(lengths, heads, width, decay, dtype)
    most = dict.fromkeys(NAMES, FP32_FAR if dtype == torch.float32 else BF16_FAR)
    if dtype == torch.bfloat16:
        most |= dict.fromkeys(("log_decay_RV", "initial"), SUM_FAR)
    found = by(kernels_backward, args, grad, final, initial)
    wanted = in_float64(args, grad, final, initial)
    off = far(found, wanted)
    print({name: f"{value:.1e}" for name, value in off.items()})
    assert all(off[name] < most[name] for name in NAMES), off
    assert [t.dtype for t in found] == [dtype] * 3 + [torch.float32] * 3
    # controls, seen by each name alone: half the decay, other documents, no gradient of the final states, which q's has no part in
    halved = far(found, in_float64({**args, "log_decay_RV": args["log_decay_RV"] / 2}, grad, final, initial))
    assert all(halved[name] > most[name] for name in NAMES), halved
    if len(lengths) > 1:
        assert min(far(found, in_float64({**args, "lengths": lengths[::-1]}, grad, final, initial)).values()) > 0.1
    without = far(found, in_float64(args, grad, None, initial))
    assert without["q_RHK"] < most["q_RHK"] and min(without[name] for name in NAMES if name not in ("q_RHK", "initial")) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("mended_interpreter", "poisoned_empty")
def test_no_states_and_the_same_bytes_twice(dtype: torch.dtype) -> None:
    args, (grad, final, _) = made([65, 2], (1, 2), 32, 0.05, dtype)
    most = FP32_FAR if dtype == torch.float32 else BF16_FAR
    found, again = (by(kernels_backward, args, grad, None, None) for _ in range(2))
    assert all(map(torch.equal, found, again))
    off = far(found, in_float64(args, grad, None, None))
    assert max(off.values()) < most, off  # here of the sums too
    assert off["v_RVE"] < 0.0022, off  # little more than its own rounding; 0.0026 with one operand in place of `_fine`'s two
    assert far(found, in_float64(args, grad, final, None))["v_RVE"] > 10 * most  # control: with the final states' gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("mended_interpreter", "poisoned_empty")
def test_a_head_that_forgets_at_once(dtype: torch.dtype) -> None:
    """Its decays' gradient, sums that cancel, vanishes but for FP32's roundings: each head by the size of its own terms."""
    args, (grad, _, _) = made([65, 2], (2, 2), 16, 0.05, dtype)
    args["log_decay_RV"][:, 0] = -80
    found = by(kernels_backward, args, grad, None, None)
    wanted = in_float64(args, grad, None, None)
    terms = (args["q_RHK"].double() * wanted[0]).abs().sum((0, 2))  # of a head: the sums are of at most so much
    off = (found[3].double() - wanted[3]).abs().amax(0) / terms
    print([f"{x:.1e}" for x in off.tolist()])
    assert wanted[3][:, 0].abs().max() < 1e-30 and off[0] < FORGETFUL_FAR
    assert (found[3].double() - wanted[3])[:, 1].norm() < (FP32_FAR if dtype == torch.float32 else SUM_FAR) * wanted[3][:, 1].norm()
    # the control: a head that keeps exp(-8) of a row
    args["log_decay_RV"][:, 0] = -8
    assert (found[3].double() - in_float64(args, grad, None, None)[3]).abs().amax(0)[0] > 10 * FORGETFUL_FAR * terms[0]


@pytest.mark.usefixtures("mended_interpreter", "poisoned_empty")
def test_operands_of_any_strides() -> None:
    """Rows of wider ones, heads that don't follow each other, gates and states transposed, an expanded gradient in FP32: equal bytes."""
    args, (_, final, initial) = made([65, 2], (2, 2), 16, 0.05, torch.bfloat16)
    ones = torch.full((1, 1, 16), 1.0078125).expand(67, 2, 16)  # BF16 has this number
    wanted = by(kernels_backward, args, ones.to(torch.bfloat16).contiguous(), final, initial)

    def turned(t: Tensor, *order: int) -> Tensor:
        """The same numbers in memory of the axes' other order."""
        return t.permute(order).contiguous().permute([order.index(i) for i in range(t.dim())])

    wide = torch.cat([args["q_RHK"], args["q_RHK"] + 1], 2)[:, :, :16]
    moved = {
        "q_RHK": (wide, args["q_RHK"].flatten(1).repeat(1, 2)[:, 32:].unflatten(1, (2, 16))),
        "k_RHK": (turned(args["k_RHK"], 1, 0, 2), turned(args["k_RHK"], 0, 2, 1)),
        "v_RVE": (turned(args["v_RVE"], 0, 2, 1), turned(args["v_RVE"], 1, 0, 2)),
        "log_decay_RV": (turned(args["log_decay_RV"], 1, 0),) * 2,
        "beta_RV": (turned(args["beta_RV"], 1, 0),) * 2,
    }
    for way in range(2):
        strided = {**args, **{name: ts[way] for name, ts in moved.items()}}
        assert all(torch.equal(strided[n], args[n]) and strided[n].stride() != args[n].stride() for n in OPERANDS)
        found = by(kernels_backward, strided, ones, *(turned(t, 0, 1, 3, 2) for t in (final, initial)))
        assert all(map(torch.equal, found, wanted))


@pytest.mark.usefixtures("mended_interpreter", "poisoned_empty")
def test_documents_do_not_mix() -> None:
    args, (grad, _, _) = made([66, 64, 3], (1, 2), 16, 0.05, torch.bfloat16)
    grad[:66] = 0
    grad[130:] = 0
    for name, t in zip(NAMES, by(kernels_backward, args, grad, None, None)):
        if name == "initial":
            assert t[1].any() and not t[0].any() and not t[2].any()
        else:
            assert t[66:130].any() and not t[:66].any() and not t[130:].any(), name


@pytest.mark.usefixtures("mended_interpreter")
def test_the_states_are_the_forwards() -> None:
    """The forward's outputs, from what the backward makes of it again."""
    args, (_, _, initial) = made([66], (1, 2), 16, 0.05, torch.bfloat16)
    q, k, v, log_decay, beta = (args[n] for n in OPERANDS)
    rows = packed_rows(args)
    chunk, _ = kernels.plan(rows)
    out = kernels.gated_delta(q, k, v, log_decay, beta, initial, rows)[0]
    *_, decay, u, rounded, _ = kernels.states(k, v, log_decay, beta, initial, None, rows)

    def outputs() -> Tensor:
        made = torch.empty_like(out)
        sizes = {"REPEAT": 2, "K": 16, "E": 16, "BLOCK": 16, "CACHED": False}
        strides = (q.stride(0), k.stride(0))
        operands = (q, k, chunk, chunk, chunk, decay, u, rounded, made, *strides, 2, 0.25)
        kernels_chunks.chunk_outputs[(chunk.shape[0], 2, 1)](*operands, **sizes)
        return made

    assert torch.equal(outputs(), out)
    u *= 1.01
    assert not torch.equal(outputs(), out)
