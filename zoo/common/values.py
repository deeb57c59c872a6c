"""Values of codes that are computed with as such: decoded once, rounded once to the program's dtype, and kept beside the codes.

For a matrix whose blocks of scales fit no product of codes. The codes stay the parameter: what is saved, published and hashed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common.codecs import BlockScaled

_NAME = "_values"  # of a module's attribute: {parameter's name: Values}; no buffers, since .to(dtype) converts them


class Values:
    """What is computed with of one parameter of codes, made again where it lies when codes or scales were written."""

    def __init__(self, codec: BlockScaled, dtype: torch.dtype) -> None:
        self.codec = codec
        self.dtype = dtype
        self._tensor: Tensor | None = None
        self._seen: tuple[tuple[int, int], ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Values, (self.codec, self.dtype)  # a copy makes its own

    def of(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Not to be written, and without a gradient: codes are frozen."""
        if self._seen is None or self._seen != _written(codes, scales):
            self.refresh(codes, scales)
        assert self._tensor is not None
        return self._tensor

    def refresh(self, codes: Tensor, scales: Tensor) -> None:
        """Makes them again in the memory that they had, which a CUDA graph reads."""
        held = self._tensor
        if held is None or held.shape != codes.shape or held.device != codes.device:
            with torch.inference_mode(False):  # what it makes could not be saved for a backward pass
                held = torch.empty_like(codes, dtype=self.dtype, requires_grad=False)
        with torch.no_grad():
            held.copy_(self.codec.decode(codes.detach(), scales.detach()))
        self._tensor = held
        self._seen = _written(codes, scales)

    @property
    def made(self) -> bool:
        return self._tensor is not None


def _written(*tensors: Tensor) -> tuple[tuple[int, int], ...] | None:
    """Where tensors lie and how often torch wrote them; None for inference tensors, whose writes nobody counts."""
    return None if any(tensor.is_inference() for tensor in tensors) else tuple((t.data_ptr(), t._version) for t in tensors)


def hold_values(module: nn.Module, name: str, codec: BlockScaled, dtype: torch.dtype) -> None:
    """From now on `values(module, name)` gives what the codec makes of the codes and the scales beside them."""
    module.__dict__.setdefault(_NAME, {})[name] = Values(codec, dtype)


def has_values(module: nn.Module, name: str) -> bool:
    return name in module.__dict__.get(_NAME, {})


def values(module: nn.Module, name: str) -> Tensor:
    """The values of a module's parameter of codes `name`."""
    held: Values = module.__dict__[_NAME][name]
    return held.of(module.get_parameter(name), module.get_parameter(f"{name}_scale_inv"))


def refresh_values(module: nn.Module) -> None:
    """After codes were written: what was made of them anywhere inside is made again, before a CUDA graph reads it."""
    for part, name, held in _inside(module):
        if held.made:
            held.refresh(part.get_parameter(name), part.get_parameter(f"{name}_scale_inv"))


def _inside(module: nn.Module) -> Iterator[tuple[nn.Module, str, Values]]:
    for part in module.modules():
        for name, held in part.__dict__.get(_NAME, {}).items():
            yield part, name, held
