"""What the comparisons with transformers share: its checkpoints, errors and gradients by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import zoo
from benchmarks.models_float64 import Float64Model, float64_of, next_log_prob
from zoo.common import ops
from zoo.common.ops.contract import Contract


class Checkpoints:
    """Checkpoints that transformers builds and saves, each once: (kind, seed, dtype) -> folder."""

    def __init__(self, folder: Path, build: Callable[[str, int], Any]) -> None:
        self.folder = folder
        self.build = build

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


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def by_published_name(model: Any, of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """`of(our name)`, a tensor like the parameter, cut into the published tensors."""
    return {piece.published: piece.of(of(entry.ours)) for entry, piece in model.table_of().pieces()}


def gradients_of(model: Any) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return by_published_name(model, lambda name: parameters[name].grad)


def leaves(exact: Float64Model) -> Float64Model:
    """The same with all its weights held, as autograd's leaves."""
    exact.p = {name: weight.requires_grad_() for name, weight in exact.p.items()}
    return exact


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

    def __init__(self, path: Path, ids: Tensor) -> None:
        self.ids = ids
        self.ours = zoo.load(path, device="cpu")
        self.theirs = theirs(path, torch.bfloat16)
        self.exact = leaves(float64_of(self.ours))
        routes: list[Tensor] = []
        for layer in self.theirs.model.layers if self.ours.config.experts else ():
            layer.mlp.gate.register_forward_hook(lambda module, inputs, output: routes.append(output[2]))
        with torch.no_grad():
            self.hidden, self.log_prob = self.our_rows(routes)
            out = self.theirs(ids[None], output_hidden_states=True)
            self.their_hidden = out.hidden_states[-1][0]
            self.their_log_prob = next_log_prob(out.logits[0].float(), ids)
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
