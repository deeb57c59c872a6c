"""What the comparisons with transformers share: its checkpoints, a float64 model of the common parts, errors and gradients by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import zoo
from zoo.common import ops
from zoo.common.ops.contract import Contract


class Checkpoints:
    """Checkpoints that transformers builds and saves, each once: (kind, seed, dtype) -> folder."""

    def __init__(self, folder: Path, build: Callable[[str, int], Any]) -> None:
        self.folder, self.build = folder, build

    def __call__(self, kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
        path = self.folder / f"{kind}-{seed}-{dtype}".replace(", ", "-").replace(" ", "-")
        if not path.exists():
            self.build(kind, seed).to(dtype).save_pretrained(path)
        return path


def theirs(path: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def tokens(seed: int, count: int) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(100 + seed))


def whole(ids: Tensor) -> Tensor:
    return torch.tensor([0, len(ids)])


def next_log_prob(logits_TV: Tensor, ids: Tensor) -> Tensor:
    return logits_TV[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def by_published_name(model: Any, of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """`of(our name)`, a tensor like the parameter, cut into the published tensors."""
    return {piece.published: piece.of(of(entry.ours)) for entry, piece in model.table_of().pieces()}


def gradients_of(model: Any) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return by_published_name(model, lambda name: parameters[name].grad)


class Float64Model:
    """What the architectures share, in a few lines of float64 over our parameters' names; a subclass gives `mixer`.

    Cosines are of FP32 angles, as everywhere. `offset` is what a norm adds to its weight.
    """

    offset = 0.0
    renormalise = True

    def __init__(self, model: Any) -> None:
        self.config: Any = model.config
        self.p = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        self.routes: list[Tensor] = []

    def mixer(self, x: Tensor, layer: int) -> Tensor:
        raise AssertionError("written by each architecture")

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config.eps) * (self.offset + weight)

    def rotated(self, x_THE: Tensor, width: int) -> Tensor:
        """The first `width` columns of each head turned by its row's position."""
        half = width // 2
        frequency = 1.0 / self.config.theta ** (torch.arange(0, width, 2).float() / width)
        angle = (torch.arange(x_THE.shape[0]).float()[:, None] * frequency).double()[:, None]
        a, b = x_THE[..., :half], x_THE[..., half:width]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x_THE[..., width:]], -1)

    def attended(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q_THE.shape[1] // t.shape[1], 1) for t in (k_TGE, v_TGE))
        scores = torch.einsum("qhe,khe->hqk", q_THE, k) * q_THE.shape[-1] ** -0.5
        future = torch.ones(len(q_THE), len(q_THE), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khe->qhe", scores.masked_fill(future, -torch.inf).softmax(-1), v)

    def swiglu(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (x @ gate_up.T).chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ down.T

    def mlp(self, x: Tensor, at: str) -> Tensor:
        if not self.config.experts:
            return self.swiglu(x, self.p[f"{at}.gate_up.weight"], self.p[f"{at}.down.weight"])
        probabilities = (x @ self.p[f"{at}.router.weight"].T).softmax(-1)
        weights, chosen = probabilities.topk(self.config.experts_per_token, -1)
        self.routes.append(chosen)
        weights = weights / weights.sum(-1, keepdim=True) if self.renormalise else weights
        share = torch.zeros_like(probabilities).scatter(1, chosen, weights)
        gate_up, down = self.p[f"{at}.experts.gate_up"], self.p[f"{at}.experts.down"]
        return sum(share[:, e, None] * self.swiglu(x, gate_up[e], down[e]) for e in range(self.config.experts))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.p["model.embed.weight"][ids]
        for i in range(self.config.layers):
            at = f"model.layers.{i}"
            x = x + self.mixer(self.norm(x, self.p[f"{at}.input_norm.weight"]), i)
            x = x + self.mlp(self.norm(x, self.p[f"{at}.post_norm.weight"]), f"{at}.mlp")
        return self.norm(x, self.p["model.norm.weight"])

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.p["model.embed.weight" if self.config.tied else "model.head.weight"].T


def assert_parity(model: Any, path: Path, other: Path, ids: Tensor, bound: float) -> None:
    """Logits and log-probabilities lie within `bound` of transformers'; with `other` weights or another token they don't."""
    expected = theirs(path, torch.float32)(ids[None]).logits[0]
    logits = model(ids, cu_seqlens=whole(ids)).logits
    assert expected.abs().max() > 2 and logits.std() > 0.3  # not a comparison of zeros
    assert (logits - expected).abs().max() <= bound
    assert (model.score(ids, whole(ids))[:-1] - next_log_prob(expected, ids)).abs().max() <= bound
    assert (logits - theirs(other, torch.float32)(ids[None]).logits[0]).abs().max() > 0.1
    moved = ids.clone()
    moved[5] = (moved[5] + 1) % 256
    assert (model(moved, cu_seqlens=whole(ids)).logits - expected)[5:].abs().max() > 0.1


def assert_packed_parity(model: Any, reference: Any, documents: list[Tensor], bound: float) -> None:
    """Documents packed, against transformers with each alone."""
    expected = torch.cat([next_log_prob(reference(d[None]).logits[0], d) for d in documents])
    starts = torch.tensor([0, *[len(d) for d in documents]]).cumsum(0)
    scored = model.score(torch.cat(documents), starts)
    kept = torch.ones(len(scored), dtype=torch.bool).index_fill(0, starts[1:] - 1, False)
    assert (scored[kept] - expected).abs().max() <= bound


class Run:
    """One BF16 checkpoint through ours, theirs and float64: final rows, log-probabilities, and where all sent rows to the same experts."""

    def __init__(self, path: Path, ids: Tensor, exact: type[Float64Model]) -> None:
        self.ids, self.ours, self.theirs = ids, zoo.load(path, device="cpu"), theirs(path, torch.bfloat16)
        self.exact = exact(self.ours)
        routes: list[Tensor] = []
        for layer in self.theirs.model.layers if self.ours.config.experts else ():
            layer.mlp.gate.register_forward_hook(lambda module, inputs, output: routes.append(output[2]))
        with torch.no_grad():
            self.hidden, self.log_prob = self.our_rows(routes)
            out = self.theirs(ids[None], output_hidden_states=True)
            self.their_hidden, self.their_log_prob = out.hidden_states[-1][0], next_log_prob(out.logits[0].float(), ids)
            self.exact_hidden = self.exact.hidden(ids)
            self.exact_log_prob = next_log_prob(self.exact.head(self.exact_hidden), ids)
        same = [(a.sort(-1)[0] == b.sort(-1)[0]).all(-1) for a, b in zip(routes, self.exact.routes * 2, strict=True)]
        self.same_experts_T = torch.stack(same).all(0) if same else torch.ones(len(ids), dtype=torch.bool)

    def our_rows(self, routes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Final rows and log-probabilities; the experts of each layer go to `routes`."""

        def observe(contract: Contract, arguments: dict[str, Any], result: Any) -> None:
            if contract.name == "route":
                routes.append(result[1])

        with ops.watch(observe):
            hidden = self.ours(self.ids, cu_seqlens=whole(self.ids)).hidden_states
        return hidden, self.ours.score(self.ids, whole(self.ids))[:-1]

    def gradients(self, model: Any) -> dict[str, Tensor]:
        """Of the mean negative log-probability, by a model of ours."""
        (-model.score(self.ids, whole(self.ids))[:-1].mean()).backward()
        return gradients_of(model)

    def their_gradients(self) -> dict[str, Tensor]:
        self.theirs(self.ids[None], labels=self.ids[None]).loss.backward()
        return {name: p.grad for name, p in self.theirs.named_parameters()}

    def exact_gradients(self) -> dict[str, Tensor]:
        (-next_log_prob(self.exact.logits(self.ids), self.ids).mean()).backward()
        return by_published_name(self.ours, lambda name: self.exact.p[name].grad)
