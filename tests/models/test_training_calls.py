"""What the training model refuses, with both numbers in one sentence, and the gradients of what else it reports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from zoo.common.rollouts import SamplingParams
from zoo.common.training import Scores
from zoo.qwen3 import SIZES, Qwen3ForRL
from zoo.testing import assert_same_bytes

CONFIG = replace(SIZES["tiny"], layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, vocabulary=300, positions=24)
IDS = torch.arange(10)
STARTS = torch.tensor([0, 4, 10])
PADDED = torch.arange(12).view(2, 6)


@pytest.fixture(scope="module")
def model() -> Qwen3ForRL:
    return Qwen3ForRL.from_config(CONFIG, seed=3, device="cpu")


def with_id(value: int) -> Tensor:
    return IDS.clone().index_fill(0, torch.tensor([3]), value)


BAD: dict[str, tuple[Callable[[Qwen3ForRL], Any], str]] = {
    "id at the vocabulary": (lambda m: m.score(with_id(300), STARTS), "token id 300 is outside the vocabulary of 300"),
    "negative id": (lambda m: m.score(with_id(-1), STARTS), "token id -1 is outside the vocabulary of 300"),
    "forward, id": (lambda m: m(with_id(999), cu_seqlens=STARTS), "token id 999 is outside the vocabulary of 300"),
    "padded id": (lambda m: m(PADDED + 290), "token id 301 is outside the vocabulary of 300"),
    "target id": (lambda m: m.score(IDS, STARTS, with_id(512)), "token id 512 is outside the vocabulary of 300"),
    "negative target": (lambda m: m.score(IDS, STARTS, with_id(-7)), "token id -7 is outside the vocabulary of 300"),
    "label": (lambda m: m(IDS, cu_seqlens=STARTS, labels=with_id(300)), "token id 300 is outside the vocabulary of 300"),
    "negative label": (lambda m: m(IDS, cu_seqlens=STARTS, labels=with_id(-1)), "token id -1 is outside the vocabulary of 300"),
    "target shape": (lambda m: m.score(IDS, STARTS, IDS[:9]), r"target_ids has shape \(9,\), input_ids \(10,\)"),
    "label shape": (lambda m: m(PADDED, labels=PADDED[:, :5]), r"labels has shape \(2, 5\), input_ids \(2, 6\)"),
    "no documents": (lambda m: m(IDS), r"input_ids \[R\] need cu_seqlens"),
    "both kinds of bounds": (lambda m: m(PADDED, cu_seqlens=STARTS), r"cu_seqlens .* \[2, 6\]"),
    "mask of packed rows": (lambda m: m(IDS, cu_seqlens=STARTS, attention_mask=torch.ones(10)), r"attention_mask .* \[10\]"),
    "three dims": (lambda m: m(PADDED[None]), r"input_ids .* \[1, 2, 6\]"),
    "padded ids at score": (lambda m: m.score(PADDED, STARTS), r"input_ids .* \[2, 6\]"),
    "descending": (lambda m: m.score(IDS, torch.tensor([0, 7, 5, 10])), "cu_seqlens must ascend: 7 is followed by 5"),
    "empty document": (lambda m: m.score(IDS, torch.tensor([0, 4, 4, 10])), "cu_seqlens must ascend: 4 is followed by 4"),
    "late start": (lambda m: m.score(IDS, torch.tensor([2, 10])), r"cu_seqlens must start at 0 .* got \[2, 10\]"),
    "no document at all": (lambda m: m.score(IDS[:0], torch.tensor([0])), r"at least one document, got \[0\]"),
    "early end": (lambda m: m.score(IDS, torch.tensor([0, 9])), "cu_seqlens ends at 9, there are 10 tokens"),
    "late end": (lambda m: m(IDS, cu_seqlens=torch.tensor([0, 11])), "cu_seqlens ends at 11, there are 10 tokens"),
    "too long": (
        lambda m: m.score(torch.zeros(30, dtype=torch.int64), torch.tensor([0, 5, 30])),
        "a document of 25 tokens is longer than the position table of 24",
    ),
    "too long, padded": (
        lambda m: m(torch.zeros(1, 25, dtype=torch.int64)),
        "a document of 25 tokens is longer than the position table of 24",
    ),
    "mask with a hole": (
        lambda m: m(PADDED, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])),
        "attention_mask of sequence 1 has a hole at position 2",
    ),
    "mask of another shape": (
        lambda m: m(PADDED, attention_mask=torch.ones(2, 5)),
        r"attention_mask has shape \(2, 5\), input_ids \(2, 6\)",
    ),
    "mask of zeros": (
        lambda m: m(PADDED, attention_mask=torch.tensor([[1] * 6, [0] * 6])),
        "sequence 1 of the batch has no token",
    ),
    "float ids": (lambda m: m.score(IDS.float(), STARTS), "input_ids must be an int32 or int64 tensor, not torch.float32"),
    "bool ids": (lambda m: m(PADDED.bool()), "input_ids must be an int32 or int64 tensor, not torch.bool"),
    "byte ids": (lambda m: m.score(IDS.to(torch.uint8), STARTS), "input_ids must be an int32 or int64 tensor, not torch.uint8"),
    "a list of fractions": (lambda m: m.score([1.0] * 10, STARTS), "input_ids must be an int32 or int64 tensor, not torch.float32"),
    "a list of texts": (lambda m: m.score(["a"], STARTS), "input_ids must hold integers, in lists of equal lengths, not"),
    "a ragged list": (lambda m: m([[1, 2], [3]]), "input_ids must hold integers, in lists of equal lengths, not"),
    "float targets": (lambda m: m.score(IDS, STARTS, IDS.double()), "target_ids must be an int32 or int64 tensor, not torch.float64"),
    "float labels": (lambda m: m(PADDED, labels=PADDED.half()), "labels must be an int32 or int64 tensor, not torch.float16"),
    "float bounds": (lambda m: m.score(IDS, torch.tensor([0, 4.9, 10])), "cu_seqlens must be an int32 or int64 tensor, not torch.float32"),
    "a list of wrong bounds": (lambda m: m.score(IDS, [0, 4, 9]), "cu_seqlens ends at 9, there are 10 tokens"),
    "bounds of two dims": (lambda m: m.score(IDS, STARTS[None]), r"cu_seqlens must be \[N \+ 1\], not \[1, 3\]"),
    "additive mask": (
        lambda m: m(PADDED, attention_mask=torch.tensor([[0.0, -1e9, 0, 0, 0, 0], [0.0] * 6])),
        "attention_mask holds 0 .padding. and 1 .a token. only, not -1000000000.0",
    ),
    "mask of NaN": (lambda m: m(PADDED, attention_mask=torch.full((2, 6), torch.nan)), "only, not nan"),
    "no items": (lambda m: m(PADDED, labels=PADDED, num_items_in_batch=0), "num_items_in_batch must be above 0 and finite, it is 0"),
    "no items, a tensor": (
        lambda m: m(PADDED, labels=PADDED, num_items_in_batch=torch.tensor(0)),
        "num_items_in_batch must be above 0 and finite, it is 0",
    ),
    "two items": (lambda m: m(PADDED, labels=PADDED, num_items_in_batch=torch.tensor([1, 2])), "must be one number, not a tensor of 2"),
    "text items": (lambda m: m(PADDED, labels=PADDED, num_items_in_batch="3"), "num_items_in_batch must be one number, not str"),
    "true items": (lambda m: m(PADDED, labels=PADDED, num_items_in_batch=True), "num_items_in_batch must be one number, not True"),
    "endless items": (
        lambda m: m(PADDED, labels=PADDED, num_items_in_batch=float("inf")),
        "num_items_in_batch must be above 0 and finite, it is inf",
    ),
    "complex items": (
        lambda m: m(PADDED, labels=PADDED, num_items_in_batch=torch.tensor(1j)),
        "num_items_in_batch must be one number, not 1j",
    ),
    "complex temperatures": (
        lambda m: m(PADDED, temperature=torch.ones(2, 6, dtype=torch.complex64)),
        "temperature must be numbers, not torch.complex64",
    ),
    "bool temperatures": (lambda m: m(PADDED, temperature=torch.ones(2, 6).bool()), "temperature must be numbers, not torch.bool"),
    "checkpointing settings": (
        lambda m: m.gradient_checkpointing_enable({"use_reentrant": True}),
        "has the setting use_reentrant=False only, not {'use_reentrant': True}",
    ),
    "unknown checkpointing settings": (lambda m: m.gradient_checkpointing_enable({"offload": 1}), "not {'offload': 1}"),
    "a dict of sampling": (lambda m: m.score(IDS, STARTS, sampling={"top_p": 0.5}), "sampling must be SamplingParams, .* not dict"),
    "a number of sampling": (lambda m: m.score(IDS, STARTS, sampling=5), "sampling must be SamplingParams, .* not int"),
    "sampling count": (
        lambda m: m.score(IDS, STARTS, sampling=[SamplingParams()] * 3),
        "3 sampling parameters for 2 documents",
    ),
    "top_k": (lambda m: m.score(IDS, STARTS, top_k=301), "top_k must be between 1 and the vocabulary of 300, not 301"),
    "fraction of top_k": (lambda m: m.score(IDS, STARTS, top_k=1.5), "top_k must be an integer, not 1.5"),
    "bool top_k": (lambda m: m.score(IDS, STARTS, top_k=True), "top_k must be an integer, not True"),
    "negative top_k": (lambda m: m.score(IDS, STARTS, top_k=-2), "top_k must be between 1 and the vocabulary of 300, not -2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence_and_changes_nothing(model: Qwen3ForRL, name: str) -> None:
    call, sentence = BAD[name]
    before = model.score(IDS, STARTS)
    with pytest.raises(ValueError, match=sentence) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert_same_bytes(model.score(IDS, STARTS), before)
    assert all(p.grad is None for p in model.parameters())


def test_what_lies_at_the_limit_is_taken(model: Qwen3ForRL) -> None:
    ids = torch.full((24,), 299)
    assert model.score(ids, torch.tensor([0, 24]), ids).isfinite().all()
    assert model(PADDED, attention_mask=torch.tensor([[1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]])).hidden_states.isfinite().all()
    assert model.score(IDS, STARTS, top_k=300).top_ids_RK.shape == (10, 300)
    assert model(IDS, cu_seqlens=STARTS, labels=torch.full_like(IDS, -100), num_items_in_batch=1).loss.item() == 0.0
    assert model.score(IDS, STARTS.int()).shape == (10,)
    masks = [torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).to(kind) for kind in (torch.int64, torch.bool, torch.float32)]
    first, *others = (model(PADDED, attention_mask=mask).hidden_states for mask in masks)
    assert_same_bytes([*others], [first, first])
    narrow = IDS.int()
    assert_same_bytes(model.score(narrow, STARTS, narrow), model.score(IDS, STARTS, IDS))
    loss = model(narrow, cu_seqlens=STARTS, labels=narrow).loss
    assert_same_bytes(loss, model(IDS, cu_seqlens=STARTS, labels=IDS, num_items_in_batch=torch.tensor(8)).loss)


def test_top_log_probs_follow_the_temperature(model: Qwen3ForRL) -> None:
    plain, hot = (model.score(IDS, STARTS, sampling=s, top_k=5, entropy=True) for s in (None, SamplingParams(temperature=2.0)))
    assert isinstance(plain, Scores) and torch.equal(plain.top_ids_RK, hot.top_ids_RK)
    for scores, scale in ((plain, 1.0), (hot, 0.5)):
        logits = model(IDS, cu_seqlens=STARTS).logits.double() * scale
        expected = logits.log_softmax(-1).gather(1, scores.top_ids_RK)
        assert (scores.top_log_prob_RK - expected).abs().max() < 1e-5
        chosen = model.score(IDS, STARTS, scores.top_ids_RK[:, 2], SamplingParams(temperature=1 / scale))
        assert_same_bytes(scores.top_log_prob_RK[:, 2].contiguous(), chosen)


def test_what_is_returned_can_be_flattened(model: Qwen3ForRL) -> None:
    """FSDP2 (before torch 2.13) and DDP look for tensors that way; a result that is one opaque leaf would lose its gradients."""
    out = model(IDS, cu_seqlens=STARTS, labels=IDS)
    leaves, shape = tree_flatten(out)
    assert leaves[0] is out.loss and leaves[1] is out.hidden_states and leaves[0].requires_grad
    again = tree_unflatten(leaves, shape)
    assert_same_bytes(again.logits, out.logits)
    scores = model.score(IDS, STARTS, entropy=True, top_k=2)
    leaves, shape = tree_flatten(scores)
    assert len(leaves) == 4 and sum(t.requires_grad for t in leaves) == 2
    assert_same_bytes(tree_unflatten(leaves, shape), scores)


def entropy_gradients(model: Qwen3ForRL, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy, d/d hidden and d/d head of a weighted sum of entropies in float64, from the model's own final rows."""
    hidden = model(IDS, cu_seqlens=STARTS).hidden_states.detach().double().requires_grad_()
    head = model.model.head_weight_VD.detach().double().requires_grad_()
    log_p = torch.log_softmax(hidden @ head.T * scale, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    weights = torch.linspace(-1, 2, 10, dtype=torch.float64)
    return entropy.detach(), *torch.autograd.grad((entropy * weights).sum(), (hidden, head)), weights


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_and_its_gradient_against_float64(model: Qwen3ForRL, temperature: float) -> None:
    expected, d_hidden, d_head, weights = entropy_gradients(model, 1 / temperature)
    seen: list[Tensor] = []
    handle = model.model.norm.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    model.zero_grad()
    scores = model.score(IDS, STARTS, sampling=SamplingParams(temperature=temperature), entropy=True)
    (scores.entropy_R * weights.float()).sum().backward()
    handle.remove()
    assert scores.entropy_R.dtype == torch.float32 and (scores.entropy_R - expected).abs().max() < 1e-5
    # d logits and each product are rounded to BF16 once (2^-9 of the value): errors add up to well below 2^-7 of the norm
    for found, wanted in ((seen[0], d_hidden), (model.model.head.weight.grad, d_head)):
        error = (found.double() - wanted).norm() / wanted.norm()
        assert 0 < error < 2**-7
    opposite = (seen[0].double() + d_hidden).norm() / d_hidden.norm()
    assert opposite > 1  # the control: the sign of the entropy is seen
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    model.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("asked", [{}, {"entropy": True}])
@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, top_p=0.9, top_k=20)])
def test_a_score_multiplies_with_the_vocabulary_once(
    model: Qwen3ForRL, monkeypatch: pytest.MonkeyPatch, asked: dict[str, bool], params: SamplingParams | None
) -> None:
    module = sys.modules["zoo.common.ops.log_prob"]
    multiply = module._logits
    rows = 0

    def counted(hidden_RD: Tensor, *others: Any) -> Tensor:
        nonlocal rows
        rows += len(hidden_RD)
        return multiply(hidden_RD, *others)

    monkeypatch.setattr(module, "_logits", counted)
    model.score(IDS, STARTS, sampling=params, **asked)
    assert rows == len(IDS)
