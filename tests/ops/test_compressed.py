"""Streams, compressed rows, their selection and attention, routes and YaRN's tables beyond the laws: what is seen, extremes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.common import ops
from zoo.common.history import CompressedRows, OpenWindows, WholeWindows, WindowedRows
from zoo.common.ops.hyper_pre.reference import sinkhorn
from zoo.common.program import resolve
from zoo.common.rows import Rows
from zoo.common.weights import check_table
from zoo.testing import assert_same_bytes

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
FP32 = resolve("transformers", "cpu", torch.float32)
zeros = torch.zeros


def rows_of(length: int) -> Rows:
    return Rows.packed(torch.tensor([0, length]))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("tokens", [4, 16])
def test_a_row_is_there_once_its_last_token_is(tokens: int) -> None:
    rows_RC = drawn(2 * tokens + 3, 4 * 6)
    ape = drawn(tokens, 12)
    pooled = ops.compress(rows_RC, ape, WholeWindows("open"), rows_of(len(rows_RC)), 6, program=FP32)
    there = pooled.abs().sum(1) > 0
    assert there.nonzero()[:, 0].tolist() == [tokens - 1, 2 * tokens - 1]
    moved = rows_RC.clone()
    moved[tokens:] += 1.0  # later tokens are in no earlier row
    again = ops.compress(moved, ape, WholeWindows("open"), rows_of(len(rows_RC)), 6, program=FP32)
    assert_same_bytes(again[tokens - 1], pooled[tokens - 1])
    assert not torch.equal(again[2 * tokens - 1], pooled[2 * tokens - 1])
    moved = rows_RC.clone()
    moved[:tokens, :6] += 1.0  # first halves go into the next window alone
    again = ops.compress(moved, ape, WholeWindows("open"), rows_of(len(rows_RC)), 6, program=FP32)
    assert_same_bytes(again[tokens - 1], pooled[tokens - 1])
    assert not torch.equal(again[2 * tokens - 1], pooled[2 * tokens - 1])


def test_the_token_that_completes_a_row_sees_it() -> None:
    keys = CompressedRows(drawn(12, 8), 4)
    chosen = ops.compressed_select(drawn(12, 2, 8), drawn(12, 2), keys, rows_of(12), 5, program=FP32)
    assert (chosen >= 0).sum(1).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    window = zeros(12, 8)
    compressed = zeros(12, 8)
    compressed[7] = 1.0  # the row of tokens 4 to 7
    history = WindowedRows(window, compressed, 4, "compressed")
    out = ops.compressed_attention(zeros(12, 1, 8), history, None, zeros(1), rows_of(12), 3, 1.0, program=FP32)
    assert (out[:, 0, 0] > 0).nonzero()[:, 0].tolist() == [7, 8, 9, 10, 11]
    assert float(out[7, 0, 0]) == pytest.approx(1 / (2 + 3 + 1))  # two rows, three tokens, the sink


def test_equal_scores_take_the_lower_row_first() -> None:
    keys = CompressedRows(torch.ones(40, 4), 2)
    chosen = ops.compressed_select(torch.ones(40, 1, 4), torch.ones(40, 1), keys, rows_of(40), 3, program=FP32)
    assert chosen[-1].tolist() == [0, 1, 2]
    negative = ops.compressed_select(-torch.ones(40, 1, 4), -torch.ones(40, 1), keys, rows_of(40), 3, program=FP32)
    assert negative[-1].tolist() == [0, 1, 2]  # scores of -0 are those of +0


def test_sinks_large_and_small() -> None:
    history = WindowedRows(drawn(9, 8), drawn(9, 8), 2, "compressed")

    def attended(sink: float) -> Tensor:
        sinks = torch.full((2,), sink)
        out: Tensor = ops.compressed_attention(drawn(9, 2, 8), history, None, sinks, rows_of(9), 4, 0.3, program=FP32)
        return out

    usual = attended(0.0)
    assert not attended(1e4).any()
    assert attended(-1e4).isfinite().all() and (attended(-1e4) - usual).abs().max() > 0.01
    assert_same_bytes(attended(-1e4), attended(-2e4))


def test_sinkhorn_of_extreme_logits() -> None:
    """Rows and columns add up to nearly 1 however far the logits lie apart."""
    logits = torch.cat([drawn(5, 4, 4) * scale for scale in (0.0, 1.0, 30.0, 1e4)])
    comb = sinkhorn(logits, 1e-6, 20)
    assert comb.isfinite().all() and (comb > 0).all()
    assert (comb.sum(-2) - 1).abs().max() < 1e-4  # columns came last
    assert (comb[:10].sum(-1) - 1).abs().max() < 1e-4


def test_a_table_of_experts() -> None:
    table = torch.tensor([[0, 3], [2, 1], [3, 0]])
    check_table("table", table, 4)
    logits = drawn(3, 4)
    weights, experts = ops.hash_route(logits, torch.tensor([2, 0, 2]), table, 1.5, program=FP32)
    assert experts.tolist() == [[3, 0], [0, 3], [3, 0]]
    assert torch.allclose(weights.sum(1), torch.full((3,), 1.5))
    for change, message in (
        (torch.zeros_like(table), "holds zeros alone"),
        (table + 1, "sends token 0 to expert 4, there are 4"),
        (table - 1, "sends token 0 to expert -1, there are 4"),
        (torch.tensor([[0, 3], [2, 2]]), "sends token 1 to expert 2 twice"),
    ):
        with pytest.raises(ValueError, match=f"^table {message}"):
            check_table("table", change, 4)


def test_slot_order_and_scores_of_learned_routing() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    weights, experts = ops.softplus_route(logits, torch.tensor([9.0, 0.0, 0.0, 0.0]), 3, 2.0, program=FP32)
    assert experts.tolist() == [[0, 1, 2]]  # by biased score, the lower id first; the bias is in no weight
    score = torch.nn.functional.softplus(logits).sqrt()[0, [0, 1, 2]]
    assert torch.allclose(weights[0], 2 * score / score.sum())
    far, _ = ops.softplus_route(torch.tensor([[-300.0, -300.0, 90.0, 1e4]]), zeros(4), 4, 1.0, program=FP32)
    assert far.isfinite().all() and far[0, 0] > 0.9


def test_yarn() -> None:
    """Fast pairs keep their frequency, slow ones have a sixteenth, and tables without scaling stay as they were."""
    yarn = ops.Yarn(16.0, 65536, 32.0, 1.0)
    plain = ops.rope_table(600, 64, 1.6e5)
    scaled = ops.yarn_table(600, 64, 1.6e5, yarn)
    assert_same_bytes(scaled[:, 0], plain[:, 0])
    turned, usual = (torch.atan2(table[1:, -1, 1], table[1:, -1, 0]) for table in (scaled, plain))
    assert ((turned * 16 / usual) - 1).abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"at most 4194304"):
        ops.yarn_table(1 << 23, 8, 1e4, yarn)


HEADS = (zeros(4, 2, 8), zeros(4, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.hyper_pre(zeros(2, 4, 8), zeros(24, 31), zeros(24), zeros(3), ops.Sinkhorn(1e-6, 1e-6, 20), program=FP32),
            r"4 streams of 8 columns, fn, base and scale of shapes \(\(24, 31\)",
        ),
        (
            lambda: ops.hyper_post(zeros(2, 8), zeros(2, 4, 8), zeros(2, 3), zeros(2, 4, 4), program=FP32),
            r"2 rows of 4 streams of 8 columns, branch, post and comb of shapes \(\(2, 8\), \(2, 3\)",
        ),
        (
            lambda: ops.hyper_head(zeros(2, 4, 8), zeros(4, 32), zeros(4), zeros(3), 1e-6, 1e-6, program=FP32),
            r"4 streams of 8 columns, fn, base and scale of shapes",
        ),
        (lambda: ops.tail_rope(zeros(2, 1, 4), zeros(9, 4, 2), zeros(2).long(), program=FP32), "a table for 8 columns, heads of 4"),
        (lambda: ops.softplus_route(zeros(2, 4), zeros(3), 2, 1.0, program=FP32), r"4 experts, a bias of shape \(3,\)"),
        (lambda: ops.softplus_route(zeros(2, 4), zeros(4), 5, 1.0, program=FP32), "top 5 of 4 experts"),
        (lambda: ops.hash_route(zeros(2, 4), zeros(3).long(), zeros(9, 2).long(), 1.0, program=FP32), r"2 rows, token ids of shape \(3,\)"),
        (
            lambda: ops.compress(zeros(4, 24), zeros(4, 12), WholeWindows("open"), rows_of(4), 8, program=FP32),
            "rows of 24 columns, ape of 12, pooled rows of 8",
        ),
        (
            lambda: ops.compress(zeros(4, 24), zeros(4, 12), WholeWindows("open"), rows_of(5), 12, program=FP32),
            "4 rows are given, there are 5",
        ),
        (
            lambda: ops.compress(
                zeros(4, 24), zeros(4, 12), OpenWindows(zeros(2, 4, 24), torch.tensor([1]), "open"), rows_of(4), 6, program=FP32
            ),
            r"slots hold \(4, 24\) of torch.float32, the rows need \(8, 24\)",
        ),
        (
            lambda: ops.compressed_select(*HEADS, CompressedRows(zeros(4, 7), 2), rows_of(4), 1, program=FP32),
            "queries of 8 columns, keys of 7",
        ),
        (lambda: ops.compressed_select(*HEADS, CompressedRows(zeros(4, 8), 2), rows_of(4), 0, program=FP32), "top 0 of a sequence's rows"),
        (
            lambda: ops.compressed_attention(
                HEADS[0], WindowedRows(zeros(4, 8), zeros(4, 7), 2, "x"), None, zeros(2), rows_of(4), 2, 1.0, program=FP32
            ),
            "queries of 8 columns, compressed rows of 7",
        ),
        (
            lambda: ops.compressed_attention(
                HEADS[0], WindowedRows(zeros(4, 8), None, 0, "x"), None, zeros(3), rows_of(4), 2, 1.0, program=FP32
            ),
            r"2 heads, sinks of shape \(3,\)",
        ),
    ],
)
def test_refusals_name_both_numbers(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
