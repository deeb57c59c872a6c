"""A model that FSDP2 shards over processes: its weights, gathered one after another, and what its processes do in step."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

RECENT = 3  # gathered tensors that are kept: files have an expert's two or three projections beside each other


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is FSDP2's DTensor, whose module takes long to import."""
    return hasattr(tensor, "full_tensor")


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a parameter, without a gradient. Of a sharded one a new tensor, for which all processes must ask in step."""
    if not is_sharded(tensor):
        return tensor.detach()
    sharded: Any = tensor.detach()
    if sharded.device.type != sharded.device_mesh.device_type:  # kept on the CPU between uses
        sharded = sharded.to(sharded.device_mesh.device_type)
    gathered: Tensor = sharded.full_tensor()
    return gathered


_UNITS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def reshard_after_steps(units: Iterable[nn.Module]) -> None:
    """From now on no optimizer's step leaves a unit of FSDP2 with what it gathered before.

    After a forward without autograd FSDP2 keeps what the root gathered, which a step doesn't reach; the next forward would read it.
    """
    _UNITS.update(units)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    """Once a process."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    for unit in list(_UNITS):
        reshard(unit)


def reshard(unit: Any) -> None:
    """Each parameter of a unit of FSDP2 is this process's share again."""
    unit.reshard()


class Recent:
    """The last few tensors of a reader, which is asked again only for others."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        self._read = read
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, name: str) -> Tensor:
        if name not in self._kept:
            while len(self._kept) >= RECENT:
                self._kept.popitem(last=False)
            self._kept[name] = self._read(name)
        self._kept.move_to_end(name)
        return self._kept[name]


class Alone:
    """The one process of a model that is whole."""

    sharded: bool = False
    writes: bool = True

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What happens inside is the same for all processes: where one raises, all do."""
        yield

    def told(self, value: Any) -> Any:
        """The first process's value, in all of them."""
        return value


class Together(Alone):
    """All processes over which a parameter is sharded. `writes` is true in the first of them, which alone writes files."""

    sharded = True

    def __init__(self, sharded: Any) -> None:
        import torch.distributed as dist

        mesh = sharded.device_mesh
        self._first = int(mesh.mesh.flatten()[0])
        self._group = mesh.get_group() if mesh.ndim == 1 else None  # of a mesh of replicas: all processes
        self._rank = dist.get_rank()
        self.writes = self._rank == self._first

    @contextmanager
    def agreed(self) -> Iterator[None]:
        import torch.distributed as dist

        mine: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the others wait
            mine = error
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, None if mine is None else f"process {self._rank}: {mine}", group=self._group)
        if mine is not None:
            raise mine
        others = [error for error in told if error is not None]
        if others:
            raise ValueError(others[0])

    def told(self, value: Any) -> Any:
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=self._first, group=self._group)
        return box[0]


def processes_of(parameters: Iterable[Tensor]) -> Alone:
    """The processes that have a model of these parameters together."""
    sharded = next((parameter for parameter in parameters if is_sharded(parameter)), None)
    return Alone() if sharded is None else Together(sharded)


class InStep:
    """A reader that is asked for names in an order known before, so that processes that need nothing of it can go along."""

    def __init__(self, order: Sequence[str], read: Callable[[str], Tensor]) -> None:
        self._order = order
        self._read = read
        self._done = 0

    def __call__(self, name: str) -> Tensor:
        assert self._order[self._done] == name, f"{name} is read where {self._order[self._done]} was said to be"
        self._done += 1
        return self._read(name)

    def rest(self) -> None:
        """Reads what nobody asked for."""
        while self._done < len(self._order):
            self(self._order[self._done])
