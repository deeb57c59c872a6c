"""What a stored qualification says of the contracts and kernels of today.

A provider that does not define its byte class runs a shape only where its bytes were found equal to the defining provider's on
this GPU and toolchain. `zoo.common.verdicts` keeps the store, `Contract.provider` chooses by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from zoo.common import verdicts
from zoo.common.ops.contract import CONTRACTS, Contract
from zoo.common.program import PROGRAMS
from zoo.common.verdicts import Verdict

ONE_KERNEL = "the reference kernels, which are all that a CPU has"


def read(path: Path) -> list[Verdict]:
    """The verdicts of a store; those of older contracts or kernels are left out. ValueError naming the file if it can't be read."""
    return [v for v in verdicts.read(path) if v.op in CONTRACTS and _holds(v, CONTRACTS[v.op])]


def _of_today(op: str, provider: str, shape: tuple[int, ...]) -> Verdict | None:
    found = verdicts.verdict(op, provider, shape)
    return found if found is not None and _holds(found, CONTRACTS[op]) else None


def _holds(verdict: Verdict, contract: Contract) -> bool:
    """Whether it is about the contract and the kernels of today."""
    versions = [p.version for p in contract.providers if p.name == verdict.provider]
    return contract.version == verdict.contract_version and versions in ([], [verdict.provider_version])


def tried(op: str, provider: str, shape: tuple[int, ...]) -> bool:
    """Whether the store has a verdict, whichever it is."""
    return _of_today(op, provider, shape) is not None


def reason(op: str, provider: str, shape: tuple[int, ...]) -> str:
    """Why a candidate does not run a shape here."""
    found = _of_today(op, provider, shape)
    return "not qualified yet" if found is None else found.reason or "admitted"


def state(chosen: Iterable[tuple[str, tuple[int, ...]]], device: str) -> str:
    """For fingerprints: "qualified" if every candidate of every (op, shape) has a verdict, else "unqualified"; a CPU has no candidates."""
    if device != "cuda":
        return ONE_KERNEL
    return "qualified" if all(tried(op, p, shape) for op, shape in chosen for p in candidates(op, shape)) else "unqualified"


def candidates(op: str, shape: tuple[int, ...]) -> list[str]:
    """Providers of `aligned`'s class on a GPU that could run a shape besides the defining one."""
    wanted = PROGRAMS["aligned"].classes["cuda"][op]
    members = [p for p in CONTRACTS[op].providers if p.device == "cuda" and p.byte_class == wanted and not p.defining]
    return [p.name for p in members if p.installed() and p.serves(*shape)]
