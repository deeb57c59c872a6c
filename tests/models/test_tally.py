"""What the ladder's tally compares of a way: every cached row up to the newest, and the states of recurrent layers, byte by byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zoo.testing import as_integers
from zoo.verify.tally import Tally, emptiness, k3_of
from zoo.verify.ways import Seen

LENGTH = 5
CACHED = 3  # numbers of one position in each cached tensor


def state_after(length: int) -> dict[str, Tensor]:
    """The state of two recurrent layers, other numbers after each token."""
    return {f"delta_state.{layer}": torch.arange(4.0).view(2, 2) + 10 * length + layer for layer in range(2)}


def whole_document() -> Seen:
    """A trainer's document: log-probabilities, a cached tensor of two layers, states."""
    log_prob_T = -torch.arange(1.0, 1.0 + LENGTH)
    cached = {f"k.{layer}": torch.arange(1.0, 1.0 + LENGTH * CACHED).view(LENGTH, CACHED) + 100 * layer for layer in range(2)}
    return Seen(0, 0, log_prob_T, cached, None, state_after)


def way_after(reference: Seen, begin: int, end: int) -> Seen:
    """A way that has just pushed rows `begin` .. `end` - 1, with bytes of its own that equal the reference's."""
    cached = {name: t[:end].clone() for name, t in reference.state.items()}
    held = state_after(end)
    return Seen(0, begin, reference.log_prob_T[begin:end].clone(), cached, None, lambda length: held)


def one_bit(x: Tensor, *place: int) -> None:
    """Turns the lowest bit of one number, in place."""
    as_integers(x)[place] ^= 1


def tally_of(reference: Seen, way: Seen, newest: int | None = None) -> Tally:
    tally = Tally()
    tally.seen(reference, way, entropy=False, newest=newest)
    return tally


@pytest.mark.parametrize(("begin", "end"), [(0, LENGTH), (0, 1), (2, 4), (LENGTH - 1, LENGTH)])
def test_each_cached_row_up_to_the_newest_is_compared(begin: int, end: int) -> None:
    """A bit in any cached row of any layer is a difference there, the row of the last token pushed included."""
    reference = whole_document()
    equal = tally_of(reference, way_after(reference, begin, end))
    assert (equal.differing, equal.spot) == (0, None)
    assert equal.compared == end - begin + 2 * end * CACHED + 2 * 4
    for layer in range(2):
        for position in range(end):
            way = way_after(reference, begin, end)
            one_bit(way.state[f"k.{layer}"], position, 1)
            tally = tally_of(reference, way)
            assert (tally.differing, tally.compared) == (1, equal.compared)
            assert tally.spot is not None and (tally.spot.name, tally.spot.position) == (f"k.{layer}", position)
            assert tally.heat == {(str(layer), position): 1} and not tally.row(3, "planted").ok


def test_of_the_newest_rows_all_are_compared_and_no_older_one() -> None:
    reference = whole_document()
    for position in range(4):
        way = way_after(reference, 3, 4)
        one_bit(way.state["k.1"], position, 0)
        tally = tally_of(reference, way, newest=2)
        assert tally.differing == int(position >= 2), position
        assert tally.compared == 1 + 2 * 2 * CACHED + 2 * 4


def test_each_log_probability_is_compared_with_that_of_its_own_position() -> None:
    reference = whole_document()
    for row in range(2):
        way = way_after(reference, 2, 4)
        one_bit(way.log_prob_T, row)
        spot = tally_of(reference, way).spot
        assert spot is not None and (spot.name, spot.position, spot.ulp) == ("log_prob", 2 + row, 1)


def test_what_is_not_finite_is_compared_and_not_counted() -> None:
    """Masked positions would otherwise make an empty comparison look like one; a NaN for an infinity is a difference all the same."""
    masked = torch.tensor([-1.0, -torch.inf, torch.nan, -2.0])
    tally = Tally()
    tally.bytes(masked, masked.clone(), "log_prob")
    assert (tally.compared, tally.compared_bytes, tally.differing) == (2, 8, 0)
    nothing = Tally()
    nothing.bytes(masked[1:3], masked[1:3].clone(), "log_prob")
    assert not nothing.row(3, "planted").ok
    nothing.bytes(masked[1:2], masked[2:3], "log_prob")
    assert nothing.differing > 0 and nothing.compared == 0


@pytest.mark.parametrize("name", ["delta_state.0", "delta_state.1"])
def test_a_differing_state_is_a_difference(name: str) -> None:
    """One bit of one recurrent layer's state, at the position of the last token pushed; the counts are those of equal states."""
    reference = whole_document()
    way = way_after(reference, 2, 4)
    assert way.slot is not None
    one_bit(way.slot(4)[name], 1, 0)
    tally = tally_of(reference, way)
    assert tally.differing == 1 and tally.compared == tally_of(reference, way_after(reference, 2, 4)).compared
    assert tally.spot is not None and (tally.spot.name, tally.spot.position, tally.spot.ulp) == (name, 3, 1)
    assert tally.heat == {(name[-1], 3): 1} and not tally.row(3, "planted").ok


def test_the_state_is_that_after_the_last_token() -> None:
    """The trainer's states after one token fewer or one more are other numbers, and are seen."""
    reference = whole_document()
    for end in (3, 5):
        way = replace(way_after(reference, 2, 4), slot=lambda length, end=end: state_after(end))
        assert tally_of(reference, way).differing > 0


def test_states_of_other_layers_are_an_error() -> None:
    reference = whole_document()
    fewer = {name: t for name, t in state_after(4).items() if name.endswith("0")}
    way = replace(way_after(reference, 2, 4), slot=lambda length: fewer)
    with pytest.raises(ValueError, match=r"states \['delta_state.0', 'delta_state.1'\] against \['delta_state.0'\]"):
        tally_of(reference, way)


@pytest.mark.parametrize("log_prob", [-5.0, -0.01, -1e-4])
def test_k3_of_one_ulp_near_certainty(log_prob: float) -> None:
    """d^2 / 2 is far below what FP64 keeps of 1 + d: taking 1 away last would leave nothing of it."""
    trainer = torch.tensor([log_prob])
    sampler = torch.nextafter(trainer, torch.zeros(1))
    d = float(trainer.double() - sampler.double())
    assert d != 0 and k3_of(trainer, sampler) == pytest.approx(d * d / 2, rel=1e-4, abs=0)


@pytest.mark.parametrize(("alike", "sentence"), [(5, None), (6, "6 of 10 log-probabilities share one bit pattern")])
def test_more_than_half_of_one_bit_pattern_prove_nothing(alike: int, sentence: str | None) -> None:
    log_prob = torch.cat([torch.full((alike,), -3.0), torch.linspace(-4, -5, 10 - alike)])
    assert emptiness(log_prob, None, 512) == sentence


@pytest.mark.parametrize(("certain", "sentence"), [(5, None), (6, "6 of 10 log-probabilities exceed -0.001")])
def test_more_than_half_near_certainty_prove_nothing(certain: int, sentence: str | None) -> None:
    log_prob = torch.cat([torch.linspace(-1e-4, -9e-4, certain), torch.linspace(-4, -5, 10 - certain)])
    assert emptiness(log_prob, None, 512) == sentence
