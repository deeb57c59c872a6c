"""FP32 masters: what an optimizer moves, and beside each of them what the program computes with.

A codec (zoo.common.codecs) says what a master becomes. It is made once per optimizer step, not once per call: behind every step of
a torch optimizer, and before a use if anything else has written the master since.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zoo.common.codecs import Codec
from zoo.common.processes import is_sharded

_NAME = "_computed"  # of a module's attribute: {parameter's name: Held}; no buffers, since DDP sends those and .to(dtype) converts them
_ALL: weakref.WeakSet[Held] = weakref.WeakSet()


class Held:
    """What is computed with of one master: `decode(*encode(master))` in the program's dtype, in memory of its own beside it.

    `kept` is False where FSDP2 shards the master: then a unit's policy casts it, or each use makes what it needs, and nothing stays.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        self.codec = codec
        self.dtype = dtype
        self.kept = True
        self._master: weakref.ref[nn.Parameter] | None = None
        self._tensor: Tensor | None = None
        self._seen: tuple[int, int] | None = None
        self._own = 0  # version of what is held, when it was made
        _ALL.add(self)
        _watch_optimizers()

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (self.codec, self.dtype)  # a copy makes its own

    def of(self, parameter: nn.Parameter) -> Tensor:
        """What a layer computes with; its gradient goes straight through to the master, in the master's dtype.

        ValueError for a sharded parameter that nobody gathered.
        """
        if is_sharded(parameter):
            raise ValueError(
                "a weight is sharded over processes and was not gathered: register_fsdp_forward_method(model, name of the method) makes "
                "FSDP2 gather for other methods than forward"
            )
        if parameter.dtype != self.codec.held:
            return parameter  # cast by FSDP2's policy; every op refuses another dtype than the program's
        computed = self.current(parameter) if self.kept else self._made(parameter)
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return computed
        through: Tensor = _StraightThrough.apply(parameter, computed)
        return through

    def current(self, parameter: nn.Parameter) -> Tensor:
        """The tensor beside the master, made again if the master was written; not to be written."""
        stale = self._seen is None or self._seen != _written(parameter) or self._master is None or self._master() is not parameter
        # somebody wrote into what is published, which is this very tensor
        if stale or self._tensor is None or self._tensor._version != self._own:
            self.refresh(parameter)
        assert self._tensor is not None
        return self._tensor

    def refresh(self, parameter: nn.Parameter) -> None:
        """Makes it again, where it lies, so that a graph that captured an optimizer's step has captured this too."""
        held = self._tensor
        if held is None or held.shape != parameter.shape or held.device != parameter.device:
            with torch.inference_mode(False):  # what it makes could not be saved for a backward pass
                held = torch.empty_like(parameter, dtype=self.dtype, requires_grad=False)
        with torch.no_grad():
            self.codec.compute(parameter.detach(), held)
        self._tensor = held
        self._own = held._version
        self._master = weakref.ref(parameter)
        # a capture runs nothing yet
        self._seen = None if parameter.is_cuda and torch.cuda.is_current_stream_capturing() else _written(parameter)

    def forget(self) -> None:
        """Has it made again before the next use: after a write that torch doesn't count."""
        self._seen = None

    def keep(self, kept: bool) -> None:
        """Whether what was made stays until the master is written."""
        self.kept = kept
        if not kept:
            self._tensor = None
            self._seen = None

    def stepped(self, moved: set[int]) -> None:
        """After a step of an optimizer that moved the parameters of these ids."""
        parameter = None if self._master is None else self._master()
        if parameter is not None and id(parameter) in moved and self._tensor is not None:
            self.refresh(parameter)

    def published(self, parameter: nn.Parameter) -> Tensor:
        """What is published of a whole master."""
        computed = self.current(parameter) if self.kept else self._made(parameter)
        return computed if computed.dtype == self.codec.stored else self.codec.encode(computed)[0]

    def _made(self, parameter: Tensor) -> Tensor:
        out = torch.empty_like(parameter, dtype=self.dtype, requires_grad=False)
        with torch.no_grad():
            self.codec.compute(parameter.detach(), out)
        return out


class _StraightThrough(torch.autograd.Function):
    """The gradient of what is computed with is the master's: the derivative of a rounding is taken to be 1."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, computed: Tensor) -> Tensor:
        ctx.dtype = master.dtype
        return computed.detach()  # of one version counter with it: a step between forward and backward is refused by torch

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


def computed(module: nn.Module, name: str = "weight") -> Tensor:
    """What a module computes with of its parameter `name`: the parameter itself, or what is held beside a master."""
    parameter = module._parameters[name]
    assert parameter is not None, f"{type(module).__name__} has no parameter {name}"
    held: Held | None = module.__dict__.get(_NAME, {}).get(name)
    return parameter if held is None else held.of(parameter)


def hold(module: nn.Module, name: str, codec: Codec, dtype: torch.dtype) -> None:
    """From now on `computed(module, name)` gives what the codec makes of the parameter, in `dtype`."""
    module.__dict__.setdefault(_NAME, {})[name] = Held(codec, dtype)


def held_beside(module: nn.Module) -> dict[str, Held]:
    """All that is held inside a module, by the master's name in it."""
    return {
        f"{path}.{name}".removeprefix("."): held
        for path, part in module.named_modules()
        for name, held in part.__dict__.get(_NAME, {}).items()
    }


def _written(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Where a parameter lies and how often torch wrote it; None for an inference tensor, whose writes nobody counts."""
    return None if parameter.is_inference() else (parameter.data_ptr(), parameter._version)


@functools.cache
def _watch_optimizers() -> None:
    """Once a process, when the first master is made."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for held in list(_ALL):
        held.stepped(moved)
