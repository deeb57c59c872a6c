"""Products of [64, K] by [K, N] in one Triton kernel: which come out wrong on this GPU, and which machine code is at fault.

  python -m benchmarks.triton_product                 runs on a CUDA device; compiles alone, for an H200, where there is none
  python -m benchmarks.triton_product --dump FOLDER   also writes ttgir, llir, ptx and sass of the kernels that came out wrong

A row: the kernel and how it is launched, its elements further from float64 than any rounding explains, the `wgmma` in its machine code,
and those whose descriptor is none (`benchmarks.wgmma`). `chunk_outputs` is gated_delta's own kernel, at the columns that it may hold at
once. What came out wrong is compiled again at lower optimisation and by the other assembler that Triton's wheel carries.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import wgmma
from zoo.common.ops.gated_delta import kernels_chunks

PROGRAMS = 6
LOWERED = 4  # kernels that came out wrong, compiled again at lower optimisation
BOUND = 2**-6  # of the sum of absolute products: four roundings to bfloat16
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


@triton.jit
def _product(
    q_ptr,
    k_ptr,
    b_ptr,
    u_ptr,
    s_ptr,
    o_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BESIDE: tl.constexpr,
    THEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """o = q b. BESIDE: s = q k^T stands before it. THEN: s u is added to it, in its accumulator."""
    program = tl.program_id(0)
    row = tl.arange(0, M)
    key = tl.arange(0, K)
    column = tl.arange(0, N)
    b_ptr += program * K * N
    if BLOCKS:
        q = tl.load(tl.make_block_ptr(q_ptr + program * M * K, (M, K), (K, 1), (0, 0), (M, K), (1, 0)))
    else:
        q = tl.load(q_ptr + program * M * K + row[:, None] * K + key[None, :])
    if BESIDE:
        k = tl.load(k_ptr + program * M * K + row[:, None] * K + key[None, :])
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if not THEN:
            tl.store(s_ptr + program * M * M + row[:, None] * M + row[None, :], s)
    if TRANSPOSED:
        b = tl.trans(tl.load(b_ptr + column[:, None] * K + key[None, :]))
    elif BLOCKS:
        b = tl.load(tl.make_block_ptr(b_ptr, (K, N), (N, 1), (0, 0), (K, N), (1, 0)))
    else:
        b = tl.load(b_ptr + key[:, None] * N + column[None, :])
    o = tl.dot(q, b, input_precision=PRECISION)
    if THEN:
        u = tl.load(u_ptr + program * M * N + row[:, None] * N + column[None, :])
        o = tl.dot(s.to(u.dtype), u, o, input_precision=PRECISION)
    tl.store(o_ptr + program * M * N + row[:, None] * N + column[None, :], o)


@dataclass(frozen=True)
class Case:
    """A kernel, the numbers that it is compiled with, its operands' dtype and how it is launched."""

    what: str
    keys: int = 64
    columns: int = 32
    rows: int = 64
    block: int | None = None  # gated_delta's `chunk_outputs`, so many of `columns` at once
    dtype: torch.dtype = torch.bfloat16
    warps: int = 4
    stages: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def constants(self) -> dict[str, Any]:
        if self.block is not None:
            return {"REPEAT": 1, "K": self.keys, "E": self.columns, "BLOCK": self.block, "CACHED": False}
        flags = {"BESIDE": True, "THEN": False, "TRANSPOSED": False, "BLOCKS": False, "PRECISION": "ieee", **self.flags}
        return {"M": self.rows, "K": self.keys, "N": self.columns, **flags}

    def __str__(self) -> str:
        at_once = "" if self.block is None else f" by {self.block}"
        return (
            f"{self.what:<22} [{self.rows}, {self.keys}] x [{self.keys}, {self.columns}]{at_once:<6} {NAMES[self.dtype]} "
            f"warps {self.warps} stages {self.stages}"
        )


def cases() -> Iterator[Case]:
    """The old form first, then the smallest kernel that comes out wrong, then what is changed in it one by one."""
    for keys, columns, block in ((128, 128, 32), (128, 128, 64), (64, 64, 64), (64, 64, 32), (64, 64, 16), (128, 32, 32), (32, 64, 32)):
        yield Case("chunk_outputs", keys, columns, block=block)
    yield Case("chunk_outputs", 128, 128, block=64, warps=8)
    yield Case("chunk_outputs", 128, 128, block=32, warps=8)
    for keys in (32, 64, 128, 256):
        for columns in (16, 32, 64, 128):
            yield Case("beside q k^T", keys, columns)
    for columns in (16, 32, 64):
        yield Case("alone", columns=columns, flags={"BESIDE": False})
        yield Case("beside, then s u", columns=columns, flags={"THEN": True})
    yield Case("b transposed", flags={"TRANSPOSED": True})
    yield Case("by block pointers", flags={"BLOCKS": True})
    for warps in (1, 2, 8):
        yield Case("other warps", warps=warps)
    for stages in (2, 3):
        yield Case("other stages", stages=stages)
    yield Case("fewer rows", rows=32)
    yield Case("more rows", rows=128)
    yield Case("other dtype", dtype=torch.float16)
    for precision in ("ieee", "tf32", "tf32x3"):
        yield Case(f"FP32 by {precision}", dtype=torch.float32, flags={"PRECISION": precision})


@dataclass(frozen=True)
class Found:
    """What was seen of a case: the numbers of its run, "not run", or how it failed, and its machine code."""

    case: Case
    asm: dict[str, Any]
    numbers: str
    wrong: bool
    products: list[wgmma.Product]

    @property
    def broken(self) -> list[wgmma.Product]:
        return [product for product in self.products if any(operand.broken for operand in product.operands)]

    def __str__(self) -> str:
        unknown = sum(not operand.known for product in self.products for operand in product.operands)
        counts = f"{len(self.products)} wgmma, {len(self.broken)} of no descriptor, {unknown} operands not followed"
        return f"{self.case}: {self.numbers}; {counts}"


def compiled(case: Case) -> Any:
    """For an H200, without a GPU."""
    kernel = _product if case.block is None else kernels_chunks.chunk_outputs
    dtype = f"*{NAMES[case.dtype]}"
    types = {name: dtype for name in ("q_ptr", "k_ptr", "b_ptr", "u_ptr", "rounded_ptr")}
    types |= {"out_ptr": dtype, "s_ptr": "*fp32", "o_ptr": "*fp32", "decay_ptr": "*fp32", "scale": "fp32"}
    types |= {"chunk_ptr": "*i32", "slot_ptr": "*i32", "k_cache_ptr": "*i32", "q_stride": "i32", "k_stride": "i32", "heads": "i32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith(("_ptr", "_stride"))}
    source = ASTSource(fn=kernel, signature=signature, constexprs=case.constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch(case))


def launch(case: Case) -> dict[str, Any]:
    return {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": False, **case.options}


def run(case: Case) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The compiled kernel, what it made, what float64 makes, and the sum of absolute products."""
    normal = torch.Generator(device="cuda").manual_seed(1)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=normal, device="cuda").to(case.dtype)

    q = made(PROGRAMS, case.rows, case.keys)
    k = made(PROGRAMS, case.rows, case.keys)
    b = made(PROGRAMS, case.keys, case.columns)
    u = made(PROGRAMS, case.rows, case.columns)
    scores = q.double() @ k.double().mT
    sizes = scores.abs()
    wanted = q.double() @ b.double()
    bound = q.double().abs() @ b.double().abs()
    if case.block is not None:
        decay = -torch.rand(PROGRAMS, case.rows, generator=normal, device="cuda").cumsum(1) / 16
        found = torch.empty(PROGRAMS, case.rows, case.columns, dtype=case.dtype, device="cuda")
        first = torch.arange(PROGRAMS, device="cuda") * case.rows
        chunk = torch.stack([first, torch.zeros_like(first), torch.full_like(first, case.rows), torch.zeros_like(first)], 1).int()
        handle = kernels_chunks.chunk_outputs[(PROGRAMS, 1)](
            q, k, chunk, chunk, chunk, decay, u, b, found, case.keys, case.keys, 1, 1.0, **case.constants, **launch(case)
        )
        fade = (decay.double()[:, :, None] - decay.double()[:, None, :]).tril().exp().tril()
        rise = decay.double().exp()[:, :, None]
        wanted = wanted * rise + (scores * fade).to(case.dtype).double() @ u.double()
        return handle, found, wanted, bound * rise + sizes * fade @ u.double().abs()
    s = torch.empty(PROGRAMS, case.rows, case.rows, device="cuda")
    found = torch.empty(PROGRAMS, case.rows, case.columns, device="cuda")
    operand = b.mT.contiguous() if case.constants["TRANSPOSED"] else b
    handle = _product[(PROGRAMS,)](q, k, operand, u, s, found, **case.constants, **launch(case))
    if case.constants["THEN"]:
        wanted = wanted + scores.to(case.dtype).double() @ u.double()
        bound = bound + sizes @ u.double().abs()
    return handle, found, wanted, bound


def look(case: Case) -> Found:
    """In a process of its own: a descriptor that is none may read where no memory is, which ends every later call of the process."""
    numbers = "not run"
    wrong = False
    if torch.cuda.is_available():
        handle, found, wanted, bound = run(case)
        try:
            distance = ((found.double() - wanted).abs() / bound).nan_to_num(float("inf"))
            off = int((distance > BOUND).sum())
            numbers = f"{off:>6} off, worst {float(distance.max()):.2g}"
            wrong = off > 0
        except RuntimeError as error:
            numbers = str(error).partition("\n")[0]
            wrong = True
    else:
        handle = compiled(case)
    asm = {form: handle.asm[form] for form in ("ttgir", "llir", "ptx", "cubin")}
    tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "nvdisasm"
    return Found(case, asm, numbers, wrong, wgmma.products(wgmma.disassembled(asm["cubin"], tool)))


def tried(case: Case) -> Found | str:
    try:
        return look(case)
    except Exception as error:  # a variant that doesn't compile is a row as well
        return f"{case}: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"


def look_at(chosen: list[Case]) -> list[Found]:
    """Prints a row a case; the ones that are wrong, in their machine code or in their numbers."""
    wrong = []
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1), maxtasksperchild=1) as pool:
        for found in pool.imap(tried, chosen, chunksize=1):
            print(found, flush=True)
            if isinstance(found, Found) and (found.wrong or found.broken):
                wrong.append(found)
    return wrong


def dump(found: Found, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "_".join(str(found.case).replace("[", "").replace("]", "").replace(",", "").split())
    for form in ("ttgir", "llir", "ptx"):
        (folder / f"{name}.{form}").write_text(found.asm[form])
    (folder / f"{name}.cubin").write_bytes(found.asm["cubin"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=Path, help="folder for the code of what came out wrong")
    parser.add_argument("--first", type=int, help="only so many cases")
    parser.add_argument("--only-old-form", action="store_true", help="the old form and the smallest kernel, by the assembler in use")
    args = parser.parse_args()
    begun = time.monotonic()
    binaries = Path(triton.backends.__file__).parent / "nvidia" / "bin"
    assembler = Path(triton.knobs.nvidia.ptxas.path)
    version = subprocess.run([assembler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-2]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: compiled for cuda:90, nothing run"
    print(f"triton {triton.__version__}, torch {torch.__version__}, {version} ({assembler.name}), {device}", flush=True)
    chosen = list(cases())
    if args.only_old_form:
        chosen = [
            Case("chunk_outputs", 128, 128, block=32),
            Case("chunk_outputs", 64, 64, block=32),
            Case("beside q k^T"),
            Case("beside q k^T", 256, 128),
        ]
    wrong = look_at(chosen[: args.first])
    if args.only_old_form:
        return
    for found in wrong:
        if args.dump is not None:
            dump(found, args.dump)
        for product in found.broken[:1]:
            print(f"  {found.case}: {product}")
    print("at --opt-level 1:", flush=True)
    look_at([dataclasses.replace(found.case, options={"ptx_options": "--opt-level 1"}) for found in wrong[:LOWERED]])
    other = binaries / "ptxas-blackwell"
    if other.exists():
        print("by the other assembler:", flush=True)
        command = [sys.executable, "-m", "benchmarks.triton_product", "--only-old-form"]
        subprocess.run(command, env={**os.environ, "TRITON_PTXAS_PATH": str(other)}, check=False)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
