"""Histories cut to one row: what an observer stores of a call reads the same bytes, in tensors of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.common.history import ConvCarry, DeltaState, History, KeyValues, PackedDelta, TokenRows

TABLE = torch.tensor([[5, 2, 0], [1, 4, 3]], dtype=torch.int32)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(history: Any) -> list[Tensor]:
    return [value for value in vars(history).values() if isinstance(value, Tensor)]


def own(cut: History, whole: History) -> bool:
    """Whether no tensor of one shares memory with a tensor of the other."""
    held = {t.untyped_storage().data_ptr() for t in tensors(whole)}
    return not any(t.untyped_storage().data_ptr() in held for t in tensors(cut))


def test_packed_rows_of_a_document_up_to_one() -> None:
    for whole in (KeyValues(random(9, 2, 4), random(9, 2, 3)), TokenRows(random(9, 5))):
        cut = whole.of_row(1, 4, 7, 3)
        assert whole.packed and whole.takes_push and not whole.changes and own(cut, whole)
        assert all(torch.equal(mine, theirs[4:8]) for mine, theirs in zip(tensors(cut), tensors(whole), strict=True))


def test_pages_up_to_a_position() -> None:
    """Position 9 lies in the second page of 8, the others go; the table counts the copy's pages."""
    for whole in (KeyValues(random(6, 8, 2, 4), random(6, 8, 2, 3), TABLE), TokenRows(random(6, 8, 5), TABLE)):
        cut = whole.of_row(1, 0, 0, 9)
        assert not whole.packed and not whole.takes_push and not whole.changes and own(cut, whole)
        assert cut.page_table_NB is not None and cut.page_table_NB.tolist() == [[0, 1]]
        assert all(torch.equal(mine, theirs[[1, 4]]) for mine, theirs in zip(tensors(cut)[:-1], tensors(whole)[:-1], strict=True))
        # control: the next position is in the same page, that of the next page in another
        assert len(tensors(whole.of_row(1, 0, 0, 15))[0]) == 2 and len(tensors(whole.of_row(1, 0, 0, 16))[0]) == 3


def test_slots_become_slots_of_the_copy() -> None:
    slots = torch.tensor([3, 1])
    state = DeltaState(*(random(4, n) for n in range(1, 9)), slots)
    for whole in (state, ConvCarry(random(4, 3, 6), slots)):
        cut = whole.of_row(0, 2, 5, 70)
        assert not whole.packed and whole.takes_push and whole.changes and own(cut, whole)
        assert cut.slot_N.tolist() == [0] and whole.of_sequences().slot_N.tolist() == [0, 1]
        assert all(torch.equal(mine[0], theirs[3]) for mine, theirs in zip(tensors(cut)[:-1], tensors(whole)[:-1], strict=True))


def test_what_stands_before_documents() -> None:
    whole = PackedDelta(random(2, 1, 3, 3))
    cut = whole.of_row(1, 0, 5, 5)
    assert whole.packed and cut.carry_NWC is None and cut.initial_NVKE is not None and whole.initial_NVKE is not None
    assert torch.equal(cut.initial_NVKE, whole.initial_NVKE[1:]) and own(cut, whole)


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (KeyValues(random(1, 1, 1), random(1, 1, 1)), "packed keys"),
        (KeyValues(random(6, 8, 1, 1), random(6, 8, 1, 1), TABLE), "keys in pages of 8"),
        (TokenRows(random(1, 1)), "packed"),
        (TokenRows(random(6, 8, 1), TABLE), "tokens in pages of 8"),
        (ConvCarry(random(4, 3, 6), torch.tensor([1])), "a slot a sequence"),
        (PackedDelta(), "whole documents"),
    ],
)
def test_words_and_copies(history: History, words: str) -> None:
    again = history.copied()
    assert history.words() == words and type(again) is type(history) and own(again, history)
    assert all(torch.equal(a, b) for a, b in zip(tensors(again), tensors(history), strict=True))
