"""How far the log-probabilities of a document lie from those of the same model in float64, ours and the rival's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.common import first_line, relative_error
from benchmarks.models_bench import Bench, free, twin
from benchmarks.models_float64 import float64_of, next_log_prob
from zoo.common import ops
from zoo.common.ops.contract import Contract
from zoo.common.program import Program


def log_prob_of(bench: Bench, program: Program, ids: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """By the trainer on `program`: log-probabilities [T - 1] of each next token; experts [T, K] of each mixture, tokens of each index."""
    routes: list[Tensor] = []
    selected: list[Tensor] = []

    def observe(contract: Contract, arguments: dict[str, Any], result: Any) -> None:
        if contract.name in ("route", "biased_route"):
            routes.append(result[1])
        if contract.name == "select":
            selected.append(result)

    model = twin(bench.source, bench.trainer, program).eval()
    with ops.watch(observe):
        scored = model.score(ids, torch.tensor([0, len(ids)], device=ids.device))
    return scored[:-1], routes, selected


@torch.no_grad()
def accuracy(bench: Bench, tokens: int) -> None:
    """A row of both programs' errors over one document of `tokens` tokens, the same one in every run; later rows carry the relative ones.

    error_vs_fp64               |found - exact| / |exact| of all log-probabilities
    max_error_vs_fp64           the largest absolute difference, in nats
    rerouted                    rows of all mixtures (`routed` of them) that went to other experts than in float64: chance, and more
                                of an error than any rounding
    rival_differs               log-probabilities with other bytes than ours: none where cuBLAS splits no product and keys fill one segment
    same_experts_error_vs_fp64  the relative error against the float64 model whose mixtures are given the program's experts, and whose
                                indices its tokens

    A rival that fails is named in `failed` and left out; ours failing raises.
    """
    if not bench.budget.allows("accuracy", 15.0):
        return
    drawn = torch.randint(bench.config.vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    ids = drawn.to(bench.device)
    model = float64_of(bench.source)
    exact = next_log_prob(model.logits(ids), ids)
    errors: dict[str, float | None] = {"error_vs_fp64": None, "rival_error_vs_fp64": None}
    more: dict[str, Any] = {}
    own: Tensor | None = None
    for name, program in bench.programs.items():
        prefix = "" if name == "aligned" else "rival_"
        try:
            found, routes, selected = log_prob_of(bench, program, ids)
            free(bench)  # waits: an error on the device shows here
        except Exception as error:  # whatever a rival fails with
            if name == "aligned":
                raise
            more["failed"] = {name: first_line(error)}
            continue
        errors[f"{prefix}error_vs_fp64"] = relative_error(found, exact)
        if own is not None:
            more["rival_differs"] = int((found != own).sum())
        own = found
        more[f"{prefix}max_error_vs_fp64"] = float((found.double() - exact).abs().max())
        if routes:
            given = next_log_prob(float64_of(bench.source, routes, selected or None).logits(ids), ids)
            rerouted = sum(_differing(a, b) for a, b in zip(routes, model.routes, strict=True))
            errors[f"{prefix}same_experts_error_vs_fp64"] = relative_error(found, given)
            more |= {f"{prefix}rerouted": rerouted, "routed": len(routes) * tokens}
    bench.errors = errors
    bench.record.add(
        {
            "kind": "model",
            "arch": bench.arch,
            "size": bench.size,
            "layers": bench.config.layers,
            "what": "accuracy",
            "tokens": tokens,
            "rival": None if bench.rival is None else "unaligned",
            **errors,
            **more,
            "providers": bench.providers,
        }
    )
    shown = (f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in {**errors, **more}.items())
    print("accuracy: " + ", ".join(shown), flush=True)
    free(bench)


def _differing(found_TK: Tensor, exact_TK: Tensor) -> int:
    """Rows with another set of experts."""
    return int((found_TK.sort(-1)[0] != exact_TK.sort(-1)[0]).any(-1).sum())
