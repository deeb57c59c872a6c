"""What an op promises, who can run it, and who watches it run.

A `Contract` is the written promise of one op. A `Provider` is one implementation of it. Providers of one byte class give equal
bytes; a program names one class per op, so the choice between providers never moves a byte.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zoo.common import verdicts
from zoo.common.program import HEAD

if TYPE_CHECKING:
    from zoo.common.program import Program

LAWS = ("row", "column", "split", "place", "shard", "fusion", "repeat")

# What an op may be given, in terms of the program.
PROGRAM = "the program's dtype"
WIDE = "float32, or the program's dtype if that is wider"
EITHER = "the program's dtype, or float32"
FLOAT32 = "float32"
INTEGERS = "int32 or int64"
FP8 = "float8_e4m3fn"
PACKED = "int8, two codes of four bits"
EXPONENTS = "float8_e8m0fnu"
READS = (PROGRAM, WIDE, EITHER, FLOAT32, INTEGERS, FP8, PACKED, EXPONENTS)


def always(*_: int) -> bool:
    return True


Functions = TypeVar("Functions", covariant=True)  # an op's own record of what a provider brings: forward, backward, ...


@dataclass(frozen=True)
class Provider(Generic[Functions]):
    """One implementation of an op.

    load      imports its module when it is first used, and gives the functions that the op's `Functions` names
    version   raised with its kernels: verdicts of older ones admit it no more
    """

    name: str
    byte_class: str
    device: str
    load: Callable[[], Functions]
    needs: tuple[str, ...] = ()
    serves: Callable[..., bool] = always
    defining: bool = False
    version: int = 1

    @property
    def functions(self) -> Functions:
        """What it brings, imported once."""
        found: Functions = _loaded(self.load)
        return found

    def lacks(self) -> list[str]:
        """What it needs and can't be imported, each with the reason."""
        return [f"{name}: {failure}" for name in self.needs if (failure := _import_failure(name))]

    def installed(self) -> bool:
        return not self.lacks()


@dataclass(frozen=True)
class Cached:
    """What a server would hold of the sequences of a call: `rows` [R, ...] of a training call, one for every so many tokens."""

    rows: Tensor
    tokens_a_row: int = 1


class Witness(Protocol):
    """What a server must hold of one sequence in a slot, from the operands of training's call."""

    def after(self, length: int) -> dict[str, Tensor]:
        """A slot's bytes after `length` tokens, named as the memory's `written` names them."""


Arguments = Mapping[str, Any]  # of one call, by name, defaults filled in


def no_shape(arguments: Arguments) -> tuple[int, ...]:
    return ()


def nothing_cached(arguments: Arguments) -> dict[str, Cached]:
    return {}


@dataclass(frozen=True)
class Contract(Generic[Functions]):
    """The promise of an op, in words that `zoo map` prints, and its providers.

    reads   the dtype of every tensor argument, one of READS by the argument's name (`history.k`: an attribute of an argument).
            `observed` holds every call against it, since a parameter may be cast between a model's check and the op: by a
            mixed-precision policy
    shape   what the choice of a provider depends on, from a call's arguments
    history the name of the argument that holds what came before the call's rows, of the protocol `History`; empty: there is none
    cached  what a server would hold of a training call's history, named as the memory's `written` names it
    witness a training call's arguments and the rows of one document -> what a slot must hold of it, where the call changes slots
    """

    name: str
    version: int
    shapes: str
    reads: Mapping[str, str]
    rounds: str
    adds: str
    laws: tuple[str, ...]
    backward: str
    launch: str
    providers: tuple[Provider[Functions], ...]
    shape: Callable[[Arguments], tuple[int, ...]] = no_shape
    history: str = ""
    cached: Callable[[Arguments], dict[str, Cached]] = nothing_cached
    witness: Callable[[Arguments, slice], Witness] | None = None

    def __post_init__(self) -> None:
        unknown = set(self.laws) - set(LAWS)
        assert not unknown, f"{self.name} claims unknown laws {sorted(unknown)}"
        assert set(self.reads.values()) <= set(READS), f"{self.name} reads unknown dtypes: {self.reads}"
        CONTRACTS[self.name] = self

    def provider(self, program: Program, shape: tuple[int, ...] = (), role: str = "") -> Provider[Functions]:
        """The fastest admitted member of the program's byte class that serves `shape`; ValueError if none does.

        `role`: what the program names the class by where that is not the op's own name.
        """
        found: Provider[Functions] = _choose(self.name, role or self.name, program, shape, verdicts.generation())
        return found


class OpFunction(torch.autograd.Function):
    """Base of the ops' autograd functions. `run` is `apply`, or where no gradient can be asked for `forward` alone, sooner."""

    @classmethod
    def run(cls, *args: Any) -> Any:
        return cls.apply(*args) if torch.is_grad_enabled() else cls.forward(_Unrecorded(), *args)


class _Unrecorded:
    """The context of a call that no backward follows."""

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


class _WholeProducts:
    """While anyone is inside, FP32 products keep all bits of their operands, whatever the process asked PyTorch for: TF32 on CUDA.

    PyTorch's setting is one of the process, and each device has a thread of its own for gradients: the first to come in notes what
    was set, the last to leave sets it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = ""

    def __enter__(self) -> None:
        products = torch.backends.cuda.matmul
        with self._lock:
            if not self._inside:
                self._before = products.fp32_precision
                products.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.matmul.fp32_precision = self._before


whole_products = _WholeProducts()


def closed_form(backward: Callable[..., Any]) -> Callable[..., Any]:
    """An op's `Function.backward`: autocast and TF32 are shut out of it, and a gradient of the gradient is refused with a ValueError."""

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # only create_graph=True leaves it on here
            raise ValueError("the ops' gradients are closed forms without gradients of their own: create_graph=True is not supported")
        device = next(grad.device.type for grad in grads if grad is not None)
        with torch.autocast(device, enabled=False), whole_products:
            return backward(ctx, *grads)

    return call


CONTRACTS: dict[str, Contract[Any]] = {}
Before = Callable[[Contract[Any], dict[str, Any]], None]

_observers: list[Callable[[Contract[Any], dict[str, Any], Any], None]] = []
_before: list[Before] = []


class _Read(NamedTuple):
    """One tensor that an op is given: its argument's name and place, an attribute of it if that holds the tensor, what it may be."""

    name: str
    place: int
    attribute: str
    dtypes: tuple[torch.dtype, ...]


def _reads(contract: Contract[Any], parameters: Mapping[str, inspect.Parameter], dtype: torch.dtype) -> tuple[_Read, ...]:
    """What a function of the contract with these parameters reads, in a program of this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    allowed = {
        PROGRAM: (dtype,),
        WIDE: (wide, torch.float32),  # a program in float64, which only measures, still rounds what asks for FP32
        EITHER: (dtype, wide, torch.float32),
        FLOAT32: (torch.float32,),
        INTEGERS: (torch.int64, torch.int32),
        FP8: (torch.float8_e4m3fn,),
        PACKED: (torch.int8,),
        EXPONENTS: (torch.float8_e8m0fnu,),
    }
    places = {name: place for place, name in enumerate(parameters)}
    split = ((*path.partition("."), kind) for path, kind in contract.reads.items())
    return tuple(_Read(name, places[name], attribute, allowed[kind]) for name, _, attribute, kind in split if name in places)


def checked(contract: Contract[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets a function of an op be called with what its contract reads alone: ValueError for a tensor of another dtype."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters
        tensors = {name for name, parameter in parameters.items() if "Tensor" in str(parameter.annotation)}
        unnamed = tensors - set(contract.reads)
        assert not unnamed, f"{contract.name} reads {sorted(unnamed)} of {function.__name__} in no dtype"
        program_place = list(parameters).index("program")
        reads = functools.cache(functools.partial(_reads, contract, parameters))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            program: Program = kwargs["program"] if "program" in kwargs else args[program_place]
            for name, place, attribute, dtypes in reads(program.torch_dtype):
                given = args[place] if place < len(args) else kwargs.get(name)
                if attribute:
                    given = getattr(given, attribute)
                if given is not None and given.dtype not in dtypes:
                    wanted = " or ".join(map(str, dict.fromkeys(dtypes)))
                    raise ValueError(
                        f"{contract.name}: {name} is {given.dtype}, program {program.name!r} reads {wanted} there: "
                        "nothing may cast it on its way, no mixed-precision policy either"
                    )
            return function(*args, **kwargs)

        return call

    return decorate


def observed(contract: Contract[Any], step: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets `watch` see every call of an op: its contract, arguments and result. What the contract doesn't read is refused before.

    step: the name of what this function gives where that is no result that every way to the contract's result has: logits, which
    decode holds whole and scoring does not.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function = checked(contract)(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for look in _before:
                look(contract, {"args": args, **kwargs, "function": call})
            result = function(*args, **kwargs)
            for observer in _observers:
                observer(contract, {"args": args, **kwargs, "function": call}, result)
            return result

        call.step = step or contract.name  # type: ignore[attr-defined]
        return call

    return decorate


@contextmanager
def watch(observer: Callable[[Contract[Any], dict[str, Any], Any], None], before: Before | None = None) -> Iterator[None]:
    """Calls `observer(contract, arguments, result)` after every op call inside the block. It sees; it changes nothing.

    arguments: "args" (the positional ones), the named ones, and "function", the public op itself. `before(contract, arguments)`
    comes before each call, for ops that change what they are given: a slot's state.
    """
    _observers.append(observer)
    if before is not None:
        _before.append(before)
    try:
        yield
    finally:
        _observers.remove(observer)
        if before is not None:
            _before.remove(before)


@functools.cache
def _loaded(load: Callable[[], Any]) -> Any:
    return load()


@functools.cache
def _import_failure(module: str) -> str:
    """Why a module can't be imported in one line; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a package that is there but can't be loaded (no GPU, wrong CUDA) is as good as absent
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def program_lines(program: Program, used: Iterable[str]) -> dict[str, str]:
    """A program as text, for the fingerprint of a model that uses these ops: equal lines make equal bytes."""
    lines = {
        "program": f"{program.name}/{program.version}",
        "device": program.device,
        "dtype": program.dtype,
        "key_segments": str(program.key_segments),
        "vocab_group": str(program.vocab_group),
        "contributors": str(program.contributors),
    }
    for name in sorted(used):
        classes = [f"{found} at {where}" if where else found for found, where in program.byte_classes(name).items()]
        lines[f"op.{name}"] = f"{name}/{CONTRACTS[name].version} {', '.join(classes)}"
    if program.byte_class(HEAD) != program.byte_class("linear"):
        lines[f"op.{HEAD}"] = f"linear/{CONTRACTS['linear'].version} {program.byte_class(HEAD)}"
    return lines


def choices_changed() -> None:
    """Forgets which provider runs each shape: a contract's providers were replaced."""
    _choose.cache_clear()


def _admitted(contract: Contract[Any], provider: Provider[Any], shape: tuple[int, ...]) -> bool:
    """Whether the provider's bytes were found equal to the defining one's at this shape, here, in the versions of today."""
    found = verdicts.verdict(contract.name, provider.name, shape)
    versions = (contract.version, provider.version)
    return found is not None and found.admitted and (found.contract_version, found.provider_version) == versions


@functools.lru_cache(maxsize=4096)
def _choose(op: str, role: str, program: Program, shape: tuple[int, ...], generation: int) -> Provider[Any]:
    contract = CONTRACTS[op]
    wanted = program.byte_class(role, shape)
    members = [p for p in contract.providers if p.byte_class == wanted and p.device == program.device]
    serving = [p for p in members if p.installed() and p.serves(*shape)]
    for provider in serving:
        if not provider.defining and _admitted(contract, provider, shape):
            return provider
    for provider in serving:
        if provider.defining:
            return provider
    names = ", ".join(p.name + ("" if p.installed() else f" (needs {', '.join(p.lacks())})") for p in members) or "none"
    raise ValueError(
        f"{op} at shape {shape}: no provider of byte class {wanted!r} on {program.device} can run it "
        f"(members: {names}); program {program.name!r} allows no other class"
    )
