"""log_prob at once and by chunks of the vocabulary: which rows take which way, and that it moves no byte."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_controls import FAULTS
from op_sizes import Largest
from torch import Tensor

from zoo.common import ops
from zoo.common.ops.cases import cases_of, check
from zoo.common.ops.log_prob import VOCABULARY_CHUNK, WHOLE_LOGITS, reference
from zoo.common.ops.log_prob.cases import case as made
from zoo.common.program import Program, resolve
from zoo.testing import LawBroken, assert_same_bytes

MODULE = importlib.import_module("zoo.common.ops.log_prob")  # the package's own name is the op's there
BACKWARD = importlib.import_module("zoo.common.ops.log_prob.backward")
PROGRAM = resolve("aligned", "cpu", torch.bfloat16)


def operands(rows: int, vocabulary: int, width: int = 8, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, width)
    weight = torch.randn(vocabulary, width)
    targets = torch.randint(vocabulary, (rows,))
    targets[0] = 0
    targets[-1] = vocabulary - 1
    return hidden.bfloat16().to(device), weight.bfloat16().to(device), targets.to(device)


def score(args: tuple[Tensor, Tensor, Tensor], program: Program, inverse: Tensor | None) -> Any:
    return ops.log_prob(*args, program=program, inverse_temperature_R=inverse)


def check_both_ways(args: tuple[Tensor, Tensor, Tensor], program: Program, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inverse = torch.rand(args[0].shape[0], device=args[0].device) + 0.5 if scaled else None
    assert args[0].shape[0] * args[1].shape[0] <= WHOLE_LOGITS
    whole = score(args, program, inverse)
    monkeypatch.setattr(MODULE, "WHOLE_LOGITS", 0)
    assert_same_bytes(score(args, program, inverse), whole)
    with pytest.raises(LawBroken):  # the control: another group is another tree
        assert_same_bytes(score(args, replace(program, vocab_group=128), inverse), whole)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("vocabulary", [VOCABULARY_CHUNK - 1, VOCABULARY_CHUNK, VOCABULARY_CHUNK + 257])
def test_chunks_give_the_bytes_of_the_whole(vocabulary: int, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_both_ways(operands(65, vocabulary), PROGRAM, scaled, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("rows", "vocabulary", "width"), [(16, 151936, 4096), (64, 151936, 4096), (441, 151936, 2048), (65, 16641, 512)])
def test_chunks_give_the_bytes_of_the_whole_on_a_gpu(
    rows: int, vocabulary: int, width: int, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, targets = operands(rows, vocabulary, width, "cuda")
    check_both_ways((hidden * 3 * width**-0.5, weight, targets), Program("aligned", "cuda", "bfloat16"), scaled, monkeypatch)


def test_few_rows_hold_all_logits_and_more_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row law over the bound, here a smaller one, and what each side of it holds."""
    vocabulary = 3 * VOCABULARY_CHUNK
    rows = 65
    monkeypatch.setattr(MODULE, "WHOLE_LOGITS", (rows - 1) * vocabulary)
    args = operands(rows, vocabulary, 2)
    with Largest() as more:
        scores = score(args, PROGRAM, None)
    assert more.numel <= (rows + 16) * VOCABULARY_CHUNK  # the reference pads to whole panels of 16 rows
    with Largest() as few:
        head = score((args[0][:5], args[1], args[2][:5]), PROGRAM, None)
    assert few.numel >= 5 * vocabulary
    found = [head.log_prob_R, head.lse_R, head.entropy_R]
    columns = (scores.log_prob_R, scores.lse_R, scores.entropy_R)
    assert_same_bytes(found, [t[:5].clone() for t in columns])
    with pytest.raises(LawBroken):  # the control: the rows behind them
        assert_same_bytes(found, [t[5:10].clone() for t in columns])


@pytest.mark.parametrize("scaled", [False, True])
def test_many_rows_never_hold_all_logits(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with smaller chunks of rows and columns than the real ones; the tail of the rows takes all columns."""
    rows = 128
    columns = 512
    count = 3 * 128 + 3
    vocabulary = 3000
    monkeypatch.setattr(MODULE, "WHOLE_LOGITS", rows * columns)
    for module in (MODULE, BACKWARD):
        monkeypatch.setattr(module, "ROW_CHUNK", rows)
        monkeypatch.setattr(module, "VOCABULARY_CHUNK", columns)
    hidden, weight, targets = operands(count, vocabulary, 2)
    inverse = torch.rand(count) + 0.5 if scaled else None

    def largest() -> int:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with Largest() as seen:
            scores = score((*leaves, targets), PROGRAM, inverse)
            (scores.log_prob_R + scores.entropy_R).sum().backward()
        return seen.numel

    bound = (rows + 16) * columns  # the reference pads to whole panels of 16 rows
    assert largest() <= bound < count * vocabulary // 10
    for module, name, wide in ((MODULE, "WHOLE_LOGITS", rows * vocabulary), (BACKWARD, "VOCABULARY_CHUNK", vocabulary)):
        with monkeypatch.context() as patch:  # the controls: either side alone takes all columns of its rows
            patch.setattr(module, name, wide)
            assert largest() > bound


@pytest.mark.parametrize("law", ["row", "place", "shard", "fusion", "repeat"])
def test_laws_over_the_bound(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows by chunks, fewer of them whole."""
    case = next(c for c in cases_of("log_prob", PROGRAM) if c.name == "more columns than a chunk")
    vocabulary = case.make(0, "cpu", torch.bfloat16)["weight_VD"].shape[0]
    monkeypatch.setattr(MODULE, "WHOLE_LOGITS", 2 * vocabulary)
    check(case, law, PROGRAM)
    faults = FAULTS["log_prob", law]
    with pytest.raises(LawBroken, match=f"{law} law"):  # the control
        for fault in faults:
            check(case, law, PROGRAM, replace=fault)


def test_605_groups_at_degree_16() -> None:
    """GLM-5.2's vocabulary on up to 16 ranks, of which some have 37 groups and some 38."""
    drawn = made("605 groups", 2, 154880, 16, group=PROGRAM.vocab_group, only=("shard",))
    seen = set()

    def logits(hidden: Tensor, weight: Tensor, **names: Any) -> Tensor:
        seen.add(weight.shape[0])
        return ops.logits(hidden, weight, **names)

    check(drawn, "shard", PROGRAM, replace={"logits": logits})
    assert {37 * 256, 38 * 256} < seen

    def fault(hidden: Tensor, weight: Tensor, **names: Any) -> Tensor:
        return logits(hidden, weight, **names) * (1 + 2.0**-12 * (weight.shape[0] == 37 * 256))

    with pytest.raises(LawBroken, match="shard law"):  # the control: ranks of 37 groups scale theirs
        check(drawn, "shard", PROGRAM, replace={"logits": fault})


def _stats(functions: Any, logits: Tensor, targets: Tensor, columns: int, group: int) -> tuple[tuple[Tensor, ...], Tensor]:
    stats = tuple(torch.full((logits.shape[0], -(-logits.shape[1] // group)), torch.nan) for _ in range(3))
    selected = torch.zeros(logits.shape[0])
    for first in range(0, logits.shape[1], columns):
        functions.chunk_stats(logits[:, first : first + columns], first, targets, group, stats, selected)
    return stats, selected


def check_chunk_stats(functions: Any) -> None:
    logits = torch.randn(5, 1003) * 4
    targets = torch.tensor([0, 511, 512, 1002, -100])
    logits[1, 511] = -0.0
    logits[2, 512] = torch.nan
    whole = functions.group_stats(logits, 256)
    for columns in (256, 512, 1024):
        stats, selected = _stats(functions, logits, targets, columns, 256)
        assert_same_bytes(stats, whole)
        assert_same_bytes(selected, torch.stack([*logits[range(4), targets[:4]], torch.tensor(0.0)]))
    assert selected[1].signbit() and selected[2].isnan()
    with pytest.raises(LawBroken):  # the control: each target a column further
        assert_same_bytes(_stats(functions, logits, targets - 1, 512, 256)[1], selected)
    with pytest.raises(AssertionError, match="column 100 starts no group of 256"):
        functions.chunk_stats(logits, 100, targets, 256, stats, selected)


def test_chunk_stats_of_the_reference() -> None:
    check_chunk_stats(reference)


@pytest.mark.interpreted
def test_chunk_stats_of_the_kernel() -> None:
    pytest.importorskip("triton")
    from zoo.common.ops.log_prob import kernels

    check_chunk_stats(kernels)
