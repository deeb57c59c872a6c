"""What an op promises, who can run it, and who watches it run.

A `Contract` is the written promise of one op. A `Provider` is one implementation of it. Providers of one byte class give equal
bytes; a program names one class per op, so the choice between providers never moves a byte.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from zoo.common.program import Program

LAWS = ("row", "column", "split", "place", "shard", "fusion", "repeat")


def always(*_: int) -> bool:
    return True


@dataclass(frozen=True)
class Provider:
    """One implementation. `forward` and `backward` are "module:function" paths, imported when first used.

    version   raised with its kernels: verdicts of older ones admit it no more
    """

    name: str
    byte_class: str
    device: str
    forward: str
    backward: str
    needs: tuple[str, ...] = ()
    serves: Callable[..., bool] = always
    defining: bool = False
    version: int = 1

    def function(self, name: str) -> Callable[..., Any]:
        """`forward`, `backward`, or another function of the forward's module by its own name."""
        named = {"forward": self.forward, "backward": self.backward}
        return _resolve(named.get(name) or f"{self.forward.split(':')[0]}:{name}")

    def lacks(self) -> list[str]:
        """What it needs and can't be imported, each with the reason."""
        return [f"{name}: {failure}" for name in self.needs if (failure := _import_failure(name))]

    def installed(self) -> bool:
        return not self.lacks()


@dataclass(frozen=True)
class Contract:
    """The promise of an op, in words that `zoo map` prints, and its providers."""

    name: str
    version: int
    shapes: str
    rounds: str
    adds: str
    laws: tuple[str, ...]
    backward: str
    launch: str
    providers: tuple[Provider, ...]

    def __post_init__(self) -> None:
        unknown = set(self.laws) - set(LAWS)
        assert not unknown, f"{self.name} claims unknown laws {sorted(unknown)}"
        CONTRACTS[self.name] = self

    def provider(self, program: Program, shape: tuple[int, ...] = ()) -> Provider:
        """The fastest admitted member of the program's byte class that serves `shape`; ValueError if none does."""
        return _choose(self.name, program, shape)


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


def closed_form(backward: Callable[..., Any]) -> Callable[..., Any]:
    """An op's `Function.backward`: autocast is shut out of it, and a gradient of the gradient is refused with a ValueError."""

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # only create_graph=True leaves it on here
            raise ValueError("the ops' gradients are closed forms without gradients of their own: create_graph=True is not supported")
        device = next(grad.device.type for grad in grads if grad is not None)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return call


CONTRACTS: dict[str, Contract] = {}
Before = Callable[[Contract, dict[str, Any]], None]

_observers: list[Callable[[Contract, dict[str, Any], Any], None]] = []
_before: list[Before] = []


def observed(contract: Contract) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets `watch` see every call of an op: its contract, arguments and result."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for look in _before:
                look(contract, {"args": args, **kwargs, "function": call})
            result = function(*args, **kwargs)
            for observer in _observers:
                observer(contract, {"args": args, **kwargs, "function": call}, result)
            return result

        return call

    return decorate


@contextmanager
def watch(observer: Callable[[Contract, dict[str, Any], Any], None], before: Before | None = None) -> Iterator[None]:
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
def _resolve(path: str) -> Callable[..., Any]:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _import_failure(module: str) -> str:
    """Why a module can't be imported in one line; empty if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a package that is there but can't be loaded (no GPU, wrong CUDA) is as good as absent
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def choices_changed() -> None:
    """Forgets which provider runs each shape: a qualification was stored, or a contract's providers were replaced."""
    _choose.cache_clear()


@functools.lru_cache(maxsize=4096)
def _choose(op: str, program: Program, shape: tuple[int, ...]) -> Provider:
    from zoo.common.qualification import admitted

    contract = CONTRACTS[op]
    wanted = program.byte_class(op)
    members = [p for p in contract.providers if p.byte_class == wanted and p.device == program.device]
    serving = [p for p in members if p.installed() and p.serves(*shape)]
    for provider in serving:
        if not provider.defining and admitted(op, provider.name, shape):
            return provider
    for provider in serving:
        if provider.defining:
            return provider
    names = ", ".join(p.name + ("" if p.installed() else f" (needs {', '.join(p.lacks())})") for p in members) or "none"
    raise ValueError(
        f"{op} at shape {shape}: no provider of byte class {wanted!r} on {program.device} can run it "
        f"(members: {names}); program {program.name!r} allows no other class"
    )
