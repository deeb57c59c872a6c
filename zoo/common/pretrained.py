"""What every model class shares: loading, saving, random weights, weight updates, fingerprints."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from zoo.common import checkpoint as files
from zoo.common.checkpoint import Checkpoint
from zoo.common.config import config_lines
from zoo.common.decoded import as_read
from zoo.common.ends import end_tokens, read_generation
from zoo.common.files import check_fresh
from zoo.common.fingerprint import Fingerprint, realisation, weights_hash
from zoo.common.hashing import distinct_, key64, normal_
from zoo.common.layers import Embedding, RotaryTable
from zoo.common.masters import Held, held_beside, hold
from zoo.common.ops import table_hash
from zoo.common.ops.contract import program_lines
from zoo.common.processes import Alone, InStep, Recent, is_sharded, processes_of, reshard, whole
from zoo.common.program import Program, parse_device, parse_dtype, resolve
from zoo.common.quantisation import take_codes, usual_program
from zoo.common.recipe import Draw, usual_recipe
from zoo.common.rows import check_dense
from zoo.common.toolchain import toolchain
from zoo.common.values import refresh_values
from zoo.common.weights import Entry, Piece, Places, WeightTable

if TYPE_CHECKING:
    from zoo.common.family import Family
    from zoo.common.walk import CausalModel

DRIVER_OPS = ("linear", "log_prob", "sample")  # what ForRL and ForServing call behind the last layer: logits, scores, draws

Seen = tuple["weakref.ref[nn.Parameter]", int, int]  # a parameter, where its memory lies and how often torch wrote it


class Pretrained(nn.Module):
    """Base of every ForRL and ForServing class.

    `family` is the record that names the classes (zoo.common.family). `trainable` says whether parameters want gradients, those
    that the weight table freezes left out.
    """

    family: ClassVar[Family]
    trainable: ClassVar[bool] = True

    model: CausalModel
    config: Any
    program: Program
    _source: Checkpoint | None = None
    _ends: tuple[int, ...] | None = None
    _label: str | None = None
    _hash: tuple[int, list[Seen], str] | None = None
    _changes: int = 0
    _places: list[tuple[str, dict[str, Any], str, torch.dtype]] | None = None
    _masters: torch.dtype | None = None
    _beside: dict[str, Held] | None = None

    def __init__(self, config: Any, program: Program) -> None:
        """Parameters of the family's model, not filled; also on the meta device."""
        super().__init__()
        self.config = config
        self.program = program
        self.model = self.family.model(config, program)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_hash": None}  # of the parameters of this object, not of a copy's

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The program's own, of the rows and of most weights."""
        return self.program.torch_dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Numbers in all parameters, or in those that want gradients, or in those beside tables of the vocabulary."""
        tables = [module.weight for module in self.modules() if exclude_embeddings and isinstance(module, Embedding)]
        left_out = {id(table) for table in tables}
        return sum(p.numel() for p in self.parameters() if id(p) not in left_out and (p.requires_grad or not only_trainable))

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a sequence, of config.json and generation_config.json together."""
        return self.config.eos if self._ends is None else self._ends

    def reset_buffers(self, device: torch.device) -> None:
        """Rebuilds whatever is not a parameter (RoPE tables) on a device."""
        for module in self.modules():
            if isinstance(module, RotaryTable):
                module.reset_buffers(device)

    def program_lines(self) -> dict[str, str]:
        """The model's own lines of the program: every field of the config that moves a byte, and the hash of each RoPE table."""
        device = next(self.parameters()).device
        tables = [(name, module) for name, module in self.named_modules() if isinstance(module, RotaryTable)]
        return config_lines(self.config) | {f"rope.{name}": table_hash(module.on(device)) for name, module in tables}

    def check_arithmetic(self) -> None:
        """ValueError if a parameter lost the dtype that the program and the weight table give it: `.half()`, `.float()`, `.to(dtype)`.

        Likewise if PyTorch may round the FP32 operands of a CPU's products.
        """
        if self._places is None:  # where parameters live, found once: decode asks before every token
            entries = self.table_of().parameters
            self._places = [
                (full, module._parameters, name, entries[full].held(self.program.torch_dtype))
                for path, module in self.named_modules()
                for name in module._parameters
                for full in [f"{path}.{name}".removeprefix(".")]
            ]
        products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        if self.program.device == "cpu" and products.fp32_precision not in ("none", "ieee"):
            raise ValueError(
                f"PyTorch may round the operands of FP32 products to {products.fp32_precision} (torch.set_float32_matmul_precision, or "
                'fp32_precision of its backends), which moves bytes on a CPU: set "highest"'
            )
        masters = self._held
        sharded = bool(masters) and bool(self._units())
        for full, owner, name, wanted in self._places:
            parameter = owner.get(name)
            if parameter is None or parameter.dtype is wanted:
                continue
            # a policy of FSDP2 rounds masters where it gathers them
            if sharded and full in masters and parameter.dtype is masters[full].dtype and not is_sharded(parameter):
                continue
            what = " masters" if full in masters else ""
            raise ValueError(
                f"{full} is {parameter.dtype}, program {self.program.name!r} needs {wanted}{what}: no model is converted after loading"
            )
        for held in masters.values():
            if held.kept is sharded:
                held.keep(not sharded)

    def _units(self) -> list[tuple[str, Any]]:
        """The modules that FSDP2 shards, by name."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # it takes long to import: where nobody did, nothing is sharded
        return [] if fsdp is None else [(name, unit) for name, unit in self.named_modules() if isinstance(unit, fsdp.FSDPModule)]

    @property
    def _held(self) -> dict[str, Held]:
        """What is held beside masters, by the master's name."""
        if self._masters is None:
            return {}
        if self._beside is None:
            self._beside = held_beside(self)
        return self._beside

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        program: str = "aligned",
        master_dtype: torch.dtype | str | None = None,
        layout: object | None = None,
        lora: object | None = None,
    ) -> Self:
        """Loads a published checkpoint, a local folder or a hub id, strictly and without a second copy of the model.

        Everything that headers can tell is checked before any weight is read. ValueError in one sentence for a checkpoint that
        is incomplete, contradictory, of another geometry or dtype, or holds a NaN. `dtype` rounds stored weights once.

        `master_dtype=torch.float32`, of a trainer: parameters are FP32, as a checkpoint of masters or of rounded weights has them,
        and the program computes with their rounding, which is what is published. No byte depends on it that does not depend on
        the rounded weights.
        """
        _not_built(layout=layout, lora=lora)
        dtype = parse_dtype(dtype)
        source = Checkpoint.open(path_or_hub_id, revision)
        source, config = as_read(source, cls.family, program, dtype)
        table = cls.family.table(config)
        match = source.match(table)
        ends = end_tokens(config, read_generation(source.folder))
        where = _device(device)
        masters = cls._master_dtype(master_dtype)
        stored = source.main_dtype(match)
        usual = dtype or (torch.bfloat16 if stored == masters else stored)  # a checkpoint of masters
        chosen = resolve(program, where, usual, cls.family.contributors)
        module = cls._on_meta(config, chosen, masters)
        if masters is not None:
            match = source.match(module.table_of())
        files.check_dtypes(source, match, module, convert=dtype is not None)
        module._allocate(where)
        files.fill(module, source, match)
        module._source = source
        module._ends = ends
        return module

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        seed: int = 0,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        program: str = "aligned",
        master_dtype: torch.dtype | str | None = None,
        layout: object | None = None,
    ) -> Self:
        """Random weights of realistic scale: the same bytes for the same seed on every device. `master_dtype` as in from_pretrained."""
        _not_built(layout=layout)
        dtype = parse_dtype(dtype)
        where = _device(device)
        usual = torch.float32 if program == "transformers" else torch.bfloat16
        chosen = resolve(program, where, dtype or usual, cls.family.contributors)
        module = cls._on_meta(config, chosen, cls._master_dtype(master_dtype))
        module._allocate(where)
        table = module.table_of()
        parameters = dict(module.named_parameters())
        for entry, piece in table.pieces():
            draw_piece(piece, piece.of(parameters[entry.ours]), seed, table, entry, cls.family.recipe)
        return module

    @classmethod
    def sharing_weights(cls, other: Pretrained) -> Self:
        """A model of this class on the very parameters of `other`, without a second copy: for a machine that holds a model once.

        A write to one is a write to both, after which `weights_changed()` is called on both. ValueError for a model of another family,
        for one that wants gradients, and for one with FP32 masters, which serving does not read.
        """
        if cls.family is not other.family:
            raise ValueError(f"{cls.__name__} has no weights of a {type(other).__name__}, another family's")
        if cls.trainable:
            raise ValueError(f"{cls.__name__} wants gradients of parameters of its own: share a trainer's weights with a serving model")
        if other._masters is not None:
            raise ValueError(f"this {type(other).__name__} has FP32 masters, which serving does not read: load it without master_dtype")
        module = cls._on_parameters(other, other.config)
        module._source = other._source
        module._ends = other._ends
        return module

    @classmethod
    def first_layers_of(cls, other: Self, layers: int) -> Self:
        """A model of the first `layers` layers of `other`, on its very parameters."""
        return cls._on_parameters(other, other.config.first_layers(layers))

    @classmethod
    def _on_parameters(cls, other: Pretrained, config: Any) -> Self:
        """A model of a geometry whose parameters `other` has, on them."""
        module = cls._on_meta(config, other.program)
        shared: dict[int, nn.Parameter] = {}  # a tied parameter stays one
        for path, part in module.named_modules():
            theirs = other.get_submodule(path)._parameters
            for name, parameter in part._parameters.items():
                held = theirs[name]
                if parameter is not None and held is not None:
                    part._parameters[name] = shared.setdefault(id(held), nn.Parameter(held.detach(), requires_grad=False))
        module.reset_buffers(other.device)
        module.weights_changed()
        return module

    def save_pretrained(self, path: str | Path, *, shard_bytes: int = files.SHARD_BYTES, masters: bool = False) -> None:
        """Writes a published-format folder, byte for byte as loaded where nothing was trained. ValueError if `path` is not empty.

        The folder appears whole or not at all. `shard_bytes` bounds the files of a model that was not loaded from a checkpoint.
        With `masters` it has FP32 masters as they are, which `from_pretrained(..., master_dtype=torch.float32)` takes up again,
        and not what is published of them; ValueError for a model without any. Of a model that is sharded over processes all call it,
        and the first one writes; where it can't, all raise.
        """
        files.check_shard_bytes(shard_bytes)
        if masters and self._masters is None:
            raise ValueError(f"masters=True, but this {type(self).__name__} was loaded without master_dtype=torch.float32")
        processes = self.processes()
        with processes.agreed():
            if processes.writes:
                check_fresh(path)
        table = self.table_of()
        usual = self.program.torch_dtype
        # another process may not have been loaded from a checkpoint, and gathers in the order of the one that writes all the same
        order = processes.told(files.reading_order(table, usual, self._source, masters=masters)) if processes.sharded else None
        read = self._reader(masters=masters)
        step = read if order is None else InStep(order, read)
        with processes.agreed():
            try:
                if processes.writes:
                    files.save(step, table, usual, self.config.to_hf(), path, self._source, shard_bytes, masters=masters)
            finally:
                if isinstance(step, InStep):
                    step.rest()

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: str | None = None) -> None:
        """Overwrites parameters in place from (published name, tensor) pairs; a partial list is fine, of one layout each.

        All names, shapes, dtypes and values are checked before the first write (so the list is held until then): a ValueError
        leaves every byte as it was. So is an iterator that names no tensor refused, since it was used up; an empty list is fine.
        `version` is a label that the fingerprint reports.
        """
        if version is not None and not isinstance(version, str):
            raise ValueError(f"version must be text, a label for the fingerprint, not {version!r:.40}")
        for view, tensor in self._writes(tensors):
            view.copy_(tensor)
        self._label = version
        self.weights_changed()

    def check_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """ValueError where `load_weights` would raise it; nothing is written."""
        self._writes(tensors)

    def _writes(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """(view of a parameter, what goes there), all of it checked."""
        if not isinstance(tensors, Iterable) or isinstance(tensors, str | Mapping | Tensor):
            raise ValueError(f"weights must be (published name, tensor) pairs, as published_tensors gives, not {type(tensors).__name__}")
        table = self.table_of()
        places = Places(table)
        parameters = self._whole()
        ours = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
        writes: dict[str, tuple[Tensor, Tensor]] = {}
        aliases: list[tuple[str, Tensor, Entry, Piece]] = []
        given = 0
        for given, pair in enumerate(tensors, 1):
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise ValueError(f"weights must be (published name, tensor) pairs, entry {given - 1} is a {type(pair).__name__} and none")
            name, tensor = pair
            found = places.find(name)
            if found is None:
                if not table.is_carried(name):
                    if name in parameters:
                        raise ValueError(
                            f"{name} is a name of this model's own parameters: give published names, as published_tensors() does"
                        )
                    raise ValueError(f"{name} is no tensor of this {self.config.model_type} geometry")
                continue
            entry, piece = found
            view = piece.of(parameters[entry.ours])
            check_dense(name, tensor)
            wanted = entry.stored(view.dtype)
            if tuple(tensor.shape) != piece.shape or tensor.dtype not in (wanted, *entry.alike):
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, it must be {wanted} {list(piece.shape)}")
            files.check_values(name, tensor, entry)
            tensor = entry.taken(name, tensor)
            itself = (tensor.data_ptr(), tensor.stride()) == (view.data_ptr(), view.stride())
            if tensor.untyped_storage().data_ptr() in ours and not itself:
                tensor = tensor.clone()  # a parameter's own memory, which another write may reach before it is read
            if entry.optional_alias:
                aliases.append((name, tensor, entry, piece))
            else:
                writes[name] = (view, tensor)
        if not given and isinstance(tensors, Iterator):
            raise ValueError(
                "the iterator of weights has no tensor left: it may have served another update (`published_tensors()` gives a fresh one)"
            )
        for name, tensor, entry, piece in aliases:
            tied = piece.of(parameters[entry.ours])
            fresh = [source for view, source in writes.values() if view.data_ptr() == tied.data_ptr()]
            files.check_alias(name, tensor, fresh[0] if fresh else entry.publish(tied), entry.ours)
        return list(writes.values())

    def published_tensors(self, *, aliases: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(published name, tensor) for every weight: what `load_weights` and an engine's `update_weights` take.

        A tensor is a view of its parameter, or of a master what is published of it. Without `aliases` a tied weight comes once, as
        SGLang wants it. Of a model that is sharded over processes each parameter is gathered when it comes, so that all processes must
        take all tensors, in step.
        """
        read = self._reader()
        pieces = ((entry, piece) for entry, piece in self.table_of().pieces() if aliases or not entry.optional_alias)
        return ((piece.published, piece.of(read(entry.ours))) for entry, piece in pieces)

    def processes(self) -> Alone:
        """The processes that have the model, each unit's own shards in its place again."""
        for _, unit in self._units():
            reshard(unit)
        return processes_of(self.parameters())

    def _reader(self, *, masters: bool = False) -> Callable[[str], Tensor]:
        """Our name of a parameter -> it as it is published, or as a master is, whole; a later write may show in it or not."""
        sharded = self.processes().sharded
        parameters = dict(self.named_parameters())
        entries = self.table_of().parameters
        held = {} if sharded else self._held

        def read(name: str) -> Tensor:
            entry = entries[name]
            if masters and entry.is_master:
                return whole(parameters[name])
            if name in held:
                return held[name].published(parameters[name])
            if entry.rounds:  # each process its own share, so that half the bytes are gathered
                return whole(entry.publish(parameters[name].detach()))
            return entry.publish(whole(parameters[name]))

        return Recent(read) if sharded else read

    def weights_changed(self) -> None:
        """Forgets the cached content hash of frozen weights and what is held beside masters, after a write that torch doesn't count:
        through `.data`, a CUDA graph replay, or another tensor that shares their storage."""
        self._changes += 1
        for held in self._held.values():
            held.forget()
        refresh_values(self)

    @property
    def weights_version(self) -> str:
        """Content hash of all weights: one pass over them, kept only for frozen parameters that nobody wrote since. Of a model that is
        sharded over processes all ask for it, and it is the whole model's.
        """
        sharded = self.processes().sharded
        parameters = dict(self.named_parameters())
        # fused optimizers write without moving torch's version counter; an inference tensor has none
        countable = not (sharded or any(p.requires_grad or p.is_inference() for p in parameters.values()))
        if self._hash is not None and countable and self._hash[0] == self._changes and _unwritten(self._hash[1], parameters.values()):
            return self._hash[2]
        seen = [(weakref.ref(p), p.data_ptr(), p._version) for p in parameters.values()] if countable else []
        found = weights_hash(self._reader(), self.table_of())
        self._hash = (self._changes, seen, found) if countable else None
        return found

    def fingerprint(self) -> Fingerprint:
        device = next(self.parameters()).device
        named = {*DRIVER_OPS, *self.family.used_ops(self.config), *(() if self.config.quantised is None else self.config.quantised.ops)}
        used = {op for name in named for op in self.program.ops_for(name)}
        made = realisation(self, self.program, used)
        if self._label is not None:
            made["weights_label"] = self._label
        return Fingerprint({**program_lines(self.program, used), **self.program_lines()}, self.weights_version, toolchain(device), made)

    def _whole(self) -> dict[str, nn.Parameter]:
        """The parameters by name. ValueError if they are sharded."""
        parameters = dict(self.named_parameters())
        for name, parameter in parameters.items():
            if is_sharded(parameter):
                raise ValueError(
                    f"{name} is sharded over processes: load a state dict, which set_model_state_dict of "
                    "torch.distributed.checkpoint.state_dict broadcasts from rank 0, or load weights before the model is sharded"
                )
        return parameters

    def table_of(self) -> WeightTable:
        table = self.family.table(self.config)
        return table if self._masters is None else table.with_masters(self._masters, self.program.torch_dtype)

    @classmethod
    def _master_dtype(cls, given: torch.dtype | str | None) -> torch.dtype | None:
        """ValueError for another dtype of masters than FP32, or for a class that trains nothing."""
        masters = parse_dtype(given)
        if masters is not None and masters != torch.float32:
            raise ValueError(f"master_dtype={masters} is not supported, only torch.float32")
        if masters is not None and not cls.trainable:
            raise ValueError(f"{cls.__name__} trains nothing: master_dtype is a trainer's, role='rl'")
        return masters

    @classmethod
    def _on_meta(cls, config: Any, program: Program, masters: torch.dtype | None = None) -> Self:
        if masters is not None and program.torch_dtype == masters:
            raise ValueError(f"program {program.name!r} computes in {masters}: its parameters are masters already, leave master_dtype out")
        if program.codes and config.quantised is None:
            raise ValueError(f"program {program.name!r} computes with FP8 codes, and this model's config has no quantization_config")
        if config.quantised is not None and (not program.codes or config.quantised.packed != program.packed):
            what = "experts are packed in four bits" if config.quantised.packed else "matrices are FP8 codes"
            wanted = usual_program(config)
            raise ValueError(f"this model's {what}, which program {program.name!r} does not compute with: take {wanted!r}")
        with torch.device("meta"):
            module = cls(config, program)
            if config.quantised is not None:
                take_codes(module, cls.family.table(config), config.quantised)
        if masters is not None:
            module._masters = masters
            entries = module.table_of().parameters
            for path, part in module.named_modules():
                for name, parameter in list(part._parameters.items()):
                    entry = entries[f"{path}.{name}".removeprefix(".")]
                    codec = entry.codec
                    if parameter is not None and codec is not None and entry.is_master:
                        part._parameters[name] = nn.Parameter(torch.empty_like(parameter, dtype=codec.held))
                        hold(part, name, codec, program.torch_dtype)
        table = module.table_of()
        parameters = dict(module.named_parameters())
        covered = dict.fromkeys(parameters, 0)
        for entry, piece in table.pieces():
            covered[entry.ours] += torch.Size(piece.shape).numel()
        assert covered == {name: p.numel() for name, p in parameters.items()}, "the weight table must tile every parameter"
        return module

    def _allocate(self, device: torch.device) -> None:
        self.to_empty(device=device)
        entries = self.table_of().parameters
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.trainable and entries[name].trainable)
        self.reset_buffers(device)


def own_dtypes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of a model, so that the program alone names its dtypes and its kernels.

    Autocast is shut out, so a trainer's mixed precision moves no byte. A compiler would fuse and reorder the arithmetic, so
    everything inside runs eagerly: `torch.compile` of the model or of the method gives the eager bytes, and no speed. ValueError
    if a parameter was converted to another dtype.
    """

    @functools.wraps(method)
    def guarded(self: Pretrained, *args: Any, **kwargs: Any) -> Any:
        self.check_arithmetic()
        with torch.autocast(next(self.parameters()).device.type, enabled=False):
            return method(self, *args, **kwargs)

    @functools.wraps(method)
    def call(self: Pretrained, *args: Any, **kwargs: Any) -> Any:
        # the compiler takes seconds to import: where nobody imported it, nobody compiles
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            return torch.compiler.disable(guarded)(self, *args, **kwargs)
        return guarded(self, *args, **kwargs)

    return call


def _unwritten(seen: Sequence[Seen], parameters: Collection[nn.Parameter]) -> bool:
    """Whether these are the very parameters that were seen: a new one may take a freed one's address."""
    now = [(p, p.data_ptr(), p._version) for p in parameters]
    return len(seen) == len(now) and all(a[0]() is b[0] and a[1:] == b[1:] for a, b in zip(seen, now, strict=True))


def draw_piece(
    piece: Piece,
    out: Tensor,
    seed: int,
    table: WeightTable,
    entry: Entry,
    how: Callable[[str, tuple[int, ...], bool], Draw] = usual_recipe,
) -> Tensor:
    """Fills the place of one published tensor from (seed, published name); codes and scales from the values that they are of."""
    owner = table.owners.get(entry.ours, entry)
    if owner.codec is not None and owner.beside:
        whole = owner.layouts[0][entry.layouts[0].index(piece)]
        whole = replace(whole, shape=owner.codec.values(whole.shape))
        values = torch.empty(whole.shape, dtype=torch.float32, device=out.device)
        plain = replace(owner, codec=None, beside=())
        stored = owner.codec.encode(draw_piece(whole, values, seed, table, plain, how))
        with torch.no_grad():
            return out.copy_(stored[(owner.ours, *owner.beside).index(entry.ours)])
    if entry.below:
        return distinct_(out, key64(seed, piece.published), entry.below)
    draw = how(piece.published, piece.shape, entry.ours in table.tied)
    return normal_(out, key64(seed, piece.published), draw.std, draw.mean)


def _device(device: torch.device | str | None) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = parse_device(("cuda" if gpus else "cpu") if device is None else device)
    if chosen.type == "cuda" and (chosen.index or 0) >= gpus:
        raise ValueError(f"device {str(chosen)!r}: torch {torch.__version__} sees {gpus} GPUs here")
    return chosen


def _not_built(**given: object | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not supported yet, only {name}=None")
