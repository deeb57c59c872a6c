"""A rank reads its slices of a published checkpoint and no other byte, and all ranks together have the whole model's bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.checkpoint import Checkpoint, fill_parameters
from zoo.common.codecs import BlockScaled
from zoo.common.layout import Layout
from zoo.common.quantisation import SCALES, in_codes
from zoo.common.ranks import load_rank
from zoo.common.registry import architectures, find
from zoo.common.shards import StoredTensor, header_of, write_shard
from zoo.common.weights import Cut, Entry, Piece, WeightTable, block_scaled, single
from zoo.testing import LawBroken, assert_same_bytes

ARCHITECTURES = sorted(architectures())
LAYOUTS = [Layout(tp=2), Layout(ep=4), Layout(tp=2, ep=2)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return {arch: make_tiny(arch, folder / arch) for arch in ARCHITECTURES}


def ranks_of(layout: Layout) -> list[dict[str, int]]:
    return [{"tp": tp, "ep": ep} for tp in range(layout.tp) for ep in range(layout.ep)]


def joined(whole: Piece, shares: list[Tensor]) -> Tensor:
    """A published tensor out of what the ranks of an axis have of it, section by section."""
    if whole.cut is None:
        for share in shares[1:]:
            assert_same_bytes(share, shares[0])
        return shares[0]
    parts = []
    start = 0
    for length, _ in whole.cut.sections or ((whole.shape[whole.cut.dim], whole.cut.unit),):
        each = length // len(shares)
        parts += [share.narrow(whole.cut.dim, start, each) for share in shares]
        start += each
    count = len(whole.cut.sections) or 1
    # section by section, in each of them rank by rank
    return torch.cat([parts[section * len(shares) + rank] for section in range(count) for rank in range(len(shares))], whole.cut.dim)


def cut_of(table: WeightTable, entry: Entry, piece: Piece) -> Cut | None:
    """How ranks share a tensor; scales as the codes that they are of, block by block."""
    owner = table.owners.get(entry.ours)
    if owner is None:
        return piece.cut
    codes = owner.layouts[0][entry.layouts[0].index(piece)]
    if codes.cut is None or owner.codec is None:
        return None
    block = owner.codec.block(len(codes.shape), codes.cut.dim)
    return replace(codes.cut, unit=1, sections=tuple((-(-length // block), 1) for length, _ in codes.cut.sections))


def check(table: WeightTable, whole: dict[str, Tensor], layout: Layout, held: list[tuple[dict[str, int], dict[str, Tensor]]]) -> None:
    """Every published tensor of the whole model out of the ranks' parameters, each rank's addressed by its own table."""
    experts = {entry.ours: 1 + max((piece.expert or 0 for piece in entry.layouts[0]), default=0) for entry, _ in table.pieces()}
    locals_ = [(ranks, table.local(layout, ranks).known, parameters) for ranks, parameters in held]
    filled = [dict.fromkeys(parameters, 0) for _, parameters in held]
    for entry, piece in table.pieces():
        shared = replace(piece, cut=cut_of(table, entry, piece))
        axis = "tp" if shared.cut is None else shared.cut.along
        shares: dict[int, Tensor] = {}
        for number, (ranks, known, parameters) in enumerate(locals_):
            if piece.expert is not None and piece.expert // (experts[entry.ours] // layout.ep) != ranks["ep"]:
                assert piece.published not in known, "another rank's expert"
                continue
            mine = known[piece.published][2]
            view = mine.of(parameters[entry.ours])
            filled[number][entry.ours] += view.numel()
            if ranks[axis] in shares:
                assert_same_bytes(view, shares[ranks[axis]])
            shares[ranks[axis]] = view
        assert_same_bytes(joined(shared, [shares[rank] for rank in sorted(shares)]), piece.of(whole[entry.ours]))
    for (_, parameters), counted in zip(held, filled, strict=True):
        assert counted == {name: tensor.numel() for name, tensor in parameters.items()}, "every element is filled once"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_ranks_have_the_whole_model_s_bytes(arch: str, layout: Layout, checkpoints: dict[str, Path]) -> None:
    model = zoo.load(checkpoints[arch], device="cpu")
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    held = [(ranks, load_rank(model.family, checkpoints[arch], layout, ranks)) for ranks in ranks_of(layout)]
    check(model.table_of(), whole, layout, held)
    alike = torch.equal(held[0][1]["model.embed.weight"], held[-1][1]["model.embed.weight"])
    assert alike == (layout.tp == 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_wrong_cut_is_caught(arch: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: runs that begin one element late, and stacked projections that are cut as if they were one."""
    model = zoo.load(checkpoints[arch], device="cpu")
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layout = Layout(tp=2)

    def held() -> list[tuple[dict[str, int], dict[str, Tensor]]]:
        return [(ranks, load_rank(model.family, checkpoints[arch], layout, ranks)) for ranks in ranks_of(layout)]

    good = Cut.runs

    def late(self: Cut, length: int, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
        found = good(self, length, rank, ranks)
        return found if rank else tuple((begin + 1, end + 1) for begin, end in found)

    def unsectioned(self: Cut, length: int, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
        return good(replace(self, sections=()), length, rank, ranks)

    planted = [late]
    if any(piece.cut is not None and piece.cut.sections for _, piece in model.table_of().pieces()):
        planted.append(unsectioned)
    for wrong in planted:
        monkeypatch.setattr(Cut, "runs", wrong)
        ranks = held()
        with pytest.raises(LawBroken):
            check(model.table_of(), whole, layout, ranks)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_rank_fills_a_model_of_the_local_sizes(arch: str, layout: Layout, checkpoints: dict[str, Path]) -> None:
    """Which has the shapes that the table gives: a router of all experts, and the rank's own experts."""
    model = zoo.load(checkpoints[arch], device="cpu")
    local_config = model.config.local(layout)
    assert local_config.whole is model.config and local_config.local(Layout()).whole is model.config
    with torch.device("meta"):
        local = model.family.model(local_config, model.program)
    mine = load_rank(model.family, checkpoints[arch], layout, ranks_of(layout)[-1])
    local.load_state_dict({name.removeprefix("model."): tensor for name, tensor in mine.items()}, assign=True, strict=True)
    assert not any(parameter.is_meta for parameter in local.parameters())


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes each read of a tensor takes from a file."""
    taken: list[int] = []
    opened = Path.open

    class Counting:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def seek(self, place: int) -> int:
            return self.file.seek(place)

        def read(self, size: int) -> bytes:
            return self.file.read(size)

        def readinto(self, room: Any) -> int:
            taken.append(self.file.readinto(room))
            return taken[-1]

    def spy(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = opened(self, *args, **kwargs)
        return Counting(file) if self.suffix == ".safetensors" else file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", spy)
        yield taken


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_other_rank_s_bytes_are_read(arch: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    family, _ = find(arch)
    layout = Layout(tp=2, ep=2)
    with counted(monkeypatch) as taken:
        mine = load_rank(family, checkpoints[arch], layout, {"tp": 1})
    # what is stored in BF16 and held in FP32 is read as stored
    table = family.table(family.config.from_hf(Checkpoint.open(checkpoints[arch]).config)).local(layout, {"tp": 1})
    stored = Checkpoint.open(checkpoints[arch]).tensors
    expected = sum(prod(piece.shape) * stored[piece.published].nbytes // prod(stored[piece.published].shape) for _, piece in table.pieces())
    assert sum(taken) == expected
    with counted(monkeypatch) as everything:
        load_rank(family, checkpoints[arch], Layout(), {})
    assert sum(everything) > 1.25 * sum(taken), "control: a whole model is seen to read more"
    assert len(mine) == len(table.parameters)


def test_a_tied_alias_is_cut_too(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path / "tied", tied=True)
    family, _ = find("qwen3")
    [embed] = [t for t in Checkpoint.open(folder).tensors.values() if t.name == "model.embed_tokens.weight"]
    tensors = {name: tensor.read() for name, tensor in Checkpoint.open(folder).tensors.items()}
    alias = embed.read()
    for name in folder.glob("*.safetensors*"):
        name.unlink()
    for spoilt, caught in ((None, None), (3, 0), (alias.shape[0] - 1, 1)):
        tensors["lm_head.weight"] = alias.clone()
        if spoilt is not None:
            tensors["lm_head.weight"].view(torch.int16)[spoilt, 0] ^= 1
        write(folder / "model.safetensors", tensors)
        for rank in range(2):
            if rank == caught:
                with pytest.raises(ValueError, match=r"lm_head.weight must equal the tied model.embed.weight, 1 bytes differ"):
                    load_rank(family, folder, Layout(tp=2), {"tp": rank})
            else:
                load_rank(family, folder, Layout(tp=2), {"tp": rank})


@pytest.mark.parametrize(
    ("layout", "ranks", "words"),
    [
        (Layout(tp=3), {}, "layout: vocab_size 512 do not divide among tp 3"),
        (Layout(tp=4), {}, "layout: num_key_value_heads 2 do not divide among tp 4"),
        (Layout(pp=2), {}, "layout: pp 2, but no family divides its layers"),
        (Layout(tp=2), {"tp": 2}, "layout: there is no rank 2 of tp 2"),
        (Layout(tp=2), {"tp": True}, "layout: there is no rank True of tp 2"),
        (Layout(tp=2), {"rows": 0}, "layout: there is no axis 'rows', there are tp, ep, cp, pp, dp"),
    ],
)
def test_what_no_rank_can_hold_is_refused(
    layout: Layout, ranks: dict[str, int], words: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a weight is read."""
    family, _ = find("qwen3")

    def refuse(*_: object) -> None:
        raise AssertionError("read before the check")

    monkeypatch.setattr(StoredTensor, "read", refuse)
    monkeypatch.setattr(StoredTensor, "read_runs", refuse)
    with pytest.raises(ValueError, match=words):
        load_rank(family, checkpoints["qwen3"], layout, ranks)


# --- runs of one stored tensor


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    header = header_of((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    write_shard(path, header, tensors, tensors.__getitem__)


def opened(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({}))
    write(folder / "model.safetensors", tensors)
    return Checkpoint.open(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("dim", "runs"),
    [(0, ((1, 3),)), (0, ((0, 1), (3, 4))), (1, ((2, 5),)), (1, ((0, 2), (4, 6))), (2, ((1, 2),)), (2, ((0, 1), (2, 3))), (1, ((0, 6),))],
)
def test_runs_are_read_as_they_would_be_cut(dim: int, runs: tuple[tuple[int, int], ...], dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored = opened(tmp_path / "a", {"before": torch.ones(7), "w": whole}).tensors["w"]
    wanted = torch.cat([whole.view(torch.uint8).unflatten(-1, (3, -1)).narrow(dim, begin, end - begin) for begin, end in runs], dim)
    assert_same_bytes(stored.read_runs(dim, runs).contiguous().view(torch.uint8), wanted.flatten(-2))


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    stored = opened(tmp_path / "a", {"w": torch.ones(4, 6)}).tensors["w"]
    path = tmp_path / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert stored.read_runs(1, ((0, 2),)).shape == (4, 2)
    with pytest.raises(ValueError, match="8 bytes of w are wanted, only 0 could be read; the file changed"):
        stored.read_runs(1, ((4, 6),))


# --- codes and their scales


BLOCKS = BlockScaled(4, 8)


def scaled_table(cut: Cut | None, shape: tuple[int, int] = (16, 36)) -> WeightTable:
    return WeightTable((*block_scaled("w", "w", shape, BLOCKS, cut=cut), single("plain", "plain", (3,))), carried=())


def scaled_tensors(shape: tuple[int, int] = (16, 36)) -> dict[str, Tensor]:
    codes, scales = BLOCKS.encode(torch.randn(*shape, generator=torch.Generator().manual_seed(1)))
    return {"w": codes, "w_scale_inv": scales * torch.arange(1, 1 + scales.numel()).view_as(scales), "plain": torch.ones(3)}


def rank_parameters(source: Checkpoint, table: WeightTable, layout: Layout, rank: int) -> dict[str, Tensor]:
    mine = table.local(layout, {"tp": rank})
    parameters = {name: torch.empty(entry.shape, dtype=entry.held(torch.float32)) for name, entry in mine.parameters.items()}
    fill_parameters(parameters, source, source.match(table).local(mine))
    return parameters


@pytest.mark.parametrize(
    ("cut", "shape", "ranks"),
    [
        (Cut(), (16, 36), 2),
        (Cut(unit=4), (16, 36), 4),
        (Cut(1), (6, 32), 2),
        (Cut(sections=((8, 4), (16, 8))), (24, 20), 2),
        (None, (6, 20), 2),
        (Cut(), (6, 20), 1),
    ],
)
def test_scales_are_cut_with_their_codes(cut: Cut | None, shape: tuple[int, int], ranks: int, tmp_path: Path) -> None:
    """A rank decodes to its part of the whole's values. Where one rank has all of a cut tensor its last blocks may be smaller."""
    tensors = scaled_tensors(shape)
    source = opened(tmp_path / "a", tensors)
    values = BLOCKS.decode(tensors["w"], tensors["w_scale_inv"])
    table = scaled_table(cut, shape)
    layout = Layout(tp=ranks)
    whole = Piece("w", shape, cut=cut)
    held = [rank_parameters(source, table, layout, rank) for rank in range(ranks)]
    shares = [BLOCKS.decode(mine["w"], mine["w_scale_inv"]) for mine in held]
    assert_same_bytes(shares, [whole.local(layout, {"tp": rank}, 0).take(values) for rank in range(ranks)])
    if cut is not None:
        assert_same_bytes(joined(whole, shares), values)
        assert all(mine["w_scale_inv"].numel() * ranks == tensors["w_scale_inv"].numel() for mine in held)
    if ranks > 1 and cut is not None:  # control: another rank's scales
        wrong = BLOCKS.decode(held[0]["w"], held[1]["w_scale_inv"])
        with pytest.raises(LawBroken):
            assert_same_bytes(wrong, shares[0])


def test_scales_of_stacked_experts_go_with_them(tmp_path: Path) -> None:
    """Experts that are published one by one, and all in one tensor."""
    codes, scales = BLOCKS.encode(torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(2)))
    names = [(f"{e}.w", f"{e}.w_scale_inv") for e in range(4)]
    apart = WeightTable(
        (
            Entry("w", (tuple(Piece(n, (8, 16), expert=e) for e, (n, _) in enumerate(names)),), codec=BLOCKS, beside=("s",)),
            Entry("s", (tuple(Piece(n, (2, 2), expert=e) for e, (_, n) in enumerate(names)),), dtype=torch.float32),
        ),
        carried=(),
    )
    one = WeightTable(
        (
            Entry("w", ((Piece("w", (4, 8, 16), cut=Cut(along="ep")),),), codec=BLOCKS, beside=("s",)),
            Entry("s", ((Piece("s", (4, 2, 2)),),), dtype=torch.float32),
        ),
        carried=(),
    )
    parts = {name: tensor[e] for e, pair in enumerate(names) for name, tensor in zip(pair, (codes, scales), strict=True)}
    for table, tensors in ((apart, parts), (one, {"w": codes, "s": scales})):
        source = opened(tmp_path / "a", tensors)
        for rank in range(2):
            mine = table.local(Layout(ep=2), {"ep": rank})
            parameters = {name: torch.empty(entry.shape, dtype=entry.held(torch.float32)) for name, entry in mine.parameters.items()}
            fill_parameters(parameters, source, source.match(table).local(mine))
            assert_same_bytes(parameters["w"], codes[2 * rank : 2 * rank + 2])
            assert_same_bytes(parameters["s"], scales[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(
    ("cut", "shape", "ranks", "words"),
    [
        (Cut(), (24, 36), 4, "w: 0 to 6 of 24 is no whole number of blocks of 4"),
        (Cut(1), (16, 40), 2, "w: 0 to 20 of 40 is no whole number of blocks of 8"),
        (Cut(sections=((4, 1), (16, 1))), (20, 8), 2, "w: 0 to 2 of 20 is no whole number of blocks of 4"),
    ],
)
def test_a_block_that_two_ranks_would_share_is_refused(cut: Cut, shape: tuple[int, int], ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scaled_table(cut, shape).local(Layout(tp=ranks), {})


def test_a_place_inside_a_block_is_refused() -> None:
    """Behind a projection whose last block is smaller."""
    pieces = (Piece("a", (6, 8)), Piece("b", (4, 8), start=6))
    scales = (Piece("a_scale", (2, 1)), Piece("b_scale", (1, 1), start=2))
    table = WeightTable((Entry("w", (pieces,), codec=BLOCKS, beside=("s",)), Entry("s", (scales,), dtype=torch.float32)), carried=())
    with pytest.raises(ValueError, match="b would fill row 6 and on, which is inside a block of 4"):
        table.local(Layout(), {})


# --- checkpoints in FP8 codes


def test_ranks_read_a_checkpoint_in_codes(tmp_path: Path) -> None:
    """As it is stored, scales with their codes, or decoded where it is read."""
    family, named = find("qwen3")
    config = in_codes(replace(named.sizes["tiny"], layers=1, kv_heads=4, intermediate=512))
    family.rl.from_config(config, seed=2, device="cpu", program="fp8").save_pretrained(tmp_path / "codes")
    layout = Layout(tp=2)
    given: dict[str, Any]
    for given in ({"program": "fp8"}, {"dtype": torch.bfloat16}):
        model = zoo.load(tmp_path / "codes", device="cpu", **given)
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        held = [(ranks, load_rank(family, tmp_path / "codes", layout, ranks, **given)) for ranks in ranks_of(layout)]
        check(model.table_of(), whole, layout, held)
        assert (torch.float8_e4m3fn in {tensor.dtype for tensor in held[0][1].values()}) == ("program" in given)
        if "program" in given:  # control: the scales of one rank's blocks under another's codes
            mine = held[0][1]
            theirs = held[1][1]
            scales = [name for name, tensor in mine.items() if name.endswith(SCALES) and not torch.equal(tensor, theirs[name])]
            mine[scales[0]].copy_(theirs[scales[0]])
            with pytest.raises(LawBroken):
                check(model.table_of(), whole, layout, held)
    with pytest.raises(ValueError, match="has matrices in FP8 codes: program='fp8' computes with them"):
        load_rank(family, tmp_path / "codes", layout, {})


def test_codes_whose_blocks_two_ranks_would_share_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path / "tiny", form="fp8")
    with pytest.raises(ValueError, match=r"k_proj.weight: 0 to 64 of 128 is no whole number of blocks of 128"):
        load_rank(find("qwen3")[0], folder, Layout(tp=2), {}, program="fp8")
