"""Which request pushes which rows next, and who gives up pages when they run out. It decides; it never touches a number."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from zoo.common.engine.pages import Key, Node, PagePool
from zoo.common.memory import ServingMemory
from zoo.common.sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """One request. `tokens` is the prompt and what was drawn; the first `computed` of them have rows in memory.

    nodes  cached pages that the first entries of `pages` are
    pure   every row in memory was pushed by the weights now loaded, so its pages may be shared
    exact, versions, log-probabilities: see Completion
    """

    request_id: str
    order: int
    prompt_length: int
    params: SamplingParams
    scores_prompt: bool
    ends: frozenset[int]
    tokens: list[int]
    computed: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    filtered_log_probs: list[float] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    pure: bool = True
    exact: bool = True
    ended: bool = False

    @property
    def pending(self) -> int:
        """Rows still to be pushed; the last of them draws the next token."""
        return len(self.tokens) - self.computed

    def mark(self, rows: range, version: str) -> None:
        """Notes who pushed `rows`. A row whose token is already drawn keeps the weights that drew it."""
        for row in rows:
            if row == len(self.versions):
                self.versions.append(version)
            elif row < self.prompt_length - 1:
                self.versions[row] = version

    def finish_reason(self) -> str | None:
        """Whether the last token ends the request, and why."""
        if self.tokens[-1] in self.ends:
            return "stop"
        return "length" if len(self.tokens) - self.prompt_length == self.params.max_new_tokens else None


def _order(request: Request) -> int:
    return request.order


@dataclass
class Scheduler:
    """Running and waiting requests, each in order of arrival. The earliest always gets what it needs, so all end."""

    memory: ServingMemory
    pool: PagePool
    version: str
    max_batch: int
    chunk_rows: int
    prefix_cache: bool
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    reused_rows: int = 0
    preemptions: int = 0

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    def admit(self) -> None:
        """Starts waiting requests while there is room for all their tokens. It takes no page from a running one.

        A request whose next page a running prompt is about to fill waits for it, so that samples of one prompt share its rows.
        """
        reserved = sum(self._missing(r) for r in self.running)
        filling = {key for r in self.running if r.pending > 1 and (key := self._next_key(r, r.nodes, len(r.tokens)))}
        for request in list(self.waiting):
            if len(self.running) == self.max_batch or (self.memory.slots and not self.pool.free_slots):
                return
            shares = self.prefix_cache and not request.scores_prompt
            # the last row is pushed in any case: it draws
            nodes = list(self.pool.walk(self.version, request.tokens[:-1])) if shares else []
            if shares and self._next_key(request, nodes, len(request.tokens) - 1) in filling:
                continue
            while nodes and not self._may_start_after(nodes):
                nodes.pop()
            need = self._missing(request) - len(nodes)
            room = self.pool.available - sum(node.refs == 0 for node in nodes) - reserved
            if self.running and room < need + len(self.running):  # a page to grow for each, or it would soon be preempted
                return
            self._start(request, nodes)
            reserved += need
            key = self._next_key(request, request.nodes, len(request.tokens))
            if key is not None and request.pending > 1:
                filling.add(key)

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
        """After `count` rows were pushed: pages that they filled become shareable."""
        request.mark(range(request.computed, request.computed + count), self.version)
        request.computed += count
        size = self.pool.page_size
        while self.prefix_cache and request.pure and (filled := len(request.nodes) + 1) * size <= request.computed:
            parent = request.nodes[-1] if request.nodes else None
            tokens = request.tokens[(filled - 1) * size : filled * size]
            node = self.pool.insert(self.version, parent, tokens, request.pages[filled - 1])
            request.pages[filled - 1] = node.page
            request.nodes.append(node)
            last = filled * size == request.computed == self.memory.reusable_length(request.computed)
            if self.memory.slots and last and node.snapshot is None:
                node.snapshot = self.memory.snapshot(request.slot, request.computed)

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
        request.computed, request.slot, request.pages, request.nodes, request.pure = 0, 0, [], [], True

    def _start(self, request: Request, nodes: list[Node]) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        self.pool.hold(nodes)
        request.nodes, request.pages = nodes, [node.page for node in nodes]
        request.computed = len(nodes) * self.pool.page_size
        request.mark(range(request.computed), self.version)
        self.reused_rows += request.computed
        if self.memory.slots:
            request.slot = self.pool.free_slots.popleft()
            self.memory.clear([], [request.slot])
            if nodes:
                self.memory.restore(request.slot, nodes[-1].snapshot)

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

    def _next_key(self, request: Request, nodes: list[Node], length: int) -> Key | None:
        """The cache key of the page after `nodes`, None where `length` tokens do not fill it."""
        size = self.pool.page_size
        start = len(nodes) * size
        if not self.prefix_cache or not request.pure or start + size > length:
            return None
        return self.pool.key(self.version, nodes[-1] if nodes else None, request.tokens[start : start + size])

    def _may_start_after(self, nodes: list[Node]) -> bool:
        length = len(nodes) * self.pool.page_size
        return self.memory.reusable_length(length) == length and (not self.memory.slots or nodes[-1].snapshot is not None)

    def _cut(self, request: Request, count: int) -> int:
        """A memory with slots stops at the last length that `count` rows would cross and that a snapshot may be taken at."""
        if not self.memory.slots or not self.prefix_cache:
            return count
        boundary = self.memory.reusable_length(request.computed + count) // self.pool.page_size * self.pool.page_size
        return boundary - request.computed if boundary > request.computed else count
