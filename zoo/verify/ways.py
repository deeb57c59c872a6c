"""The ways to push the same tokens: training's packed batch, prefill, eager decode, CUDA graph. Each yields what it saw."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.common import ops
from zoo.common.memory import ServingMemory
from zoo.common.ops.contract import Cached, Contract, Witness
from zoo.common.rows import Rows
from zoo.common.serving import DecodeGraph
from zoo.common.training import Scores
from zoo.testing import finite
from zoo.verify.calls import Call
from zoo.verify.subject import Subject
from zoo.verify.trace import Tap

ODD_CHUNKS = (1, 7, 64, 65, 129, 500, 1023)
PREFILL_ROWS = 8192  # rows of one prefill launch, at most, when a batch of long contexts is set up


@dataclass(frozen=True)
class Seen:
    """What a way shows after it pushed rows `begin` .. of a document: their log-probabilities, and all bytes cached so far."""

    document: int
    begin: int
    log_prob_T: Tensor
    state: dict[str, Tensor]
    entropy_T: Tensor | None = None
    slot: Callable[[int], dict[str, Tensor]] | None = None  # what slots hold after so many tokens
    rates: Mapping[str, int] = field(default_factory=dict)  # tokens of a row of the state, by name without its layer; else 1

    def rate(self, name: str) -> int:
        return self.rates.get(name.rsplit(".", 1)[0], 1)

    def finite(self, name: str, first: int, end: int) -> int:
        """Finite entries of a cached tensor's rows first .. end - 1, counted on the device once for all rows."""
        sums = self._finite[name]
        return sums[end] - sums[first]

    @functools.cached_property
    def _finite(self) -> dict[str, list[int]]:
        counts = {name: finite(t).flatten(1).sum(1).cumsum(0) for name, t in self.state.items()}
        if not counts:
            return {}
        every = iter(torch.cat(list(counts.values())).tolist())  # rows of several tokens are fewer
        return {name: [0, *itertools.islice(every, len(sums))] for name, sums in counts.items()}


class Poisoned(TorchDispatchMode):
    """Fresh memory holds NaN (floats) or a large number (integers) inside the block."""

    _FRESH = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and func._schema.name in self._FRESH and made.device.type != "meta":
            made.fill_(torch.nan if made.is_floating_point() else 1 if made.dtype == torch.bool else 77)
        return made


def train(
    subject: Subject,
    tap: Tap,
    documents: list[int],
    *,
    grad: bool = False,
    checkpointed: bool = False,
    evaluate: bool = False,
    poisoned: bool = False,
    backward_first: bool = False,
) -> Iterator[Seen]:
    """One packed batch through the trainer, scored; its contracts say what a server would cache of each call."""
    model = subject.trainer
    ids = torch.cat([subject.ids(d) for d in documents])
    targets = torch.cat([subject.targets(d) for d in documents])
    cu_seqlens = offsets([subject.length(d) for d in documents], subject.device)
    was_training = model.training
    was_checkpointed = model.gradient_checkpointing
    model.train(not evaluate)
    model.gradient_checkpointing = checkpointed
    kept: dict[str, list[Cached]] = {}
    slots: list[Call] = []

    def keep(contract: Contract, seen: dict[str, Any], result: Any) -> None:
        call = Call.of(contract, seen, result)
        for name, cached in contract.cached(call.arguments).items():
            kept.setdefault(name, []).append(cached)
        if contract.witness is not None:
            slots.append(call)

    try:
        if backward_first:
            model(ids, cu_seqlens=cu_seqlens, labels=ids).loss.backward()
            model.zero_grad(set_to_none=True)
        with (
            torch.set_grad_enabled(grad or checkpointed),
            Poisoned() if poisoned else nullcontext(),
            ops.watch(keep),
            tap.rows(documents, Rows.packed(cu_seqlens)),
        ):
            scores = model.score(ids, cu_seqlens, targets, entropy=True)
            assert isinstance(scores, Scores) and scores.entropy_R is not None
    finally:
        model.train(was_training)
        model.gradient_checkpointing = was_checkpointed
    begin = 0
    for number, document in enumerate(documents):
        mine = slice(begin, begin + subject.length(document))
        before = [subject.length(d) for d in documents[:number]]
        # views, not a stack: at the published sizes the reference is gigabytes
        state = {f"{name}.{layer}": _rows_of(c, before, mine) for name, each in kept.items() for layer, c in enumerate(each)}
        rates = {name: each[0].tokens_a_row for name, each in kept.items()}
        slot = _witnessed(slots, mine)
        yield Seen(document, 0, scores.log_prob_R[mine].detach(), state, scores.entropy_R[mine].detach(), slot, rates)
        begin = mine.stop


def _rows_of(cached: Cached, before: list[int], document: slice) -> Tensor:
    """A document's own rows of what a packed call caches: whole rows alone, the documents `before` it have theirs first."""
    first = sum(length // cached.tokens_a_row for length in before)
    return cached.rows.detach()[first : first + (document.stop - document.start) // cached.tokens_a_row]


def _witnessed(calls: list[Call], document: slice) -> Callable[[int], dict[str, Tensor]] | None:
    """What slots must hold of a document after so many tokens, by name and layer, from training's calls in order."""
    witnesses: list[Witness] = []
    for call in calls:
        assert call.contract.witness is not None
        witnesses.append(call.contract.witness(call.arguments, document))

    def after(length: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        numbers: Counter[str] = Counter()  # one op may fill slots of several names
        for witness in witnesses:
            for name, part in witness.after(length).items():
                found[f"{name}.{numbers[name]}"] = part
                numbers[name] += 1
        return found

    return after if witnesses else None


class Session:
    """Sequences behind pages: entry e is document `entries[e]`, with its own shuffled pages in memory full of NaN."""

    def __init__(self, subject: Subject, tap: Tap, entries: list[int], page_size: int | None = None, seed: int = 0) -> None:
        self.subject = subject
        self.tap = tap
        self.entries = entries
        server = subject.server
        probe = server.make_memory(2, page_size, 1)
        self.page_size = probe.page_size
        needed = [probe.pages_for(subject.length(d)) for d in entries]
        total = 1 + sum(needed) + 3
        self.memory = server.make_memory(total, page_size, len(entries))
        for value in _buffers(self.memory):
            value.fill_(torch.nan)
        free = list(range(1, total))
        random.Random(seed).shuffle(free)
        self.pages = [[free.pop() for _ in range(count)] for count in needed]
        self.slots = [e + 1 if self.memory.slots else 0 for e in range(len(entries))]
        self.memory.clear([page for pages in self.pages for page in pages], self.slots if self.memory.slots else ())
        self.done = [0] * len(entries)

    def table(self, entries: list[int]) -> Tensor:
        width = max(len(self.pages[e]) for e in entries)
        return self.memory.table([self.pages[e] for e in entries], [self.slots[e] for e in entries], width)

    def push(self, counts: dict[int, int], *, decode: bool = False) -> Iterator[Seen]:
        """`counts[e]` more rows of each entry, in one launch."""
        entries = list(counts)
        contexts = [self.done[e] for e in entries]
        rows = Rows.pushed(list(counts.values()), contexts, self.subject.device)
        spans = [(self.entries[e], self.done[e], self.done[e] + counts[e]) for e in entries]
        ids, targets = (torch.cat([of(d)[a:b] for d, a, b in spans]) for of in (self.subject.ids, self.subject.targets))
        server = self.subject.server
        with torch.no_grad(), self.tap.rows([d for d, _, _ in spans], rows):
            if decode:
                logits = server.decode(ids, rows, self.memory, self.table(entries))
                log_prob = ops.log_prob_of_logits(logits, targets, program=server.program).log_prob_R
            else:
                log_prob = server.log_prob(server.prefill(ids, rows, self.memory, self.table(entries)), targets)
        yield from self.seen(entries, [b - a for _, a, b in spans], log_prob)

    def seen(self, entries: list[int], counts: list[int], log_prob_R: Tensor) -> Iterator[Seen]:
        """The rows just pushed, entry by entry."""
        start = 0
        for e, count in zip(entries, counts, strict=True):
            begin = self.done[e]
            self.done[e] = self.done[e] + count
            held = _by_layer(self.memory.written_slot(self.slots[e], self.done[e]))
            cached = _by_layer(self.memory.written(self.pages[e], self.done[e], self.slots[e]))
            state = {name: part for name, part in cached.items() if name not in held}
            slot = (lambda length, held=held: held) if held else None
            yield Seen(self.entries[e], begin, log_prob_R[start : start + count], state, None, slot)
            start += count

    def catch_up(self, contexts: dict[int, int]) -> Iterator[Seen]:
        """Prefills entries up to their contexts, several at a time."""
        batch: dict[int, int] = {}
        for e, context in contexts.items():
            if context:
                if batch and sum(batch.values()) + context > PREFILL_ROWS:
                    yield from self.push(batch)
                    batch = {}
                batch[e] = context
        if batch:
            yield from self.push(batch)


def prefill(
    subject: Subject, tap: Tap, documents: list[int], *, page_size: int | None = None, chunked: bool = False, seed: int = 0
) -> Iterator[Seen]:
    """Whole prompts in one launch, or in chunks whose sizes differ from document to document."""
    session = Session(subject, tap, documents, page_size, seed)
    if not chunked:
        yield from session.push({e: subject.length(d) for e, d in enumerate(documents)})
        return
    turn = 0
    while True:
        left = {e: subject.length(d) - session.done[e] for e, d in enumerate(documents)}
        counts = {e: min(n, ODD_CHUNKS[(turn + 2 * e) % len(ODD_CHUNKS)]) for e, n in left.items() if n}
        if not counts:
            return
        yield from session.push(counts)
        turn += 1


def decode(
    subject: Subject, tap: Tap, documents: list[int], *, tail: int | None, page_size: int | None = None, seed: int = 0
) -> Iterator[Seen]:
    """Token by token, sequences joining one after another, so that a batch holds many positions. `tail`: the last ones only."""
    session = Session(subject, tap, documents, page_size, seed)
    lengths = [subject.length(d) for d in documents]
    starts = {e: 0 if tail is None else max(0, length - tail) for e, length in enumerate(lengths)}
    yield from session.catch_up(starts)
    step = 0
    while any(done < length for done, length in zip(session.done, lengths, strict=True)):
        live = {e: 1 for e in range(len(lengths)) if session.done[e] < lengths[e] and step >= 3 * e}
        if live:
            yield from session.push(live, decode=True)
        step += 1


def graph(subject: Subject, tap: Tap, documents: list[int], *, batch: int, steps: int, seed: int = 0) -> Iterator[Seen]:
    """Decode by CUDA graph: `batch` sequences at different positions, an eager step before, then other slots and dead slots."""
    long = [d for d in documents if subject.length(d) > 2 * steps] or documents
    entries = [long[i % len(long)] for i in range(batch)]
    session = Session(subject, tap, entries, None, seed)
    room = [subject.length(d) - steps - 1 for d in entries]
    yield from session.catch_up({e: max(0, room[e] - (e // len(long)) % max(room[e], 1)) for e in range(batch)})
    captured = DecodeGraph(subject.server, session.memory, batch, max(len(p) for p in session.pages))
    yield from session.push({e: 1 for e in range(batch) if session.done[e] < subject.length(entries[e])}, decode=True)
    for step in range(steps):
        live = [e for e in range(batch) if session.done[e] < subject.length(entries[e])]
        if step >= steps // 2:  # other slots, and some of them dead
            live = live[::-1][: max(1, len(live) - len(live) // 4)]
        if not live:
            return
        yield from _replay(session, captured, live)


def _replay(session: Session, captured: DecodeGraph, live: list[int]) -> Iterator[Seen]:
    subject = session.subject
    position = torch.tensor([session.done[e] for e in live], device=subject.device)
    ids, targets = (torch.stack([of(session.entries[e])[session.done[e]] for e in live]) for of in (subject.ids, subject.targets))
    logits = captured.replay(ids, position, session.table(live))
    log_prob = ops.log_prob_of_logits(logits, targets, program=subject.server.program).log_prob_R
    yield from session.seen(live, [1] * len(live), log_prob)


def _by_layer(cached: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{layer}": part for name, each in cached.items() for layer, part in enumerate(each)}


def _buffers(memory: ServingMemory) -> list[Tensor]:
    """Every floating-point tensor of a memory."""
    return [tensor for tensor in memory.tensors().values() if tensor.is_floating_point()]


def exhaust(way: Iterable[Seen]) -> None:
    """Runs a way for its op calls alone."""
    for _ in way:
        pass


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    """cu_seqlens of documents of these lengths, int32."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
