"""Qualification: what is admitted, what is refused, and how the store decides which provider runs."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from zoo.cli import app
from zoo.common import ops, qualification, verdicts
from zoo.common.ops.comparison import KINDS, comparison_of, numbers
from zoo.common.ops.contract import Provider, choices_changed
from zoo.common.ops.linear.reference import linear as reference_linear
from zoo.common.ops.linear.reference import linear_backward
from zoo.common.program import Program, resolve
from zoo.common.verdicts import Verdict
from zoo.verify import admission, outside, qualify
from zoo.verify.qualify import Target

HERE = "tests.models.test_qualify"
TARGET = Target("linear", (48, 96, 1))
PROGRAM = resolve("aligned", "cpu", torch.bfloat16)


def fast_linear(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """Another way to the same bytes: row by row."""
    return torch.cat([reference_linear(row, weight_NK, out_dtype, k_parts) for row in x_RK.split(16)])


def wrong_linear(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """K in two halves, where the contract says one accumulator."""
    return reference_linear(x_RK, weight_NK, out_dtype, 2)


def broken_linear(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    raise RuntimeError("no kernel image is available")


def outside_linear(x_RK: Tensor, weight_NK: Tensor, *, program: Program, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> Tensor:
    """A stranger's kernel with the op's signature, right."""
    return ops.linear(x_RK, weight_NK, program=program, out_dtype=out_dtype, k_parts=k_parts)


def leaky_linear(x_RK: Tensor, weight_NK: Tensor, *, program: Program, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> Tensor:
    """A stranger's kernel whose bytes depend on the number of rows."""
    y = ops.linear(x_RK, weight_NK, program=program, out_dtype=out_dtype, k_parts=k_parts)
    return y if x_RK.shape[0] % 2 else y * (1 + 2.0**-6)


class _WrongForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
        ctx.save_for_backward(x_RK, weight_NK)
        return (3 * reference_linear(x_RK, weight_NK, torch.float32, k_parts) + 1).to(out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *linear_backward(grads[0], *ctx.saved_tensors, True, True), None, None


def wrong_forward(x_RK: Tensor, weight_NK: Tensor, *, program: Program, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> Tensor:
    """A stranger's kernel that keeps every law and has the right gradient: 3 x W^T + 1."""
    return _WrongForward.apply(x_RK, weight_NK, out_dtype or x_RK.dtype, k_parts)  # type: ignore[no-any-return,no-untyped-call]


def other_class(x_RK: Tensor, weight_NK: Tensor, *, program: Program, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> Tensor:
    """A stranger's kernel of another byte class: 16 chains over K, then their sum, in FP32."""
    chains = [(x_RK[:, None, i::16].float() * weight_NK[None, :, i::16].float()).cumsum(-1)[..., -1:] for i in range(16)]
    return torch.cat(chains, -1).cumsum(-1)[..., -1].to(out_dtype or x_RK.dtype)


@contextmanager
def candidates(*functions: str) -> Iterator[list[Provider]]:
    """linear with test-only providers in the reference's class, before the defining one."""
    contract = ops.CONTRACTS["linear"]
    usual = contract.providers[0].functions
    planted = [Provider(name, "reference", "cpu", partial(usual._replace, forward=globals()[name])) for name in functions]
    replace(contract, providers=(*planted, *contract.providers))
    choices_changed()
    try:
        yield planted
    finally:
        ops.CONTRACTS["linear"] = contract
        choices_changed()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "deep" / "store.json"
    verdicts.use(path)
    yield path
    verdicts.use(None)


def chosen() -> str:
    return ops.CONTRACTS["linear"].provider(PROGRAM, TARGET.shape).name


def test_equal_bytes_are_admitted_and_run(store: Path) -> None:
    with candidates("fast_linear"):
        assert chosen() == "reference"
        verdicts = qualify.qualify([TARGET], program=PROGRAM, rows=65, jobs=1)
        assert [v.admitted for v in verdicts] == [True] and verdicts[0].checks == 4 * 2 * 7
        assert chosen() == "fast_linear"
        assert ops.CONTRACTS["linear"].provider(PROGRAM, (48, 96, 2)).name == "reference"  # another shape was not tried
        assert qualify.qualify([TARGET], program=PROGRAM, rows=65, jobs=1) == []  # nothing left to try
        assert qualify.running([TARGET], PROGRAM) == [(TARGET, "fast_linear", "")]
    assert json.loads(store.read_text())["toolchain"]["torch"] == torch.__version__


@pytest.mark.parametrize(("name", "why"), [("wrong_linear", "elements differ from reference"), ("broken_linear", "no kernel image")])
def test_other_bytes_are_refused(store: Path, name: str, why: str) -> None:
    with candidates(name):
        (verdict,) = qualify.qualify([TARGET], program=PROGRAM, rows=65, jobs=1)
        assert not verdict.admitted and why in verdict.reason
        assert chosen() == "reference"
        ((_, provider, reason),) = qualify.running([TARGET], PROGRAM)
        assert provider == "reference" and why in reason


@pytest.fixture
def registered() -> Iterator[tuple[str, ...]]:
    """The module whose import registers `equal` and `unequal`, here and in worker processes."""
    contract = ops.CONTRACTS["linear"]
    module = "tests.models.provider_module"
    importlib.import_module(module).register()
    choices_changed()
    yield (module,)
    ops.CONTRACTS["linear"] = contract
    choices_changed()


def test_worker_processes_decide_what_this_process_does(store: Path, registered: tuple[str, ...]) -> None:
    """Two shapes by two providers in two processes; the wrong one is refused for its FP32 output alone."""
    targets = [TARGET, Target("linear", (24, 64, 1))]
    lines: list[str] = []
    found = qualify.qualify(targets, lines.append, program=PROGRAM, rows=7, jobs=2, modules=registered)
    by_provider = {(v.provider, v.shape): v for v in found}
    assert len(found) == len(by_provider) == 4
    for target in targets:
        assert by_provider["equal", target.shape].admitted and by_provider["equal", target.shape].checks == 4 * 2 * 3
        assert "elements differ from reference" in by_provider["unequal", target.shape].reason
    assert {(v.provider, v.shape) for v in qualification.read(store)} == set(by_provider)  # merged once, all of them
    assert chosen() == "equal" and not list(store.parent.glob("*.part"))
    assert sum("equal admitted, 24 comparisons" in line and line.endswith(" s)") for line in lines) == 2
    assert sum("falls back to reference, unequal: " in line for line in lines) == 2
    here = qualify.qualify(targets, program=PROGRAM, rows=7, jobs=1, again=True)
    assert {(v.provider, v.shape): v for v in here} == by_provider


def test_a_kernel_that_kills_its_process_is_refused_and_the_others_go_on(store: Path, registered: tuple[str, ...]) -> None:
    deadly = Target("linear", (56, 64, 1))
    found = qualify.qualify([deadly, TARGET], program=PROGRAM, rows=2, jobs=2, modules=registered)
    reasons = {(v.provider, v.shape): v.reason for v in found}
    assert reasons["equal", deadly.shape] == "it failed: its process was ended by signal 6" and not reasons["equal", TARGET.shape]


def test_what_takes_too_long_gets_no_verdict(store: Path, registered: tuple[str, ...]) -> None:
    slow = Target("linear", (40, 64, 1))
    lines = list[str]()
    found = qualify.qualify([slow], lines.append, program=PROGRAM, rows=1, jobs=4, modules=registered, seconds=5)
    assert "equal" not in {v.provider for v in found} and not qualification.tried("linear", "equal", slow.shape)
    assert any("equal not decided: not finished after 5 s" in line for line in lines)


def test_processes_that_write_at_once_keep_one_anothers_verdicts(store: Path) -> None:
    version = ops.CONTRACTS["linear"].version

    def write(n: int) -> None:
        verdicts.write(store, [Verdict("linear", "x", (n, 8, 1), version, 1)], {})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(24)))
    assert {v.shape[0] for v in qualification.read(store)} == set(range(24))


def test_numbers_are_of_their_kind() -> None:
    x = {kind: numbers((9, 64), kind, "x", PROGRAM).float() for kind in KINDS}
    assert all(values.isfinite().all() and values.any() for values in x.values())
    assert x["wide"].abs().log2().std() > 8 and 0 < x["subnormal"].abs().max() < 2.0**-126
    near = (x["cancel"][:, ::2] + x["cancel"][:, 1::2]).abs() / x["cancel"][:, ::2].abs()
    assert near.max() < 2.0**-5 and x["normal"].std() > 0.5


COMPARED = {"linear": (24, 40, 1), "experts": (5, 32, 16), "packed_experts": (5, 64, 32)}


def test_every_op_with_a_candidate_says_how_it_is_compared() -> None:
    wanting = {name for name, contract in ops.CONTRACTS.items() if any(not p.defining for p in contract.providers)}
    assert wanting == set(COMPARED) and all(comparison_of(op).parts for op in wanting)
    with pytest.raises(ValueError, match=r"op 'rope' has no comparison of providers: write `comparison\(\)` in its cases.py"):
        comparison_of("rope")


@pytest.mark.parametrize("op", sorted(COMPARED))
def test_a_candidate_of_every_op_is_compared(op: str) -> None:
    """The reference under another name is equal; one that adds half an ulp to a row of every seven is not."""
    contract = ops.CONTRACTS[op]
    usual = next(provider.functions for provider in contract.providers if provider.name == "reference")

    def forward(*args: Any) -> Tensor:
        out = usual.forward(*args).clone()
        if len(out) >= 7:
            out.view(torch.int32 if out.dtype == torch.float32 else torch.int16)[6] ^= 1
        return out

    planted = [
        Provider("same", contract.providers[0].byte_class, "cpu", lambda: usual),
        Provider("near", contract.providers[0].byte_class, "cpu", lambda: usual._replace(forward=forward)),
    ]
    replace(contract, providers=(*planted, *contract.providers))
    try:
        for part in comparison_of(op).parts:
            same = admission.compare(admission.Task(op, COMPARED[op], "same", part, 17), PROGRAM)
            assert (same.reason, same.undecided, same.checks) == ("", "", 20)
            near = admission.compare(admission.Task(op, COMPARED[op], "near", part, 17), PROGRAM)
            assert near.checks == 2 and near.reason.endswith("elements differ from reference (normal, 7 rows)")
    finally:
        ops.CONTRACTS[op] = contract
        choices_changed()


def test_a_store_of_an_older_contract_or_kernel_admits_nothing(store: Path) -> None:
    with candidates("fast_linear"):
        old = Verdict("linear", "fast_linear", TARGET.shape, ops.CONTRACTS["linear"].version - 1, 9)
        verdicts.write(store, [old], {})
        assert chosen() == "reference"
        verdicts.write(store, [today := replace(old, contract_version=old.contract_version + 1)], {})
        assert chosen() == "fast_linear"
        verdicts.write(store, [replace(today, provider_version=2)], {})  # other kernels than those of today
        assert chosen() == "reference"


def test_a_damaged_store_is_named(store: Path) -> None:
    store.parent.mkdir()
    for text in ("{", '{"format": 99, "verdicts": []}', '{"format": 1, "verdicts": [{"op": "linear"}]}'):
        store.write_text(text)
        with pytest.raises(ValueError, match=r"store\.json can't be read"):
            qualification.read(store)


def test_a_write_keeps_other_verdicts(store: Path) -> None:
    version = ops.CONTRACTS["linear"].version
    a, b = (Verdict("linear", "x", shape, version, 1) for shape in ((1, 1, 1), (2, 2, 1)))
    verdicts.write(store, [a], {})
    verdicts.write(store, [b, replace(a, reason="no")], {})
    assert {v.shape: v.reason for v in qualification.read(store)} == {(1, 1, 1): "no", (2, 2, 1): ""}
    assert not list(store.parent.glob("*.part"))
    found = {shape: verdicts.verdict("linear", "x", shape) for shape in ((1, 1, 1), (2, 2, 1))}
    assert [verdict is not None and verdict.admitted for verdict in found.values()] == [False, True]
    assert qualification.tried("linear", "x", (1, 1, 1)) and not qualification.tried("linear", "y", (1, 1, 1))


def test_targets_of_published_sizes() -> None:
    dense = qualify.targets_of_sizes("qwen3", ["8b"])
    assert Target("linear", (6144, 4096, 1)) in dense and Target("linear", (4096, 12288, 1)) in dense
    assert Target("linear", (151936, 4096, 1)) in dense and Target("linear", (16384, 4096, 1)) in dense
    assert Target("linear", (151936 % 16384, 4096, 1)) in dense
    assert Target("experts", (128, 2048, 768)) in qualify.targets_of_sizes("qwen3_moe", ["30b-a3b"])
    targets = qualify.default_targets()
    assert len(set(targets)) == len(targets) > 40
    assert set(qualify.targets_of_sizes("qwen3_5", ["4b"])) | {Target("experts", (256, 2048, 512))} <= set(targets)


def test_an_outside_kernel_keeps_the_laws() -> None:
    found = outside.put_through("linear", f"{HERE}:outside_linear", PROGRAM)
    assert found.ok and not found.broken and found.kept >= 30 and found.gradient.startswith("right")
    assert found.equal.split()[-4] == found.equal.split()[-2] and found.numbers.endswith(" in 10 of 10 cases") and not found.missed
    (line,) = found.benchmark  # a CPU has no published shape
    assert line.startswith("K 1024 (x_RK 33x1024, weight_NK 129x1024): ") and line.endswith("; a toy shape: these times mean nothing")


@pytest.mark.parametrize(("kernel", "code"), [("wrong_forward", 1), ("other_class", 0)])
def test_an_outside_kernel_s_numbers_decide(kernel: str, code: int) -> None:
    """Laws, which hold a kernel against itself, and its gradient see nothing of a wrong forward; other bytes alone are no fault."""
    found = outside.put_through("linear", f"{HERE}:{kernel}", PROGRAM)
    assert not found.broken and found.kept >= 30 and found.gradient.startswith("right") and found.ok == (not code)
    assert found.equal != "bytes equal to ours in 10 of 10 cases"
    done = CliRunner().invoke(app, ["qualify", "--device", "cpu", "--op", "linear", "--kernel", f"{HERE}:{kernel}"])
    assert done.exit_code == code and f"in {0 if code else 10} of 10 cases" in done.output
    wrong = [line for line in done.output.splitlines() if line.startswith("wrong numbers: ")]
    assert len(wrong) == (10 if code else 0)
    assert all(re.fullmatch(r"wrong numbers: .+: ours \S+, its error \S+, at most \S+", line) for line in wrong)


def test_published_shapes_are_timed_without_a_remark_and_said_to_be_held_against_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [replace(case, device_sized=True) for case in outside.cases_of("linear", PROGRAM)[1:3]]
    monkeypatch.setattr(outside, "cases_of", lambda op, program: cases)
    found = outside.put_through("linear", f"{HERE}:other_class", PROGRAM)
    assert len(found.benchmark) == 2 and not any("toy" in line for line in found.benchmark)
    assert found.numbers.endswith("in 2 of 2 cases; 2 of them are published shapes, which are held against our kernel instead")
    assert not outside.put_through("linear", f"{HERE}:wrong_forward", PROGRAM).ok


def test_an_outside_kernel_that_breaks_the_row_law_is_caught() -> None:
    found = outside.put_through("linear", f"{HERE}:leaky_linear", PROGRAM)
    assert not found.ok and any(line.startswith("row law") for line in found.broken)
    assert found.equal != "bytes equal to ours in 10 of 10 cases"


def swapped(weight_NK, x_RK, *, program, out_dtype=None, k_parts=1):  # type: ignore[no-untyped-def]
    raise AssertionError("never called")


def with_more(x_RK, weight_NK, *, program, out_dtype=None, k_parts=1, **options):  # type: ignore[no-untyped-def]
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("fast_linear", "lacks the parameter program"),
        ("with_more", "has a parameter options that the op lacks"),
        ("swapped", "has the op's parameters in another order"),
    ],
)
def test_an_outside_kernel_of_another_signature_is_refused(kernel: str, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"{kernel} {fault}: it takes \(.*, ops\.linear takes \(x_RK"):
        outside.put_through("linear", f"{HERE}:{kernel}", PROGRAM)


def bare(x_RK, weight_NK, *, program, out_dtype=None, k_parts=1):  # type: ignore[no-untyped-def]
    return ops.linear(x_RK, weight_NK, program=program, out_dtype=out_dtype, k_parts=k_parts)


def test_an_outside_kernel_needs_no_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = outside.cases_of("linear", PROGRAM)[:1]
    monkeypatch.setattr(outside, "cases_of", lambda op, program: cases)
    found = outside.put_through("linear", f"{HERE}:bare", PROGRAM)
    assert found.ok and found.kept == len(cases[0].laws)


FAULTS = {
    "leaves": "raise SystemExit(0)",
    "key_error": "raise KeyError('BLOCK')",
    "asserts": "raise AssertionError",
    "compiler": "raise CompilationError('BLOCK must be a power of 2\\nat line 7')",
    "nothing": "return None",
    "a_number": "return 1.0",
    "detached": "return ops.linear(x_RK, weight_NK, program=program, out_dtype=out_dtype, k_parts=k_parts).detach()",
    "quits": "os._exit(0)",
    "crashes": "os.abort()",
}
STRANGER = """
import os
from zoo.common import ops

class CompilationError(Exception): ...

def {name}(x_RK, weight_NK, *, program, out_dtype=None, k_parts=1):
    {body}
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the working directory with a kernel per fault."""
    name = f"stranger_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("".join(STRANGER.format(name=kernel, body=body) for kernel, body in FAULTS.items()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("leaves", "it failed: SystemExit: 0"),
        ("key_error", "it failed: KeyError: 'BLOCK'"),
        ("asserts", "it failed: AssertionError"),
        ("compiler", "it failed: CompilationError: BLOCK must be a power of 2"),
        ("nothing", "it returns no tensor, ours out bfloat16"),
        ("a_number", "out is a float, not a tensor"),
        ("detached", "has no gradient (it failed: "),
    ],
)
def test_whatever_an_outside_kernel_raises_or_returns_is_a_verdict(
    stranger: str, kernel: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = outside.cases_of("linear", PROGRAM)[:1]
    monkeypatch.setattr(outside, "cases_of", lambda op, program: cases)
    found = outside.put_through("linear", f"{stranger}:{kernel}", PROGRAM)
    assert not found.ok and any(said in line for line in (*found.broken, *found.missed, found.gradient))
    assert not any("\n" in line for line in (*found.broken, *found.missed, found.gradient))


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("leaves", "broken: row law, K 1024: it failed: SystemExit: 0"),
        ("quits", "its process ended with status 0 and no verdict"),
        ("crashes", "its process was ended by signal 6"),
    ],
)
def test_the_exit_status_says_it_even_if_the_kernel_ends_its_process(stranger: str, kernel: str, said: str) -> None:
    done = CliRunner().invoke(app, ["qualify", "--device", "cpu", "--op", "linear", "--kernel", f"{stranger}:{kernel}"])
    assert done.exit_code == 1 and said in done.output and "Traceback" not in done.output
    assert "linear by stranger_" in done.output


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(0)", "importing it failed: SystemExit: 0"),
        ("{}['x']", "importing it failed: KeyError: 'x'"),
        ("def f(:", "importing it failed: SyntaxError: invalid syntax"),
        ("raise ValueError('no such GPU')", "importing it failed: ValueError: no such GPU"),
    ],
)
def test_a_module_that_does_not_import_is_a_verdict(source: str, said: str, stranger: str) -> None:
    Path(f"{stranger}_import.py").write_text(source)
    found = outside.put_through("linear", f"{stranger}_import:f", PROGRAM)
    assert not found.ok and found.kept == 0 and found.broken[0].startswith(said)


@pytest.mark.parametrize(("module", "hinted"), [("absent_module", True), ("zoo.absent", True), ("needs_absent_module", False)])
def test_a_module_that_is_not_found_gets_the_hint(module: str, hinted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hinted:  # found, but what it imports is not
        (tmp_path / "needs_absent_module.py").write_text("import absent_module\n")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"--kernel '{module}:f': No module named") as caught:
        outside.outside(f"{module}:f")
    assert str(caught.value).endswith("; modules are looked for among what is installed and in the working directory") == hinted
