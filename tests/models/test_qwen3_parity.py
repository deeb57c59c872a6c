"""Qwen3 against transformers' own classes, and both against a plain float64 model: values, accuracy, gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity_harness
import pytest
import torch
import transformers
from parity_harness import (
    Checkpoints,
    assert_packed_parity,
    assert_parity,
    gradients_of,
    relative,
    theirs,
    whole,
)
from torch import Tensor, nn

from benchmarks.models_float64 import float64_of
from zoo.common import ops
from zoo.common.history import KeyValues
from zoo.common.memory import PackedKeyValues
from zoo.common.ops.contract import Contract
from zoo.common.rows import Rows
from zoo.qwen3 import Qwen3ForRL

TOKENS = 120
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {}),
    "dense, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "dense, one key head": ("Qwen3", {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "moe": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True}),
    "moe, not renormalised": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": False, "num_experts": 5, "num_experts_per_tok": 3}),
}


def build(kind: str, seed: int) -> nn.Module:
    """Every parameter at a realistic scale."""
    family, fields = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.1 * drawn if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("published"), build)


def tokens(seed: int = 0, count: int = TOKENS) -> Tensor:
    return parity_harness.tokens(seed, count)


class TestParity:
    """program="transformers", FP32: 5e-5."""

    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_logits_and_log_probs(self, checkpoint: Checkpoints, kind: str) -> None:
        model = Qwen3ForRL.from_pretrained(checkpoint(kind), program="transformers", dtype=torch.float32, device="cpu")
        assert_parity(model, checkpoint(kind), checkpoint(kind, 1), tokens(), 5e-5)

    @pytest.mark.parametrize("kind", ["dense", "moe"])
    @torch.no_grad()
    def test_padded_and_packed(self, checkpoint: Checkpoints, kind: str) -> None:
        model = Qwen3ForRL.from_pretrained(checkpoint(kind), program="transformers", dtype=torch.float32, device="cpu")
        documents = [tokens(1, 31), tokens(2, 5), tokens(3, 18)]
        reference = theirs(checkpoint(kind), torch.float32)
        assert_packed_parity(model, reference, documents, 5e-5)
        padded = nn.utils.rnn.pad_sequence(documents, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in documents], batch_first=True)
        labels = torch.where(mask.bool(), padded, -100)
        loss = model(padded, attention_mask=mask, labels=labels).loss
        assert abs(loss - reference(padded, attention_mask=mask, labels=labels).loss) <= 5e-5

    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients(self, checkpoint: Checkpoints, kind: str) -> None:
        """FP32 autograd of both; sums of some hundred FP32 products differ by a few times 2^-24 of their terms."""
        ids = tokens()
        model = Qwen3ForRL.from_pretrained(checkpoint(kind), program="transformers", dtype=torch.float32, device="cpu")
        reference = theirs(checkpoint(kind), torch.float32)
        (-model.score(ids, whole(ids))[:-1].mean()).backward()
        reference(ids[None], labels=ids[None]).loss.backward()
        found = gradients_of(model)
        wanted = {name: p.grad for name, p in reference.named_parameters()}
        for name, gradient in unstacked(wanted).items():
            assert relative(found[name], gradient) < 1e-4, name
        assert set(unstacked(wanted)) == set(found)

    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_the_float64_model_is_the_architecture(self, checkpoint: Checkpoints, kind: str) -> None:
        """So that what follows measures errors and not a misunderstanding."""
        model = Qwen3ForRL.from_pretrained(checkpoint(kind), program="transformers", dtype=torch.float32, device="cpu")
        expected = theirs(checkpoint(kind), torch.float32)(tokens()[None]).logits[0]
        assert (float64_of(model).logits(tokens()) - expected).abs().max() <= 5e-5


def unstacked(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' parameters under the names that it saves them by."""
    out = {}
    for name, gradient in gradients.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(gradient):
                for part, half in zip(("gate", "up"), both.chunk(2)):
                    out[name.replace("gate_up_proj", f"{e}.{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): part for e, part in enumerate(gradient)}
        else:
            out[name] = gradient
    return out


class Detached(PackedKeyValues):
    """A memory that cuts the gradient of the keys, as a cache of plain bytes would."""

    def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
        return KeyValues(k_RGE.detach(), v_RGE)


class ForgetsKeys(Qwen3ForRL):
    def layer_memory(self, layer: int, rows: Rows) -> Detached:
        return Detached()


def eight_bit(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to(torch.float8_e4m3fn).to(output.dtype)


class Run(parity_harness.Run):
    """`comparable_T`: rows up to the first that anybody sends to other experts. Later rows read what that one wrote."""

    def __init__(self, path: Path, ids: Tensor) -> None:
        super().__init__(path, ids)
        self.comparable_T = self.same_experts_T.cumprod(0).bool()

    def errors(self, hidden: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Squared errors against float64 of comparable final rows and log-probabilities."""
        rows = self.comparable_T
        scored = self.comparable_T[:-1]
        by_row = (hidden.double() - self.exact_hidden).square().mean(-1)
        return by_row[rows], (log_prob.double() - self.exact_log_prob).square()[scored]


def pooled(errors: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    hidden, log_prob = (torch.cat(parts).mean().sqrt().item() for parts in zip(*errors))
    return hidden, log_prob


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bf16_errs_no_more_than_transformers(checkpoint: Checkpoints, kind: str) -> None:
    """Root mean square errors against float64 over several checkpoints.

    Both round every activation to BF16; transformers also rounds inside norms, rotation, SwiGLU and softmax, and its logits.
    """
    runs = [Run(checkpoint(kind, seed, torch.bfloat16), tokens(seed)) for seed in range(6)]
    assert sum(int(run.comparable_T.sum()) for run in runs) >= 100
    ours = pooled([run.errors(run.hidden, run.log_prob) for run in runs])
    their = pooled([run.errors(run.their_hidden, run.their_log_prob) for run in runs])
    assert 0 < ours[0] <= their[0] and 0 < ours[1] <= their[1], (ours, their)
    # the control: a branch of one layer rounded to eight bits loses
    worse = []
    for run in runs:
        run.ours.model.layers[1].mlp.register_forward_hook(eight_bit)
        with torch.no_grad():
            worse.append(run.errors(*run.our_rows([])))
    assert pooled(worse)[0] > their[0] and pooled(worse)[1] > their[1]


# BF16 keeps 8 bits: a rounding errs by up to 2^-9 of its value. A gradient here passes some 30 of them on its way forward and
# back, which add like noise: sqrt(30) * 2^-9 is about 1 %, and a few times that where large terms cancel.
GRADIENT_BOUND = 0.06


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bf16_gradients_against_float64(checkpoint: Checkpoints, kind: str) -> None:
    ours: list[float] = []
    their: list[float] = []
    for seed in range(8):
        run = Run(checkpoint(kind, seed, torch.bfloat16), tokens(seed, 20))
        if not run.comparable_T.all():
            continue  # another expert, another gradient
        found = run.gradients(run.ours)
        reference = unstacked(run.their_gradients())
        wanted = run.exact_gradients()
        for name, gradient in wanted.items():
            if not gradient.any():
                assert not found[name].any(), f"{name} has no gradient in float64"
                continue
            error = relative(found[name], gradient)
            assert error < GRADIENT_BOUND, f"{name}: {error}"
            ours.append(error)
            their.append(relative(reference[name], gradient))
    assert len(ours) >= 3 * 24
    assert sum(ours) <= sum(their), (sum(ours) / len(ours), sum(their) / len(their))


def test_a_gradient_that_is_cut_is_caught(checkpoint: Checkpoints) -> None:
    path = checkpoint("dense", 0, torch.bfloat16)
    run = Run(path, tokens(0, 20))
    broken = run.gradients(ForgetsKeys.from_pretrained(path, device="cpu"))
    wanted = run.exact_gradients()
    beyond = {name for name, gradient in wanted.items() if relative(broken[name], gradient) >= GRADIENT_BOUND}
    assert "model.layers.1.self_attn.k_proj.weight" in beyond and "model.layers.1.self_attn.v_proj.weight" not in beyond


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_finite_gradient_or_is_an_unused_expert(checkpoint: Checkpoints, kind: str) -> None:
    model = Qwen3ForRL.from_pretrained(checkpoint(kind, 0, torch.bfloat16), device="cpu")
    ids = tokens(0, 3)
    used = set()
    layers = iter(range(model.config.layers))

    def observe(contract: Contract, arguments: dict[str, Any], result: Any) -> None:
        if contract.name == "route":
            layer = next(layers)
            used.update(f"model.layers.{layer}.mlp.experts.{e}." for e in result[1].unique().tolist())

    with ops.watch(observe):
        scores = model.score(ids, whole(ids), entropy=True)
    (scores.log_prob_R + scores.entropy_R).sum().backward()
    found = gradients_of(model)
    without = {name for name, gradient in found.items() if not gradient.any()}
    unused = {name for name in found if ".experts." in name and not name.startswith(tuple(used))}
    assert without == unused and all(gradient.isfinite().all() for gradient in found.values())
    assert bool(unused) == ("moe" in kind), "three tokens leave some experts alone"
