"""An outside kernel's numbers: its error against the op's reference in float64, beside the error of the kernel that runs here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from zoo.common.ops.cases import Case, Trial, trial
from zoo.common.program import Program
from zoo.testing import Args, LawBroken, tensors

TIMES = 4  # another order of additions, or a rounding more inside, stays well below it
# added, as ours may happen to err little: one rounding to BF16; an FP32 result is a sum of many
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 8 * 2.0**-24}
# of a published shape, whose float64 reference would take minutes: from our kernel; FP32 sums on tensor cores lose some 2^-16
APART = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-12}
BOUND = f"{TIMES} times our error against float64 plus one rounding to BF16 or eight to FP32"


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def tried(call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> tuple[Result | None, str]:
    """What a call that runs an outside kernel gives, and why it gives nothing: a law that is broken, or whatever the kernel raises."""
    try:
        return call(*args, **kwargs), ""
    except LawBroken as error:
        return None, str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a kernel must not decide how the command ends
        return None, f"it failed: {described(error)}"


def described(error: BaseException) -> str:
    """The kind of an exception and its first line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}".removesuffix(": ")


def promoted(args: Args) -> Args:
    """The same numbers in float64; a rotation's table stays FP32 and codes of a byte stay codes, as their ops ask."""
    floats = {name: value for name, value in args.items() if isinstance(value, Tensor) and value.is_floating_point()}
    wide = {name: value for name, value in floats.items() if not name.startswith("table") and value.element_size() > 1}
    return {**args, **{name: value.double() for name, value in wide.items()}}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Of the whole tensor, in float64: |found - exact| / |exact|, or |found| where exact is zero; of integers the share that differs.

    Equal infinities are no error, and neither is what FP32 has no normal number for. NaN where only one side is finite.
    """
    if not exact.is_floating_point():
        return float((found != exact).double().mean()) if exact.numel() else 0.0
    found = found.detach().double()
    exact = exact.detach().double()
    same = (found == exact) | ((found - exact).abs() < torch.finfo(torch.float32).tiny)
    scale = float(exact[exact.isfinite()].norm())
    error = float((found - exact)[~same].norm())
    return error / (scale or 1.0) if error < torch.inf else torch.nan


def reaches(case: Case, program: Program, op: str) -> bool:
    """Whether a case calls this op itself; one of rms_norm may call add_rms_norm alone."""
    public = trial(case, program).op(op)
    calls = []

    def counted(*args: Any, **names: Any) -> Any:
        calls.append(op)
        return public(*args, **names)

    trial(case, program, replace={op: counted}).call()
    return bool(calls)


def misses(case: Case, program: Program, op: str, kernel: Callable[..., Any]) -> list[str]:
    """What of a case is not as near to the reference in float64 as BOUND says, or of a published shape to our kernel; both numbers."""
    ours = _outputs(trial(case, program))
    found, fault = tried(_outputs, trial(case, program, replace={op: kernel}))
    if found is None:
        return [f"{case.name}: {fault}"]
    kinds = [[(name, t.dtype, tuple(t.shape)) for name, t in side] for side in (found, ours)]
    if kinds[0] != kinds[1]:
        return [f"{case.name}: it returns {_words(kinds[0])}, ours {_words(kinds[1])}"]
    exact = ours if case.device_sized else reference(case, program)
    out = []
    for (name, theirs), (_, mine), (_, value) in zip(found, ours, exact, strict=True):
        far, own = (relative_error(t.cpu(), value.cpu()) for t in (theirs, mine))
        limit = APART.get(mine.dtype, 0.0) if case.device_sized else TIMES * own + ROUNDING.get(mine.dtype, 0.0)
        against = "distance from ours" if case.device_sized else f"ours {own:.2g}, its error"
        what = "" if name == "out" else f", {name}"
        if not far <= limit:
            out.append(f"{case.name}{what}: {against} {far:.2g}, at most {limit:.2g}")
    return out


def _outputs(t: Trial) -> list[tuple[str, Tensor]]:
    return tensors(t.call())


def reference(case: Case, program: Program) -> list[tuple[str, Tensor]]:
    """The same numbers through the reference in float64, on the CPU; attention in one pass, a GPU's segments are no tiles of it."""
    wide = promoted(case.make(0, "cpu", program.torch_dtype))
    return tensors(Trial(case, replace(program, device="cpu", dtype="float64", key_segments=()), wide).call())


def _words(kinds: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}" for name, dtype, shape in kinds) or "no tensor"
