"""Programs: every choice that can move a bit, under one name.

A program is chosen once, when a model is built. Nothing else (argument, environment, installed package, tensor size) picks an
arithmetic. `DECISIONS` records the choices that were measured before version 1 was frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VERSION = 1

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

REFERENCE = "reference"

ALIGNED_CUDA = {
    "embed": "copy",
    "linear": "fixed_k",
    "rms_norm": "pair_tree",
    "rope": "single_round",
    "swiglu": "single_round",
    "attention": "fa4",
    "route": "pair_tree",
    "experts": "fixed_k",
    "combine": "contributor_tree",
    "log_prob": "group_tree",
}
UNALIGNED_CUDA = {
    **ALIGNED_CUDA,
    "linear": "cublas",
    "attention": "split_kv",
    "experts": "grouped_mm",
}


@dataclass(frozen=True)
class Program:
    """The arithmetic of a model on one kind of device.

    key_segment   keys per attention pass, an absolute grid of positions; None: one pass
    vocab_group   logits per group of the log-probability's tree
    contributors  leaves of the routed experts' sum (DESIGN: expert e belongs to e // ceil(E / contributors))
    """

    name: str
    device: str
    dtype: str
    key_segment: int | None = None
    vocab_group: int = 256
    contributors: int = 8
    version: int = VERSION

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def byte_class(self, op: str) -> str:
        """The byte class that `op` belongs to in this program."""
        if self.device == "cpu":
            return REFERENCE
        return (UNALIGNED_CUDA if self.name == "unaligned" else ALIGNED_CUDA)[op]

    def lines(self) -> dict[str, str]:
        """The program as text, for fingerprints: two programs with equal lines make equal bytes."""
        from zoo.common.ops import CONTRACTS

        out = {
            "program": f"{self.name}/{self.version}",
            "device": self.device,
            "dtype": self.dtype,
            "key_segment": str(self.key_segment),
            "vocab_group": str(self.vocab_group),
            "contributors": str(self.contributors),
        }
        for name, contract in sorted(CONTRACTS.items()):
            out[f"op.{name}"] = f"{name}/{contract.version} {self.byte_class(name)}"
        return out


NAMES = ("aligned", "transformers", "unaligned")


def resolve(name: str, device: torch.device | str, dtype: torch.dtype) -> Program:
    """The named program on a device. ValueError for a name, device or dtype that it does not have."""
    kind = torch.device(device).type
    if name not in NAMES:
        raise ValueError(f"unknown program {name!r}; there are {', '.join(NAMES)}")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"program {name!r} runs on cpu and cuda, not on {kind}")
    text = {value: key for key, value in DTYPES.items()}.get(dtype)
    if name == "transformers":
        if text != "float32" or kind != "cpu":
            raise ValueError(f"program 'transformers' is float32 on cpu, not {dtype} on {kind}")
        return Program(name, kind, text)
    if text != "bfloat16":
        raise ValueError(
            f"program {name!r} has bfloat16 weights and activations, not {dtype}; "
            "give dtype=torch.bfloat16 to round the stored weights once at load"
        )
    if name == "unaligned" and kind != "cuda":
        raise ValueError("program 'unaligned' is the rival of benchmarks and runs on cuda only")
    return Program(name, kind, text)
