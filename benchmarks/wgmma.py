"""The operands of each `wgmma` in machine code: uniform registers are followed through the instructions that make its descriptors.

A descriptor of an operand in shared memory has an address (in 16 bytes, 14 bits) in its low word and, in its high word, the bytes (in 16)
between groups of eight rows and the width of the swizzle. Both are sums of constants, so their values are known without running anything.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

WORD = (1 << 32) - 1
# the high words that Triton asks for: eight rows of 128, 64 or 32 bytes, swizzled as widely
HIGH_WORDS = {0x40000040: 128, 0x80000020: 64, 0xC0000010: 32}
NOTHING = "a register that nothing wrote"
ANOTHER = "a register that holds another value"


@dataclass(frozen=True)
class Operand:
    """A descriptor's words, None where a run alone can tell; `fault`: what else than a descriptor went into it."""

    low: int | None
    high: int | None
    fault: str = ""

    @property
    def broken(self) -> bool:
        return bool(self.fault) or (self.high is not None and self.high not in HIGH_WORDS)

    @property
    def known(self) -> bool:
        return self.broken or self.high is not None

    def __str__(self) -> str:
        if self.fault:
            return f"from {self.fault}"
        words = ("?" if word is None else f"{word:#x}" for word in (self.high, self.low))
        return ":".join(words)


@dataclass(frozen=True)
class Product:
    """One `wgmma`: where it stands, its name, its operands in shared memory (the left one may be in registers)."""

    at: str
    name: str
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{self.at} {self.name}  " + "  x  ".join(str(operand) for operand in self.operands)


def disassembled(cubin: bytes, tool: Path) -> str:
    """Machine code as text, by the `nvdisasm` at `tool`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def products(text: str) -> list[Product]:
    """Every `wgmma` of a kernel, a loop's once, as if each branch fell through."""
    return list(_Registers().follow(text))


class _Registers:
    """Uniform registers and carries after each instruction; a word is None where it isn't known.

    faults  registers whose word is of no descriptor: an argument, a program's number, or of a register that nothing wrote
    aside   ordinary registers that hold a uniform one's word for a while, and its fault
    """

    def __init__(self) -> None:
        self.words: dict[int, int | None] = {}
        self.carries: dict[str, int] = {}
        self.faults: dict[int, str] = {}
        self.aside: dict[str, tuple[int | None, str]] = {}
        self.rules: dict[str, Callable[[list[str]], tuple[int | None, ...]]] = {
            "UMOV": lambda sources: (self.word(sources[0]),),
            "UIADD3": self.add,
            "UIADD3.X": self.add,
            "UIADD3.64": self.add_wide,
            "ULEA": self.scaled_add,
            "ULEA.HI": lambda sources: self.of_words(
                sources, lambda x, y, high, by: ((high << 32 | x) << by >> 32) + y, order=(0, 1, 2, 3)
            ),
            "USHF.R.U32.HI": lambda sources: self.of_words(sources, lambda _, by, x: x >> by, order=(0, 1, 2)),
            "USHF.L.U32": lambda sources: self.of_words(sources, lambda x, by: x << by, order=(0, 1)),
            "USGXT.U32": lambda sources: self.of_words(sources, lambda x, bits: x & ((1 << bits) - 1), order=(0, 1)),
            "ULOP3.LUT": self.bitwise,
        }

    def follow(self, text: str) -> Iterator[Product]:
        for at, guard, name, rest in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(@\S+\s+)?([\w.]+)\s*([^;]*);", text):
            sources = [part.strip().replace(".reuse", "") for part in rest.split(",")]
            group = re.search(r"gdesc\[UR(\d+)\]", rest)
            if group is not None:
                yield self.product(at, name, int(group[1]), left_in_registers=not sources[1].startswith("gdesc"))
            elif re.fullmatch(r"UR\d+", sources[0]):
                self.write(name, int(sources[0][2:]), sources[1:], guarded=bool(guard))
            elif re.fullmatch(r"R\d+", sources[0]):
                moved = re.fullmatch(r"UR(\d+)", sources[-1]) if name in ("MOV", "IMAD.U32") else None
                self.aside.pop(sources[0], None)
                if moved is not None:
                    self.aside[sources[0]] = (self.words.get(int(moved[1])), self.fault(int(moved[1])))

    def product(self, at: str, name: str, group: int, left_in_registers: bool) -> Product:
        firsts = [group + 2] if left_in_registers else [group, group + 2]
        return Product(at, name, tuple(self.operand(first) for first in firsts))

    def operand(self, first: int) -> Operand:
        fault = self.fault(first + 1)
        if self.fault(first) == NOTHING:
            fault = NOTHING
        return Operand(self.words.get(first), self.words.get(first + 1), fault)

    def fault(self, register: int) -> str:
        return self.faults.get(register, "") if register in self.words else NOTHING

    def write(self, name: str, target: int, sources: list[str], guarded: bool) -> None:
        if name in ("S2UR", "R2UR"):
            base = (0, "") if sources[0] == "SR_CgaCtaId" else (None, ANOTHER)
            self.words[target], self.faults[target] = self.aside.get(sources[0], base)
            return
        wide = ".64" in name or "WIDE" in name
        values = self.rules[name](sources) if name in self.rules else ()
        read = [int(number) for source in sources for number in re.findall(r"UR(\d+)", source)]
        found = []
        for lane in range(2 if wide else 1):
            value = values[lane] if lane < len(values) else None
            faults = [self.fault(register + lane if name == "UIADD3.64" else register) for register in read]
            other = "" if name in self.rules else ANOTHER
            found.append((None if value is None or guarded else value & WORD, next(filter(None, faults), other)))
        for lane, (value, fault) in enumerate(found):
            self.words[target + lane] = value
            self.faults[target + lane] = fault

    def word(self, source: str) -> int | None:
        if source in ("URZ", "RZ"):
            return 0
        if source.startswith("-UR"):
            value = self.word(source[1:])
            return None if value is None else -value
        if re.fullmatch(r"UR\d+", source):
            return self.words.get(int(source[2:]))
        return int(source, 0) & WORD if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", source) else None

    def of_words(self, sources: list[str], make: Callable[..., int], order: tuple[int, ...]) -> tuple[int | None]:
        words = [self.word(sources[i]) for i in order]
        return (None,) if None in words else (make(*words),)

    def add(self, sources: list[str]) -> tuple[int | None]:
        """Words plus carries in; a carry's name before the words receives the one out, none where the sum isn't known."""
        names = [source for source in sources if re.fullmatch(r"UP\d", source)]
        words = [self.word(source) for source in sources if not re.fullmatch(r"!?UP[\dT]", source)]
        carried = sources[0] in names
        into = [self.carries.get(name, 0) for name in (names[1:] if carried else names)]
        total = None if None in words else sum(words) + sum(into)
        if carried:
            self.carries[names[0]] = 0 if total is None else total >> 32
        return (total,)

    def add_wide(self, sources: list[str]) -> tuple[int | None, int | None]:
        """A low word that isn't known is an address: it carries nothing into the high one."""
        pairs = [self.pair(source) for source in sources]
        highs = [high for _, high in pairs]
        if None in highs:
            return None, None
        lows = [low for low, _ in pairs]
        total = sum(low or 0 for low in lows) + (sum(highs) << 32)
        return None if None in lows else total & WORD, total >> 32 & WORD

    def pair(self, source: str) -> tuple[int | None, int | None]:
        """The words of a register's pair, or of a constant."""
        name = source.lstrip("-")
        if not re.fullmatch(r"UR\d+", name):
            value = self.word(source)
            return value, None if value is None else -(value >> 31)
        low = self.words.get(int(name[2:]))
        high = self.words.get(int(name[2:]) + 1)
        if source.startswith("-"):
            return None if low is None else -low, None if high is None else -high
        return low, high

    def bitwise(self, sources: list[str]) -> tuple[int | None]:
        """A table of eight bits says what becomes of three words' bits."""
        *words, table = (self.word(source) for source in sources[:4])
        if None in words or table is None:
            return (None,)
        a, b, c = words
        return (sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32)),)

    def scaled_add(self, sources: list[str]) -> tuple[int | None]:
        words = [self.word(source) for source in sources if not re.fullmatch(r"!?UP[\dT]", source)]
        return (None,) if None in words[:3] else ((words[0] << words[2]) + words[1],)
