"""What the tests of whole models share: models by name, documents, pushes through shuffled memory, autograd's modes, rows per op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.ops.contract import Contract
from zoo.common.rows import Rows
from zoo.testing import Plan, assert_same_bytes


class Models:
    """A family's trainers and servers by the names of their configs, on the CPU and, unless said, on seed 1."""

    def __init__(self, configs: Mapping[str, Any], rl: type[Any], serving: type[Any]) -> None:
        self.configs = configs
        self.rl = rl
        self.serving = serving
        self._kept: dict[str, tuple[Any, Any]] = {}

    def fresh(self, name: str, seed: int = 1) -> Any:
        return self.rl.from_config(self.configs[name], seed=seed, device="cpu")

    def server(self, name: str, seed: int = 1, **changes: Any) -> Any:
        return self.serving.from_config(replace(self.configs[name], **changes), seed=seed, device="cpu")

    def twins(self, name: str) -> tuple[Any, Any]:
        """A trainer and a server, the same ones each time; tests that change weights make their own."""
        if name not in self._kept:
            self._kept[name] = self.fresh(name), self.server(name)
        return self._kept[name]

    def trainer(self, name: str) -> Any:
        return self.twins(name)[0]

    def documents(self, name: str, lengths: tuple[int, ...]) -> list[Tensor]:
        random = torch.Generator().manual_seed(sum(lengths))
        return [torch.randint(self.configs[name].vocabulary, (n,), generator=random) for n in lengths]

    def weights(self, name: str, seed: int = 2) -> list[tuple[str, Tensor]]:
        """The tensors of another seed, by published name."""
        return [(published, t.clone()) for published, t in self.server(name, seed).published_tensors()]


def packed(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(documents), torch.tensor([0, *[len(d) for d in documents]]).cumsum(0)


def targets_of(document: Tensor) -> Tensor:
    return torch.cat([document[1:], document[:1]])


def scores(model: Any, documents: list[Tensor]) -> list[Tensor]:
    ids, starts = packed(documents)
    scored = model.score(ids, starts, torch.cat([targets_of(d) for d in documents]))
    return list(scored.split([len(d) for d in documents]))


def pools_of(memory: Any) -> list[Tensor]:
    """Every tensor of a memory."""
    return list(memory.tensors().values())


class Session:
    """Sequences behind shuffled pages, and slots where the model has them, of a memory whose dead bytes are NaN."""

    def __init__(self, model: Any, documents: list[Tensor], page_size: int = 16, spare: int = 3) -> None:
        self.model = model
        self.documents = documents
        count = len(documents)
        needed = [-(-len(d) // page_size) for d in documents]
        self.memory = memory = model.make_memory(sum(needed) + 3, page_size, slots=count + spare)
        for pool in pools_of(memory):
            pool.fill_(torch.nan)
        pages = iter((torch.randperm(sum(needed)) + 2).tolist())
        self.pages = [[next(pages) for _ in range(n)] for n in needed]
        self.slots = (torch.randperm(count + spare)[:count] + 1).tolist()
        memory.clear([0, *[page for held in self.pages for page in held]], [0, *self.slots])
        self.done = [0] * count
        self.found = [[] for _ in documents]
        self.blocks = max(needed)

    def push(self, step: tuple[int, ...]) -> None:
        """step[n] more rows of document n."""
        active = [n for n, count in enumerate(step) if count]
        cuts = [slice(self.done[n], self.done[n] + step[n]) for n in active]
        table = self.memory.table([self.pages[n] for n in active], [self.slots[n] for n in active], self.blocks)
        rows = Rows.pushed([step[n] for n in active], [self.done[n] for n in active], "cpu")
        ids = torch.cat([self.documents[n][cut] for n, cut in zip(active, cuts)])
        wanted = torch.cat([targets_of(self.documents[n])[cut] for n, cut in zip(active, cuts)])
        log_prob = self.model.log_prob(self.model.prefill(ids, rows, self.memory, table), wanted)
        for n, part in zip(active, log_prob.split([step[n] for n in active])):
            self.found[n].append(part)
            self.done[n] += step[n]

    def scores(self) -> list[Tensor]:
        return [torch.cat(parts) for parts in self.found]

    def written(self, n: int) -> dict[str, Tensor]:
        return self.memory.written(self.pages[n], self.done[n], self.slots[n])


def pushed(model: Any, documents: list[Tensor], plan: Plan, page_size: int = 16) -> tuple[list[Tensor], Any]:
    """Log-probabilities of each document, and the cached bytes after every push: (document, tokens) -> bytes."""
    session = Session(model, documents, page_size)
    seen = {}
    for step in plan:
        session.push(step)
        seen |= {(n, session.done[n]): session.written(n) for n, count in enumerate(step) if count}
    return session.scores(), seen


def assert_same_states(seen: Any, other: Any, what: str) -> None:
    """At every token boundary that both ways stopped at."""
    common = sorted(seen.keys() & other.keys())
    assert common, what
    for at in common:
        assert_same_bytes(seen[at], other[at], f"{what}, document {at[0]} after {at[1]} tokens")


def assert_alone_is_packed(model: Any, documents: list[Tensor]) -> list[Tensor]:
    """Alone, in another order and beside a copy: the scores of the documents together, which it returns."""
    together = scores(model, documents)
    for document, expected in zip(documents, together):
        assert_same_bytes(scores(model, [document])[0], expected)
    assert_same_bytes(scores(model, documents[::-1])[::-1], together)
    assert_same_bytes(scores(model, [documents[2], *documents])[1:], together)
    return together


def assert_rows_and_splits(model: Any, serving: Any, documents: list[Tensor], plans: Mapping[str, Plan]) -> list[Tensor]:
    """Each document alone and every way to push them: the scores of the documents together, which it returns."""
    together = scores(model, documents)
    for document, expected in zip(documents, together):
        assert_same_bytes(scores(model, [document])[0], expected)
    for name, plan in plans.items():
        assert_same_bytes(pushed(serving, documents, plan)[0], together, name)
    return together


# autograd's modes


def other_under_grad(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A fault: a kernel picked by whether a gradient is wanted."""
    return tuple(t * 1.01 if torch.is_grad_enabled() else t for t in output)


def other_in_training(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A fault: a kernel picked by the module's mode."""
    return tuple(t * 1.01 if module.training else t for t in output)


def other_in_recomputation(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A fault: a layer whose state moves on when it is run again inside the backward pass."""
    return tuple(t * 1.01 if torch._C._current_graph_task_id() != -1 else t for t in output)


def assert_modes_agree(model: Any, documents: list[Tensor]) -> None:
    """Scores, and gradients where there are some, in every mode that must not matter."""
    ids, starts = packed(documents)

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        found = model.score(ids, starts)
        (-found.mean()).backward()
        return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    with torch.no_grad():
        expected = model.score(ids, starts)
    with torch.inference_mode():
        assert_same_bytes(model.score(ids, starts).clone(), expected, "inference mode")
    plain = gradients()
    assert_same_bytes(plain[0], expected, "with autograd")
    assert_same_bytes(model.score(ids, starts), expected, "after backward")
    model.gradient_checkpointing_enable()
    assert_same_bytes(gradients(), plain, "checkpointed")
    model.eval()
    assert_same_bytes(gradients(), plain, "checkpointing, eval mode")
    model.gradient_checkpointing_disable()
    assert_same_bytes(gradients(), plain, "eval mode")
    model.train()


# rows per op


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Rows that enter each op inside the block, by its contract's name."""
    seen: Counter[str] = Counter()

    def observe(contract: Contract, arguments: dict[str, Any], result: Any) -> None:
        seen[contract.name] += arguments["args"][0].shape[0]

    with ops.watch(observe):
        yield seen


def rows_in_training(model: Any, documents: list[Tensor]) -> Counter[str]:
    """Rows that enter each op while the documents are scored and differentiated, `log_prob` aside: that is each row once."""
    ids, starts = packed(documents)
    with counted() as seen:
        model.score(ids, starts, entropy=True).log_prob_R.sum().backward()
    model.zero_grad()
    assert seen.pop("log_prob") == len(ids)
    return seen
