"""Which request pushes which rows next, and who gives up pages when they run out. It decides; it never touches a number."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from zoo.common.engine.pages import Key, Node, PagePool
from zoo.common.engine.request import Request
from zoo.common.memory import ServingMemory


def _order(request: Request) -> int:
    return request.order


@dataclass(frozen=True)
class Start:
    """Where a request begins: after `length` tokens, `nodes` their full pages, `key` the snapshot (in a memory with slots)."""

    length: int
    nodes: list[Node]
    key: Key | None = None


@dataclass
class Scheduler:
    """Running and waiting requests, each in order of arrival. The earliest always gets what it needs, so all end.

    Prefixes in a memory with slots: a snapshot is taken at multiples of `snapshot_stride` and at a prompt's last full grain; a
    push ends there. A request starts at the nearest one at or before what it has in common with the cache. It shares the full
    pages before it, has the rows of the open page copied into a page of its own, and pushes everything after it again: the
    recurrent layers need those rows, and their keys and values go to pages of its own. So nobody writes into a shared page.
    A page that it fills and that the cache has already, with the same bytes, is given back for the cached one.
    """

    memory: ServingMemory
    pool: PagePool
    version: str
    max_batch: int
    chunk_rows: int
    prefix_cache: bool
    snapshot_stride: int = 1024
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    reused_rows: int = 0
    preemptions: int = 0

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    def admit(self) -> None:
        """Starts waiting requests while there is room for all their tokens. It takes no page from a running one.

        A request that a running prompt is about to push rows for waits for them, so that samples of one prompt share its rows.
        """
        reserved = sum(self._missing(r) for r in self.running)
        for request in list(self.waiting):
            if len(self.running) == self.max_batch or (self.memory.slots and not self.pool.free_slots):
                return
            start = Start(0, [])
            if self.prefix_cache and not request.scores_prompt:
                cached = list(self.pool.walk(self.version, request.tokens[:-1]))  # the last row is pushed in any case: it draws
                start = self._nearest(request, cached)
                if any(self._serves(other, request, start, cached) for other in self.running):
                    continue
            need = self._missing(request) - len(start.nodes)
            room = self.pool.available - sum(node.refs == 0 for node in start.nodes) - reserved
            if self.running and room < need + len(self.running):  # a page to grow for each, or it would soon be preempted
                return
            self._start(request, start)
            reserved += self._missing(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """(request, rows) of the next step, pages assigned and clean: one row where it decodes, prompt rows within the budget."""
        work: list[tuple[Request, int]] = []
        budget = self.chunk_rows
        for request in list(self.running):
            if request not in self.running or (request.pending > 1 and budget == 0):
                continue
            count = self._cut(request, min(request.pending, max(budget, 1)))
            if not self._hold(request, request.computed + count):
                break  # it was the last one
            budget -= count if request.pending > 1 else 0
            work.append((request, count))
        return work

    def advance(self, request: Request, count: int) -> None:
        """After `count` rows were pushed: pages that they filled become shareable, and a snapshot is taken where one is due."""
        request.mark(range(request.computed, request.computed + count), self.version)
        due = self._next_snapshot(request)
        request.computed += count
        size = self.pool.page_size
        while self.prefix_cache and request.pure and (filled := len(request.nodes) + 1) * size <= request.computed:
            parent = request.nodes[-1] if request.nodes else None
            tokens = request.tokens[(filled - 1) * size : filled * size]
            node = self.pool.insert(self.version, parent, tokens, request.pages[filled - 1])
            request.pages[filled - 1] = node.page
            request.nodes.append(node)
        if request.computed == due:
            key = self.pool.after(self.version, request.nodes, request.tokens, due)
            self.pool.keep(key, partial(self.memory.snapshot, request.slot, due, request.pages))

    def preempt(self, request: Request) -> None:
        """Takes a running request's pages; it waits, keeps its tokens, and pushes their rows again later."""
        self.release(request)
        self.preemptions += 1
        self.add(request)

    def release(self, request: Request) -> None:
        """Takes a request out and everything that it held."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.pool.release(request.nodes)
        self.pool.give(request.pages[len(request.nodes) :])
        if request.slot:
            self.pool.free_slots.append(request.slot)
        request.forget()

    def start_over(self, requests: Iterable[Request]) -> None:
        """All of `requests`, rewound, wait; the pool is a fresh one already."""
        running = self.running
        self.running = []
        self.waiting = sorted(requests, key=_order)
        self.preemptions += len(running)

    def _start(self, request: Request, start: Start) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        self.pool.hold(start.nodes)
        request.nodes = start.nodes
        request.pages = [node.page for node in start.nodes]
        request.computed = start.length
        request.mark(range(request.computed), self.version)
        self.reused_rows += request.computed
        if self.memory.slots:
            request.slot = self.pool.free_slots.popleft()
            self.memory.clear([], [request.slot])
            if start.key is not None:
                snapshot = self.pool.use(start.key)
                held = self._hold(request, start.length)
                assert held, "a request was started without room for its open page"
                self.memory.restore(request.slot, request.pages, snapshot)

    def _hold(self, request: Request, length: int) -> bool:
        """Pages for `length` tokens, taken from the latest requests if need be; False if the request itself was the latest."""
        need = self.memory.pages_for(length) - len(request.pages)
        while need > self.pool.available:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        if need > 0:
            pages = self.pool.take(need)
            self.memory.clear(pages)
            request.pages += pages
        return True

    def _missing(self, request: Request) -> int:
        return max(0, self.memory.pages_for(len(request.tokens)) - len(request.pages))

    def _nearest(self, request: Request, cached: list[Node]) -> Start:
        """The longest start that the cache has: `cached` are the known pages of all tokens but the last."""
        size = self.pool.page_size
        if not self.memory.slots:
            return Start(len(cached) * size, cached)
        length, key = self.pool.nearest(self.version, cached, request.tokens[:-1], self.memory.grain)
        return Start(length, cached[: length // size], key)

    def _next_snapshot(self, request: Request) -> int | None:
        """The next length after which one is taken; None where nothing is shared by snapshots."""
        if not self.prefix_cache or not request.pure or not self.pool.room:
            return None
        computed = request.computed
        grain = self.memory.grain
        stride = self.snapshot_stride
        # the same prompt again may use all but its last row, a longer one all of it
        ends = [n // grain * grain for n in (request.prompt_length - 1, request.prompt_length)]
        return min(n for n in (*ends, (computed // stride + 1) * stride) if n > computed)

    def _serves(self, other: Request, request: Request, start: Start, cached: list[Node]) -> bool:
        """Whether the prompt rows that `other` pushes next will let `request` start later than at `start`."""
        size = self.pool.page_size
        full = len(other.nodes)
        coming = self._next_snapshot(other) if self.memory.slots else (full + 1) * size
        if other.pending == 1 or not other.pure or coming is None or coming > len(other.tokens):
            return False
        if not start.length < coming < len(request.tokens) or (full and cached[full - 1 : full] != other.nodes[-1:]):
            return False
        mine = request.tokens
        theirs = other.tokens
        after = full * size
        return mine[coming - 1] == theirs[coming - 1] and mine[after:coming] == theirs[after:coming]

    def _cut(self, request: Request, count: int) -> int:
        """A push ends where a snapshot is due."""
        due = self._next_snapshot(request)
        return count if due is None else min(count, due - request.computed)
