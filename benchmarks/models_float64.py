"""The models in float64: a few lines of plain torch over our parameters' names, on any device. No op of ours and no kernel runs.

Accuracy is measured against it; the tests compare it with transformers' own classes. T tokens of one document, H query heads,
G key heads, E head dim, V vocabulary, X experts, K chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import has_slots
from zoo.glm5.config import LATENT_EPS


class Widened(Mapping[str, Tensor]):
    """A model's parameters in float64, each made when asked for and held by who asked: never the whole model at once."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name].detach().double()

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def part(self, name: str, index: int) -> Tensor:
        """One expert's of a stack that may be wider than the device has room for."""
        return self.parameters[name][index].detach().double()

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def next_log_prob(logits_TV: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [T - 1] of each next token."""
    return logits_TV[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


class Float64Model:
    """What the architectures share; a subclass gives `mixer`.

    Cosines are of FP32 angles, as everywhere. `offset` is what a norm adds to its weight.
    routes, selections  what each mixture chose of experts, [T, K], and each index of tokens, [T, T], as they ran
    experts, selected   give them instead, for one walk: as `route` and `select` return them
    """

    offset = 0.0
    renormalise = True

    def __init__(self, model: Any, experts: Sequence[Tensor] | None = None, selected: Sequence[Tensor] | None = None) -> None:
        self.config: Any = model.config
        self.p: Mapping[str, Tensor] = Widened(model)
        self.routes: list[Tensor] = []
        self.selections: list[Tensor] = []
        self.experts = experts
        self.selected = selected

    def mixer(self, x: Tensor, layer: int) -> Tensor:
        raise AssertionError("written by each architecture")

    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + (self.config.eps if eps is None else eps)) * (self.offset + weight)

    def rotated(self, x_THE: Tensor, width: int) -> Tensor:
        """The first `width` columns of each head turned by its row's position."""
        half = width // 2
        frequency = 1.0 / self.config.theta ** (torch.arange(0, width, 2).float() / width)
        angle = (torch.arange(x_THE.shape[0]).float()[:, None] * frequency).double()[:, None].to(x_THE.device)
        a = x_THE[..., :half]
        b = x_THE[..., half:width]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x_THE[..., width:]], -1)

    def attended(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q_THE.shape[1] // t.shape[1], 1) for t in (k_TGE, v_TGE))
        scores = torch.einsum("qhe,khe->hqk", q_THE, k) * q_THE.shape[-1] ** -0.5
        future = torch.ones(len(q_THE), len(q_THE), dtype=torch.bool, device=q_THE.device).triu(1)
        return torch.einsum("hqk,khe->qhe", scores.masked_fill(future, -torch.inf).softmax(-1), v)

    def swiglu(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (x @ gate_up.T).chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ down.T

    def mlp(self, x: Tensor, at: str) -> Tensor:
        if f"{at}.router.weight" not in self.p:
            return self.swiglu(x, self.p[f"{at}.gate_up.weight"], self.p[f"{at}.down.weight"])
        chosen, weights = self.route(x @ self.p[f"{at}.router.weight"].T, at)
        self.routes.append(chosen)
        share = x.new_zeros(len(x), self.config.experts).scatter(1, chosen, weights)
        return sum(share[:, e, None] * self.swiglu(x, *self.expert(at, e)) for e in range(self.config.experts))

    def route(self, logits_TX: Tensor, at: str) -> tuple[Tensor, Tensor]:
        """(experts, weights) [T, K]."""
        probabilities = logits_TX.softmax(-1)
        chosen = self.given_or(lambda: probabilities.topk(self.config.experts_per_token, -1).indices)
        weights = probabilities.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) if self.renormalise else weights

    def given_or(self, choose: Callable[[], Tensor]) -> Tensor:
        return choose() if self.experts is None else self.experts[len(self.routes)].long()

    def expert(self, at: str, e: int) -> tuple[Tensor, Tensor]:
        names = (f"{at}.experts.gate_up", f"{at}.experts.down")
        gate_up, down = (self.p.part(name, e) if isinstance(self.p, Widened) else self.p[name][e] for name in names)
        return gate_up, down

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


class Float64Qwen3(Float64Model):
    def __init__(self, model: Any, experts: Sequence[Tensor] | None = None, selected: Sequence[Tensor] | None = None) -> None:
        super().__init__(model, experts, selected)
        self.renormalise = model.config.renormalise

    def mixer(self, x: Tensor, layer: int) -> Tensor:
        c = self.config
        at = f"model.layers.{layer}.attention"
        heads = (x @ self.p[f"{at}.qkv.weight"].T).unflatten(1, (-1, c.head_dim))
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], 1)
        q, k = (self.rotated(self.norm(t, self.p[f"{at}.norm.{name}"]), c.head_dim) for t, name in ((q, "q"), (k, "k")))
        return self.attended(q, k, v).flatten(1) @ self.p[f"{at}.out.weight"].T


class Float64Qwen35(Float64Model):
    """The delta rule token by token."""

    offset = 1.0

    def mixer(self, x: Tensor, layer: int) -> Tensor:
        return (self.attention if self.config.full[layer] else self.delta)(x, f"model.layers.{layer}.mixer")

    def attention(self, x: Tensor, at: str) -> Tensor:
        c = self.config
        row = x @ self.p[f"{at}.qkv.weight"].T
        queries, k, v = row.split([2 * c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], 1)
        q, gate = queries.unflatten(1, (c.heads, 2, c.head_dim)).unbind(2)
        k, v = (t.unflatten(1, (c.kv_heads, c.head_dim)) for t in (k, v))
        q, k = (self.rotated(self.norm(t, self.p[f"{at}.norm.{name}"]), c.rope_dim) for t, name in ((q, "q"), (k, "k")))
        return (self.attended(q, k, v) * gate.sigmoid()).flatten(1) @ self.p[f"{at}.out.weight"].T

    def delta(self, x: Tensor, at: str) -> Tensor:
        c = self.config
        values = c.value_heads * c.value_dim
        keys = c.key_heads * c.key_dim
        qkv, z, b, a = (x @ self.p[f"{at}.qkvzba.weight"].T).split([c.conv_channels, values, c.value_heads, c.value_heads], 1)
        taps = self.p[f"{at}.conv"].squeeze(1)
        padded = nn.functional.pad(qkv, (0, 0, taps.shape[1] - 1, 0))
        mixed = nn.functional.silu(sum(padded[i : i + len(x)] * taps[:, i] for i in range(taps.shape[1])))
        q, k, v = mixed.split([keys, keys, values], 1)
        q, k = (t.unflatten(1, (c.key_heads, c.key_dim)) for t in (q, k))
        q, k = ((t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(c.value_heads // c.key_heads, 1) for t in (q, k))
        v = v.unflatten(1, (c.value_heads, c.value_dim))
        decay = (-self.p[f"{at}.gate.a_log"].exp() * nn.functional.softplus(a + self.p[f"{at}.gate.dt_bias"])).exp()
        beta = b.sigmoid()
        state = x.new_zeros(c.value_heads, c.key_dim, c.value_dim)
        out = []
        for t in range(len(x)):
            state = state * decay[t, :, None, None]
            news = beta[t, :, None] * (v[t] - torch.einsum("vk,vke->ve", k[t], state))
            state = state + k[t, :, :, None] * news[:, None]
            out.append(torch.einsum("vk,vke->ve", q[t], state) * c.key_dim**-0.5)
        o = torch.stack(out)
        o = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + c.eps) * self.p[f"{at}.norm.weight"]
        return (o * nn.functional.silu(z.unflatten(1, (c.value_heads, c.value_dim)))).flatten(1) @ self.p[f"{at}.out.weight"].T

    def mlp(self, x: Tensor, at: str) -> Tensor:
        out = super().mlp(x, at)
        if not self.config.experts:
            return out
        shared = self.swiglu(x, self.p[f"{at}.shared.gate_up.weight"], self.p[f"{at}.shared.down.weight"])
        return out + shared * (x @ self.p[f"{at}.shared_gate.weight"].T).sigmoid()


class Float64GLM(Float64Model):
    """As published and not absorbed: every head's keys and values are made of the latent rows, and all pairs of tokens are scored."""

    def turned(self, x_THE: Tensor) -> Tensor:
        """The leading columns turned in pairs of neighbours, first elements first."""
        width = self.config.rope_dim
        pairs = x_THE[..., :width].unflatten(-1, (width // 2, 2)).transpose(-1, -2).flatten(-2)
        return self.rotated(torch.cat([pairs, x_THE[..., width:]], -1), width)

    def mixer(self, x: Tensor, layer: int) -> Tensor:
        c = self.config
        at = f"model.layers.{layer}.attention"
        query, latent, turning = (x @ self.p[f"{at}.down.weight"].T).split([c.query_rank, c.kv_rank, c.rope_dim], 1)
        query, latent = (self.norm(t, self.p[f"{at}.{n}_norm.weight"], LATENT_EPS) for t, n in ((query, "query"), (latent, "latent")))
        if c.full[layer]:
            self.selections.append(self.index(x, query, f"{at}.indexer"))
        q = (query @ self.p[f"{at}.query_up.weight"].T).unflatten(1, (c.heads, c.nope_dim + c.rope_dim))
        k, v = (latent @ self.p[f"{at}.latent_up"].T).unflatten(1, (c.heads, c.nope_dim + c.value_dim)).split([c.nope_dim, c.value_dim], 2)
        q = torch.cat([q[..., : c.nope_dim], self.turned(q[..., c.nope_dim :])], 2)
        k = torch.cat([k, self.turned(turning[:, None]).expand(-1, c.heads, -1)], 2)
        scores = torch.einsum("qhe,khe->hqk", q, k) * (c.nope_dim + c.rope_dim) ** -0.5
        shares = scores.masked_fill(~self.selections[-1], -torch.inf).softmax(-1)
        return torch.einsum("hqk,khe->qhe", shares, v).flatten(1) @ self.p[f"{at}.out.weight"].T

    @torch.no_grad()
    def index(self, x: Tensor, query: Tensor, at: str) -> Tensor:
        """[T, T], True where a row reads a token."""
        c = self.config
        nothing = torch.zeros(len(x), len(x), dtype=torch.bool, device=x.device)
        past = ~nothing.logical_not().triu(1)
        if self.selected is not None:
            places = self.selected[len(self.selections)].long()
            padded = torch.cat([nothing, nothing[:, :1]], 1)
            return padded.scatter(1, torch.where(places < 0, len(x), places), True)[:, :-1]
        q = self.turned((query @ self.p[f"{at}.query.weight"].T).unflatten(1, (c.index_heads, c.index_dim)))
        key, weights = (x @ self.p[f"{at}.key_weights.weight"].T).split([c.index_dim, c.index_heads], 1)
        norm = (self.p[f"{at}.norm.weight"], self.p[f"{at}.norm.bias"])
        key = self.turned(nn.functional.layer_norm(key, (c.index_dim,), *norm, LATENT_EPS)[:, None])[:, 0]
        scores = sum(weights[:, h, None] * (q[:, h] @ key.T).relu() for h in range(c.index_heads))
        best = scores.masked_fill(~past, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, : c.index_top_k]
        return nothing.scatter(1, best, True) & past

    def route(self, logits_TX: Tensor, at: str) -> tuple[Tensor, Tensor]:
        choice = self.config.choice
        score = logits_TX.sigmoid()

        def choose() -> Tensor:
            biased = (score + self.p[f"{at}.route.bias"]).unflatten(1, (choice.groups, -1))
            worth = biased.topk(2, -1).values.sum(-1)
            closed = torch.ones_like(worth).scatter(1, worth.topk(choice.open_groups, -1).indices, 0.0).bool()
            return biased.masked_fill(closed[..., None], -torch.inf).flatten(1).topk(choice.top_k, -1).indices

        chosen = self.given_or(choose)
        weights = score.gather(1, chosen)
        return chosen, (weights / (weights.sum(-1, keepdim=True) + 1e-20) if choice.renormalise else weights) * choice.scale

    def mlp(self, x: Tensor, at: str) -> Tensor:
        out = super().mlp(x, at)
        if f"{at}.router.weight" not in self.p:
            return out
        return out + self.swiglu(x, self.p[f"{at}.shared.gate_up.weight"], self.p[f"{at}.shared.down.weight"])


def float64_of(model: Any, experts: Sequence[Tensor] | None = None, selected: Sequence[Tensor] | None = None) -> Float64Model:
    """The float64 model over the parameters of a model of ours.

    Where they are not its own choice: `experts` [T, K] of each mixture, and `selected` [T, K] of each index, -1 behind the last.
    """
    kind = Float64GLM if "index_heads" in vars(model.config) else Float64Qwen35 if has_slots(model.config) else Float64Qwen3
    return kind(model, experts, selected)
