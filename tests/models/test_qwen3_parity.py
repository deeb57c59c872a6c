"""Qwen3 against transformers' own classes, and both against a plain float64 model: values, accuracy, gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.memory import KeyValues, PackedKeyValues, PackedMemory
from zoo.common.ops.contract import Contract
from zoo.common.rows import Rows
from zoo.qwen3 import Qwen3Config, Qwen3ForRL

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


@cache
def published(kind: str, seed: int, folder: Path, dtype: torch.dtype) -> Path:
    """A checkpoint that transformers built, and saved in `dtype`, every parameter drawn at a realistic scale."""
    family, fields = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.1 * drawn if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5)
    path = folder / f"{kind}-{seed}-{dtype}".replace(", ", "-").replace(" ", "-")
    model.to(dtype).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("published")
    return lambda kind, seed=0, dtype=torch.float32: published(kind, seed, folder, dtype)


def theirs(path: Path, dtype: torch.dtype) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def tokens(seed: int = 0, count: int = TOKENS) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(100 + seed))


class Float64Qwen3:
    """The architecture in a few lines of float64, over our parameters' names. Cosines are of FP32 angles, as everywhere."""

    def __init__(self, model: Qwen3ForRL) -> None:
        self.config: Qwen3Config = model.config
        self.p = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        self.routes: list[Tensor] = []

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config.eps) * weight

    def rotated(self, x_THE: Tensor) -> Tensor:
        half = self.config.head_dim // 2
        frequency = 1.0 / self.config.theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
        angle = (torch.arange(x_THE.shape[0]).float()[:, None] * frequency).double()[:, None]
        a, b = x_THE[..., :half], x_THE[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def attention(self, x: Tensor, at: str) -> Tensor:
        c = self.config
        heads = (x @ self.p[f"{at}.qkv.weight"].T).unflatten(1, (-1, c.head_dim))
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], 1)
        q, k = self.rotated(self.norm(q, self.p[f"{at}.norm.q"])), self.rotated(self.norm(k, self.p[f"{at}.norm.k"]))
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) * c.head_dim**-0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khe->qhe", weights, v).flatten(1) @ self.p[f"{at}.out.weight"].T

    def swiglu(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (x @ gate_up.T).chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ down.T

    def mlp(self, x: Tensor, at: str) -> Tensor:
        if not self.config.experts:
            return self.swiglu(x, self.p[f"{at}.gate_up.weight"], self.p[f"{at}.down.weight"])
        probabilities = (x @ self.p[f"{at}.router.weight"].T).softmax(-1)
        weights, chosen = probabilities.topk(self.config.experts_per_token, -1)
        self.routes.append(chosen)
        weights = weights / weights.sum(-1, keepdim=True) if self.config.renormalise else weights
        share = torch.zeros_like(probabilities).scatter(1, chosen, weights)
        gate_up, down = self.p[f"{at}.experts.gate_up"], self.p[f"{at}.experts.down"]
        return sum(share[:, e, None] * self.swiglu(x, gate_up[e], down[e]) for e in range(self.config.experts))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.p["model.embed.weight"][ids]
        for i in range(self.config.layers):
            at = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, self.p[f"{at}.input_norm.weight"]), f"{at}.attention")
            x = x + self.mlp(self.norm(x, self.p[f"{at}.post_norm.weight"]), f"{at}.mlp")
        return self.norm(x, self.p["model.norm.weight"])

    def logits(self, ids: Tensor) -> Tensor:
        head = self.p["model.embed.weight" if self.config.tied else "model.head.weight"]
        return self.hidden(ids) @ head.T


def next_log_prob(logits_TV: Tensor, ids: Tensor) -> Tensor:
    return logits_TV[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def whole(ids: Tensor) -> Tensor:
    return torch.tensor([0, len(ids)])


class TestParity:
    """program="transformers", FP32: 5e-5."""

    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_logits_and_log_probs(self, checkpoint: Callable[..., Path], kind: str) -> None:
        ids = tokens()
        model = Qwen3ForRL.from_pretrained(checkpoint(kind), program="transformers", dtype=torch.float32, device="cpu")
        expected = theirs(checkpoint(kind), torch.float32)(ids[None]).logits[0]
        logits = model(ids, cu_seqlens=whole(ids)).logits
        assert expected.abs().max() > 2 and logits.std() > 0.3  # not a comparison of zeros
        assert (logits - expected).abs().max() <= 5e-5
        assert (model.score(ids, whole(ids))[:-1] - next_log_prob(expected, ids)).abs().max() <= 5e-5
        # the control: other weights, one token moved
        other = theirs(checkpoint(kind, 1), torch.float32)(ids[None]).logits[0]
        assert (logits - other).abs().max() > 0.1
        ids[5] = (ids[5] + 1) % 256
        assert (model(ids, cu_seqlens=whole(ids)).logits - expected)[5:].abs().max() > 0.1

    @pytest.mark.parametrize("kind", ["dense", "moe"])
    @torch.no_grad()
    def test_padded_and_packed(self, checkpoint: Callable[..., Path], kind: str) -> None:
        model = Qwen3ForRL.from_pretrained(checkpoint(kind), program="transformers", dtype=torch.float32, device="cpu")
        documents = [tokens(1, 31), tokens(2, 5), tokens(3, 18)]
        reference = theirs(checkpoint(kind), torch.float32)
        expected = torch.cat([next_log_prob(reference(d[None]).logits[0], d) for d in documents])
        starts = torch.tensor([0, 31, 36, 54])
        scored = model.score(torch.cat(documents), starts)
        kept = torch.ones(54, dtype=torch.bool).index_fill(0, starts[1:] - 1, False)
        assert (scored[kept] - expected).abs().max() <= 5e-5
        padded = nn.utils.rnn.pad_sequence(documents, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in documents], batch_first=True)
        labels = torch.where(mask.bool(), padded, -100)
        loss = model(padded, attention_mask=mask, labels=labels).loss
        assert abs(loss - reference(padded, attention_mask=mask, labels=labels).loss) <= 5e-5

    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients(self, checkpoint: Callable[..., Path], kind: str) -> None:
        """FP32 autograd of both; sums of some hundred FP32 products differ by a few times 2^-24 of their terms."""
        ids = tokens()
        model = Qwen3ForRL.from_pretrained(checkpoint(kind), program="transformers", dtype=torch.float32, device="cpu")
        reference = theirs(checkpoint(kind), torch.float32)
        (-model.score(ids, whole(ids))[:-1].mean()).backward()
        reference(ids[None], labels=ids[None]).loss.backward()
        found = gradients_by_published_name(model)
        wanted = {name: p.grad for name, p in reference.named_parameters()}
        for name, gradient in unstacked(wanted).items():
            assert relative(found[name], gradient) < 1e-4, name
        assert set(unstacked(wanted)) == set(found)

    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_the_float64_model_is_the_architecture(self, checkpoint: Callable[..., Path], kind: str) -> None:
        """So that what follows measures errors and not a misunderstanding."""
        model = Qwen3ForRL.from_pretrained(checkpoint(kind), program="transformers", dtype=torch.float32, device="cpu")
        expected = theirs(checkpoint(kind), torch.float32)(tokens()[None]).logits[0]
        assert (Float64Qwen3(model).logits(tokens()) - expected).abs().max() <= 5e-5


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def gradients_by_published_name(model: Qwen3ForRL) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    pieces = [(entry, piece) for entry, piece in model.table_of().pieces()]
    return {piece.published: piece.of(parameters[entry.ours].grad) for entry, piece in pieces}


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


class Detached(PackedMemory):
    """A memory that cuts the gradient of the keys, as a cache of plain bytes would."""

    def __getitem__(self, layer: int) -> Any:
        class Layer(PackedKeyValues):
            def append(self, k_RGE: Tensor, v_RGE: Tensor, rows: Rows) -> KeyValues:
                return KeyValues(k_RGE.detach(), v_RGE)

        return Layer()


class ForgetsKeys(Qwen3ForRL):
    def hidden_rows(self, ids_R: Tensor, rows: Rows, memory: PackedMemory) -> Tensor:
        return super().hidden_rows(ids_R, rows, Detached())


def eight_bit(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to(torch.float8_e4m3fn).to(output.dtype)


class Run:
    """One BF16 checkpoint through ours, theirs and float64.

    `comparable_T`: rows up to the first that anybody sends to other experts. Later rows read what that one wrote.
    """

    def __init__(self, path: Path, ids: Tensor) -> None:
        self.ids = ids
        self.ours = Qwen3ForRL.from_pretrained(path, device="cpu")
        self.theirs = theirs(path, torch.bfloat16)
        self.float64 = Float64Qwen3(self.ours)
        routes: list[Tensor] = []
        for layer in self.theirs.model.layers if self.ours.config.experts else ():
            layer.mlp.gate.register_forward_hook(lambda module, inputs, output: routes.append(output[2]))
        with torch.no_grad():
            self.hidden, self.log_prob = self.our_rows(routes)
            out = self.theirs(ids[None], output_hidden_states=True)
            self.their_hidden, self.their_log_prob = out.hidden_states[-1][0], next_log_prob(out.logits[0].float(), ids)
            self.hidden64 = self.float64.hidden(ids)
            self.log_prob64 = next_log_prob(self.float64.logits(ids), ids)
        wanted = self.float64.routes[: self.ours.config.layers]
        same = [(a.sort(-1)[0] == b.sort(-1)[0]).all(-1) for a, b in zip(routes, wanted * 2, strict=True)]
        self.comparable_T = torch.stack(same).all(0).cumprod(0).bool() if same else torch.ones(len(ids), dtype=torch.bool)

    def our_rows(self, routes: list[Tensor]) -> tuple[Tensor, Tensor]:
        def observe(contract: Contract, arguments: dict[str, Any], result: Any) -> None:
            if contract.name == "route":
                routes.append(result[1])

        with ops.watch(observe):
            hidden = self.ours(self.ids, cu_seqlens=whole(self.ids)).hidden_states
        return hidden, self.ours.score(self.ids, whole(self.ids))[:-1]

    def errors(self, hidden: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Squared errors against float64 of comparable final rows and log-probabilities."""
        rows, scored = self.comparable_T, self.comparable_T[:-1]
        by_row = (hidden.double() - self.hidden64).square().mean(-1)
        return by_row[rows], (log_prob.double() - self.log_prob64).square()[scored]

    def gradients(self, model: Qwen3ForRL) -> dict[str, Tensor]:
        (-model.score(self.ids, whole(self.ids))[:-1].mean()).backward()
        return gradients_by_published_name(model)

    def their_gradients(self) -> dict[str, Tensor]:
        self.theirs(self.ids[None], labels=self.ids[None]).loss.backward()
        return unstacked({name: p.grad for name, p in self.theirs.named_parameters()})

    def gradients64(self) -> dict[str, Tensor]:
        (-next_log_prob(self.float64.logits(self.ids), self.ids).mean()).backward()
        p = self.float64.p
        return {piece.published: piece.of(p[entry.ours].grad) for entry, piece in self.ours.table_of().pieces()}


def pooled(errors: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    hidden, log_prob = (torch.cat(parts).mean().sqrt().item() for parts in zip(*errors))
    return hidden, log_prob


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bf16_errs_no_more_than_transformers(checkpoint: Callable[..., Path], kind: str) -> None:
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
def test_bf16_gradients_against_float64(checkpoint: Callable[..., Path], kind: str) -> None:
    ours: list[float] = []
    their: list[float] = []
    for seed in range(8):
        run = Run(checkpoint(kind, seed, torch.bfloat16), tokens(seed, 20))
        if not run.comparable_T.all():
            continue  # another expert, another gradient
        found, reference, wanted = run.gradients(run.ours), run.their_gradients(), run.gradients64()
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


def test_a_gradient_that_is_cut_is_caught(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("dense", 0, torch.bfloat16)
    run = Run(path, tokens(0, 20))
    broken, wanted = run.gradients(ForgetsKeys.from_pretrained(path, device="cpu")), run.gradients64()
    beyond = {name for name, gradient in wanted.items() if relative(broken[name], gradient) >= GRADIENT_BOUND}
    assert "model.layers.1.self_attn.k_proj.weight" in beyond and "model.layers.1.self_attn.v_proj.weight" not in beyond


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_finite_gradient_or_is_an_unused_expert(checkpoint: Callable[..., Path], kind: str) -> None:
    model, ids, used = Qwen3ForRL.from_pretrained(checkpoint(kind, 0, torch.bfloat16), device="cpu"), tokens(0, 3), set()
    layers = iter(range(model.config.layers))

    def observe(contract: Contract, arguments: dict[str, Any], result: Any) -> None:
        if contract.name == "route":
            layer = next(layers)
            used.update(f"model.layers.{layer}.mlp.experts.{e}." for e in result[1].unique().tolist())

    with ops.watch(observe):
        scores = model.score(ids, whole(ids), entropy=True)
    (scores.log_prob_R + scores.entropy_R).sum().backward()
    found = gradients_by_published_name(model)
    without = {name for name, gradient in found.items() if not gradient.any()}
    unused = {name for name in found if ".experts." in name and not name.startswith(tuple(used))}
    assert without == unused and all(gradient.isfinite().all() for gradient in found.values())
    assert bool(unused) == ("moe" in kind), "three tokens leave some experts alone"
