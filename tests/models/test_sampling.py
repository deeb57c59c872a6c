"""The sampling program: parameters, the cut against its definition, the draw, and the trainer's replay of it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo.common import ops
from zoo.common.ops.sample import sample, score_filtered, support
from zoo.common.ops.sample.reference import gumbel, philox
from zoo.common.ops.sample.replay import log_sum_exp, score_of
from zoo.common.program import resolve
from zoo.common.rollouts import SamplingParams, seed_of_sample
from zoo.common.row_sampling import MASS_ONE, NO_CUT, RowSampling
from zoo.testing import LawBroken, assert_same_bytes

LOG_PROB = sys.modules["zoo.common.ops.log_prob"]
PROGRAM = resolve("aligned", "cpu", torch.bfloat16)
GREEDY = SamplingParams(temperature=0.0)
MIXED = (
    SamplingParams(seed=1),
    GREEDY,
    SamplingParams(temperature=0.6, top_p=0.95, top_k=20, seed=2),
    SamplingParams(top_k=3, seed=3),
    SamplingParams(top_p=0.5, seed=4),
    SamplingParams(temperature=1.7, min_p=0.05, seed=5),
    SamplingParams(temperature=3.0, seed=2**64 - 1),
)


def rows_of(params: Any, positions: Any = None) -> RowSampling:
    params = list(params)
    return RowSampling.of(params, range(len(params)) if positions is None else positions, "cpu")


def logits_of(rows: int, vocabulary: int, seed: int = 0, kind: str = "normal") -> Tensor:
    x = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    return {"normal": x, "ties": x.round(), "flat": x * 1e-3, "zeros": torch.where(x > 0, 0.0, -0.0)}[kind]


def operands(rows: int, vocabulary: int, width: int = 48, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(rows, width, generator=random)
    weight = torch.randn(vocabulary, width, generator=random) / width**0.5 * 3
    return hidden.to(dtype), weight.to(dtype)


def scaled_and_lse(x: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    scaled = x * rows.inverse_temperature_R[:, None]
    return scaled, ops.log_prob_of_logits(scaled, torch.zeros(len(x), dtype=torch.int64), program=PROGRAM).lse_R


def support_by_hand(scaled_V: Tensor, lse: Tensor, params: SamplingParams) -> list[bool]:
    """The definition, token by token, in Python integers."""
    p = torch.exp(scaled_V - lse)
    values = scaled_V.tolist()
    chances = p.tolist()
    likely = (p >= torch.tensor(params.min_p, dtype=torch.float32) * p.max()).tolist()
    kept = [False] * len(values)
    mass = 0
    for rank, token in enumerate(sorted(range(len(values)), key=lambda t: (-values[t], t))):
        few = params.top_k <= 0 or rank < params.top_k
        kept[token] = few and (params.top_p >= 1 or mass <= params.top_p * MASS_ONE) and likely[token]
        mass += int(chances[token] * MASS_ONE)
    return kept


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    c = list(counter)
    k = list(key)
    for _ in range(10):
        a = c[0] * 0xD2511F53
        b = c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ({"temperature": -0.5}, "-0.5"),
        ({"temperature": 1e-7}, "1e-07"),
        ({"temperature": math.nan}, "nan"),
        ({"temperature": math.inf}, "inf"),
        ({"temperature": True}, "True"),
        ({"top_k": -2}, "-2"),
        ({"top_k": 1 << 63}, "9223372036854775808"),
        ({"top_k": 2.5}, "2.5"),
        ({"top_p": 0.0}, "0.0"),
        ({"top_p": 1.5}, "1.5"),
        ({"min_p": -0.1}, "-0.1"),
        ({"min_p": 1.1}, "1.1"),
        ({"seed": -1}, "-1"),
        ({"seed": 2**64}, str(2**64)),
        ({"max_new_tokens": 0}, "0"),
        ({"stop_token_ids": (3, -4)}, "-4"),
        ({"stop_token_ids": 5}, "5"),
        ({"stop_token_ids": None}, "None"),
        ({"temperature": 10**400}, "1" + 20 * "0"),
        ({"top_p": -(10**400)}, "-1" + 20 * "0"),
        ({"ignore_eos": 1}, "1"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_number(given: dict[str, Any], number: str) -> None:
    with pytest.raises(ValueError, match=next(iter(given))) as caught:
        SamplingParams(**given)
    assert number in str(caught.value)


def test_params_survive_a_dictionary() -> None:
    params = SamplingParams(0.7, 20, 0.9, 0.1, 2**64 - 1, 33, [1, 2], True)  # type: ignore[arg-type]
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert SamplingParams.from_dict({}) == SamplingParams()
    with pytest.raises(ValueError, match="topk"):
        SamplingParams.from_dict({"topk": 3})
    assert [p.is_identity for p in MIXED] == [True, True, False, False, False, False, False]
    assert [p.filters for p in MIXED] == [False, False, True, True, True, True, False]
    assert SamplingParams(top_k=-1).is_identity and not SamplingParams(temperature=0.0, top_k=5, min_p=0.5).filters


def test_row_tensors_copy_index_and_spread() -> None:
    rows = rows_of(MIXED)
    assert rows.seed_R.tolist()[-1] == -1 and rows.mass_limit_R.tolist()[4] == MASS_ONE // 2 and rows.top_k_R.tolist()[0] == NO_CUT
    assert not rows_of([SamplingParams(), GREEDY]).filters and not rows_of([SamplingParams(), GREEDY]).scales
    buffer = RowSampling.buffer(9, "cpu")
    pointers = [t.data_ptr() for t in buffer.tensors()]
    buffer.copy_(rows)
    assert pointers == [t.data_ptr() for t in buffer.tensors()]
    assert_same_bytes(list(buffer[:7].tensors()), list(rows.tensors()), "buffer")
    assert buffer.greedy_R[7:].all()
    spread = rows.at(torch.tensor([3, 3, 0]), torch.tensor([8, 9, 1]))
    assert spread.position_R.tolist() == [8, 9, 1] and spread.top_k_R.tolist() == [3, 3, NO_CUT]
    with pytest.raises(ValueError, match=r"7 rows .* 2"):
        RowSampling.buffer(2, "cpu").copy_(rows)
    with pytest.raises(ValueError, match=r"7 .* 2"):
        RowSampling.of(MIXED, [1, 2], "cpu")


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 257, 1000]),
    kind=st.sampled_from(["normal", "ties", "flat", "zeros"]),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 20, 256, 5000]),
    top_p=st.one_of(st.sampled_from([1e-9, 0.5, 1.0]), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 0.5)),
)
def test_support_is_its_definition(
    vocabulary: int, kind: str, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    x = logits_of(2, vocabulary, seed, kind)
    rows = rows_of([params, params])
    scaled, lse = scaled_and_lse(x, rows)
    found = support(scaled, lse, rows, PROGRAM)
    for r in range(2):
        assert found[r].tolist() == support_by_hand(scaled[r], lse[r], params)


def test_support_at_exact_boundaries() -> None:
    """Four equal tokens of a quarter each: the mass before the third is one half, exactly top_p."""
    x = torch.zeros(1, 4)
    lse = torch.full((1,), math.log(4.0))
    quarter = int(torch.exp(-lse).item() * MASS_ONE)

    def kept(limit: int) -> list[bool]:
        rows = replace(rows_of([SamplingParams(top_p=0.5)]), mass_limit_R=torch.tensor([limit]))
        return support(x, lse, rows, PROGRAM)[0].tolist()

    assert kept(2 * quarter) == [True, True, True, False]
    assert kept(2 * quarter - 1) == [True, True, False, False]
    assert kept(0) == [True, False, False, False]
    assert SamplingParams(top_p=0.1).mass_limit == (0.1).as_integer_ratio()[0] * MASS_ONE // (0.1).as_integer_ratio()[1]


def test_the_mass_of_equal_tokens_ends_before_int64() -> None:
    """FP32 rounds the log-sum-exp of huge logits; of one below 2^26 a row's mass stays countable."""
    params = SamplingParams(top_p=0.5)
    rows = rows_of([params])

    def same(logit: float, equals: int) -> bool:
        x = torch.tensor([[logit] * equals + [logit / 2] * 5])
        scaled, lse = scaled_and_lse(x, rows)
        return support(scaled, lse, rows, PROGRAM)[0].tolist() == support_by_hand(scaled[0], lse[0], params)

    assert all(same(2.0**26 - 32, equals) and same(2.0**25 - 2, equals) for equals in (1, 2, 3, 4, 7, 8, 9, 21, 60, 500))
    assert not same(2.0**26, 8)  # control: beyond, a log-sum-exp rounded by 2.08 leaves eight tokens of probability 1


def test_filters_act_jointly() -> None:
    """One after another, top_p would renormalise the two tokens that top_k leaves and drop the second; jointly it stays."""
    x = torch.log(torch.tensor([[0.35, 0.25, 0.2, 0.2]]))
    both = rows_of([SamplingParams(top_k=2, top_p=0.36)])
    scaled, lse = scaled_and_lse(x, both)
    assert support(scaled, lse, both, PROGRAM)[0].tolist() == [True, True, False, False]
    left, left_lse = scaled_and_lse(x[:, :2].contiguous(), both)
    assert support(left, left_lse, both, PROGRAM)[0].tolist() == [True, False]


def test_special_logits() -> None:
    x = torch.tensor([[-0.0, 0.0, -1.0, -torch.inf], [1.0, torch.nan, 0.5, -torch.inf], [-torch.inf] * 4])
    rows = rows_of([SamplingParams(top_k=1, seed=0)] * 3)
    scaled, lse = scaled_and_lse(x, rows)
    assert support(scaled, lse, rows, PROGRAM).tolist()[0] == [True, False, False, False]
    drawn = sample(x, rows, PROGRAM)
    assert drawn.token_R.tolist() == [0, 0, 0]
    assert drawn.log_prob_R[1].isnan() and drawn.filtered_log_prob_R[1].isnan()
    assert sample(x[:2], rows_of([GREEDY] * 2), PROGRAM).token_R.tolist() == [0, 0]


def test_philox_known_answers() -> None:
    def words(*values: int) -> list[int]:
        tensors = [torch.tensor([v]) for v in values]
        return [int(w) for w in philox(tuple(tensors[:4]), tuple(tensors[4:]))]

    answers = {
        (0,) * 6: [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        (0xFFFFFFFF,) * 6: [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): [
            0xD16CFE09,
            0x94FDCCEB,
            0x5001E420,
            0x24126EA1,
        ],
    }
    for values, answer in answers.items():
        assert words(*values) == answer == philox_by_hand(list(values[:4]), list(values[4:]))
    assert words(1, 0, 0, 0, 0, 0) != answers[(0,) * 6]


@pytest.mark.parametrize("width", [5, 1000, 4097, 9000])
def test_noise_follows_its_counter_layout(width: int) -> None:
    seeds = [3, 2**64 - 7]
    positions = [17, 2**40 + 5]
    found = gumbel(torch.tensor([3, -7]), torch.tensor(positions), width)
    assert found.isfinite().all()
    for r in range(2):
        for token in {0, 1, 4, width // 2, width - 2, width - 1}:
            counter = [(token >> 12 << 10) | (token & 1023), positions[r] % 2**32, positions[r] >> 32, 0]
            word = philox_by_hand(counter, [seeds[r] % 2**32, seeds[r] >> 32])[(token >> 10) & 3]
            u = ((word >> 8) | 1) / 2**24
            assert found[r, token].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-5, abs=1e-5)
    assert len(torch.unique(found)) > 0.95 * found.numel()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**33), vocabulary=st.sampled_from([257, 1000]), data=st.data())
def test_token_is_the_argmax_over_the_support(seed: int, position: int, vocabulary: int, data: st.DataObject) -> None:
    params = replace(data.draw(st.sampled_from(MIXED)), seed=seed)
    x = logits_of(1, vocabulary, seed % 97, data.draw(st.sampled_from(["normal", "ties"])))
    rows = rows_of([params], [position])
    scaled, lse = scaled_and_lse(x, rows)
    kept = support(scaled, lse, rows, PROGRAM)
    score = (scaled if params.is_greedy else scaled + gumbel(rows.seed_R, rows.position_R, vocabulary))[0].tolist()
    token, log_prob, filtered = sample(x, rows, PROGRAM)
    assert int(token) == min((t for t in range(vocabulary) if kept[0, t]), key=lambda t: (-score[t], t))
    wide = scaled.double()
    exact = wide[0, token] - wide.logsumexp(1)
    assert log_prob.item() == pytest.approx(exact.item(), abs=3e-6)
    renormalised = wide[0, token] - wide.masked_fill(~kept, -torch.inf).logsumexp(1)
    assert filtered.item() == pytest.approx(min(renormalised.item(), 0.0), abs=3e-6)
    assert filtered.item() <= 0 and kept[0, token].all()


@pytest.mark.parametrize("vocabulary", [9, 700])
def test_the_draws_log_sum_exp_is_scorings(vocabulary: int) -> None:
    """From whole logits without a token, and from hidden rows by log_prob's chunks."""
    hidden, weight = operands(40, vocabulary)
    targets = torch.arange(40) % vocabulary
    x = ops.logits(hidden, weight, program=PROGRAM)
    calls: list[str] = []
    with ops.watch(lambda contract, arguments, result: calls.append(contract.name)):
        found = log_sum_exp(x, PROGRAM)
    scored = ops.log_prob(hidden, weight, targets, program=PROGRAM)
    assert calls == [], "no token is scored for it"
    assert_same_bytes([found, score_of(x, found, targets)], [scored.lse_R, scored.log_prob_R], "log-sum-exp")
    # control: another order of the sum is another number in some row
    with pytest.raises(LawBroken):
        assert_same_bytes([x.logsumexp(1)], [scored.lse_R], "log-sum-exp")
    dead = torch.full((1, vocabulary), -torch.inf)
    assert log_sum_exp(torch.cat([x[:1], dead]), PROGRAM)[0] == found[0]


def test_greedy_takes_the_lower_id_and_scores_natively() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for params in (GREEDY, SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9, seed=9)):
        token, log_prob, filtered = sample(x, rows_of([params]), PROGRAM)
        native = ops.log_prob_of_logits(x, token, program=PROGRAM).log_prob_R
        assert token.tolist() == [1]
        assert_same_bytes([log_prob, filtered], [native, native], "greedy")


@pytest.mark.parametrize("params", [SamplingParams(seed=11), SamplingParams(temperature=1.5, top_k=4, seed=12)])
def test_frequencies_follow_the_probabilities(params: SamplingParams) -> None:
    """Chi-square with 7 (or 3) degrees of freedom: 40 is implausible for them, and little for a wrong temperature."""
    draws = 6000
    x = torch.tensor([[1.0, 0.5, 0.0, 2.0, -1.0, 0.3, 1.2, -0.4]])
    rows = rows_of([params] * draws, range(draws))
    counts = torch.bincount(sample(x.expand(draws, -1).contiguous(), rows, PROGRAM).token_R, minlength=8).double()

    def statistic(temperature: float) -> float:
        one = rows_of([replace(params, temperature=temperature)])
        scaled, lse = scaled_and_lse(x, one)
        kept = support(scaled, lse, one, PROGRAM)
        expected = draws * scaled.double().masked_fill(~kept, -torch.inf).softmax(1)[0]
        assert counts[expected == 0].sum() == 0
        return float(((counts - expected) ** 2 / expected)[expected > 0].sum())

    assert statistic(params.temperature) < 40 < statistic(params.temperature * 1.4)


@pytest.mark.parametrize("vocabulary", [257, 1000, 5000])
def test_a_row_is_independent_of_its_batch(vocabulary: int) -> None:
    x = logits_of(7, vocabulary)
    rows = rows_of(MIXED, [5, 6, 7, 8, 9, 10, 11])
    whole = sample(x, rows, PROGRAM)
    for index in ([0], [6], [2], [6, 5, 4, 3, 2, 1, 0], [3, 3, 1], [0, 1, 6]):
        pick = torch.tensor(index)
        assert_same_bytes(list(sample(x[pick], rows[pick], PROGRAM)), [t[pick] for t in whole], "row law")
    alone = [sample(x[r : r + 1], rows_of([p], [5 + r]), PROGRAM) for r, p in enumerate(MIXED)]  # with its own bounds
    assert_same_bytes([torch.cat(t) for t in zip(*alone, strict=True)], list(whole), "row law with each row's own bounds")
    with pytest.raises(LawBroken):  # control: positions counted inside the batch
        at_zero = sample(x[3:], replace(rows[torch.arange(3, 7)], position_R=torch.arange(4)), PROGRAM)
        assert_same_bytes(list(at_zero), [t[3:] for t in whole], "control")


def test_bounds_move_no_byte() -> None:
    """Rows without filters or temperature: the cheap path, the full path and the native score."""
    x = logits_of(4, 1000)
    rows = rows_of([SamplingParams(seed=s) for s in range(3)] + [GREEDY])
    full = replace(rows, scales=True, filters=True)
    assert not rows.filters and not rows.scales
    cheap = sample(x, rows, PROGRAM)
    assert_same_bytes(list(sample(x, full, PROGRAM)), list(cheap), "bounds")
    native = ops.log_prob_of_logits(x, cheap.token_R, program=PROGRAM).log_prob_R
    assert_same_bytes([cheap.log_prob_R, cheap.filtered_log_prob_R], [native, native], "identity rows")
    with pytest.raises(LawBroken):  # control: a temperature one FP32 step from 1
        near = replace(full, inverse_temperature_R=torch.nextafter(torch.ones(4), torch.tensor(2.0)))
        assert_same_bytes(sample(x, near, PROGRAM).log_prob_R, native, "control")


def test_resumed_equals_uninterrupted() -> None:
    """A toy model over one sequence: stopped after any token and resumed in another batch, the rest is drawn alike."""
    vocabulary = 257
    table = logits_of(257, 257)

    def continued(tokens: list[int], until: int, params: SamplingParams, beside: int = 0, shift: int = 0) -> list[int]:
        tokens = list(tokens)
        while len(tokens) < until:
            rows = rows_of([params] + [MIXED[2]] * beside, [len(tokens) + shift] + [99] * beside)
            x = torch.cat([table[tokens[-1:]], logits_of(beside, vocabulary, 5)])
            tokens.append(int(sample(x, rows, PROGRAM).token_R[0]))
        return tokens

    for params in (SamplingParams(seed=3), SamplingParams(temperature=0.8, top_p=0.9, seed=4)):
        whole = continued([7], 20, params)
        for cut in (2, 9, 19):
            assert continued(whole[:cut], 20, params, beside=3) == whole
        assert continued(whole[:9], 20, params, shift=1) != whole
        assert continued([7], 20, replace(params, seed=77)) != whole


@pytest.mark.parametrize("vocabulary", [257, 1000])
def test_replay_gives_the_reported_bytes(vocabulary: int) -> None:
    count = 140  # more than one block of rows
    hidden, weight = operands(count, vocabulary)
    rows = rows_of([MIXED[r % 7] for r in range(count)], [3 * r for r in range(count)])
    decoded = [  # one row at a time, as a sampler would
        sample(ops.logits(hidden[r : r + 1], weight, program=PROGRAM), rows[r : r + 1], PROGRAM) for r in range(count)
    ]
    token, plain, reported = (torch.cat(t) for t in zip(*decoded, strict=True))
    assert_same_bytes(score_filtered(hidden, weight, token, rows, PROGRAM).log_prob_R, reported, "replay")
    scale = rows.inverse_temperature_R
    native = ops.log_prob(hidden, weight, token, program=PROGRAM, inverse_temperature_R=scale).log_prob_R
    assert_same_bytes(native, plain, "temperature only")
    unfiltered = torch.tensor([not MIXED[r % 7].filters for r in range(count)])
    assert_same_bytes(reported[unfiltered], native[unfiltered], "rows without filters")
    assert not torch.equal(reported, native)
    with pytest.raises(LawBroken):  # control: the neighbour's parameters
        wrong = rows[torch.arange(count).roll(1)]
        assert_same_bytes(score_filtered(hidden, weight, token, wrong, PROGRAM).log_prob_R, reported, "control")
    identity = rows_of([SamplingParams()] * count)
    bare = ops.log_prob(hidden, weight, token, program=PROGRAM).log_prob_R
    for bound in (identity, replace(identity, scales=True, filters=True)):
        assert_same_bytes(score_filtered(hidden, weight, token, bound, PROGRAM).log_prob_R, bare, "identity replay")
    with pytest.raises(ValueError, match="140 hidden rows, 3 targets"):
        score_filtered(hidden, weight, token[:3], rows, PROGRAM)


def test_the_replay_multiplies_with_the_vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores after the filters, log-sum-exp and entropy before them: bytes and gradients of two calls, from one product."""
    count = 140
    hidden, weight = operands(count, 257)
    rows = rows_of([MIXED[r % 7] for r in range(count)])
    token = sample(ops.logits(hidden, weight, program=PROGRAM), rows, PROGRAM).token_R
    products = 0
    multiply = LOG_PROB._logits

    def counted(x: Tensor, *args: Any) -> Tensor:
        nonlocal products
        products += x.shape[0]
        return multiply(x, *args)

    monkeypatch.setattr(LOG_PROB, "_logits", counted)

    def gradients_of(together: bool) -> tuple[Tensor, ...]:
        h = hidden.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        scores = score_filtered(h, w, token, rows, PROGRAM)
        plain = scores
        if not together:
            plain = ops.log_prob(h, w, token, program=PROGRAM, inverse_temperature_R=rows.inverse_temperature_R)
        out = torch.where(scores.log_prob_R == -torch.inf, 0.0, scores.log_prob_R)
        total = out.sum() + plain.entropy_R.square().sum() + plain.lse_R.sum()
        return (out.detach(), plain.lse_R.detach(), plain.entropy_R.detach(), *torch.autograd.grad(total, (h, w)))

    once = gradients_of(True)
    assert products == 3 * count  # forward, and once behind each distribution
    assert_same_bytes(once, gradients_of(False), "two calls")
    assert products == 3 * count + 4 * count
    with pytest.raises(LawBroken):  # the control: another distribution's entropy
        assert_same_bytes(once[2], ops.log_prob(hidden, weight, token, program=PROGRAM).entropy_R)


def test_replay_gradient_against_float64() -> None:
    program = resolve("transformers", "cpu", torch.float32)
    vocabulary = 257
    count = 14
    hidden, weight = operands(count, vocabulary, 24, torch.float32)
    rows = rows_of([MIXED[r % 7] for r in range(count)])
    x = ops.logits(hidden, weight, program=program)
    target = sample(x, rows, program).token_R
    target[3] = x[3].argmin()  # outside the support of top_k 3
    scaled = x * rows.inverse_temperature_R[:, None]
    lse = ops.log_prob_of_logits(scaled, target, program=program).lse_R
    kept = support(scaled, lse, rows, program)
    upstream = torch.randn(count, generator=torch.Generator().manual_seed(1))

    def ours(g: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = hidden.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        scored = score_filtered(h, w, target, rows, program).log_prob_R
        return (scored.detach(), *torch.autograd.grad(scored, (h, w), g))

    def exact(mask: Tensor) -> tuple[Tensor, Tensor]:
        h = hidden.double().requires_grad_()
        w = weight.double().requires_grad_()
        wide = (h @ w.T) * rows.inverse_temperature_R.double()[:, None]
        scored = wide.gather(1, target[:, None])[:, 0] - wide.masked_fill(~mask, -torch.inf).logsumexp(1)
        live = torch.arange(count) != 3
        return torch.autograd.grad(scored[live], (h, w), upstream[live].double())  # type: ignore[return-value]

    scored, grad_hidden, grad_weight = ours(upstream, target)
    assert scored[3] == -torch.inf and scored.isfinite().sum() == count - 1
    assert (grad_hidden[3] == 0).all() and (grad_hidden[[0, 1, 2, 4]].abs().amax(1) > 0).all()
    for found, wanted in zip((grad_hidden, grad_weight), exact(kept), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):  # control: a gradient through the unfiltered softmax
        torch.testing.assert_close(grad_hidden.double(), exact(torch.ones_like(kept))[0], rtol=1e-4, atol=1e-5)
    blown = upstream.clone()
    blown[3] = torch.nan  # what a loss may send back through a score of -inf
    assert_same_bytes(list(ours(blown, target)[1:]), [grad_hidden, grad_weight], "rows of -inf")


def test_samples_of_one_request_have_seeds_of_their_own() -> None:
    """Sample 0 keeps the seed that was asked for; no two of 4000 agree, and the next seed's samples are others too."""
    assert [seed_of_sample(seed, 0) for seed in (0, 7, 2**64 - 1)] == [0, 7, 2**64 - 1]
    derived = {seed_of_sample(seed, index) for seed in (0, 1, 7, 2**64 - 1) for index in range(1000)}
    assert len(derived) == 4000 and all(0 <= seed < 1 << 64 for seed in derived)
    assert seed_of_sample(7, 3) == 2349298555761033711
