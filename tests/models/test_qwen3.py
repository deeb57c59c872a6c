"""Whole Qwen3 models: every way to push the same tokens gives the same bytes, and each comparison has a fault that it catches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import planted
import pytest
import torch
from model_harness import (
    Models,
    assert_alone_is_packed,
    assert_modes_agree,
    assert_rows_and_splits,
    assert_same_states,
    counted,
    other_in_recomputation,
    other_in_training,
    other_under_grad,
    packed,
    pushed,
    rows_in_training,
    scores,
    targets_of,
)
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.rows import Rows
from zoo.qwen3 import MOE_SIZES, SIZES, Qwen3Config, Qwen3ForRL, Qwen3ForServing
from zoo.testing import LawBroken, assert_same_bytes, split_plans

SMALL = replace(SIZES["tiny"], layers=2, heads=8, head_dim=16, hidden=64, intermediate=96, vocabulary=300)
CONFIGS: dict[str, Qwen3Config] = {
    "dense": SIZES["tiny"],
    "moe": MOE_SIZES["tiny"],
    "tied": replace(SMALL, tied=True),
    # sums over 1024 and more, whose order BF16 rounding does not hide
    "wide": replace(SMALL, hidden=1024, intermediate=1056, layers=1, kv_heads=1),
    "unnormalised": replace(MOE_SIZES["tiny"], layers=1, experts=5, experts_per_token=3, renormalise=False, vocabulary=257),
    **{f"ratio {ratio}": replace(SMALL, kv_heads=8 // ratio) for ratio in (1, 2, 4, 8)},
}
LENGTHS = (40, 1, 23)
FAULTS = (planted.narrow_vocabulary_group, planted.late_rope_table, planted.twice_rounded_residual)
MODELS = Models(CONFIGS, Qwen3ForRL, Qwen3ForServing)
fresh = MODELS.fresh
trainer = MODELS.trainer
server = MODELS.server


def documents_of(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return MODELS.documents(name, lengths)


class TestWaysToPush:
    """Alone, packed, whole, in chunks, a row at a time, in training."""

    @pytest.mark.parametrize("name", CONFIGS)
    def test_decode_is_prefill_is_training(self, name: str) -> None:
        documents = documents_of(name)
        model = server(name)
        trained = scores(trainer(name), documents)
        plans = split_plans(LENGTHS, edges=(16,))
        chosen = ("whole", "a row at a time", "in pieces of 7", "cut at 17", "one sequence after another", "at random")
        cached = pushed(model, documents, plans["whole"])[1]
        for plan in chosen if name in ("dense", "moe") else chosen[:3]:
            found, seen = pushed(model, documents, plans[plan])
            assert_same_bytes(found, trained, plan)
            assert_same_states(seen, cached, plan)

    @pytest.mark.parametrize("name", ["dense", "moe"])
    def test_across_an_edge_of_the_key_segments(self, name: str) -> None:
        """Rows on both sides of position 256, the reference's segment; decoded one by one around it."""
        documents = documents_of(name, (262, 31))
        plan = ((250, 31), *[(1, 0)] * 12)
        found, _ = pushed(server(name), documents, plan, 32)
        assert_same_bytes(found, scores(trainer(name), documents))
        one_pass = server(name)
        one_pass.program = replace(one_pass.program, key_segments=())
        for layer in one_pass.model.layers:
            layer.attention.program = one_pass.program
        with pytest.raises(LawBroken):
            assert_same_bytes(pushed(one_pass, documents, plan, 32)[0], scores(trainer(name), documents))

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
    def test_a_planted_fault_is_caught(self, fault: Callable[[Qwen3ForServing], None]) -> None:
        documents = documents_of("dense")
        model = server("dense")
        fault(model)
        with pytest.raises(LawBroken):
            assert_same_bytes(pushed(model, documents, (LENGTHS,))[0], scores(trainer("dense"), documents))

    @pytest.mark.parametrize("name", CONFIGS)
    def test_alone_is_packed(self, name: str) -> None:
        assert_alone_is_packed(trainer(name), documents_of(name))

    def test_alone_is_packed_catches_documents_that_read_each_other(self) -> None:
        documents = documents_of("dense")
        merged = scores(trainer("dense"), [torch.cat(documents)])[0].split(LENGTHS)
        assert_same_bytes(merged[0][:-1], scores(trainer("dense"), documents[:1])[0][:-1])
        with pytest.raises(LawBroken):
            assert_same_bytes(merged[2][:-1], scores(trainer("dense"), documents[2:])[0][:-1])

    @pytest.mark.parametrize("config", [SIZES["tiny"], MOE_SIZES["tiny"]], ids=["dense", "moe"])
    def test_the_transformers_program_keeps_rows_and_splits(self, config: Qwen3Config) -> None:
        names = {"seed": 1, "device": "cpu", "program": "transformers"}
        model = Qwen3ForRL.from_config(config, **names)
        serving = Qwen3ForServing.from_config(config, **names)
        documents = documents_of("dense")
        plans = split_plans(LENGTHS, edges=(16,))
        together = assert_rows_and_splits(model, serving, documents, {n: plans[n] for n in ("whole", "a row at a time", "at random")})
        with pytest.raises(LawBroken):  # the control: another program is another arithmetic
            assert_same_bytes(scores(trainer("dense"), documents), together)

    @pytest.mark.parametrize("name", ["dense", "moe"])
    def test_a_prompt_token_matters_to_what_follows_and_to_nothing_before(self, name: str) -> None:
        document = documents_of(name)[0]
        changed = document.clone()
        changed[11] = (changed[11] + 1) % CONFIGS[name].vocabulary
        before = scores(trainer(name), [document])[0]
        after = scores(trainer(name), [changed])[0]
        assert_same_bytes(after[:10], before[:10])
        assert (after[11:-1] != before[11:-1]).all()
        served, served_changed = (pushed(server(name), [d], ((20,), *[(1,)] * 20))[0][0] for d in (document, changed))
        assert_same_bytes(served_changed[:10], served[:10])
        assert (served_changed[11:-1] != served[11:-1]).all()


class TestModes:
    @pytest.mark.parametrize("name", ["dense", "moe", "tied"])
    def test_no_mode_matters(self, name: str) -> None:
        assert_modes_agree(fresh(name), documents_of("tied"))

    @pytest.mark.parametrize("fault", [other_under_grad, other_in_training, other_in_recomputation])
    def test_a_mode_that_matters_is_caught(self, fault: Callable[..., Any]) -> None:
        model = fresh("tied")
        model.model.layers[1].input_norm.register_forward_hook(fault)
        with pytest.raises(LawBroken):
            assert_modes_agree(model, documents_of("tied"))

    def test_checkpointing_does_recompute(self) -> None:
        ids, starts = packed(documents_of("tied"))
        counts = {}
        for checkpointing in (False, True):
            model = fresh("tied")
            model.gradient_checkpointing = checkpointing
            with counted() as seen:
                model.score(ids, starts).sum().backward()
            counts[checkpointing] = seen["attention"]
        assert counts == {False: 2 * len(ids), True: 4 * len(ids)}

    @pytest.mark.parametrize("name", ["dense", "moe"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_autocast_does_not_matter(self, name: str, checkpointing: bool) -> None:
        """Trainers turn mixed precision on by themselves; here the program names the dtypes."""
        ids, starts = packed(documents_of(name))
        model = fresh(name)
        model.gradient_checkpointing = checkpointing

        def everything() -> Any:
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                out = model(ids, cu_seqlens=starts, labels=ids)
                scored = model.score(ids, starts)
                logits = out.logits
            (out.loss - scored.mean() + logits.mean()).backward()
            return out.loss, scored, logits, {key: p.grad.clone() for key, p in model.named_parameters()}

        enabled = False
        expected = everything()
        enabled = True
        assert_same_bytes(everything(), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(LawBroken):  # the control: the loop behind the public call
            bare = model.hidden_rows(ids, Rows.packed(starts))
            assert_same_bytes(bare, model(ids, cu_seqlens=starts).hidden_states)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_the_default_dtype_does_not_matter(self, dtype: torch.dtype) -> None:
        documents = documents_of("moe")
        expected = scores(trainer("moe"), documents)
        try:
            torch.set_default_dtype(dtype)
            found = scores(fresh("moe"), documents)
            served = pushed(server("moe"), documents, (LENGTHS,))[0]
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same_bytes(found, expected)
        assert_same_bytes(served, expected)


def _all_bytes(name: str, change: Callable[[Qwen3ForRL], None] | None = None) -> Any:
    model = fresh(name)
    if change is not None:
        change(model)
    documents = documents_of(name)
    found = scores(model, documents)
    (-torch.cat(found).mean()).backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    return found, gradients, pushed(server(name), documents, split_plans(LENGTHS, edges=(16,))["in pieces of 7"])


@pytest.fixture(scope="module")
def clean_bytes() -> dict[str, Any]:
    """What the models give where torch.empty is as the allocator left it. Made before any test poisons it."""
    return {name: _all_bytes(name) for name in ("dense", "moe")}


class TestFreshMemory:
    """A wider fixture comes first, so `clean_bytes` never sees the NaN of `poisoned_empty`."""

    @pytest.mark.parametrize("name", ["dense", "moe"])
    def test_no_byte_is_left_unwritten(self, clean_bytes: dict[str, Any], poisoned_empty: None, name: str) -> None:
        assert torch.empty(3).isnan().all()
        assert_same_bytes(_all_bytes(name), clean_bytes[name])

    def test_an_unwritten_byte_is_caught(self, clean_bytes: dict[str, Any], poisoned_empty: None) -> None:
        def forget(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            out = torch.empty_like(output)
            out[:, 1:] = output[:, 1:]
            return out

        with pytest.raises(LawBroken):
            assert_same_bytes(_all_bytes("dense", lambda m: m.model.layers[0].mlp.register_forward_hook(forget)), clean_bytes["dense"])


class TestRowsThatEnterEachOp:
    CALLS: ClassVar[dict[str, dict[str, int]]] = {  # calls of each op while a row passes through a tiny model of three layers
        "dense": {"embed": 1, "rms_norm": 7, "linear": 12, "norm_rope": 3, "attention": 3, "swiglu": 3},
        "moe": {"embed": 1, "rms_norm": 7, "linear": 9, "norm_rope": 3, "attention": 3, "route": 3, "experts": 3, "combine": 3},
    }

    @pytest.mark.parametrize("name", CALLS)
    def test_decoding_pushes_one_row_per_token(self, name: str) -> None:
        document = documents_of(name)[0]
        prompt = 13
        drawn = 9
        with counted() as seen:
            pushed(server(name), [document[: prompt + drawn]], ((prompt,), *[(1,)] * drawn))
        del seen["log_prob"]
        assert seen == {op: calls * (prompt + drawn) for op, calls in self.CALLS[name].items()}

    @pytest.mark.parametrize("name", CALLS)
    def test_training_pushes_every_token_once(self, name: str) -> None:
        assert rows_in_training(trainer(name), documents_of(name)) == {op: n * sum(LENGTHS) for op, n in self.CALLS[name].items()}

    def test_a_hidden_rerun_is_seen(self) -> None:
        document = documents_of("dense")[0]
        prompt = 13
        drawn = 9
        with counted() as seen:
            for length in range(prompt, prompt + drawn + 1):  # no cache: the whole prefix again for every token
                pushed(server("dense"), [document[:length]], ((length,),))
        assert seen["attention"] > self.CALLS["dense"]["attention"] * (prompt + drawn)


class TestForwardDoor:
    @staticmethod
    def padded(documents: list[Tensor], left: bool) -> tuple[Tensor, Tensor]:
        width = max(len(d) for d in documents) + 2
        ids = torch.full((len(documents), width), 5)
        mask = torch.zeros(len(documents), width, dtype=torch.int64)
        for row, document in enumerate(documents):
            where = slice(width - len(document), width) if left else slice(0, len(document))
            ids[row, where] = document
            mask[row, where] = 1
        return ids, mask

    @pytest.mark.parametrize("name", ["dense", "moe", "tied"])
    @pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
    def test_padded_is_packed(self, name: str, left: bool) -> None:
        documents = documents_of(name)
        ids, mask = self.padded(documents, left)
        flat, starts = packed(documents)
        out = trainer(name)(ids, attention_mask=mask)
        expected = trainer(name)(flat, cu_seqlens=starts)
        keep = mask.bool()
        assert out.hidden_states.shape == (*ids.shape, CONFIGS[name].hidden) and not out.hidden_states[~keep].any()
        assert_same_bytes(out.hidden_states[keep], expected.hidden_states)
        assert out.logits.shape == (*ids.shape, CONFIGS[name].vocabulary) and out.logits.dtype == torch.float32
        assert_same_bytes(out.logits[keep], expected.logits)
        assert out.loss is None and out["logits"] is out.logits and out[0] is out.logits
        with pytest.raises(LawBroken):  # the control: without the mask a left pad is read
            whole = trainer(name)(ids.flip(1) if not left else ids)
            assert_same_bytes(whole.hidden_states[keep.flip(1) if not left else keep], expected.hidden_states)

    @pytest.mark.parametrize("name", ["dense", "tied"])
    def test_logits_are_those_that_score_reduces(self, name: str) -> None:
        documents = documents_of(name)
        ids, starts = packed(documents)
        model = trainer(name)
        targets = torch.cat([targets_of(d) for d in documents])
        logits = model(ids, cu_seqlens=starts).logits
        again = ops.log_prob_of_logits(logits.detach(), targets, program=model.program)
        assert_same_bytes(again.log_prob_R, model.score(ids, starts, targets))
        full = model.score(ids, starts, targets, entropy=True, top_k=4)
        assert_same_bytes((full.log_prob_R, full.entropy_R), (again.log_prob_R, again.entropy_R))
        assert_same_bytes(full.top_ids_RK, logits.sort(dim=1, descending=True, stable=True)[1][:, :4].contiguous())
        with pytest.raises(LawBroken):
            assert_same_bytes(again.log_prob_R, model.score(ids, starts, targets.roll(1)))

    @pytest.mark.parametrize("name", ["dense", "moe"])
    def test_loss_is_the_mean_of_minus_score(self, name: str) -> None:
        documents = documents_of(name)
        model = trainer(name)
        ids, mask = self.padded(documents, False)
        flat, starts = packed(documents)
        labels = torch.where(mask.bool(), ids, -100)
        scored = model.score(flat, starts)
        count = len(flat) - len(documents)  # a document's last row has no next token
        expected = -scored.sum() / count
        assert_same_bytes(model(ids, attention_mask=mask, labels=labels).loss, expected)
        assert_same_bytes(model(flat, cu_seqlens=starts, labels=flat).loss, expected)
        assert_same_bytes(model(flat, cu_seqlens=starts, labels=flat, num_items_in_batch=7).loss, -scored.sum() / 7)
        # only the second half of the first document: label r + 1 belongs to row r
        partial = torch.full_like(flat, -100)
        partial[20:40] = flat[20:40]
        chosen = torch.zeros_like(scored)
        chosen[19:39] = scored[19:39]
        assert_same_bytes(model(flat, cu_seqlens=starts, labels=partial).loss, -chosen.sum() / 20)
        with pytest.raises(LawBroken):  # the control: labels of the row itself
            assert_same_bytes(model(flat, cu_seqlens=starts, labels=flat.roll(1)).loss, expected)

    def test_default_targets_are_the_next_tokens(self) -> None:
        documents = documents_of("dense")
        model = trainer("dense")
        ids, starts = packed(documents)
        given = model.score(ids, starts, torch.cat([targets_of(d) for d in documents]))
        default = model.score(ids, starts)
        last = starts[1:] - 1
        assert default[last].tolist() == [0.0] * len(documents) and (given[last] < 0).all()
        given = given.index_fill(0, last, 0.0)
        assert_same_bytes(default, given)

    def test_a_batch_without_any_label_has_no_loss(self) -> None:
        ids, starts = packed(documents_of("dense"))
        out = trainer("dense")(ids, cu_seqlens=starts, labels=torch.full_like(ids, -100), num_items_in_batch=5)
        assert out.loss.item() == 0.0
        assert trainer("dense")(ids, cu_seqlens=starts, labels=torch.full_like(ids, -100)).loss.item() == 0.0


class TestTiedEmbeddings:
    def test_one_parameter_two_uses(self) -> None:
        model = fresh("tied")
        assert model.model.head_weight_VD is model.model.embed.weight and "model.head.weight" not in dict(model.named_parameters())
        ids, starts = packed(documents_of("tied"))
        model.score(ids, starts).sum().backward()
        unused = torch.ones(CONFIGS["tied"].vocabulary, dtype=torch.bool)
        unused[ids] = False
        assert model.model.embed.weight.grad[unused].any(), "tokens that were never read still get the head's gradient"
        untied = Qwen3ForRL.from_config(replace(CONFIGS["tied"], tied=False), seed=1, device="cpu")
        untied.score(ids, starts).sum().backward()
        assert not untied.model.embed.weight.grad[unused].any() and untied.model.head.weight.grad[unused].any()
