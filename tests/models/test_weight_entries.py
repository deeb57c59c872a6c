"""Entries of a weight table: dtypes, codecs and cuts, through loading, saving, publishing and drawing, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.common.checkpoint import Checkpoint
from zoo.common.codecs import BlockScaled, Rounded
from zoo.common.family import Family
from zoo.common.layout import Layout
from zoo.common.pretrained import Pretrained
from zoo.common.program import Program, resolve
from zoo.common.registry import architectures, find
from zoo.common.shards import header_of, write_shard
from zoo.common.weights import Cut, Entry, Piece, WeightTable, block_scaled, single, stacked_rows
from zoo.testing import LawBroken, assert_same_bytes

BLOCKS = BlockScaled(4, 8)
SHAPE = (6, 20)  # neither is a whole number of blocks


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# --- codecs


def test_a_master_is_published_rounded_once() -> None:
    codec = Rounded()
    master = normal(1000)
    [stored] = codec.encode(master)
    assert_same_bytes(stored, master.to(torch.bfloat16))
    assert_same_bytes(codec.encode(codec.decode(stored))[0], stored)
    assert codec.decode(stored).dtype == torch.float32 and not torch.equal(codec.decode(stored), master)


@pytest.mark.parametrize("shape", [SHAPE, (4, 8), (1, 1), (3, 9, 17)])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_block_scales_come_back(shape: tuple[int, ...], scale: float) -> None:
    values = normal(*shape, scale=scale)
    values[..., :2, :8] = 0.0
    codes, scales = BLOCKS.encode(values)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == shape and scales.shape == BLOCKS.scales(shape)
    decoded = BLOCKS.decode(codes, scales)
    # each element by itself: its block's scale, half a step of four bits or of the smallest code
    for at in torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape)).tolist():
        own = scales[(*at[:-2], at[-2] // 4, at[-1] // 8)]
        value = values[tuple(at)]
        assert decoded[tuple(at)] == codes[tuple(at)].float() * own
        assert abs(float(decoded[tuple(at)] - value)) <= max(abs(float(value)) * 2**-4, float(own) * 2**-10) * (1 + 1e-6)
    assert_same_bytes(list(BLOCKS.encode(decoded)), [codes, scales])
    assert bool((codes.float().abs() <= 448).all())


def test_a_block_of_zeros_has_the_scale_one_and_the_largest_the_largest_code() -> None:
    codes, scales = BLOCKS.encode(torch.zeros(SHAPE))
    assert not codes.float().any() and bool((scales == 1).all())
    codes, scales = BLOCKS.encode(torch.tensor([[3.0, -1.5]]))
    assert codes.float().tolist() == [[448.0, -224.0]] and float(scales) == float(torch.tensor(3.0) / 448)


# --- cuts


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "cut", [Cut(), Cut(unit=2), Cut(1), Cut(sections=((8, 2), (8, 2), (16, 4))), Cut(1, sections=((16, 4), (32, 4)), along="cp")]
)
def test_shares_make_the_whole(cut: Cut, ranks: int) -> None:
    """Section by section; a rank has the same number of whole units of each."""
    whole = torch.arange(32 * 48).view(32, 48)
    layout = Layout(**{cut.along: ranks})
    pieces = [Piece("w", (32, 48), cut=cut).local(layout, {cut.along: rank}, 0) for rank in range(ranks)]
    shares = [piece.take(whole) for piece in pieces]
    assert {piece.shape for piece in pieces} == {tuple(share.shape) for share in shares} and len({piece.shape for piece in pieces}) == 1
    start = 0
    for part, unit in cut.sections or ((whole.shape[cut.dim], cut.unit),):
        each = part // ranks
        assert each % unit == 0
        joined = torch.cat([share.narrow(cut.dim, start // ranks, each) for share in shares], cut.dim)
        assert_same_bytes(joined, whole.narrow(cut.dim, start, part))
        start += part


@pytest.mark.parametrize(
    ("cut", "ranks", "words"),
    [
        (Cut(), 5, "32 in units of 1 can't be shared by 5 ranks"),
        (Cut(unit=16), 4, "32 in units of 16 can't be shared by 4 ranks"),
        (Cut(sections=((8, 1), (8, 1))), 2, r"sections \[8, 8\] make 16, the tensor has 32"),
    ],
)
def test_what_can_not_be_shared_is_refused(cut: Cut, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Piece("w", (32, 4), cut=cut).local(Layout(tp=ranks), {}, 0)
    with pytest.raises(ValueError, match="there is no rank 2 of 2"):
        Piece("w", (32, 4), cut=Cut()).local(Layout(tp=2), {"tp": 2}, 0)


@pytest.mark.parametrize("arch", sorted(architectures()))
def test_a_rank_s_tensors_have_the_sizes_of_its_geometry(arch: str) -> None:
    """What tensor-parallel ranks take tiles the parameters of a model of the local sizes, and all ranks together take everything."""
    family, named = find(arch)
    config = named.sizes["tiny"]
    layout = Layout(tp=2)
    whole = family.table(config)
    with torch.device("meta"):
        model = family.model(config.local(layout), resolve("aligned", "cpu", torch.bfloat16, family.contributors))
    locals_ = [whole.local(layout, {"tp": rank}) for rank in range(2)]
    for mine in locals_:
        held = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
        for entry, piece in mine.pieces():
            parameter = model.get_parameter(entry.ours.removeprefix("model."))
            assert piece.of(parameter).shape == piece.shape, piece
            held[entry.ours.removeprefix("model.")] += torch.Size(piece.shape).numel()
        assert held == {name: p.numel() for name, p in model.named_parameters()}
    for (entry, piece), *shared in zip(whole.pieces(), *(mine.pieces() for mine in locals_), strict=True):
        published = torch.arange(torch.Size(piece.shape).numel()).view(piece.shape)
        seen = torch.cat([share.take(published).flatten() for _, share in shared]).unique()
        assert len(seen) == published.numel(), (entry.ours, piece)


@pytest.mark.parametrize("arch", [name for name, (_, one) in sorted(architectures().items()) if one.sizes["tiny"].experts])
def test_a_rank_has_its_own_experts_in_every_layout(arch: str) -> None:
    family, named = find(arch)
    config = named.sizes["tiny"]
    count = config.experts
    for entry in family.table(config).local(Layout(ep=2), {"ep": 1}).entries:
        if entry.ours.endswith(("experts.gate_up", "experts.down")):
            for pieces in entry.layouts:
                numbers = sorted({piece.expert for piece in pieces if piece.expert is not None})
                if numbers:
                    assert numbers == list(range(count // 2))
                    assert all(f".experts.{piece.expert + count // 2}." in piece.published for piece in pieces)
                else:
                    assert [(piece.shape[0], piece.taken) for piece in pieces] == [(count // 2, ((count // 2, count),))]


def test_the_rows_of_a_fused_parameter_have_addresses() -> None:
    entry = stacked_rows("qkv", 5, [("q", 4, None), ("k", 2, None), ("v", 2, None)])
    fused = torch.arange(40).view(8, 5)
    [layout] = entry.layouts
    assert [piece.rows for piece in layout] == [slice(0, 4), slice(4, 6), slice(6, 8)]
    assert_same_bytes(layout[1].of(fused), fused[4:6])


# --- a model whose parameters have three dtypes


class Config:
    model_type = "toy_entries"
    quantised = None
    vocabulary = 1
    eos: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> Config:
        return cls()

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": self.model_type}


def table(_: Config) -> WeightTable:
    halves = (Piece("gate", (2, 5)), Piece("up", (2, 5), start=2))
    return WeightTable(
        (
            single("plain", "plain.weight", (3, 5)),
            single("decay", "decay", (7,), dtype=torch.float32, trainable=False),
            Entry("master", (halves,), codec=Rounded()),
            *block_scaled("codes", "experts.weight", SHAPE, BLOCKS),
        ),
        carried=(),
    )


class Model(Pretrained):
    def __init__(self, config: Config, program: Program) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.program = program
        self.plain = nn.Parameter(torch.empty(3, 5, dtype=program.torch_dtype))
        self.decay = nn.Parameter(torch.empty(7, dtype=torch.float32))
        self.master = nn.Parameter(torch.empty(4, 5, dtype=torch.float32))
        self.codes = nn.Parameter(torch.empty(SHAPE, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.codes_scale_inv = nn.Parameter(torch.empty(BLOCKS.scales(SHAPE), dtype=torch.float32))


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


def stored() -> dict[str, Tensor]:
    """As a publisher wrote it: scales that no `encode` makes, with codes that are not the largest."""
    codes = (normal(*SHAPE, seed=1) * 100).to(torch.float8_e4m3fn)
    return {
        "plain.weight": normal(3, 5).bfloat16(),
        "decay": normal(7, seed=2),
        "gate": normal(2, 5, seed=3).bfloat16(),
        "up": normal(2, 5, seed=4).bfloat16(),
        "experts.weight": codes,
        "experts.weight_scale_inv": normal(*BLOCKS.scales(SHAPE), seed=5).abs() / 300,
    }


def checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": Config.model_type}))
    header = header_of((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    write_shard(folder / "model.safetensors", header, tensors, tensors.__getitem__)
    return folder


def contents(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in Checkpoint.open(folder).tensors.items()}


def loaded(folder: Path) -> Model:
    return Model.from_pretrained(folder, device="cpu")


def test_each_parameter_has_its_dtype_and_gradient(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path / "a", stored()))
    kinds = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    assert kinds == {
        "plain": (torch.bfloat16, True),
        "decay": (torch.float32, False),
        "master": (torch.float32, True),
        "codes": (torch.float8_e4m3fn, False),
        "codes_scale_inv": (torch.float32, False),
    }
    model.check_arithmetic()
    assert_same_bytes(model.master.detach()[2:], stored()["up"].float())
    assert_same_bytes(model.codes.detach(), stored()["experts.weight"])


@pytest.mark.parametrize("name", ["plain", "decay", "master", "codes", "codes_scale_inv"])
def test_a_lost_dtype_is_refused(name: str, tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path / "a", stored()))
    setattr(model, name, nn.Parameter(model.get_parameter(name).detach().half(), requires_grad=False))
    with pytest.raises(ValueError, match=f"{name} is torch.float16, program 'aligned' needs"):
        model.check_arithmetic()


def test_saved_and_published_as_they_were(tmp_path: Path) -> None:
    """Also in shards of its own, where nothing of the source's layout is left."""
    folder = checkpoint(tmp_path / "a", stored())
    model = loaded(folder)
    model.save_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert_same_bytes(dict(model.published_tensors()), stored())
    model._source = None
    model.save_pretrained(tmp_path / "c", shard_bytes=100)
    assert_same_bytes(contents(tmp_path / "c"), stored())
    with torch.no_grad():
        model.codes.view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(LawBroken):
        assert_same_bytes(dict(model.published_tensors()), stored())


def test_a_trained_master_is_rounded_on_its_way(tmp_path: Path) -> None:
    """What is published and what an engine loads have the same content hash as the trainer's own."""
    trainer = loaded(checkpoint(tmp_path / "a", stored()))
    before = trainer.weights_version
    with torch.no_grad():
        trainer.master += 2.0**-12
    moved = dict(trainer.published_tensors())
    assert moved["gate"].dtype == torch.bfloat16
    assert_same_bytes(moved["gate"], trainer.master.detach()[:2].bfloat16())
    server = loaded(tmp_path / "a")
    server.load_weights(moved.items())
    assert server.weights_version == trainer.weights_version != before
    assert not torch.equal(server.master, trainer.master)
    trainer.save_pretrained(tmp_path / "b")
    assert_same_bytes(contents(tmp_path / "b"), moved)
    # a step below half a unit of BF16 everywhere moves no published byte, and the hash with it
    small = loaded(tmp_path / "a")
    with torch.no_grad():
        small.master *= 1 + 2.0**-20
    assert small.weights_version == before


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gate", lambda t: t.float(), "gate is torch.float32 .* must be torch.bfloat16"),
        ("experts.weight", lambda t: t.float(), "experts.weight is torch.float32 .* must be torch.float8_e4m3fn"),
        ("experts.weight_scale_inv", lambda t: t.bfloat16(), "must be torch.float32"),
        ("experts.weight", lambda t: (t.view(torch.uint8) | 0x7F).view(t.dtype), "experts.weight has 120 NaN or infinite values"),
    ],
)
def test_an_update_of_another_form_is_refused(name: str, change: Any, words: str, tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path / "a", stored()))
    before = model.weights_version
    with pytest.raises(ValueError, match=words):
        model.load_weights({**stored(), name: change(stored()[name])}.items())
    assert model.weights_version == before


def test_codes_need_their_dtype_and_scales(tmp_path: Path) -> None:
    wide = stored() | {"experts.weight": stored()["experts.weight"].bfloat16()}
    with pytest.raises(ValueError, match=r"experts.weight is BF16 where the program needs F8_E4M3"):
        Model.from_pretrained(checkpoint(tmp_path / "a", wide), device="cpu", dtype="bfloat16")
    bare = {name: tensor for name, tensor in stored().items() if "scale" not in name}
    with pytest.raises(ValueError, match="1 tensors missing: experts.weight_scale_inv"):
        loaded(checkpoint(tmp_path / "b", bare))
    coded = stored() | {"plain.weight": stored()["plain.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match="1 tensors are codes of one byte, and config.json says nothing of them: plain.weight"):
        loaded(checkpoint(tmp_path / "c", coded))


def test_random_weights_are_codes_of_what_they_would_be() -> None:
    model = Model.from_config(Config(), device="cpu", seed=3)
    values = BLOCKS.decode(model.codes, model.codes_scale_inv)
    assert_same_bytes(list(BLOCKS.encode(values)), [model.codes.detach(), model.codes_scale_inv.detach()])
    assert 0.7 < float(values.std()) * SHAPE[1] ** 0.5 < 1.3
    assert_same_bytes(dict(model.named_parameters()), dict(Model.from_config(Config(), device="cpu", seed=3).named_parameters()))
    assert model.weights_version != Model.from_config(Config(), device="cpu", seed=4).weights_version
