"""Matrix products of our own kernels against float64: a compiler that gets one wrong is seen before a number of it is used.

Laws and equal bytes can't see a fault that every path of a kernel has. docs/TRITON_FAULT.md tells of one in the assembler of Triton 3.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.common.ops import CONTRACTS, Provider
from zoo.common.ops.cases import Product, products_of
from zoo.common.program import Program
from zoo.testing import tensors
from zoo.verify.accuracy import promoted, relative_error
from zoo.verify.admission import provider_of

# a step of K left out, or read from elsewhere, is an error of a third or more; roundings to BF16 on the way are some 2^-8
FAR = 2.0**-5
# of one element, beside the typical size of all: a fragment of a tile that is wrong, among thousands that are right
OFF = 1.0


@dataclass(frozen=True)
class Held:
    """One call's error against float64, and of its worst element beside their typical size; `failure` where it did not run."""

    product: Product
    error: float = 0.0
    worst: float = 0.0
    failure: str = ""

    @property
    def right(self) -> bool:
        return not self.failure and self.error <= FAR and self.worst <= OFF

    def __str__(self) -> str:
        numbers = self.failure or f"error {self.error:.2g}, at most {FAR:.2g}; worst element {self.worst:.2g}, at most {OFF:.2g}"
        return f"{self.product.op}, {self.product.name}: {numbers}"


def all_products(op: str | None = None) -> list[Product]:
    """Of one op, or of all."""
    return [product for name in CONTRACTS if op in (None, name) for product in products_of(name)]


def defining(op: str, program: Program) -> Provider:
    """The provider that defines the program's byte class of an op: its own kernels."""
    wanted = (program.byte_class(op), program.device, True)
    return next(p for p in CONTRACTS[op].providers if (p.byte_class, p.device, p.defining) == wanted)


def hold(products: Iterable[Product], program: Program, say: Callable[[str], None] = lambda text: None) -> list[Held]:
    """Every product by the program's own kernels, against the reference in float64 on the CPU."""
    found = []
    for product in products:
        say(f"{product.op}, {product.name}")
        found.append(_held(product, program))
    return found


def _held(product: Product, program: Program) -> Held:
    args = product.make(0, program.device, program.torch_dtype)
    with torch.no_grad():
        try:
            ours = tensors(product.run(defining(product.op, program), args))
        except Exception as error:  # a kernel that does not compile raises whatever its compiler does
            return Held(product, failure=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        wide = promoted(product.make(0, "cpu", program.torch_dtype))
        exact = tensors(product.run(provider_of(product.op, "reference"), wide))
    pairs = [(mine.cpu(), value) for (_, mine), (_, value) in zip(ours, exact, strict=True)]
    return Held(product, max(relative_error(*pair) for pair in pairs), max(_worst(*pair) for pair in pairs))


def _worst(found: Tensor, exact: Tensor) -> float:
    if not exact.is_floating_point() or not exact.numel():
        return 0.0
    typical = float(exact.square().mean().sqrt())
    worst = float((found.double() - exact).abs().nan_to_num(torch.inf).max())
    return worst / typical if typical else worst
