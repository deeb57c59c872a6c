"""What the ladder climbs: a trainer and a server of one architecture, built apart from the same weights, and fixed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zoo.common.program import specification
from zoo.common.quantisation import in_codes, usual_program
from zoo.common.registry import architectures, find, model_class
from zoo.common.serving import ForServing
from zoo.common.threads import is_large
from zoo.common.training import ForRL
from zoo.verify.asked import check_lengths, check_random


@dataclass(frozen=True)
class Settings:
    """How far a climb goes.

    lengths        tokens of each sequence
    tail           positions decoded one by one at the end of each sequence; None: all of them
    page_sizes     pages tried beside the model's own
    backward_rows  tokens that take a backward pass; the shortest sequences up to here
    steps          optimizer steps of rung 5
    graph_batches  sequences decoded at once by a CUDA graph
    graph_steps    tokens that each of them decodes
    requests       live requests of rung 4, and the tokens each draws
    """

    lengths: tuple[int, ...]
    tail: int | None = None
    page_sizes: tuple[int, ...] = (16, 64)
    backward_rows: int = 4096
    steps: int = 3
    graph_batches: tuple[int, ...] = (1, 8, 64)
    graph_steps: int = 12
    requests: int = 6
    drawn: int = 24

    def again(self) -> Settings:
        """For rung 5, which climbs rungs 3 and 4 once more after every step."""
        return replace(self, tail=min(self.tail or 24, 24), page_sizes=self.page_sizes[:1])


@dataclass
class Subject:
    """A trainer and a server. `source` says how another process gets the same weights: see zoo.verify.score."""

    arch: str
    trainer: ForRL
    server: ForServing
    source: dict[str, Any]
    documents: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return next(self.trainer.parameters()).device

    @property
    def vocabulary(self) -> int:
        return int(self.trainer.config.vocabulary)

    def ids(self, document: int) -> Tensor:
        """The tokens that are read, [T]."""
        return self.documents[document][:-1]

    def targets(self, document: int) -> Tensor:
        """The tokens that are scored, [T]: the next one of each."""
        return self.documents[document][1:]

    def length(self, document: int) -> int:
        return self.documents[document].shape[0] - 1

    def draw(self, lengths: tuple[int, ...], seed: int = 0) -> None:
        """Fixed random documents, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randint(self.vocabulary, (length + 1,), generator=generator) for length in lengths]
        self.documents = [ids.to(self.device) for ids in drawn]


def sizes(arch: str) -> Mapping[str, Any]:
    """Published and tiny geometries of an architecture by name. ValueError for one that is unknown or not built yet."""
    _, found = find(arch)
    return found.sizes


def config_of(arch: str, size: str, layers: int | None) -> Any:
    """One geometry, with fewer layers if asked. ValueError for a size or layer count that there is not."""
    known = sizes(arch)
    if size not in known:
        others = [other for other in architectures() if size in sizes(other)]
        hint = f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else ""
        raise ValueError(f"{arch} has no size {size!r}; there are {', '.join(known)}{hint}")
    config = known[size]
    if layers is None:
        return config
    if not 1 <= layers <= config.layers:
        raise ValueError(f"--layers {layers}: {arch} {size} has 1 to {config.layers}")
    return config.first_layers(layers)


def geometry(
    arch: str,
    checkpoint: str | None,
    size: str | None,
    layers: int | None,
    revision: str | None = None,
    program: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The config of a checkpoint or of random weights, in codes for a `program` of codes, and its config.json.

    ValueError for whatever the user got wrong.
    """
    from zoo.common.hub import read_config

    family, named = find(arch)
    check_random(checkpoint, size, layers, revision)
    if checkpoint is None:
        name = "tiny" if size is None else size
        config = config_of(arch, name, layers)
        if program is not None and specification(program).codes:
            widths = named.tiny_codes if name == "tiny" else {}
            config = in_codes(family.config.from_hf({**config.to_hf(), **widths}), packed=specification(program).packed)
        return config, config.to_hf()
    fields = read_config(checkpoint, revision)
    if fields.get("model_type") not in named.model_types:
        raise ValueError(f"{checkpoint} is a {fields.get('model_type')!r} checkpoint, not {arch!r}")
    return family.config.from_hf(fields), fields


def build(
    arch: str,
    *,
    checkpoint: str | None,
    revision: str | None = None,
    device: str | None,
    size: str | None = None,
    layers: int | None = None,
    seed: int = 0,
    masters: bool = False,
    program: str | None = None,
    shared: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Subject:
    """Both models, from a checkpoint or from random weights; with `masters` the trainer's parameters are FP32, `shared`: they are the
    server's too, which holds none of its own.

    ValueError for whatever the user got wrong.
    """
    _, fields = geometry(arch, checkpoint, size, layers, revision, program)
    source = {"config": fields, "seed": seed} if checkpoint is None else {"checkpoint": str(checkpoint), "revision": revision}
    say("building the trainer")
    trainer = load(source, "rl", device, torch.float32 if masters else None)
    say("building the server")
    server = model_class(fields, "serving").sharing_weights(trainer) if shared else load(source, "serving", device)
    assert isinstance(trainer, ForRL) and isinstance(server, ForServing)
    return Subject(arch, trainer, server, source)


def load(source: dict[str, Any], role: str, device: str | None, master_dtype: torch.dtype | None = None) -> Any:
    """A model from a subject's source, in this process or another."""
    from zoo.common.hub import read_config

    stored = "checkpoint" in source
    fields = read_config(source["checkpoint"], source.get("revision")) if stored else source["config"]
    made = model_class(fields, role)
    config = made.family.config.from_hf(fields)
    program = usual_program(config)
    if stored:
        path = source["checkpoint"]
        return made.from_pretrained(path, device=device, revision=source.get("revision"), master_dtype=master_dtype, program=program)
    return made.from_config(config, seed=source["seed"], device=device, master_dtype=master_dtype, program=program)


def settings_for(subject: Subject, lengths: tuple[int, ...] | None = None) -> Settings:
    """Lengths at the edges of the program's tiles and segments, and how much of them is decoded token by token."""
    cuda = subject.device.type == "cuda"
    memory = subject.server.make_memory(2, slots=1)
    large = is_large(subject.trainer)  # then only the ends of sequences are decoded token by token
    slots = bool(memory.slots)
    if lengths is None:
        # decode with slots is the dearest of a CPU's climb: 140 tokens close two chunks
        small = (1, 63, 64, 65, 140 if slots and not (cuda or large) else 300)
        lengths = (1, 64, 593, 594, 1025, 2049, 4096) if large else (*small, 593, 2060) if cuda else small
    check_lengths(lengths, subject.trainer.config.positions)
    pages = tuple(size for size in (16, 64, 80) if size != memory.page_size)[:2] if subject.server.takes_any_page else ()
    tail = 64 if large else 200 if cuda else None
    batches = (1, 8, 32 if slots else 64)  # a state is far larger than a page
    return Settings(tuple(lengths), tail=tail, page_sizes=pages, backward_rows=2400 if large else 4096, graph_batches=batches)
