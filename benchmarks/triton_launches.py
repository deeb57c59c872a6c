"""Every launch of our kernels that multiply matrices, compiled for an H200 without one: are the descriptors in its machine code whole?

  python -m benchmarks.triton_launches [OP ...] [--width N] [--by ASSEMBLER]

The launches are those of `zoo.common.ops.cases.Product`; nothing runs. A row: the kernel, its constants, the products in its source, the
`wgmma` in its machine code, those of no descriptor (`benchmarks.wgmma`), operands that were not followed. Exit status 1 if one is broken.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks import wgmma
from zoo.common.ops import CONTRACTS
from zoo.common.ops.cases import products_of
from zoo.common.program import resolve
from zoo.verify.products import defining

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


@dataclass
class Launch:
    """A kernel with what it is compiled for; `of`: the product that launches it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: dict[tuple[int], Any]
    options: dict[str, Any]
    of: str

    @property
    def key(self) -> str:
        parts = (self.kernel.fn.__name__, self.signature, self.constants, self.aligned, self.options)
        return " ".join(map(str, parts))

    def compiled(self) -> Any:
        source = ASTSource(fn=self.kernel, signature=self.signature, constexprs=self.constants, attrs=self.aligned)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=self.options)

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.constants.items())
        options = " ".join(f"{name}={value}" for name, value in self.options.items() if name != "enable_fp_fusion")
        return f"{self.kernel.fn.__name__} {sizes} {options} ({self.of})"


def noted(kernel: Any, args: tuple[Any, ...], names: dict[str, Any], of: str) -> Launch:
    """As Triton specialises a launch: 1 is a constant, multiples of 16 and whole tensors are aligned."""
    given = {**{p.name: p.default for p in kernel.params}, **dict(zip(kernel.arg_names, args)), **names}
    options = {name: value for name, value in names.items() if name not in kernel.arg_names and value is not None}
    launch = Launch(kernel, {}, {}, {}, options, of)
    for i, param in enumerate(kernel.params):
        value = given[param.name]
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not param.do_not_specialize):
            launch.signature[param.name] = "constexpr"
            launch.constants[param.name] = value
            continue
        if isinstance(value, Tensor):
            launch.signature[param.name] = f"*{TYPES[value.dtype]}"
        else:
            launch.signature[param.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize):
            launch.aligned[(i,)] = [["tt.divisibility", 16]]
    return launch


def launches(ops: list[str], width: int | None) -> dict[str, Launch]:
    """Of all products of some ops, each once; `width`: only products whose name ends in it."""
    program = resolve("aligned", "cuda", torch.bfloat16)
    found: dict[str, Launch] = {}
    running = [""]

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **names: Any) -> None:
        launch = noted(kernel, args, names, running[0])
        found.setdefault(launch.key, launch)

    kept = JITFunction.run
    JITFunction.run = run
    try:
        for product in (product for op in ops for product in products_of(op)):
            if width is None or product.name.endswith(f"width {width}"):
                running[0] = f"{product.op}, {product.name}"
                with torch.no_grad():
                    product.run(defining(product.op, program), product.make(0, "cpu", torch.bfloat16))
    finally:
        JITFunction.run = kept
    return found


def looked_at(found: dict[str, Launch]) -> Iterator[tuple[Launch, int, list[wgmma.Product]]]:
    """(launch, products in its source, those in its machine code) of each that multiplies matrices."""
    tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "nvdisasm"
    for launch in found.values():
        handle = launch.compiled()
        dots = handle.asm["ttir"].count("tt.dot ")
        if dots:
            yield launch, dots, wgmma.products(wgmma.disassembled(handle.asm["cubin"], tool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="all by default", metavar="OP")
    parser.add_argument("--width", type=int, help="only the products of gated_delta of this width")
    parser.add_argument("--by", help="another ptxas, or the name of one in Triton's wheel: ptxas-blackwell")
    args = parser.parse_args()
    if args.by is not None:
        path = Path(triton.backends.__file__).parent / "nvidia" / "bin" / args.by
        command = [sys.executable, "-m", "benchmarks.triton_launches", *args.ops]
        command += [] if args.width is None else ["--width", str(args.width)]
        sys.exit(subprocess.run(command, env={**os.environ, "TRITON_PTXAS_PATH": str(path)}, check=False).returncode)
    total = 0
    wrong = 0
    for launch, dots, products in looked_at(launches(args.ops or list(CONTRACTS), args.width)):
        broken = [product for product in products if any(operand.broken for operand in product.operands)]
        unknown = sum(not operand.known for product in products for operand in product.operands)
        print(f"{launch}: {dots} products, {len(products)} wgmma, {len(broken)} of no descriptor, {unknown} not followed", flush=True)
        for product in broken[:2]:
            print(f"  {product}")
        total += 1
        wrong += bool(broken)
    print(f"{total} launches, {wrong or 'none'} with a wgmma of no descriptor")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
