"""The weight table of an architecture: which published tensors make which parameter, of what dtype, cut how, stored how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from zoo.common.codecs import PACKED, BlockScaled, Codec, Exponents, MxFp4, Rounded
from zoo.common.layout import Layout

LARGEST_FP8_SCALE = 246  # as a byte: 448 x 2^119 is a BF16 number, 448 x 2^120 is not


@dataclass(frozen=True)
class Cut:
    """How the ranks of a layout share a published tensor: in runs of whole units, the same number to each.

    dim       of the tensor that is cut
    unit      elements that stay together: the rows of a head
    sections  (length, unit) of parts that are shared by themselves, for a tensor that is several stacked ones; none: it is one
    along     the axis of the layout whose ranks share it
    """

    dim: int = 0
    unit: int = 1
    sections: tuple[tuple[int, int], ...] = ()
    along: str = "tp"

    def runs(self, length: int, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
        """[begin, end) of each section that a rank has. ValueError if units don't divide among the ranks, or sections don't add up."""
        parts = self.sections or ((length, self.unit),)
        if sum(part for part, _ in parts) != length:
            raise ValueError(f"sections {[part for part, _ in parts]} make {sum(part for part, _ in parts)}, the tensor has {length}")
        if not 0 <= rank < ranks:
            raise ValueError(f"there is no rank {rank} of {ranks}")
        found = []
        start = 0
        for part, unit in parts:
            if part % (unit * ranks):
                raise ValueError(f"{part} in units of {unit} can't be shared by {ranks} ranks")
            share = part // ranks
            found.append((start + rank * share, start + (rank + 1) * share))
            start += part
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Piece:
    """One published tensor and its place inside one of our parameters.

    shape   of what fills the place
    expert  index on our parameter's leading dimension, if it stacks experts
    start   first row that it fills: param[start : start + shape[0]], or the same inside param[expert]
    cut     how ranks share it; None: each has the whole
    taken   runs along the cut's dimension that a rank takes of the published tensor; none: all of it
    """

    published: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0
    cut: Cut | None = None
    taken: tuple[tuple[int, int], ...] = ()

    @property
    def rows(self) -> slice:
        """The rows that it fills, for what addresses a part of a fused parameter."""
        return slice(self.start, self.start + self.shape[0])

    def of(self, parameter: Tensor) -> Tensor:
        """The view of our parameter that this published tensor is."""
        inside = parameter if self.expert is None else parameter[self.expert]
        return inside[self.rows]

    def take(self, published: Tensor) -> Tensor:
        """What of the published tensor fills the place."""
        if self.cut is None or not self.taken:
            return published
        runs = [published.narrow(self.cut.dim, begin, end - begin) for begin, end in self.taken]
        return runs[0] if len(runs) == 1 else torch.cat(runs, self.cut.dim)

    def local(self, layout: Layout, ranks: Mapping[str, int], start: int) -> Piece:
        """The same on one rank of a layout, from row `start` on. `ranks`: which of each axis's ranks it is, the first by default."""
        if self.cut is None:
            return replace(self, start=start)
        runs = self.cut.runs(self.shape[self.cut.dim], ranks.get(self.cut.along, 0), getattr(layout, self.cut.along))
        held = sum(end - begin for begin, end in runs)
        shape = (*self.shape[: self.cut.dim], held, *self.shape[self.cut.dim + 1 :])
        return replace(self, shape=shape, start=start, taken=runs)

    def beside(self, whole: Piece, mine: Piece, codec: Codec) -> Piece:
        """What a rank takes of this where it is stored beside a piece, `whole`, of which the rank takes `mine`: its blocks' scales.

        ValueError, with both numbers, where the rank would get a part of a block.
        """
        dims = len(whole.shape)
        rows = codec.block(dims, 0)
        if mine.start % rows:
            raise ValueError(f"{whole.published} would fill row {mine.start} and on, which is inside a block of {rows}")
        placed = replace(self, expert=mine.expert, start=mine.start // rows)
        if mine.cut is None:
            return placed
        dim = mine.cut.dim
        size = codec.block(dims, dim)
        for begin, end in mine.taken:
            if begin % size or (end % size and end != whole.shape[dim]):
                raise ValueError(f"{whole.published}: {begin} to {end} of {whole.shape[dim]} is no whole number of blocks of {size}")
        runs = tuple((begin // size, -(-end // size)) for begin, end in mine.taken)
        held = sum(end - begin for begin, end in runs)
        return replace(placed, shape=(*self.shape[:dim], held, *self.shape[dim + 1 :]), cut=mine.cut, taken=runs)


@dataclass(frozen=True)
class Entry:
    """One parameter of ours.

    ours            its name in module.state_dict()
    layouts         alternatives as published checkpoints have them; the first is what save writes by default
    optional_alias  may be absent; when present its bytes must equal those of the parameter (lm_head of a tied model)
    dtype           of the parameter in every program; None: the program's. FP32 may be stored narrower, which widens exactly
    trainable       whether it gets a gradient; the architecture's table says why not
    codec           what lies between its values and what is stored; None: it is stored as it is
    beside          parameters that hold what the codec stores beside this one's codes: scales
    below           of a table of integers: its rows hold different ones below so many, and not all of them are 0
    multiplies      whether it is scales that FP8 codes are multiplied by
    """

    ours: str
    layouts: tuple[tuple[Piece, ...], ...]
    optional_alias: bool = False
    dtype: torch.dtype | None = None
    trainable: bool = True
    codec: Codec | None = None
    beside: tuple[str, ...] = ()
    below: int = 0
    multiplies: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's: all that its pieces fill together."""
        pieces = self.layouts[0]
        rows = max(piece.rows.stop for piece in pieces)
        experts = [1 + piece.expert for piece in pieces if piece.expert is not None]
        return (*([max(experts)] if experts else []), rows, *pieces[0].shape[1:])

    def held(self, usual: torch.dtype) -> torch.dtype:
        """The parameter's dtype in a program whose own is `usual`."""
        if self.codec is not None:
            return self.codec.held
        return usual if self.dtype is None else self.dtype

    def stored(self, usual: torch.dtype) -> torch.dtype:
        """What it is published in."""
        return self.held(usual) if self.codec is None else self.codec.stored

    @property
    def alike(self) -> tuple[torch.dtype, ...]:
        """Other dtypes that a checkpoint may have the same bytes in."""
        return () if self.codec is None else self.codec.alike

    def taken(self, name: str, published: Tensor) -> Tensor:
        """A published tensor in the dtype that it is stored in, the same bytes. ValueError for bytes that mean nothing here."""
        if self.codec is None:
            return published
        stored = published.view(self.codec.stored) if published.dtype in self.codec.alike else published
        self.codec.check(name, stored)
        return stored

    @property
    def is_master(self) -> bool:
        """Whether the parameter holds more than is stored of it, and an optimizer may move it by less than that shows."""
        return isinstance(self.codec, Rounded | BlockScaled) and self.codec.held != self.codec.stored

    @property
    def rounds(self) -> bool:
        """Whether what is stored of the parameter is each of its numbers rounded by itself."""
        return isinstance(self.codec, Rounded)

    @property
    def widens(self) -> bool:
        """Whether a checkpoint may have it narrower."""
        return self.held(torch.float64) is torch.float32

    @property
    def fixed(self) -> bool:
        """Whether its dtype in a checkpoint tells nothing of the program's."""
        return self.dtype is not None or (self.codec is not None and self.codec.held == self.codec.stored)

    def publish(self, view: Tensor) -> Tensor:
        """What is published of a part of the parameter: the part itself, unless a codec holds more than it stores."""
        if self.codec is None or self.codec.held == self.codec.stored:
            return view
        return self.codec.encode(view)[0]


def single(
    ours: str,
    published: str,
    shape: tuple[int, ...],
    *,
    optional_alias: bool = False,
    dtype: torch.dtype | None = None,
    trainable: bool = True,
    cut: Cut | None = None,
) -> Entry:
    """One parameter that is one published tensor of `shape`."""
    return Entry(ours, ((Piece(published, shape, cut=cut),),), optional_alias, dtype, trainable)


def stacked_rows(ours: str, columns: int, parts: Iterable[tuple[str, int, Cut | None]]) -> Entry:
    """Published projections of one input, (name, rows, cut) each of `columns` columns, stacked by rows in the order given."""
    pieces = []
    start = 0
    for published, rows, cut in parts:
        pieces.append(Piece(published, (rows, columns), start=start, cut=cut))
        start += rows
    return Entry(ours, (tuple(pieces),))


def block_scaled(
    ours: str,
    published: str,
    shape: tuple[int, ...],
    codec: BlockScaled,
    scales: str = "_scale_inv",
    *,
    cut: Cut | None = None,
) -> list[Entry]:
    """A weight of FP8 codes, and its scales under both names with `scales` behind them; ".scale" stands in place of ".weight" in both.

    Scales that are powers of two are stored as exponents, and held in FP32. Neither codes nor scales are trained.

    `cut` is that of the codes, in whole blocks; the scales of a rank's blocks go with them.
    """
    beside = scale_name(ours, scales)
    stored = Exponents(held=torch.float32, largest=LARGEST_FP8_SCALE) if codec.power_of_two else None
    piece = Piece(scale_name(published, scales), codec.scales(shape))
    return [
        Entry(ours, ((Piece(published, shape, cut=cut),),), trainable=False, codec=codec, beside=(beside,)),
        Entry(beside, ((piece,),), dtype=torch.float32, trainable=False, codec=stored, multiplies=True),
    ]


def scale_name(codes: str, scales: str) -> str:
    """The name of the scales beside codes: `scales` behind it, or in place of its last part where it begins with a dot."""
    return f"{codes.rpartition('.')[0]}{scales}" if scales.startswith(".") else f"{codes}{scales}"


def packed_experts(
    ours: str,
    theirs: Sequence[str],
    count: int,
    hidden: int,
    intermediate: int,
    codec: MxFp4 = PACKED,
    *,
    projections: tuple[str, str, str] = ("w1", "w3", "w2"),
    scales: str = ".scale",
) -> list[Entry]:
    """The parameters of `PackedExperts`, of published codes and scales of every expert's gate, up and down projections.

    theirs       what the names before an expert's number may be, one layout each
    projections  the published names of gate, up and down

    None is trained. ValueError for sizes that are no whole groups of 32.
    """
    gate, up, down = projections
    parts = {
        "gate_up": ([(gate, 0), (up, intermediate)], (intermediate, hidden)),
        "down": ([(down, 0)], (hidden, intermediate)),
    }
    entries = []
    for name, (pieces, values) in parts.items():
        codes = codec.packed(values)
        layouts = tuple(
            tuple(Piece(f"{at}.{e}.{part}.weight", codes, expert=e, start=start) for e in range(count) for part, start in pieces)
            for at in theirs
        )
        beside = tuple(
            tuple(replace(piece, published=scale_name(piece.published, scales), shape=codec.scales(codes)) for piece in layout)
            for layout in layouts
        )
        own = f"{ours}.{name}_scale"
        entries += [
            Entry(f"{ours}.{name}", layouts, trainable=False, codec=codec, beside=(own,)),
            Entry(own, beside, trainable=False, codec=Exponents()),
        ]
    return entries


def gated_mlp(ours: str, theirs: str, hidden: int, intermediate: int) -> list[Entry]:
    """The parameters of a `GatedMLP`: gate over up, and down."""
    return [
        stacked_rows(f"{ours}.gate_up.weight", hidden, [(f"{theirs}.{n}_proj.weight", intermediate, Cut()) for n in ("gate", "up")]),
        single(f"{ours}.down.weight", f"{theirs}.down_proj.weight", (hidden, intermediate), cut=Cut(1)),
    ]


def separate_experts(theirs: str, count: int, hidden: int, intermediate: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The layouts of `Experts`' gate_up and down where each expert's projections are published by themselves."""
    gate_up = tuple(
        Piece(f"{theirs}.{e}.{name}_proj.weight", (intermediate, hidden), expert=e, start=start)
        for e in range(count)
        for name, start in (("gate", 0), ("up", intermediate))
    )
    return gate_up, tuple(Piece(f"{theirs}.{e}.down_proj.weight", (hidden, intermediate), expert=e) for e in range(count))


@dataclass(frozen=True)
class WeightTable:
    """All parameters of a geometry.

    carried  regexes of published names that are recognised, not used, and written back as they were (vision, MTP)
    prefix   what a tensor's published name begins with inside a larger model, and what it begins with in the text model alone
    """

    entries: tuple[Entry, ...]
    carried: tuple[str, ...]
    prefix: tuple[str, str] = ("", "")

    def is_carried(self, published: str) -> bool:
        return any(re.fullmatch(pattern, published) for pattern in self.carried)

    @cached_property
    def parameters(self) -> dict[str, Entry]:
        """Every parameter's entry by our name, aliases left out. Not to be changed."""
        return {entry.ours: entry for entry in self.entries if not entry.optional_alias}

    @cached_property
    def owners(self) -> dict[str, Entry]:
        """The entries whose codec stores something beside them, by the name of the parameter that holds it. Not to be changed."""
        return {name: entry for entry in self.entries for name in entry.beside}

    @cached_property
    def tied(self) -> frozenset[str]:
        """Our names of the parameters that a checkpoint may have once more, as an alias."""
        return frozenset(entry.ours for entry in self.entries if entry.optional_alias)

    @cached_property
    def known(self) -> dict[str, tuple[Entry, tuple[Piece, ...], Piece]]:
        """Every published name of a parameter: its entry, the layout that has it, and its piece. Not to be changed."""
        return {p.published: (entry, layout, p) for entry in self.entries for layout in entry.layouts for p in layout}

    def with_masters(self, held: torch.dtype, usual: torch.dtype) -> WeightTable:
        """The same where every parameter of the program's dtype, `usual`, is a master in `held`; those of a dtype of their own stay."""
        codec = Rounded(usual, held)
        plain = [entry.dtype is None and entry.codec is None for entry in self.entries]
        return replace(self, entries=tuple(replace(e, codec=codec) if own else e for e, own in zip(self.entries, plain, strict=True)))

    def local(self, layout: Layout, ranks: Mapping[str, int]) -> WeightTable:
        """The table of one rank: the same parameters, each filled with the rank's part of what is published.

        `ranks`: which of each axis's ranks it is, the first by default. ValueError, with both numbers, for what does not divide.
        """
        layout.check_ranks(ranks)

        def shared(entry: Entry) -> Entry:
            codes = self.owners.get(entry.ours)
            if codes is None:
                return replace(entry, layouts=tuple(_local(pieces, layout, ranks) for pieces in entry.layouts))
            pairs = zip(entry.layouts, codes.layouts, strict=True)
            return replace(entry, layouts=tuple(_local_beside(pieces, codes, of, layout, ranks) for pieces, of in pairs))

        return replace(self, entries=tuple(map(shared, self.entries)))

    def pieces(self) -> Iterator[tuple[Entry, Piece]]:
        """The default layout of every parameter, aliases left out."""
        return ((entry, piece) for entry in self.entries if not entry.optional_alias for piece in entry.layouts[0])

    def canonical(self, published: str) -> str:
        """A tensor's name in the content hash: that of the text model alone, so equal weights have equal hashes in either."""
        inside, alone = self.prefix
        return alone + published.removeprefix(inside) if published.startswith(inside) else published


def _local(pieces: tuple[Piece, ...], layout: Layout, ranks: Mapping[str, int]) -> tuple[Piece, ...]:
    """A rank's pieces of one parameter: its experts, numbered from 0, and behind each other its rows of each piece."""
    return tuple(mine for _, mine in _shares(pieces, layout, ranks))


def _local_beside(
    pieces: tuple[Piece, ...],
    owner: Entry,
    codes: tuple[Piece, ...],
    layout: Layout,
    ranks: Mapping[str, int],
) -> tuple[Piece, ...]:
    """A rank's pieces of what `owner` stores beside its codes: piece by piece, those of the blocks that it has."""
    assert owner.codec is not None, "only a codec stores something beside"
    beside = {whole.published: piece for whole, piece in zip(codes, pieces, strict=True)}
    return tuple(beside[whole.published].beside(whole, mine, owner.codec) for whole, mine in _shares(codes, layout, ranks))


def _shares(pieces: tuple[Piece, ...], layout: Layout, ranks: Mapping[str, int]) -> list[tuple[Piece, Piece]]:
    """(piece, what a rank has of it) for those pieces of which it has something."""
    experts = [piece.expert for piece in pieces if piece.expert is not None]
    [(first, last)] = Cut().runs(1 + max(experts), ranks.get("ep", 0), layout.ep) if experts else [(0, 0)]
    found = []
    ends: dict[int | None, int] = {}
    for piece in pieces:
        if piece.expert is None or first <= piece.expert < last:
            expert = None if piece.expert is None else piece.expert - first
            mine = replace(piece.local(layout, ranks, ends.get(expert, 0)), expert=expert)
            ends[expert] = mine.rows.stop
            found.append((piece, mine))
    return found


def check_table(name: str, table_VK: Tensor, experts: int) -> None:
    """ValueError for a table with an entry outside the experts, with an expert twice in a row, or of zeros alone."""
    if not bool(table_VK.any()):
        raise ValueError(f"{name} holds zeros alone: every token would have expert 0 and no other, the table was never filled")
    outside = (table_VK < 0) | (table_VK >= experts)
    if bool(outside.any()):
        row, slot = outside.nonzero()[0].tolist()
        raise ValueError(f"{name} sends token {row} to expert {int(table_VK[row, slot])}, there are {experts}")
    ordered = table_VK.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).nonzero()
    if len(twice):
        row, slot = twice[0].tolist()
        raise ValueError(f"{name} sends token {row} to expert {int(ordered[row, slot])} twice")


class Places:
    """Where published tensors go, asked for one after another.

    ValueError for a name that comes twice, and for a second layout of a parameter: the order would decide which one stays.
    """

    def __init__(self, table: WeightTable) -> None:
        self._known = table.known
        self._seen: set[str] = set()
        self._chosen: dict[str, tuple[tuple[Piece, ...], str]] = {}

    def find(self, name: str) -> tuple[Entry, Piece] | None:
        """None for a name that is no parameter's."""
        if name not in self._known:
            return None
        if name in self._seen:
            raise ValueError(f"{name} is given twice")
        self._seen.add(name)
        entry, layout, piece = self._known[name]
        if not entry.optional_alias:
            chosen, first = self._chosen.setdefault(entry.ours, (layout, name))
            if chosen is not layout:
                raise ValueError(f"{first} and {name} are two layouts of one parameter, only one of them may be given")
        return entry, piece
