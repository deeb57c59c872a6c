"""What other trainers pass to `forward`: taken where it agrees with the rest, the bytes unmoved, or refused in a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from zoo.common.rollouts import SamplingParams
from zoo.common.training import ModelOutput
from zoo.qwen3 import SIZES, Qwen3ForRL
from zoo.testing import LawBroken, assert_same_bytes

CONFIG = replace(SIZES["tiny"], layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, vocabulary=300, positions=24)
IDS = torch.arange(3, 13)
STARTS = torch.tensor([0, 4, 10])
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])
LABELS = IDS.clone().index_fill(0, torch.tensor([2]), -100)
SHIFTED = torch.tensor([4, -100, 6, -100, 8, 9, 10, 11, 12, -100])  # label r + 1 inside a document
PADDED = torch.tensor([[9, 9, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])


@pytest.fixture(scope="module")
def model() -> Qwen3ForRL:
    return Qwen3ForRL.from_config(CONFIG, seed=3, device="cpu")


@pytest.fixture(scope="module")
def plain(model: Qwen3ForRL) -> ModelOutput:
    return model(IDS, cu_seqlens=STARTS, labels=LABELS)


WAYS: dict[str, Callable[[Qwen3ForRL], ModelOutput]] = {
    "lists": lambda m: m(IDS.tolist(), cu_seqlens=STARTS.tolist(), labels=LABELS.tolist()),
    "shift_labels": lambda m: m(IDS, cu_seqlens=STARTS, shift_labels=SHIFTED),
    "positions beside bounds": lambda m: m(IDS, cu_seqlens=STARTS, labels=LABELS, position_ids=POSITIONS),
    "positions alone": lambda m: m(IDS, labels=LABELS, position_ids=POSITIONS),
    "one line, as verl": lambda m: m(
        IDS[None],
        attention_mask=None,
        position_ids=POSITIONS[None],
        cu_seqlens=STARTS,
        cu_seqlens_cpu=STARTS,
        shift_labels=SHIFTED[None],
        temperature=1.0,
        use_cache=False,
        return_dict=True,
    ),
    "one line, as miles and a flattening collator": lambda m: m(input_ids=IDS[None], position_ids=POSITIONS[None], labels=LABELS[None]),
    "one line, as TRL without padding": lambda m: m(
        IDS[None],
        labels=LABELS[None],
        position_ids=POSITIONS[None],
        cu_seq_lens_q=STARTS,
        cu_seq_lens_k=STARTS.int(),
        max_length_q=6,
        max_length_k=6,
        output_attentions=False,
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_same_documents_in_other_words_give_the_same_bytes(model: Qwen3ForRL, plain: ModelOutput, name: str) -> None:
    out = WAYS[name](model)
    for part in ("loss", "log_probs", "entropy", "hidden_states", "logits"):
        assert_same_bytes(out[part].reshape(plain[part].shape), plain[part], part)
    if "one line" in name:
        assert out.log_probs.shape == out.entropy.shape == (1, 10) and out.logits.shape == (1, 10, 300)


def test_log_probs_and_entropy_are_those_of_score(model: Qwen3ForRL, plain: ModelOutput) -> None:
    scores = model.score(IDS.tolist(), STARTS.tolist(), entropy=True)
    assert_same_bytes(plain.entropy, scores.entropy_R)
    assert_same_bytes(plain.log_probs, torch.where(SHIFTED == -100, 0.0, scores.log_prob_R))
    with pytest.raises(LawBroken):  # the control: a label that is no target is seen
        assert_same_bytes(plain.log_probs, scores.log_prob_R)
    assert_same_bytes(plain.loss, -plain.log_probs.sum() / 7)


def test_a_batch_with_padding_has_them_where_its_tokens_are(model: Qwen3ForRL) -> None:
    positions = (MASK.cumsum(1) - 1).masked_fill(MASK == 0, 1)  # as transformers makes them
    out = model(PADDED, attention_mask=MASK, labels=PADDED, position_ids=positions, use_cache=False)
    flat = model(IDS, cu_seqlens=STARTS, labels=IDS)
    assert_same_bytes(out.log_probs[MASK.bool()], flat.log_probs)
    assert_same_bytes(out.entropy[MASK.bool()], flat.entropy)
    assert not out.log_probs[MASK == 0].any() and not out.entropy[MASK == 0].any()
    assert_same_bytes(out.loss, flat.loss)


@pytest.mark.parametrize(
    "given",
    [0.7, torch.tensor(0.7), torch.tensor([0.7], dtype=torch.float64), torch.full((10,), 0.7), torch.full((10,), 0.7, dtype=torch.float64)],
)
def test_a_temperature_is_the_sampler_s(model: Qwen3ForRL, given: Any) -> None:
    out = model(IDS, cu_seqlens=STARTS, shift_labels=SHIFTED.clamp(min=0), temperature=given)
    scores = model.score(IDS, STARTS, SHIFTED.clamp(min=0), SamplingParams(temperature=0.7), entropy=True)
    assert_same_bytes(out.log_probs, scores.log_prob_R)
    assert_same_bytes(out.entropy, scores.entropy_R)
    with pytest.raises(LawBroken):
        assert_same_bytes(model(IDS, cu_seqlens=STARTS, shift_labels=SHIFTED.clamp(min=0)).log_probs, scores.log_prob_R)


def test_every_temperature_in_fp32_stands_for_its_decimal(model: Qwen3ForRL) -> None:
    """A sampler's 0.3 is not the FP32 number nearest to it, and the reciprocals of the two may round apart."""
    from zoo.common.inputs import _inverse
    from zoo.common.row_sampling import DrawParams

    decimals = [n / 100 for n in range(1, 200)]
    narrow = [_inverse(float(torch.tensor(value)), torch.float32) for value in decimals]
    assert narrow == [DrawParams(temperature=value).inverse_temperature for value in decimals]
    apart = [torch.tensor(1 / value).item() != torch.tensor(1 / float(torch.tensor(value))).item() for value in decimals]
    assert any(apart)  # the control


def test_temperatures_of_each_token(model: Qwen3ForRL) -> None:
    mixed = torch.where(torch.arange(10) < 4, 1.0, 2.0)
    out = model(IDS, cu_seqlens=STARTS, shift_labels=SHIFTED, temperature=mixed)
    each = model.score(IDS, STARTS, sampling=[SamplingParams(), SamplingParams(temperature=2.0)])
    assert_same_bytes(out.log_probs, torch.where(SHIFTED == -100, 0.0, each))
    out.log_probs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()


BAD: dict[str, tuple[Callable[[Qwen3ForRL], Any], str]] = {
    "other positions": (
        lambda m: m(IDS, cu_seqlens=STARTS, position_ids=torch.arange(10)),
        "position_ids has 4 for token 0 of document 1, by cu_seqlens it is at 0",
    ),
    "positions of padding": (
        lambda m: m(PADDED, attention_mask=MASK, position_ids=torch.arange(6).expand(2, 6)),
        "position_ids has 2 for token 0 of document 0, by attention_mask it is at 0",
    ),
    "positions of several documents in a line": (
        lambda m: m(PADDED, position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]] * 2)),
        "position_ids has 0 for token 2 of document 0, by a batch without a mask it is at 2",
    ),
    "positions that begin late": (
        lambda m: m(IDS, position_ids=POSITIONS + 1),
        "position_ids begin at 1: a document's first token is at 0",
    ),
    "positions that jump": (
        lambda m: m(IDS[None], position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 4, 5, 6]])),
        "position_ids has 4 for token 3 of document 1",
    ),
    "positions of axes": (lambda m: m(PADDED, position_ids=torch.zeros(3, 2, 6).long()), r"position_ids has shape \(3, 2, 6\)"),
    "other bounds": (
        lambda m: m(IDS, cu_seqlens=STARTS, cu_seqlens_cpu=torch.tensor([0, 5, 10])),
        r"cu_seqlens and cu_seqlens_cpu bound other documents: \[0, 4, 10\] and \[0, 5, 10\]",
    ),
    "a longest that is too short": (
        lambda m: m(IDS, cu_seqlens=STARTS, max_length_q=5),
        "max_length_q is 5, the longest document has 6 tokens",
    ),
    "two kinds of labels": (lambda m: m(IDS, cu_seqlens=STARTS, labels=IDS, shift_labels=IDS), "one row apart: give one of them"),
    "shift_labels of another shape": (
        lambda m: m(IDS, cu_seqlens=STARTS, shift_labels=IDS[:9]),
        r"shift_labels has shape \(9,\), input_ids \(10,\)",
    ),
    "a mask of a line": (
        lambda m: m(IDS[None], cu_seqlens=STARTS, attention_mask=torch.ones(1, 10)),
        "attention_mask marks padding of a batch",
    ),
    "a cache": (lambda m: m(PADDED, use_cache=True), "use_cache=True: a trainer keeps no cache"),
    "a tuple": (lambda m: m(PADDED, return_dict=False), "return_dict=False: what forward returns is read by name and by item"),
    "attention weights": (lambda m: m(PADDED, output_attentions=True), "output_attentions=True: attention weights are never held"),
    "embeddings": (lambda m: m(PADDED, inputs_embeds=torch.ones(2, 6, 32)), "inputs_embeds=.*: documents begin as token ids"),
    "an unknown name": (lambda m: m(PADDED, pixel_values=None), "forward takes no pixel_values; beside its tokens it takes shift_labels"),
    "no temperature": (lambda m: m(PADDED, labels=PADDED, temperature=0), "temperature must be between 1e-05 and 100000, not 0.0"),
    "a text of temperature": (lambda m: m(PADDED, labels=PADDED, temperature="hot"), "temperature must be a number, not 'hot'"),
    "temperatures of sequences": (
        lambda m: m(PADDED, labels=PADDED, temperature=torch.ones(2)),
        r"temperature is one number or one a token, \[2, 6\]; it has shape \[2\]",
    ),
    "a cache in the config": (lambda m: setattr(m.config, "use_cache", True), "use_cache=True: a trainer keeps no cache"),
    "offloading": (lambda m: m.activation_checkpointing_enable(offload=True), "nothing offloaded, not every_n_layers=1, offload=True"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_agree_is_refused_in_one_sentence(model: Qwen3ForRL, plain: ModelOutput, name: str) -> None:
    call, sentence = BAD[name]
    with pytest.raises(ValueError, match=sentence) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert_same_bytes(model(IDS, cu_seqlens=STARTS, labels=LABELS).loss, plain.loss)


def test_the_output_is_read_by_name_by_item_and_as_a_tuple(model: Qwen3ForRL, plain: ModelOutput) -> None:
    assert plain["loss"] is plain.loss is plain[0] and plain["log_probs"] is plain.log_probs
    assert plain[1] is plain.logits is plain["logits"] and plain[1:] == (plain.logits,)
    assert set(plain) == set(plain.keys()) == {"loss", "logits", "log_probs", "entropy", "hidden_states"}
    bare = model(IDS, cu_seqlens=STARTS)
    assert bare[0] is bare.logits and "loss" not in bare and "entropy" not in bare and bare.loss is None
    with pytest.raises(KeyError, match="no 'attentions'"):
        plain["attentions"]
    with pytest.raises(IndexError):
        bare[1]


def test_what_trainers_look_for_in_the_signature_and_the_model(model: Qwen3ForRL) -> None:
    names = inspect.signature(model.forward).parameters
    assert {"input_ids", "cu_seqlens", "attention_mask", "position_ids", "labels"} <= set(names)  # verl looks for cu_seqlens
    assert [name for name in names if "label" in name] == ["labels"]  # Trainer takes every such name for one that batches must have
    assert model.device == torch.device("cpu") and model.dtype == torch.bfloat16
    everything = sum(p.numel() for p in model.parameters())
    assert model.num_parameters() == model.num_parameters(only_trainable=True) == everything
    assert model.num_parameters(exclude_embeddings=True) == everything - 2 * 300 * 32


def test_use_cache_alone_is_writable_in_a_config(model: Qwen3ForRL) -> None:
    before = repr(model.config)
    model.config.use_cache = False
    assert repr(model.config) == before and model.config.use_cache is False and model.config == replace(model.config)
    with pytest.raises(AttributeError):
        model.config.hidden = 64
