"""Qualification: what is admitted, what is refused, and how the store decides which provider runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zoo.common import ops, qualification
from zoo.common.ops.contract import Provider, choices_changed
from zoo.common.ops.linear.reference import linear as reference_linear
from zoo.common.program import Program, resolve
from zoo.common.qualification import Verdict
from zoo.verify import qualify
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


@contextmanager
def candidates(*functions: str) -> Iterator[list[Provider]]:
    """linear with test-only providers in the reference's class, before the defining one."""
    contract = ops.CONTRACTS["linear"]
    backward = "zoo.common.ops.linear.reference:linear_backward"
    planted = [Provider(name, "reference", "cpu", f"{HERE}:{name}", backward) for name in functions]
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
    qualification.use(path)
    yield path
    qualification.use(None)


def chosen() -> str:
    return ops.CONTRACTS["linear"].provider(PROGRAM, TARGET.shape).name


def test_equal_bytes_are_admitted_and_run(store: Path) -> None:
    with candidates("fast_linear"):
        assert chosen() == "reference"
        verdicts = qualify.qualify([TARGET], program=PROGRAM, rows=65)
        assert [v.admitted for v in verdicts] == [True] and verdicts[0].checks == 4 * 2 * 7
        assert chosen() == "fast_linear"
        assert ops.CONTRACTS["linear"].provider(PROGRAM, (48, 96, 2)).name == "reference"  # another shape was not tried
        assert qualify.qualify([TARGET], program=PROGRAM, rows=65) == []  # nothing left to try
        assert qualify.running([TARGET], PROGRAM) == [(TARGET, "fast_linear", "")]
    assert json.loads(store.read_text())["toolchain"]["torch"] == torch.__version__


@pytest.mark.parametrize(("name", "why"), [("wrong_linear", "elements differ from reference"), ("broken_linear", "no kernel image")])
def test_other_bytes_are_refused(store: Path, name: str, why: str) -> None:
    with candidates(name):
        (verdict,) = qualify.qualify([TARGET], program=PROGRAM, rows=65)
        assert not verdict.admitted and why in verdict.reason
        assert chosen() == "reference"
        ((_, provider, reason),) = qualify.running([TARGET], PROGRAM)
        assert provider == "reference" and why in reason


def test_a_store_of_an_older_contract_admits_nothing(store: Path) -> None:
    with candidates("fast_linear"):
        old = Verdict("linear", "fast_linear", TARGET.shape, ops.CONTRACTS["linear"].version - 1, 9)
        qualification.write(store, [old], {})
        assert chosen() == "reference"
        qualification.write(store, [replace(old, contract_version=old.contract_version + 1)], {})
        assert chosen() == "fast_linear"


def test_a_damaged_store_is_named(store: Path) -> None:
    store.parent.mkdir()
    for text in ("{", '{"format": 99, "verdicts": []}', '{"format": 1, "verdicts": [{"op": "linear"}]}'):
        store.write_text(text)
        with pytest.raises(ValueError, match=r"store\.json can't be read"):
            qualification.read(store)


def test_a_write_keeps_other_verdicts(store: Path) -> None:
    version = ops.CONTRACTS["linear"].version
    a, b = (Verdict("linear", "x", shape, version, 1) for shape in ((1, 1, 1), (2, 2, 1)))
    qualification.write(store, [a], {})
    qualification.write(store, [b, replace(a, reason="no")], {})
    assert {v.shape: v.reason for v in qualification.read(store)} == {(1, 1, 1): "no", (2, 2, 1): ""}
    assert not list(store.parent.glob("*.part"))
    assert qualification.admitted("linear", "x", (2, 2, 1)) and not qualification.admitted("linear", "x", (1, 1, 1))
    assert qualification.tried("linear", "x", (1, 1, 1)) and not qualification.tried("linear", "y", (1, 1, 1))


def test_targets_of_published_sizes() -> None:
    dense = qualify.targets_of_sizes("qwen3", ["8b"])
    assert Target("linear", (6144, 4096, 1)) in dense and Target("linear", (4096, 12288, 1)) in dense
    assert Target("linear", (151936, 4096, 1)) in dense and Target("linear", (16384, 4096, 1)) in dense
    assert Target("linear", (151936 % 16384, 4096, 1)) in dense
    assert Target("experts", (128, 2048, 768)) in qualify.targets_of_sizes("qwen3_moe", ["30b-a3b"])
    assert len(set(qualify.default_targets())) == len(qualify.default_targets()) > 20


def test_an_outside_kernel_keeps_the_laws() -> None:
    found = qualify.put_through("linear", f"{HERE}:outside_linear", PROGRAM)
    assert found.ok and not found.broken and found.kept >= 30 and found.gradient.startswith("right")
    assert found.equal.split()[-4] == found.equal.split()[-2] and found.benchmark and "ratio" in found.benchmark[0]


def test_an_outside_kernel_that_breaks_the_row_law_is_caught() -> None:
    found = qualify.put_through("linear", f"{HERE}:leaky_linear", PROGRAM)
    assert not found.ok and any(line.startswith("row law") for line in found.broken)
    assert found.equal != "bytes equal to ours in 10 of 10 cases"


def test_an_outside_kernel_of_another_signature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ops\.linear takes"):
        qualify.put_through("linear", f"{HERE}:fast_linear", PROGRAM)
