"""weights-tools quantize and dequantize: FP8 blocks and MXFP4, there and back; what is corrupt leaves no folder behind."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weights_tools import forms
from weights_tools.compare import differences
from weights_tools.inspect import content_hash_of
from weights_tools.make_tiny import make_tiny
from weights_tools.quantize import dequantize, quantize
from zoo.common.checkpoint import Checkpoint
from zoo.common.codecs import PACKED
from zoo.common.family import Architecture, Family
from zoo.common.layers import Experts, PackedExperts
from zoo.common.pretrained import Pretrained
from zoo.common.program import Program
from zoo.common.quantisation import FIELD
from zoo.common.registry import model_class
from zoo.common.shards import write_shards
from zoo.common.weights import Entry, WeightTable, packed_experts, separate_experts, single
from zoo.testing import assert_same_bytes

COUNT = 3
HIDDEN = 64
INNER = 32
NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True)
class Config:
    """A family whose experts may be MXFP4."""

    packed: bool
    quantised: None = None
    model_type = "toy_quantize"
    vocabulary = 1
    eos: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> Config:
        return cls(fields.get(FIELD) is not None)

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": self.model_type}


def table(config: Config) -> WeightTable:
    plain = single("plain", "plain.weight", (3, 5))
    if config.packed:
        return WeightTable((plain, *packed_experts("experts", ("ffn.experts",), COUNT, HIDDEN, INNER)), carried=(r"mtp\..*",))
    layouts = separate_experts("ffn.experts", COUNT, HIDDEN, INNER)
    named = [
        tuple(
            replace(p, published=f"ffn.experts.{p.expert}.{NAMES[p.published.split('.')[3].removesuffix('_proj')]}.weight") for p in pieces
        )
        for pieces in layouts
    ]
    return WeightTable((plain, Entry("experts.gate_up", (named[0],)), Entry("experts.down", (named[1],))), carried=(r"mtp\..*",))


class Model(Pretrained):
    def __init__(self, config: Config, program: Program) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.program = program
        self.plain = nn.Parameter(torch.empty(3, 5, dtype=program.torch_dtype))
        self.experts = (PackedExperts if config.packed else Experts)(COUNT, HIDDEN, INNER, program)


FAMILY = Family(
    config=Config,
    model=nn.Module,  # type: ignore[arg-type]
    table=table,
    used_ops=lambda config: (),
    rl=Model,  # type: ignore[arg-type]
    serving=Model,  # type: ignore[arg-type]
    architectures=(Architecture("toy_quantize", ("toy_quantize",), {"tiny": Config(False)}, "tiny", (), {}),),
    page_size=lambda config: 1,
    forms={"mxfp4": lambda fields: {**fields, FIELD: {"quant_method": "fp8", "expert_dtype": "fp4"}}},
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools find the family by its config.json."""

    def found(fields: dict[str, Any], role: str = "rl") -> Any:
        return Model if fields["model_type"] == "toy_quantize" else model_class(fields, role)

    for module in ("weights_tools.quantize", "weights_tools.inspect", "weights_tools.convert"):
        monkeypatch.setattr(f"{module}.model_class", found)


def values() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tensors = {"plain.weight": torch.randn(3, 5, generator=draw), "mtp.0.weight": torch.randn(4, 4, generator=draw)}
    for e in range(COUNT):
        for name, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
            tensors[f"ffn.experts.{e}.{name}.weight"] = torch.randn(shape, generator=draw) / 8
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def written(folder: Path, tensors: dict[str, Tensor], fields: dict[str, Any] | None = None) -> Path:
    """In several shards with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "toy_quantize", **(fields or {})}))
    specs = [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    write_shards(folder, specs, tensors.__getitem__, 8000)
    return folder


def contents(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in sorted(Checkpoint.open(folder).tensors.items())}


@pytest.mark.usefixtures("toy")
def test_experts_in_four_bits_and_back(tmp_path: Path) -> None:
    source = written(tmp_path / "bf16", values())
    quantize(source, tmp_path / "mxfp4", "mxfp4")
    packed = contents(tmp_path / "mxfp4")
    for name, tensor in values().items():
        if ".experts." not in name:
            assert_same_bytes(packed[name], tensor)
            continue
        codes, scales = PACKED.encode(tensor)
        assert_same_bytes([packed[name], packed[name.replace(".weight", ".scale")]], [codes, scales])
    model = Model.from_pretrained(tmp_path / "mxfp4", device="cpu")
    model.save_pretrained(tmp_path / "saved")
    assert not differences(str(tmp_path / "mxfp4"), str(tmp_path / "saved"))
    assert content_hash_of(Checkpoint.open(tmp_path / "mxfp4")) == model.weights_version
    dequantize(tmp_path / "mxfp4", tmp_path / "again")
    again = contents(tmp_path / "again")
    assert set(again) == set(values())
    for name, tensor in again.items():
        if ".experts." in name:
            assert_same_bytes(tensor.float(), PACKED.decode(*PACKED.encode(values()[name])))
            assert not torch.equal(tensor, values()[name])  # control: four bits do lose something
    # values of four bits have codes again, of the same values
    quantize(tmp_path / "again", tmp_path / "twice", "mxfp4")
    dequantize(tmp_path / "twice", tmp_path / "thrice")
    assert not differences(str(tmp_path / "again"), str(tmp_path / "thrice"))


@pytest.mark.usefixtures("toy")
def test_scales_of_either_dtype_are_one_checkpoint(tmp_path: Path) -> None:
    quantize(written(tmp_path / "bf16", values()), tmp_path / "a", "mxfp4")
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    as_bytes = {n: t.view(torch.uint8) if n.endswith(".scale") else t for n, t in contents(tmp_path / "a").items()}
    written(tmp_path / "b", as_bytes, fields)
    found = differences(str(tmp_path / "a"), str(tmp_path / "b"))
    assert len(found) == 3 * COUNT and {line.reason for line in found} == {"F8_E8M0 against U8, the same bytes"}
    assert content_hash_of(Checkpoint.open(tmp_path / "a")) == content_hash_of(Checkpoint.open(tmp_path / "b"))
    as_bytes["ffn.experts.1.w2.scale"][3, 0] += 1
    written(tmp_path / "c", as_bytes, fields)
    assert [line.reason for line in differences(str(tmp_path / "a"), str(tmp_path / "c")) if "other" in line.reason]
    assert content_hash_of(Checkpoint.open(tmp_path / "a")) != content_hash_of(Checkpoint.open(tmp_path / "c"))
    dequantize(tmp_path / "b", tmp_path / "values")
    dequantize(tmp_path / "a", tmp_path / "same")
    assert not differences(str(tmp_path / "values"), str(tmp_path / "same"))


def spoilt(change: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = values()
    name = "ffn.experts.1.w2.weight"
    if change == "NaN":
        tensors[name][3, 4] = torch.nan
    elif change == "too large":
        tensors[name][3, 4] = 3e38
    elif change == "missing":
        del tensors[name]
    elif change == "codes":
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    elif change == "narrow":
        tensors[name] = tensors[name][:, :31].contiguous()
    return tensors, {FIELD: {"quant_method": "fp8"}} if change == "quantised" else {}


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("NaN", "w2.weight has 1 NaN or infinite values"),
        ("too large", "w2.weight: a value is NaN, infinite or beyond 6 x 2"),
        ("missing", "1 tensors missing: ffn.experts.1.w2.weight"),
        ("codes", "codes of one byte|no values that could be quantised"),
        ("narrow", "of a wrong shape"),
        ("quantised", "has codes already: dequantize it first"),
    ],
)
def test_what_can_not_be_quantised_leaves_nothing(change: str, words: str, tmp_path: Path) -> None:
    source = written(tmp_path / "bf16", *spoilt(change))
    with pytest.raises(ValueError, match=words):
        quantize(source, tmp_path / "out", "mxfp4")
    assert [path.name for path in tmp_path.iterdir()] == ["bf16"]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("byte", [253, 255])
def test_corrupt_scales_are_no_values(byte: int, tmp_path: Path) -> None:
    quantize(written(tmp_path / "bf16", values()), tmp_path / "a", "mxfp4")
    tensors = contents(tmp_path / "a")
    tensors["ffn.experts.2.w3.scale"].view(torch.uint8)[5, 1] = byte
    written(tmp_path / "b", tensors, json.loads((tmp_path / "a" / "config.json").read_text()))
    with pytest.raises(ValueError, match=f"w3.scale has the scale byte {byte}|w3.scale has 1 NaN"):
        dequantize(tmp_path / "b", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="has no codes"):
        dequantize(tmp_path / "bf16", tmp_path / "out")


@pytest.mark.usefixtures("toy")
def test_a_form_that_a_family_has_not_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "bf16", values())
    for form, words in (("fp4", "must be bf16 or fp8 or mxfp4"), ("bf16", "has this form")):
        with pytest.raises(ValueError, match=words):
            quantize(source, tmp_path / "out", form)


def test_fp8_blocks_there_and_back(tmp_path: Path) -> None:
    """A published family: what is quantised has the bytes of a checkpoint drawn in codes, and loads."""
    plain = make_tiny("qwen3", tmp_path / "bf16")
    quantize(plain, tmp_path / "fp8", "fp8")
    fields = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert fields[FIELD]["quant_method"] == "fp8"
    model = model_class(fields, "rl").from_pretrained(tmp_path / "fp8", device="cpu", program="fp8")
    codes = [name for name, tensor in Checkpoint.open(tmp_path / "fp8").tensors.items() if tensor.dtype == "F8_E4M3"]
    assert codes
    model.save_pretrained(tmp_path / "saved")
    assert not differences(str(tmp_path / "fp8"), str(tmp_path / "saved"))
    dequantize(tmp_path / "fp8", tmp_path / "again")
    again = model_class(json.loads((tmp_path / "again" / "config.json").read_text()), "rl").from_pretrained(
        tmp_path / "again", device="cpu"
    )
    rounded = model_class(fields, "rl").from_pretrained(tmp_path / "fp8", device="cpu", dtype="bfloat16")
    assert again.weights_version == rounded.weights_version
    names = {line.name for line in differences(str(plain), str(tmp_path / "again"))}
    assert names and names <= set(codes)  # what has no codes is the same, and three bits of mantissa do lose something


def test_make_tiny_has_the_forms_of_a_family(tmp_path: Path) -> None:
    family = model_class({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}).family
    assert forms.forms_of(family) == ("bf16", "fp8")
    with pytest.raises(ValueError, match="--form 'mxfp4' must be bf16 or fp8"):
        make_tiny("qwen3", tmp_path / "out", form="mxfp4")
    assert forms.forms_of(FAMILY) == ("bf16", "fp8", "mxfp4")
