"""Which page and slot belongs to whom: the pool, and what requests with a common prefix share: full pages and snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Key = tuple["str | int", tuple[int, ...]]


@dataclass(eq=False)
class Node:
    """A full page in the cache: `key` is (its parent's number, or the weights version at the root; the page's tokens).

    refs      running requests that hold the page; they hold all its ancestors too
    children  cached pages that continue it
    """

    number: int
    key: Key
    page: int
    parent: Node | None
    refs: int = 0
    children: int = 0


@dataclass
class PagePool:
    """Pages 1 .. pages - 1 and slots 1 .. slots. A page is free, held by one request, or a node of the cache.

    Nodes that nobody holds stay readable until their page is needed; the least recently released leaf goes first. Of at most
    `room` snapshots the least recently used goes first. One is found by its prefix: the last full page, and the tokens after it.
    It goes with that page, but needs no later one.
    """

    pages: int
    slots: int
    page_size: int
    room: int = 0
    free: deque[int] = field(init=False)
    free_slots: deque[int] = field(init=False)
    nodes: dict[Key, Node] = field(default_factory=dict)
    snapshots: dict[Key, Any] = field(default_factory=dict)  # the least recently used first
    idle: dict[Node, None] = field(default_factory=dict)  # unheld leaves, oldest first
    unheld: int = 0
    numbers: int = 0

    def __post_init__(self) -> None:
        self.free = deque(range(1, self.pages))
        self.free_slots = deque(range(1, self.slots + 1))

    @property
    def available(self) -> int:
        """Pages that `take` can give: a node without a holder has only such descendants."""
        return len(self.free) + self.unheld

    def take(self, count: int) -> list[int]:
        """`count` pages of unknown content, evicting cached ones where no free page is left."""
        assert count <= self.available, f"{count} pages taken of {self.available}"
        while len(self.free) < count:
            self._evict(next(iter(self.idle)))
        return [self.free.popleft() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Takes back pages that are no nodes."""
        self.free.extend(pages)

    def key(self, version: str, parent: Node | None, tokens: Sequence[int]) -> Key:
        return (version if parent is None else parent.number, tuple(tokens))

    def walk(self, version: str, tokens: Sequence[int]) -> Iterator[Node]:
        """The cached pages of the longest known prefix, first to last, under exactly this weights version."""
        parent: Node | None = None
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            node = self.nodes.get(self.key(version, parent, tokens[start : start + self.page_size]))
            if node is None:
                return
            yield node
            parent = node

    def hold(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.refs == 0:
                self.unheld -= 1
                self.idle.pop(node, None)
            node.refs += 1

    def release(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            node.refs -= 1
            if node.refs == 0:
                self.unheld += 1
                if node.children == 0:
                    self.idle[node] = None

    def insert(self, version: str, parent: Node | None, tokens: Sequence[int], page: int) -> Node:
        """The node of these tokens after `parent`, which the caller holds, as it now does this one.

        If there was one already, its page has the same bytes and `page` is freed.
        """
        key = self.key(version, parent, tokens)
        node = self.nodes.get(key)
        if node is not None:
            self.give([page])
            self.hold([node])
            return node
        self.numbers += 1
        node = self.nodes[key] = Node(self.numbers, key, page, parent, refs=1)
        if parent is not None:
            parent.children += 1
        return node

    def after(self, version: str, nodes: Sequence[Node], tokens: Sequence[int], length: int) -> Key:
        """The key of a snapshot after `length` of the tokens, whose first pages are `nodes`."""
        full = length // self.page_size
        return self.key(version, nodes[full - 1] if full else None, tokens[full * self.page_size : length])

    def nearest(self, version: str, nodes: Sequence[Node], tokens: Sequence[int], grain: int) -> tuple[int, Key | None]:
        """(length, key) of the snapshot that covers most of `tokens`, whose cached pages are `nodes`; (0, None) without one."""
        longest = min(len(tokens), (len(nodes) + 1) * self.page_size - 1)
        for length in range(longest // grain * grain, 0, -grain) if self.snapshots else ():
            key = self.after(version, nodes, tokens, length)
            if key in self.snapshots:
                return length, key
        return 0, None

    def use(self, key: Key) -> Any:
        """A snapshot, which is now the last to go."""
        self.snapshots[key] = found = self.snapshots.pop(key)
        return found

    def keep(self, key: Key, make: Callable[[], Any]) -> None:
        """Keeps what `make` returns, unless there is one already; the oldest goes before it is made, so there are never more."""
        if key in self.snapshots:
            self.use(key)
        elif self.room:
            while len(self.snapshots) >= self.room:
                del self.snapshots[next(iter(self.snapshots))]
            self.snapshots[key] = make()

    def _evict(self, node: Node) -> None:
        assert node.refs == 0 and node.children == 0
        del self.nodes[node.key], self.idle[node]
        for key in [key for key in self.snapshots if key[0] == node.number]:
            del self.snapshots[key]
        self.unheld -= 1
        self.free.append(node.page)
        if node.parent is not None:
            node.parent.children -= 1
            if node.parent.refs == 0 and node.parent.children == 0:
                self.idle[node.parent] = None
