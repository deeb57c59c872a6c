"""MXFP4 experts and exponents as scales: through loading, saving, publishing and drawing, byte for byte; what is wrong is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.checkpoint import Checkpoint
from zoo.common.codecs import PACKED, BlockScaled, Exponents
from zoo.common.decoded import decoded
from zoo.common.family import Family
from zoo.common.layers import PackedExperts
from zoo.common.layout import Layout
from zoo.common.pretrained import Pretrained
from zoo.common.program import Program
from zoo.common.shards import header_of, write_shard
from zoo.common.weights import WeightTable, block_scaled, packed_experts, single
from zoo.testing import LawBroken, assert_same_bytes

COUNT = 4
HIDDEN = 64
INNER = 32
BLOCKS = BlockScaled(4, 8, power_of_two=True)
SHAPE = (6, 20)
E8M0 = torch.float8_e8m0fnu


class Config:
    model_type = "toy_packed"
    vocabulary = 1
    eos: tuple[int, ...] = ()
    quantised = None

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> Config:
        return cls()

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": self.model_type}


def table(_: Config) -> WeightTable:
    return WeightTable(
        (
            single("plain", "plain.weight", (3, 5)),
            *packed_experts("experts", ("layers.0.ffn.experts", "model.layers.0.ffn.experts"), COUNT, HIDDEN, INNER),
            *block_scaled("linear.weight", "layers.0.wq.weight", SHAPE, BLOCKS, ".scale"),
        ),
        carried=(),
    )


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SHAPE, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(BLOCKS.scales(SHAPE)), requires_grad=False)


class Model(Pretrained):
    def __init__(self, config: Config, program: Program) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.program = program
        self.plain = nn.Parameter(torch.empty(3, 5, dtype=program.torch_dtype))
        self.experts = PackedExperts(COUNT, HIDDEN, INNER, program, 10.0)
        self.linear = Linear()


Family(
    config=Config,
    model=nn.Module,  # type: ignore[arg-type]
    table=table,
    used_ops=lambda config: (),
    rl=Model,  # type: ignore[arg-type]
    serving=Model,  # type: ignore[arg-type]
    architectures=(),
    page_size=lambda config: 1,
)


def drawn(*shape: int, below: int = 256, first: int = 0, seed: int = 0) -> Tensor:
    return torch.randint(first, below, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def stored(scales: torch.dtype = E8M0, prefix: str = "") -> dict[str, Tensor]:
    """As a publisher wrote it: all codes, the zero with a sign too, and scales that no `encode` makes."""
    tensors = {
        "plain.weight": (drawn(3, 5).float() / 64 - 2).bfloat16(),
        "layers.0.wq.weight": (drawn(*SHAPE).float() - 128).to(torch.float8_e4m3fn),
        "layers.0.wq.scale": drawn(*BLOCKS.scales(SHAPE), first=110, below=130).view(scales),
    }
    for e in range(COUNT):
        for seed, (name, rows, columns) in enumerate((("w1", INNER, HIDDEN), ("w2", HIDDEN, INNER), ("w3", INNER, HIDDEN))):
            at = f"{prefix}layers.0.ffn.experts.{e}.{name}"
            tensors[f"{at}.weight"] = drawn(rows, columns // 2, seed=10 * e + seed).view(torch.int8)
            tensors[f"{at}.scale"] = drawn(rows, columns // 32, first=0, below=253, seed=10 * e + seed).view(scales)
    return tensors


def checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": Config.model_type, "quantization_config": {"quant_method": "fp8"}}))
    header = header_of((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    write_shard(folder / "model.safetensors", header, tensors, tensors.__getitem__)
    return folder


def contents(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in Checkpoint.open(folder).tensors.items()}


def loaded(folder: Path) -> Model:
    return Model.from_pretrained(folder, device="cpu")


def test_experts_are_stacked_gate_first(tmp_path: Path) -> None:
    tensors = stored()
    model = loaded(checkpoint(tmp_path / "a", tensors))
    model.check_arithmetic()
    experts = model.experts
    assert (experts.gate_up.dtype, tuple(experts.gate_up.shape)) == (torch.int8, (COUNT, 2 * INNER, HIDDEN // 2))
    assert (experts.gate_up_scale.dtype, tuple(experts.gate_up_scale.shape)) == (E8M0, (COUNT, 2 * INNER, HIDDEN // 32))
    assert (experts.down.dtype, tuple(experts.down.shape)) == (torch.int8, (COUNT, HIDDEN, INNER // 2))
    assert not any(parameter.requires_grad for parameter in experts.parameters())
    at = "layers.0.ffn.experts.2"
    for name, part in ((f"{at}.w1", slice(0, INNER)), (f"{at}.w3", slice(INNER, None))):
        assert_same_bytes(experts.gate_up.detach()[2, part], tensors[f"{name}.weight"])
        assert_same_bytes(experts.gate_up_scale.detach()[2, part], tensors[f"{name}.scale"])
    assert_same_bytes(experts.down.detach()[2], tensors[f"{at}.w2.weight"])
    assert_same_bytes(model.linear.scale.detach(), tensors["layers.0.wq.scale"].float())


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("scales", [E8M0, torch.uint8], ids=str)
def test_saved_and_published_as_they_were(scales: torch.dtype, prefix: str, tmp_path: Path) -> None:
    """Scales in either dtype go back as they came; the content hash is of the bytes alone, and an update may have either."""
    folder = checkpoint(tmp_path / "a", stored(scales, prefix))
    model = loaded(folder)
    model.save_pretrained(tmp_path / "b")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes()
    published = dict(model.published_tensors())
    wanted = {name: stored()[name] for name in published}
    assert_same_bytes(published, wanted)
    model._source = None
    model.save_pretrained(tmp_path / "c", shard_bytes=1000)
    assert_same_bytes({name: contents(tmp_path / "c")[name] for name in published}, wanted)
    other = loaded(checkpoint(tmp_path / "d", stored()))
    assert other.weights_version == model.weights_version
    with torch.no_grad():
        other.experts.down.view(torch.uint8)[1, 0, 0] ^= 1
    assert other.weights_version != model.weights_version
    other.load_weights(stored(scales).items())
    assert other.weights_version == model.weights_version


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("layers.0.ffn.experts.1.w2.scale", lambda t: t.view(torch.uint8).fill_(255).view(E8M0), "255, which is NaN|NaN or infinite"),
        ("layers.0.ffn.experts.1.w2.scale", lambda t: t.view(torch.uint8).fill_(255), "w2.scale has the scale byte 255, which is NaN"),
        ("layers.0.ffn.experts.3.w1.scale", lambda t: t.view(torch.uint8).fill_(253).view(E8M0), "byte 253, beyond 252: .* no BF16 number"),
        ("layers.0.wq.scale", lambda t: t.view(torch.uint8).fill_(247).view(E8M0), "byte 247, beyond 246: .* no BF16 number"),
        ("layers.0.ffn.experts.1.w2.weight", lambda t: t[:, :15].contiguous(), r"w2.weight \[64, 15\] where the config needs \[64, 16\]"),
        ("layers.0.ffn.experts.1.w2.weight", lambda t: t.to(torch.int16), "is I16 where the program needs I8"),
        ("layers.0.ffn.experts.1.w2.scale", lambda t: t.float(), "is F32 where the program needs F8_E8M0"),
        ("layers.0.ffn.experts.1.w2.scale", None, "1 tensors missing: layers.0.ffn.experts.1.w2.scale"),
    ],
)
def test_what_is_corrupt_is_refused(name: str, change: Any, words: str, tmp_path: Path) -> None:
    """When it is loaded, and as an update, which then changes nothing."""
    tensors = stored()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name].clone())
    with pytest.raises(ValueError, match=words):
        loaded(checkpoint(tmp_path / "a", tensors))
    if change is not None:
        model = loaded(checkpoint(tmp_path / "b", stored()))
        before = model.weights_version
        with pytest.raises(ValueError, match=name.rpartition(".")[0]):
            model.load_weights([("plain.weight", torch.zeros(3, 5).bfloat16()), (name, tensors[name])])
        assert model.weights_version == before


def test_random_weights_are_codes_of_what_they_would_be() -> None:
    model = Model.from_config(Config(), device="cpu", seed=3)
    values = PACKED.decode(model.experts.gate_up.detach(), model.experts.gate_up_scale.detach())
    assert values.shape == (COUNT, 2 * INNER, HIDDEN)
    assert 0.7 < float(values.std()) * HIDDEN**0.5 < 1.3
    assert_same_bytes(dict(model.named_parameters()), dict(Model.from_config(Config(), device="cpu", seed=3).named_parameters()))
    exponents = model.linear.scale.log2()
    assert torch.equal(exponents, exponents.round())


def test_a_layer_of_them_is_the_op_and_the_sum() -> None:
    model = Model.from_config(Config(), device="cpu", seed=3)
    x = torch.randn(5, HIDDEN).bfloat16()
    chosen = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3]])
    weights = torch.rand(5, 2)
    dense = [PACKED.decode(*pair).bfloat16() for pair in _pairs(model.experts)]
    slots = ops.experts(x, chosen, *dense, program=model.program, limit=10.0)
    wanted = ops.combine(slots, weights, chosen, COUNT, program=model.program)
    assert_same_bytes(model.experts(x, weights, chosen), wanted)
    with pytest.raises(LawBroken):
        assert_same_bytes(model.experts(x, weights, chosen.flip(1)), wanted)


def _pairs(experts: PackedExperts) -> list[tuple[Tensor, Tensor]]:
    return [(experts.gate_up.detach(), experts.gate_up_scale.detach()), (experts.down.detach(), experts.down_scale.detach())]


def test_a_checkpoint_is_seen_decoded(tmp_path: Path) -> None:
    """As one of BF16 weights under the codes' names; code times scale is exact there, and what is corrupt is refused where it is read."""
    tensors = stored(torch.uint8, "model.")
    folder = checkpoint(tmp_path / "a", tensors)
    seen = decoded(Checkpoint.open(folder), table(Config()))
    assert set(seen.tensors) == {name for name in tensors if not name.endswith(".scale")}
    name = "model.layers.0.ffn.experts.2.w3"
    told = seen.tensors[f"{name}.weight"]
    assert (told.dtype, told.shape) == ("BF16", (INNER, HIDDEN))
    exact = PACKED.decode(tensors[f"{name}.weight"], tensors[f"{name}.scale"].view(E8M0))
    assert_same_bytes(told.read().float(), exact)
    linear = BLOCKS.decode(tensors["layers.0.wq.weight"], tensors["layers.0.wq.scale"].view(E8M0))
    assert_same_bytes(seen.tensors["layers.0.wq.weight"].read(), linear.bfloat16())
    assert "quantization_config" not in seen.config
    tensors[f"{name}.scale"].fill_(255)
    bad = decoded(Checkpoint.open(checkpoint(tmp_path / "b", tensors)), table(Config()))
    with pytest.raises(ValueError, match="w3.scale has the scale byte 255, which is NaN"):
        bad.tensors[f"{name}.weight"].read()


def test_a_rank_has_its_experts_codes_and_scales() -> None:
    for entry in table(Config()).local(Layout(ep=2), {"ep": 1}).entries:
        if entry.ours.startswith("experts."):
            for pieces in entry.layouts:
                assert sorted({piece.expert for piece in pieces if piece.expert is not None}) == [0, 1]
                assert all(f".experts.{(piece.expert or 0) + 2}." in piece.published for piece in pieces)


def test_what_can_not_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of 48 values are no whole groups of 32"):
        packed_experts("experts", ("e",), 2, 48, 32)
    with pytest.raises(ValueError, match="rows of 15 packed bytes are no whole groups of 16"):
        PACKED.scales((4, 15))


def test_exponents_lose_nothing() -> None:
    every = torch.arange(255, dtype=torch.uint8).view(E8M0)
    codec = replace(Exponents(), held=torch.float32, largest=254)
    assert_same_bytes(codec.encode(codec.decode(every))[0], every)
    with pytest.raises(ValueError, match="no power of two"):
        codec.encode(torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_block_scales_of_two(scale: float) -> None:
    """The least power of two that takes the largest of a block to at most 448."""
    values = torch.randn(3, 9, 17, generator=torch.Generator().manual_seed(1)) * scale
    values[0, :4, :8] = 0
    codes, scales = BLOCKS.encode(values)
    exponents = scales.log2()
    assert torch.equal(exponents, exponents.round()) and scales[0, 0, 0] == 1
    again = BLOCKS.decode(*BLOCKS.encode(BLOCKS.decode(codes, scales)))
    assert_same_bytes(again, BLOCKS.decode(codes, scales))
    for i in range(3):
        largest = values[i, 4:8, :8].abs().max()
        assert 224 < largest / scales[i, 1, 0] <= 448
