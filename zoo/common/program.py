"""Programs: every choice that can move a bit, under one name.

A program is chosen once, when a model is built. Nothing else (argument, environment, installed package, tensor size) picks an
arithmetic. `DECISIONS` records the choices that were measured before version 1 was frozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

VERSION = 1

# no program is chosen in float64: it is what the others are measured against
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

REFERENCE = "reference"
HEAD = "head"  # the vocabulary product: `linear` by another class where a program says so


# rows and index keys are cached as they come, not as codes would hold them
ROWS_AS_THEY_ARE: Mapping[str, tuple[str, ...]] = {"code_round": (), "hadamard": ()}
CODED_INDEX = {"select": ("fp8_quantise", "fp8_select")}  # index keys are cached and scored as codes with scales


@dataclass(frozen=True)
class Specification:
    """A named program before a model gives it a device, a dtype and contributors.

    classes       byte class of each op by device; on a CPU an op that is not named has the class of references
    by_geometry   by device and op, (how a shape begins, byte class): the class of an op's shapes that begin so, whatever the rows
    key_segments  by device, (widest head, keys per attention pass): see Program
    codes         whether weights that a checkpoint has as codes and scales are computed with as such
    packed        whether experts among them are MXFP4
    instead       op -> the ops that stand for it where the program has other operands for the same purpose; none: it is left out
    captures      whether the kernels take every size that changes from the device, so that whole prefills can be captured
    otherwise     what the refusal of another dtype or device advises
    """

    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    classes: Mapping[str, Mapping[str, str]]
    by_geometry: Mapping[str, Mapping[str, tuple[tuple[tuple[int, ...], str], ...]]]
    key_segments: Mapping[str, tuple[tuple[int, int], ...]]
    captures: bool
    otherwise: str
    codes: bool = False
    packed: bool = False
    instead: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def derived(self, classes: Mapping[str, Mapping[str, str]] | None = None, **changes: Any) -> Specification:
        """The same with some classes replaced, device by device, and other fields changed."""
        merged = {device: {**ops, **(classes or {}).get(device, {})} for device, ops in self.classes.items()}
        return replace(self, classes=merged, **changes)

    def geometries(self, device: str, op: str) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(how a shape begins, byte class) of the op's shapes that have a class of their own."""
        return self.by_geometry.get(device, {}).get(op, ())

    def byte_class(self, device: str, op: str, shape: tuple[int, ...] = ()) -> str:
        """The class of `op` at a shape; without one, that of shapes which have none of their own."""
        for begins, byte_class in self.geometries(device, op):
            if shape[: len(begins)] == begins:
                return byte_class
        classes = self.classes[device]
        return classes.get(op, REFERENCE) if device == "cpu" else classes[op]


_ALIGNED = Specification(
    devices=("cpu", "cuda"),
    dtypes=("bfloat16",),
    classes={
        "cpu": {},
        "cuda": {
            "embed": "copy",
            "linear": "fixed_k",
            "rms_norm": "pair_tree",
            "norm_rope": "pair_tree",
            "rope": "single_round",
            "swiglu": "single_round",
            "attention": "fa4",
            "route": "pair_tree",
            "causal_conv": "single_round",
            "l2_norm": "pair_tree",
            "delta_gate": "fp32",
            "gated_rms_norm": "pair_tree",
            "output_gate": "single_round",
            "experts": "fixed_k",
            "packed_experts": "fixed_k",
            "combine": "contributor_tree",
            "gated_delta": "chunk_replay",
            "fp8_quantise": "nearest",
            "fp8_linear": "deepgemm_fp8",
            "fp8_experts": "deepgemm_fp8",
            "layer_norm": "pair_tree",
            "head_linear": "fixed_k",
            "biased_route": "fp32",
            "select": "pair_tree",
            "fp8_select": "lane_sums",
            "sparse_attention": "list_tiles",
            "hyper_pre": "pair_tree",
            "hyper_post": "pair_tree",
            "hyper_head": "pair_tree",
            "tail_rope": "single_round",
            "code_round": "nearest",
            "hadamard": "stages",
            "compress": "pair_tree",
            "compressed_select": "pair_tree",
            "compressed_attention": "list_tiles",
            "softplus_route": "fp32",
            "hash_route": "fp32",
            "log_prob": "group_tree",
            "sample": "fixed_point",
        },
    },
    # latent rows of 576 columns with values of 512: the one geometry that FlashMLA's sparse kernel and our models share; index heads and
    # widths at which DeepGEMM's packed and paged scorers were found to have the same bytes
    by_geometry={
        "cuda": {
            "sparse_attention": (((576, 512), "flash_mla"),),
            "fp8_select": (((32, 128), "deepgemm_scores"), ((64, 128), "deepgemm_scores")),
        }
    },
    # FA4's key tile divides each: 128 up to head dim 128, 80 at 256. The reference's grid is small so that tests cross it.
    key_segments={"cuda": ((128, 2048), (256, 2080)), "cpu": ((256, 256),)},
    captures=True,
    otherwise="give dtype=torch.bfloat16 to round the stored weights once at load",
)
PROGRAMS: Mapping[str, Specification] = {
    "aligned": _ALIGNED,
    # that library's roundings, for parity
    "transformers": _ALIGNED.derived(
        devices=("cpu",),
        dtypes=("float32",),
        key_segments={},
        captures=False,
        instead=ROWS_AS_THEY_ARE,
        otherwise="give dtype=torch.float32 and device='cpu'",
    ),
    # the rival of benchmarks: the fastest kernels, whose bytes depend on the batch
    "unaligned": _ALIGNED.derived(
        devices=("cuda",),
        classes={"cuda": {"linear": "cublas", "attention": "split_kv", "experts": "grouped_mm", "gated_delta": "recurrent"}},
        key_segments={},
        captures=False,
        otherwise="it is the rival of benchmarks and runs on cuda only",
    ),
    # aligned, over a checkpoint whose matrices are FP8 codes with scales; a selector has codes of its queries and keys
    "fp8": _ALIGNED.derived(codes=True, instead=CODED_INDEX, otherwise="a checkpoint in FP8 has BF16 beside its codes"),
    # the same with experts packed in MXFP4, whose rows stay BF16
    "mxfp4": _ALIGNED.derived(codes=True, packed=True, otherwise="a checkpoint with packed experts has BF16 beside its codes"),
    # aligned, with both operands of the vocabulary product widened to FP32
    "fp32_head": _ALIGNED.derived(classes={"cpu": {HEAD: "fp32_operands"}, "cuda": {HEAD: "fp32_operands"}}),
}


@dataclass(frozen=True)
class Program:
    """The arithmetic of a model on one kind of device.

    key_segments  (widest head, keys per attention pass) on an absolute grid of positions; empty: one pass
    vocab_group   logits per group of the log-probability's tree
    contributors  leaves of the routed experts' sum (expert e belongs to e // ceil(E / contributors))
    """

    name: str
    device: str
    dtype: str
    key_segments: tuple[tuple[int, int], ...] = ()
    vocab_group: int = 256
    contributors: int = 8
    version: int = VERSION

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def wide_dtype(self) -> torch.dtype:
        """FP32, or the program's dtype where that is wider."""
        return torch.promote_types(self.torch_dtype, torch.float32)

    def key_segment(self, head_dim: int) -> int | None:
        """Keys per attention pass for heads of `head_dim`; None: one pass."""
        return next((keys for widest, keys in self.key_segments if head_dim <= widest), None)

    @property
    def captures(self) -> bool:
        """Whether whole prefills can be captured in a CUDA graph."""
        return PROGRAMS[self.name].captures

    @property
    def codes(self) -> bool:
        """Whether weights that a checkpoint has as codes and scales are computed with as such."""
        return PROGRAMS[self.name].codes

    @property
    def packed(self) -> bool:
        """Whether experts among them are MXFP4."""
        return PROGRAMS[self.name].packed

    def ops_for(self, op: str) -> tuple[str, ...]:
        """The ops that do what `op` is asked for: itself, but where the program says another, or none."""
        return PROGRAMS[self.name].instead.get(op, (op,))

    def byte_class(self, op: str, shape: tuple[int, ...] = ()) -> str:
        """The byte class that `op` belongs to in this program at a shape that it asks its contract for; HEAD is the vocabulary product.

        Without a shape: that of shapes which have no class of their own.
        """
        found = PROGRAMS[self.name]
        if op == HEAD and HEAD not in found.classes[self.device]:
            return self.byte_class("linear", shape)
        return found.byte_class(self.device, op, shape)

    def byte_classes(self, op: str) -> dict[str, str]:
        """Every class that `op` belongs to at some shape -> at which, in words: empty for all others."""
        found = {self.byte_class(op): ""}
        for begins, byte_class in PROGRAMS[self.name].geometries(self.device, op):
            where = "x".join(map(str, begins))
            found[byte_class] = f"{found[byte_class]} and {where}" if found.get(byte_class) else where
        return found


def specification(name: str) -> Specification:
    """ValueError for a name that no program has."""
    if name not in PROGRAMS:
        raise ValueError(f"unknown program {name!r}; there are {', '.join(PROGRAMS)}")
    return PROGRAMS[name]


def parse_device(device: torch.device | str) -> torch.device:
    """ValueError for what torch knows no device by."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r:.40} must be cpu, cuda or cuda:N") from error


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype from itself or its name, "bfloat16" as transformers takes it. ValueError for what torch knows no dtype by."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = vars(torch).get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {dtype!r:.40} must be {' or '.join(map(str, DTYPES.values()))}, or its name")
    return found


def resolve(name: str, device: torch.device | str, dtype: torch.dtype, contributors: int = 8) -> Program:
    """The named program on a device, with an architecture's contributors. ValueError for a name, device or dtype that it does not have."""
    kind = parse_device(device).type
    found = specification(name)
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"program {name!r} runs on cpu and cuda, not on {kind}")
    text = {value: key for key, value in DTYPES.items()}.get(dtype)
    if kind not in found.devices or text not in found.dtypes:
        wanted = f"{' or '.join(found.dtypes)} on {' or '.join(found.devices)}"
        raise ValueError(f"program {name!r} is {wanted}, not {dtype} on {kind}: {found.otherwise}")
    assert text is not None
    return Program(name, kind, text, key_segments=found.key_segments.get(kind, ()), contributors=contributors)


def split_k(outputs: int, inputs: int) -> int:
    """K parts of a narrow linear (routers, gates), a constant of its shape: see DECISIONS, `k_parts`.

    Where the parts wanted don't divide K, the next smaller power of two that does.
    """
    if outputs > 256:
        wanted = 1
    elif outputs < 16:
        wanted = 8 if inputs >= 1024 else 1
    else:
        wanted = 1 if inputs <= 4096 else 8 if inputs <= 8192 else 16
    return math.gcd(inputs, wanted)


@dataclass(frozen=True)
class Decision:
    """A choice that moves bytes, why it was made, and what was measured (one H200; rows in benchmarks/results/decisions_h200.jsonl)."""

    question: str
    answer: str
    evidence: str


DECISIONS = (
    Decision(
        "dense attention: byte class and key segments",
        "FlashAttention 4 (one split) inside segments of 2048 absolute positions (2080 at head dim 256, whose key tile is 80), "
        "merged left to right",
        "decode at batch 1 and 32768 keys 46 us against 374 us in one pass, at batch 64 and 4096 keys 266 against 246; training "
        "forward of one 4096-token document 282 us against 255, of 32768 tokens 15.4 ms against 14.0; segments of 1024 cost "
        "training 89 and 28 %; relative error against float64 0.00202 (one pass 0.00187, rounding alone 0.00165); decode rows "
        "equal training rows byte for byte at ten positions up to 4095",
    ),
    Decision(
        "experts: where the route weight is applied",
        "after a BF16 slot row, in FP32 slot order, one rounding per contributor",
        "relative error 0.0042 at 35B-A3B geometry; folded into SwiGLU 0.0041; on FP32 slot rows 0.0039, which doubles the slot "
        "rows' bytes; a plain grouped product serves it, and the Triton one was the fastest at decode (15.4 us against "
        "DeepGEMM's 13.4 to 15.0 at 1 token, 61 against 72 to 82 at 8, 221 against 247 to 318 at 64) and within 2 % at 4096 "
        "tokens",
    ),
    Decision(
        "k_parts of narrow linears",
        "1 up to K = 4096 for 16 to 256 outputs, 8 up to 8192, 16 beyond; 8 below 16 outputs",
        "128 x 2048 with one part by DeepGEMM 4.6 / 4.9 / 8.2 us at 1 / 64 / 4096 rows (cuBLAS 4.9 / 5.3 / 6.4), eight parts "
        "4.0 / 4.4 / 16.3; 256 x 6144 at 1 row 8.9 with one part, 5.4 with eight; 24 x 16384 20.3 against 6.0 with sixteen; 1 x "
        "2048 6.2 against 3.5 with eight",
    ),
    Decision(
        "FP8 class",
        "DeepGEMM's own order",
        "row-count invariant with itself at three shapes and nine row counts; 9.1 us at 4096 x 4096 and 1 row, 100 us at 4096 "
        "rows (BF16 11.0 and 174)",
    ),
    Decision(
        "FP8 selector: byte class of its scores",
        "DeepGEMM's own order, for prefill and decode alike",
        "its packed kernel gave a row of 256 the same bytes at 1 to 65 rows, and its paged kernel the same again at 1 to 64 "
        "sequences with pages in any order, at 32 and 64 heads and 4096 keys",
    ),
    Decision(
        "segments of a selected list in sparse attention",
        "none: one pass over the list",
        "one FlashMLA launch over 2048 selected rows takes 62 us at 1 query and 65 to 69 us at 64, so a split has little left to win",
    ),
    Decision(
        "compressed rows of 128 tokens: what a slot holds of the open window",
        "its raw rows in FP32, not a fold of them into (largest gate, sum, values)",
        "on a CPU, 64 windows of 512 channels against float64: relative error 1.2e-7 of raw rows with a tree, 2.9e-7 of a left fold, "
        "which rounding to BF16 hides but for 3 numbers in 10,000; 512 KiB a layer and sequence against 6; raw rows are what "
        "training has, so a slot needs no arithmetic of its own. Times on a GPU were not measured",
    ),
)
