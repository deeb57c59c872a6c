"""Loading, saving, updating and describing checkpoints: every fault named in one sentence, every byte kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import zoo
from weights_tools.cli import app
from weights_tools.compare import differences
from weights_tools.convert import convert
from weights_tools.make_tiny import make_tiny
from zoo.common import checkpoint as files
from zoo.common.checkpoint import Checkpoint
from zoo.common.family import Family
from zoo.common.fingerprint import Fingerprint
from zoo.common.hashing import checksums, key64, normal_
from zoo.common.pretrained import Pretrained, draw_piece
from zoo.common.program import Program
from zoo.common.registry import architectures, model_class
from zoo.common.shards import INDEX, SINGLE, header_of, read_shard, write_shard, write_shards
from zoo.common.weights import Entry, Piece, Places, WeightTable
from zoo.qwen3 import Qwen3ForRL, Qwen3ForServing
from zoo.verify.subject import config_of

MASK = (1 << 64) - 1


@pytest.fixture(scope="session", params=["qwen3", "qwen3_moe", "tied"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("published") / request.param
    if request.param == "tied":
        return make_tiny("qwen3", out, tied=True)
    return make_tiny(request.param, out)


@pytest.fixture
def copy(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh dense checkpoint to spoil."""
    return make_tiny("qwen3", tmp_path / "spoiled", layers=2, hidden=64)


def load(path: Path, **kwargs: Any) -> Qwen3ForRL:
    model = zoo.load(path, device="cpu", **kwargs)
    assert isinstance(model, Qwen3ForRL)
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def rewrite(folder: Path, change: Any) -> None:
    """Applies `change(name, tensor) -> tensor or None` to every tensor and writes the shards and the index anew."""
    weight_map: dict[str, str] = {}
    for shard in Checkpoint.open(folder).shards:
        kept = {t.name: out for t in shard.tensors if (out := change(t.name, t.read())) is not None}
        header = header_of((name, t.dtype, tuple(t.shape)) for name, t in kept.items())
        write_shard(folder / shard.name, header, list(kept), kept.__getitem__)
        weight_map |= dict.fromkeys(kept, shard.name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


# --- round trips


def test_round_trip_is_every_file_byte_for_byte(published: Path, tmp_path: Path) -> None:
    load(published).save_pretrained(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(published)
    assert len(list(published.glob("*.safetensors"))) >= 2
    assert not [p for p in tmp_path.iterdir() if p.name != "out"]  # no working folder is left


def test_round_trip_control_one_bit_is_seen(published: Path, tmp_path: Path) -> None:
    model = load(published)
    with torch.no_grad():
        model.model.layers[1].attention.qkv.weight.view(torch.int16)[258, 5] ^= 1
    model.save_pretrained(tmp_path / "out")
    (line,) = differences(str(published), str(tmp_path / "out"))
    assert (line.name, line.elements, line.max_ulp) == ("model.layers.1.self_attn.k_proj.weight", 1, 1)
    result = CliRunner().invoke(app, ["compare", str(published), str(tmp_path / "out")])
    assert result.exit_code == 1 and "k_proj" in result.output
    assert CliRunner().invoke(app, ["compare", str(published), str(published)]).exit_code == 0


def test_both_roles_hold_the_published_values(published: Path) -> None:
    stored = Checkpoint.open(published).tensors
    for model in (load(published), zoo.load(published, role="serving", device="cpu")):
        qkv = model.model.layers[0].attention.qkv.weight
        prefix = "model.layers.0.self_attn"
        assert torch.equal(qkv, torch.cat([stored[f"{prefix}.{n}_proj.weight"].read() for n in "qkv"]))
        assert torch.equal(
            model.model.head_weight_VD, stored["model.embed_tokens.weight" if model.config.tied else "lm_head.weight"].read()
        )
        if model.config.experts:
            got = model.model.layers[1].mlp.experts.gate_up[5]
            prefix = "model.layers.1.mlp.experts.5"
            assert torch.equal(got, torch.cat([stored[f"{prefix}.{n}_proj.weight"].read() for n in ("gate", "up")]))
    assert isinstance(model, Qwen3ForServing)


def test_new_models_are_sharded_on_save(tmp_path: Path) -> None:
    from zoo.qwen3.config import SIZES

    model = Qwen3ForRL.from_config(SIZES["tiny"], seed=3, device="cpu")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", shard_bytes=200_000)
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    shards = list((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 4 and all(p.stat().st_size < 210_000 for p in shards)
    for name in ("one", "many"):
        assert load(tmp_path / name).weights_version == model.weights_version
        assert load(tmp_path / name).config == model.config


def test_random_weights_do_not_depend_on_the_class(published: Path) -> None:
    loaded = load(published)
    made = Qwen3ForServing.from_config(loaded.config, seed=0, device="cpu")
    assert made.weights_version == loaded.weights_version
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), loaded.parameters(), strict=True))
    assert Qwen3ForRL.from_config(loaded.config, seed=1, device="cpu").weights_version != loaded.weights_version


def test_random_logits_are_realistic(published: Path) -> None:
    model = load(published)
    ids = torch.randint(0, model.config.vocabulary, (200,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids, torch.tensor([0, 200])).logits.double(), -1)
    entropy = float(-(log_p.exp() * log_p).sum(-1).mean())
    assert 0.3 * torch.tensor(512.0).log() < entropy < 0.9 * torch.tensor(512.0).log()


@pytest.mark.parametrize("kind", ["dense", "mixture", "tied"])
def test_transformers_own_checkpoints_load_and_come_back(kind: str, tmp_path: Path) -> None:
    import transformers

    common = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    torch.manual_seed(0)
    if kind == "mixture":
        config = transformers.Qwen3MoeConfig(**common, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
        theirs = transformers.Qwen3MoeForCausalLM(config)
    else:
        theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, tie_word_embeddings=kind == "tied"))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    model = load(tmp_path / "theirs")
    assert torch.equal(model.model.layers[1].attention.out.weight, theirs.model.layers[1].self_attn.o_proj.weight)
    if kind == "mixture":
        assert torch.equal(model.model.layers[1].mlp.experts.gate_up, theirs.model.layers[1].mlp.experts.gate_up_proj)
    model.save_pretrained(tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    again = type(theirs).from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), theirs.state_dict().values(), strict=True))


def test_fp32_checkpoints_need_an_explicit_rounding(copy: Path, tmp_path: Path) -> None:
    wide = {}

    def widen(name: str, tensor: Tensor) -> Tensor:
        wide[name] = tensor.float() + 1e-4 * torch.arange(tensor.numel()).view(tensor.shape)
        return wide[name]

    rewrite(copy, widen)
    with pytest.raises(ValueError, match="float32.*dtype=torch.bfloat16"):
        load(copy)
    model = load(copy, dtype=torch.bfloat16)
    assert torch.equal(model.model.norm.weight, wide["model.norm.weight"].bfloat16())
    model.save_pretrained(tmp_path / "out")
    assert {t.dtype for t in Checkpoint.open(tmp_path / "out").tensors.values()} == {"BF16"}
    assert load(tmp_path / "out").weights_version == model.weights_version
    parity = load(copy, program="transformers", dtype=torch.float32)
    assert torch.equal(parity.model.norm.weight, wide["model.norm.weight"])


def test_float64_is_refused_without_a_hint_that_does_not_help(copy: Path) -> None:
    rewrite(copy, lambda name, t: t.double() if name == "model.norm.weight" else t)
    for dtype in (None, torch.bfloat16):
        with pytest.raises(ValueError, match="1 tensors of a wrong dtype: model.norm.weight is F64 where the program needs BF16$"):
            load(copy, dtype=dtype)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_a_new_model_names_its_dtype(arch: str, tmp_path: Path) -> None:
    config = config_of(arch, "tiny", None)
    for program, dtype in (("aligned", torch.bfloat16), ("transformers", torch.float32)):
        made = model_class(config.to_hf()).from_config(config, program=program, device="cpu")
        made.save_pretrained(tmp_path / program)
        assert json.loads((tmp_path / program / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
        found = model_class(config.to_hf()).from_pretrained(tmp_path / program, program=program, dtype=dtype, device="cpu")
        assert found.config == config and found.weights_version == made.weights_version


def test_one_tensor_of_another_dtype_is_named(copy: Path) -> None:
    rewrite(copy, lambda name, t: t.float() if name.endswith("0.mlp.up_proj.weight") else t)
    with pytest.raises(ValueError, match=r"1 tensors of a wrong dtype: model.layers.0.mlp.up_proj.weight is F32 .* BF16"):
        load(copy)


# --- faults


def spoil_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def truncate(folder: Path) -> None:
    path = folder / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def plant(value: float) -> Any:
    def change(name: str, tensor: Tensor) -> Tensor:
        if name == "model.layers.1.mlp.down_proj.weight":
            tensor[3, 7] = value
        return tensor

    return lambda folder: rewrite(folder, change)


def rename_in_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "model-00009-of-00004.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def move_in_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00004.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def drop(*endings: str) -> Any:
    return lambda folder: rewrite(folder, lambda name, t: None if name.endswith(endings) else t)


FAULTS: dict[str, tuple[Any, str]] = {
    "missing shard": (lambda f: (f / "model-00002-of-00004.safetensors").unlink(), "names 1 absent files: model-00002-of-00004"),
    "absent file in index": (rename_in_index, "names 1 absent files: model-00009-of-00004"),
    "index in the wrong": (move_in_index, "disagree on 1 tensors: model.embed_tokens.weight"),
    "file outside": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../b.safetensors"}}'), "outside its folder"),
    "no index": (lambda f: (f / INDEX).unlink(), "4 .safetensors files and no model.safetensors.index.json"),
    "broken index": (lambda f: (f / INDEX).write_text("{"), "not valid JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("[1]"), "holds a list, not an object"),
    "unknown field": (lambda f: spoil_config(f, attention_sinks=4), "unknown fields attention_sinks=4"),
    "unsupported field": (lambda f: spoil_config(f, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "unknown model": (lambda f: spoil_config(f, model_type="llama"), "model_type 'llama' is not supported"),
    "wrong shape": (
        lambda f: spoil_config(f, intermediate_size=128),
        r"gate_proj.weight \[256, 64\] where the config needs \[128, 64\]",
    ),
    "fewer layers": (lambda f: spoil_config(f, num_hidden_layers=1), "11 tensors unknown: model.layers.1"),
    "more layers": (lambda f: spoil_config(f, num_hidden_layers=3), "11 tensors missing: model.layers.2.*and 7 more"),
    "missing tensor": (drop("1.mlp.up_proj.weight"), "1 tensors missing: model.layers.1.mlp.up_proj.weight"),
    "missing several": (drop("k_proj.weight"), "2 tensors missing: model.layers.0.*k_proj.weight, model.layers.1.*k_proj.weight"),
    "truncated": (truncate, r"model-00002-of-00004.safetensors is truncated: its header describes \d+ bytes, the file has \d+"),
    "cut in header": (
        lambda f: (f / "model-00001-of-00004.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}"),
        "truncated or no safetensors",
    ),
    "empty": (
        lambda f: (f / "model-00001-of-00004.safetensors").write_bytes(b""),
        "is truncated or no safetensors file: it has 0 bytes, the length of its header alone takes 8",
    ),
    "no safetensors": (
        lambda f: (f / "model-00001-of-00004.safetensors").write_bytes(b"<html>not found</html>"),
        "no safetensors file",
    ),
    "NaN": (plant(float("nan")), r"model.layers.1.mlp.down_proj.weight has 1 NaN or infinite values, the first at \[3, 7\]"),
    "infinity": (plant(float("-inf")), "model.layers.1.mlp.down_proj.weight has 1 NaN or infinite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_checkpoint_is_refused_in_one_sentence(fault: str, copy: Path) -> None:
    spoil, expected = FAULTS[fault]
    load(copy)  # the control: unspoiled it loads
    spoil(copy)
    with pytest.raises(ValueError, match=expected) as caught:
        load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["missing tensor", "wrong shape", "truncated", "unknown field"])
def test_header_faults_are_found_before_anything_is_allocated_or_read(fault: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault][0](copy)

    def refuse(*_: object) -> None:
        raise AssertionError("touched before the check")

    monkeypatch.setattr("zoo.common.shards.StoredTensor.read", refuse)
    monkeypatch.setattr(Pretrained, "_allocate", refuse)
    with pytest.raises(ValueError):
        load(copy)


def test_other_refusals(copy: Path, tmp_path: Path) -> None:
    for kwargs, expected in (
        ({"layout": "tp2"}, "layout='tp2' is not supported yet"),
        ({"lora": 8}, "lora=8 is not supported yet"),
        ({"program": "fast"}, "unknown program 'fast'"),
        ({"role": "judge"}, "role 'judge'"),
        ({"revision": "v2"}, "has no revisions"),
    ):
        with pytest.raises(ValueError, match=expected):
            zoo.load(copy, device="cpu", **kwargs)
    with pytest.raises(ValueError, match="not a folder and not a hub id"):
        zoo.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="neither a local folder nor a hub id"):
        zoo.load("no spaces allowed")
    for path in (123, None, b"x", "/" + "n" * 300):
        for opener in (Qwen3ForRL.from_pretrained, zoo.load):
            with pytest.raises(ValueError, match="is not a folder and not a hub id"):
                opener(path)
    for device, expected in (
        ("tpu", "cpu, cuda or cuda:N"),
        (1.5, "cpu, cuda or cuda:N"),
        ("cuda:99", "sees . GPUs"),
        ("meta", "not on meta"),
    ):
        with pytest.raises(ValueError, match=expected):
            Qwen3ForRL.from_pretrained(copy, device=device)


def test_saving_never_overwrites(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(copy)
    before = contents(copy)
    with pytest.raises(ValueError, match="not an empty folder"):
        model.save_pretrained(copy)
    assert contents(copy) == before
    (tmp_path / "empty").mkdir()
    model.save_pretrained(tmp_path / "empty")

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "write_shard", full_disk)
    with pytest.raises(ValueError, match="failed can't be written: no space left on device"):
        model.save_pretrained(tmp_path / "failed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", copy.name]


def test_a_place_that_cannot_be_written_is_one_sentence(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(copy)
    work = tmp_path / "work"
    for name in ("empty", "here"):
        (work / name).mkdir(parents=True)
    (work / "file").write_text("mine")
    (work / "link").symlink_to(work / "empty")
    (work / "dangling").symlink_to(work / "absent")
    before = sorted(work.rglob("*"))
    monkeypatch.chdir(work / "here")
    for place, sentence in (
        (work / "link", "is a symbolic link"),
        (work / "dangling", "exists and is not an empty folder"),
        (work / "dangling" / "out", "dangling is no folder"),
        (work / "file" / "out", "file is no folder"),
        (work / "file" / "deep" / "out", "file is no folder"),
        (work / ("n" * 300), "File name too long"),
        (work / "absent" / ("n" * 300), "File name too long"),
        (work / "absent" / ("n" * 300) / "out", "File name too long"),
        (Path("/proc/absent/out"), "can't be written"),
        (Path("."), "is the working directory"),
    ):
        with pytest.raises(ValueError, match=sentence) as caught:
            model.save_pretrained(place)
        assert "\n" not in str(caught.value) and str(place if place != Path(".") else work) in str(caught.value)
        for command in (["make-tiny", "qwen3", str(place)], ["convert", str(copy), str(place)]):
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 2 and sentence in result.output, result
        assert sorted(work.rglob("*")) == before
    with pytest.raises(ValueError, match="5 can't be written"):
        model.save_pretrained(5)  # type: ignore[arg-type]
    make_tiny("qwen3", work / "n" / ("n" * 250), layers=1)  # as long as a file system takes


def test_a_save_outlives_its_source(copy: Path, tmp_path: Path) -> None:
    model = load(copy)
    before = contents(copy)
    shutil.rmtree(copy)
    model.save_pretrained(tmp_path / "out")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("equal", [True, False])
def test_alias_of_a_tied_model(equal: bool, tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path / "tied", tied=True)
    assert "lm_head.weight" not in Checkpoint.open(folder).tensors
    embed = Checkpoint.open(folder).tensors["model.embed_tokens.weight"].read()
    if not equal:
        embed[17, 3] += 1
    index = json.loads((folder / INDEX).read_text())
    write_shard(
        folder / "z.safetensors",
        header_of([("lm_head.weight", embed.dtype, tuple(embed.shape))]),
        ["lm_head.weight"],
        lambda _: embed,
    )
    index["weight_map"]["lm_head.weight"] = "z.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    if equal:
        load(folder).save_pretrained(tmp_path / "out")
        assert contents(tmp_path / "out") == contents(folder)
    else:
        with pytest.raises(ValueError, match="lm_head.weight must equal the tied model.embed.weight, [12] bytes differ"):
            load(folder)


# --- a toy with everything that Qwen3 lacks: carried tensors, FP32 entries, two layouts


class ToyConfig:
    model_type = "toy"
    vocabulary = 1
    quantised = None
    eos: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> ToyConfig:
        return cls()

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": "toy"}


def toy_table(_: ToyConfig) -> WeightTable:
    each = tuple(Piece(f"experts.{e}.w", (3, 5), expert=e) for e in range(4))
    return WeightTable(
        (Entry("stack", (each, (Piece("experts.w", (4, 3, 5)),))), Entry("decay", ((Piece("A_log", (7,)),),), dtype=torch.float32)),
        carried=(r"visual\..*",),
    )


def test_known_names_are_made_once_and_places_are_asked_anew() -> None:
    table = toy_table(ToyConfig())
    known = table.known
    assert set(known) == {*(f"experts.{e}.w" for e in range(4)), "experts.w", "A_log"}
    first = Places(table)
    second = Places(table)
    assert first.find("experts.0.w") and second.find("experts.w") and first.find("A_log") and second.find("A_log")
    with pytest.raises(ValueError, match="A_log is given twice"):
        first.find("A_log")
    with pytest.raises(ValueError, match="experts.0.w and experts.w are two layouts"):
        first.find("experts.w")
    assert table.known is known and toy_table(ToyConfig()) == table and hash(toy_table(ToyConfig())) == hash(table)


class Toy(Pretrained):
    def __init__(self, config: ToyConfig, program: Program) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.program = program
        self.stack = nn.Parameter(torch.empty(4, 3, 5, dtype=torch.bfloat16))
        self.decay = nn.Parameter(torch.empty(7, dtype=torch.float32))


Family(
    config=ToyConfig,
    model=nn.Module,  # type: ignore[arg-type]
    table=toy_table,
    used_ops=lambda config: (),
    rl=Toy,  # type: ignore[arg-type]
    serving=Toy,  # type: ignore[arg-type]
    architectures=(),
    page_size=lambda config: 1,
)


def toy_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy"}')
    header = header_of((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    write_shard(folder / "model.safetensors", header, tensors, tensors.__getitem__)
    return folder


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("decay", [torch.float32, torch.bfloat16])
def test_layouts_fp32_entries_and_carried_tensors_come_back(stacked: bool, decay: torch.dtype, tmp_path: Path) -> None:
    stack = torch.randn(4, 3, 5).bfloat16()
    experts = {"experts.w": stack} if stacked else {f"experts.{e}.w": stack[e] for e in range(4)}
    visual = {"visual.a": torch.randint(0, 255, (9,), dtype=torch.uint8), "visual.b": torch.tensor(float("nan"))}
    folder = toy_checkpoint(tmp_path / "toy", {**experts, "A_log": torch.randn(7).to(decay), **visual})
    model = Toy.from_pretrained(folder, device="cpu")
    assert torch.equal(model.stack, stack) and model.decay.dtype == torch.float32
    model.save_pretrained(tmp_path / "same")
    assert contents(tmp_path / "same") == contents(folder)
    with torch.no_grad():
        model.decay.add_(1e-6)  # no longer a BF16 number: it must not be rounded away
    model.save_pretrained(tmp_path / "trained")
    assert Toy.from_pretrained(tmp_path / "trained", device="cpu").weights_version == model.weights_version
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="is missing"):  # carried tensors live in the source
        model.save_pretrained(tmp_path / "late")


def test_unknown_beside_carried(tmp_path: Path) -> None:
    folder = toy_checkpoint(
        tmp_path / "toy", {"experts.w": torch.zeros(4, 3, 5).bfloat16(), "A_log": torch.zeros(7), "vision.a": torch.zeros(1)}
    )
    with pytest.raises(ValueError, match="1 tensors unknown: vision.a"):
        Toy.from_pretrained(folder, device="cpu")


# --- updates, versions, fingerprints


def published_values(model: Pretrained) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {piece.published: piece.of(parameters[entry.ours]).detach().clone() for entry, piece in model.table_of().pieces()}


def test_load_weights_writes_in_place_and_in_parts(published: Path) -> None:
    model = load(published)
    other = Qwen3ForRL.from_config(load(published).config, seed=9, device="cpu")
    pointers = [p.data_ptr() for p in model.parameters()]
    first = model.weights_version
    values = list(published_values(other).items())
    model.load_weights(iter(values[:10]), version="half")
    assert model.weights_version not in (first, other.weights_version)
    model.load_weights(values[10:], version="step 1")
    assert model.weights_version == other.weights_version
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert model.fingerprint().realisation["weights_label"] == "step 1"
    model.fingerprint().check(other.fingerprint())


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (("model.layers.9.mlp.gate.weight", torch.zeros(1)), "no tensor of this qwen3"),
        (("model.norm.weight", torch.zeros(3).bfloat16()), r"\[3\], it must be torch.bfloat16 \[128\]"),
        (("model.norm.weight", torch.zeros(128)), "torch.float32"),
        (("model.norm.weight", torch.full((128,), float("nan")).bfloat16()), "128 NaN"),
        (("model.layers.0.input_layernorm.weight", torch.ones(128).bfloat16()), "given twice"),
        (("model.norm.weight", torch.zeros(128).bfloat16().to_sparse()), "model.norm.weight must be a dense tensor .* torch.sparse_coo"),
        (("model.norm.weight", torch.zeros(128, device="meta").bfloat16()), "model.norm.weight must be a dense tensor .* meta"),
        (("model.norm.weight", None), "model.norm.weight must be a dense tensor .* NoneType"),
    ],
)
def test_a_refused_update_changes_nothing(bad: tuple[str, Tensor], expected: str, published: Path) -> None:
    model = load(published)
    before = {n: p.clone() for n, p in model.named_parameters()}
    version = model.weights_version
    good = ("model.layers.0.input_layernorm.weight", torch.zeros(128).bfloat16())
    with pytest.raises(ValueError, match=expected):
        model.load_weights([good, bad], version="never")
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert model.weights_version == version and "weights_label" not in model.fingerprint().realisation
    model.load_weights([good])  # the control: without the bad one it writes
    assert model.weights_version != version


def test_tied_update(tmp_path: Path) -> None:
    model = load(make_tiny("qwen3", tmp_path / "tied", tied=True))
    embed = torch.ones(512, 128).bfloat16()
    with pytest.raises(ValueError, match="lm_head.weight must equal"):
        model.load_weights([("lm_head.weight", embed)])
    model.load_weights([("lm_head.weight", embed), ("model.embed_tokens.weight", embed)])
    model.load_weights([("lm_head.weight", embed)])
    assert torch.equal(model.model.head_weight_VD, embed)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.AdamW(p, 0.1, fused=True)])
def test_version_follows_the_optimizer(make: Any, copy: Path) -> None:
    model = load(copy)
    optimizer = make(model.parameters())
    seen = {model.weights_version}
    for step in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        seen.add(model.weights_version)
        assert len(seen) == step + 2


def test_version_of_frozen_weights_is_kept_until_they_are_written(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(copy).requires_grad_(False)
    version = model.weights_version
    with monkeypatch.context() as patch:
        patch.setattr("zoo.common.pretrained.weights_hash", lambda *_: "recomputed")
        assert model.weights_version == version
    weight = model.model.norm.weight
    weight.add_(1)
    second = model.weights_version
    assert second != version
    weight.data.view(torch.int16)[0] ^= 1  # invisible to torch's counters
    assert model.weights_version == second
    model.weights_changed()
    assert model.weights_version not in (version, second)


def test_fingerprint(copy: Path) -> None:
    model = load(copy)
    mine = model.fingerprint()
    assert Fingerprint.from_dict(json.loads(json.dumps(mine.to_dict()))) == mine
    mine.check(zoo.load(copy, role="serving", device="cpu").fingerprint())
    assert (
        mine.realisation["qualification"] == "the reference kernels, which are all that a CPU has"
        and mine.toolchain["torch"] == torch.__version__
    )
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(ValueError, match=rf"differ in 1 line\(s\): weights: {mine.weights} against {model.weights_version} \(this one"):
        mine.check(model.fingerprint())
    with pytest.raises(ValueError, match="float32 on cpu, not torch.bfloat16 on cpu: give dtype=torch.float32"):
        load(copy, program="transformers")
    other = load(copy, program="transformers", dtype=torch.float32).fingerprint()
    with pytest.raises(ValueError, match="dtype: bfloat16 against float32"):
        mine.check(other)
    with pytest.raises(ValueError, match="fields"):
        Fingerprint.from_dict({"program": {}})


# --- hashing


def splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_random_numbers_equal_a_plain_integer_program() -> None:
    key = key64(5, "some.weight")
    std = 0.37
    count = 1000
    scale = torch.tensor(std / (4 * (2**32 - 1) / 3) ** 0.5, dtype=torch.float32)
    words = [splitmix((key + (i + 1) * 0x9E3779B97F4A7C15) & MASK) for i in range(count)]
    sums = torch.tensor([2 * sum((w >> s) & 0xFFFF for s in (0, 16, 32, 48)) - 4 * 0xFFFF for w in words], dtype=torch.float32)
    expected = (sums * scale).bfloat16()
    for chunk in (None, 1, 7, 64, 999, 5000):
        assert torch.equal(normal_(torch.empty(10, 100, dtype=torch.bfloat16), key, std, chunk=chunk).flatten(), expected)
    assert not torch.equal(normal_(torch.empty(count, dtype=torch.bfloat16), key + 1, std), expected)


def test_random_numbers_look_normal() -> None:
    x = normal_(torch.empty(1 << 18), key64("x"), 2.0, 1.0).double()
    assert abs(x.mean() - 1) < 0.02 and abs(x.std() - 2) < 0.02
    centred = (x - 1) / 2
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.01
    assert abs((centred**3).mean()) < 0.03 and 2.6 < (centred**4).mean() < 2.8


def test_random_tensors_have_their_recipe(published: Path) -> None:
    table = load(published).table_of()
    for entry, piece in table.pieces():
        value = draw_piece(piece, torch.empty(piece.shape), 0, table, entry)
        if "norm" in piece.published:
            assert 0.05 < value.std() < 0.15 and abs(value.mean() - 1) < 0.08
        elif "embed" not in piece.published and "lm_head" not in piece.published:
            assert abs(float(value.std()) * piece.shape[-1] ** 0.5 - 1) < 0.05


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 37, 13), (5, 8, 16), (4, 100, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_checksums_equal_a_plain_integer_program(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 50).to(dtype)
    expected = []
    for block in x:
        raw = block.contiguous().view(torch.uint8).numpy().tobytes()
        words = [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]
        expected.append(sum(splitmix((w + (i + 1) * 0x9E3779B97F4A7C15) & MASK) for i, w in enumerate(words)) & MASK)
    for chunk in (None, 1, 3, 50):
        assert [c & MASK for c in checksums(x, chunk=chunk).tolist()] == expected
    offset = torch.cat([torch.zeros(1).to(dtype), x.flatten()])[1:].view(shape)  # not on an 8-byte address
    assert [c & MASK for c in checksums(offset).tolist()] == expected
    swapped = x.flatten().roll(1).view(shape)
    if not torch.equal(swapped, x):
        assert [c & MASK for c in checksums(swapped).tolist()] != expected


# --- tools


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--hidden", "100000000"], "--hidden 100000000: a tiny checkpoint has at most 8192"),
        (["--layers", "10000000"], "--layers 10000000: a tiny checkpoint has at most 256"),
    ],
)
def test_make_tiny_of_an_absurd_size_is_refused_at_once(given: list[str], sentence: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    result = CliRunner().invoke(app, ["make-tiny", "qwen3_moe", str(tmp_path / "deep" / "tiny"), *given])
    assert result.exit_code == 2 and result.output == f"error: {sentence}\n" and time.monotonic() - begin < 2
    assert not list(tmp_path.iterdir())


def test_make_tiny_asks_for_its_bytes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("qwen3", tmp_path / "there")
    needed = sum(t.nbytes for path in (tmp_path / "there").glob("*.safetensors") for t in read_shard(path).tensors)
    for free, code in ((needed - 1, 2), (needed, 0)):
        monkeypatch.setattr("zoo.common.files.shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free, total=1 << 40))
        result = CliRunner().invoke(app, ["make-tiny", "qwen3", str(tmp_path / "deep" / "tiny")])
        assert result.exit_code == code
        assert not code or f"tiny needs {needed:,} bytes, {needed - 1:,} are free there" in result.output
        assert (tmp_path / "deep").exists() == (not code)


@pytest.mark.parametrize("arch", architectures())
def test_make_tiny_is_a_checkpoint_for_transformers(arch: str, tmp_path: Path) -> None:
    import transformers

    result = CliRunner().invoke(app, ["make-tiny", arch, str(tmp_path / "tiny"), "--layers", "2", "--hidden", "64", "--seed", "4"])
    assert result.exit_code == 0, result.output
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", output_loading_info=True)
    # transformers ignores the layer that predicts a second token by its number in the published model
    carried = {name for name in report["unexpected_keys"] if name.startswith("model.layers.2.")}
    assert bool(carried) == (arch == "glm5")
    report["unexpected_keys"] = set(report["unexpected_keys"]) - carried
    assert not any(report.values()) and model.dtype == torch.bfloat16 and model.config.num_hidden_layers == 2
    assert zoo.load(tmp_path / "tiny", device="cpu").config.hidden == 64
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny")
    text = "Score every token, même ça: 123"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and max(ids) < model.config.vocab_size and len(tokenizer) <= 512
    assert tokenizer.eos_token_id == 2 == model.config.eos_token_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True).endswith(
        "<|assistant|>"
    )
    again = make_tiny(arch, tmp_path / "again", layers=2, hidden=64, seed=4)
    assert contents(again) == contents(tmp_path / "tiny")


def test_make_tiny_refuses(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for arguments, expected in (
        (["qwen3", str(tmp_path / "full")], "not an empty folder"),
        (["llama", str(tmp_path / "x")], "unknown architecture"),
    ):
        result = CliRunner().invoke(app, ["make-tiny", *arguments])
        assert result.exit_code == 2 and expected in result.output
    assert contents(tmp_path / "full") == {"file": b"mine"} and not (tmp_path / "x").exists()


def test_compare_holds_two_dtypes_of_the_same_bits_apart(tmp_path: Path) -> None:
    """F16 and BF16 of the same bits are other numbers."""
    bits = torch.arange(1, 9, dtype=torch.int16)
    for name, dtype in (("half", torch.float16), ("brain", torch.bfloat16), ("again", torch.float16)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_shard(tmp_path / name / SINGLE, header_of([("w", dtype, (8,))]), ["w"], lambda _, dtype=dtype: bits.view(dtype))
    (found,) = differences(str(tmp_path / "half"), str(tmp_path / "brain"))
    assert (found.name, found.reason) == ("w", "F16 [8] against BF16 [8]")
    assert not differences(str(tmp_path / "half"), str(tmp_path / "again"))  # the control
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "half"), str(tmp_path / "brain")])
    assert result.exit_code == 1 and "F16 [8] against BF16 [8]" in result.output


def test_inspect_reports_without_building_the_model(published: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = load(published).weights_version
    monkeypatch.setattr(Qwen3ForRL, "__init__", lambda *_: pytest.fail("built"))
    result = CliRunner().invoke(app, ["inspect", str(published)])
    assert result.exit_code == 0 and version in result.output and "model-00001-of" in result.output
    rewrite(copy, lambda name, t: None if name == "model.norm.weight" else t)
    spoil_config(copy, extra=1)
    result = CliRunner().invoke(app, ["inspect", str(copy)])
    assert result.exit_code == 0 and "unknown fields extra=1" in result.output


def test_inspect_of_the_zoo_s_own_names(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "own", "zoo", shard_bytes=300_000)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "own")])
    assert result.exit_code == 0 and "in the zoo's own names" in result.output
    assert load(published).weights_version in result.output
    assert not any(word in result.output for word in ("│ fault", "UNKNOWN", "missing"))
    assert "in the zoo's own names" not in CliRunner().invoke(app, ["inspect", str(published)]).output
    rewrite(tmp_path / "own", lambda name, t: None if name == "model.embed.weight" else t)  # the control
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "own")])
    assert result.exit_code == 0 and "1 parameters missing ['model.embed.weight']" in result.output
    assert "│ fault" in result.output and "none: see fault" in result.output


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
def test_inspect_of_the_zoo_s_own_names_with_carried_tensors(arch: str, tmp_path: Path) -> None:
    convert(make_tiny(arch, tmp_path / "published", vision=True), tmp_path / "own", "zoo")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "own")])
    assert result.exit_code == 0 and "in the zoo's own names" in result.output and "carried through" in result.output
    assert zoo.load(tmp_path / "published", device="cpu").weights_version in result.output
    assert "│ fault" not in result.output and "UNKNOWN" not in result.output


@pytest.mark.parametrize("own", [False, True])
def test_a_nan_is_said_by_inspect_and_not_converted(own: bool, tmp_path: Path) -> None:
    """Unless it is in a tensor that is only carried, which no model loads."""
    folder = make_tiny("qwen3_5", tmp_path / "published", vision=True)
    if own:
        convert(folder, tmp_path / "own", "zoo")
        folder = tmp_path / "own"
    to = "hf" if own else "zoo"
    rewrite(folder, lambda name, t: torch.full_like(t, torch.nan) if name == "mtp.fc.weight" else t)
    convert(folder, tmp_path / "carried", to)
    assert "│ fault" not in CliRunner().invoke(app, ["inspect", str(folder)]).output
    spoiled = next(n for n in Checkpoint.open(folder).tensors if n.endswith("down.weight" if own else "down_proj.weight"))
    rewrite(folder, lambda name, t: t.index_fill(0, torch.tensor([1]), torch.nan) if name == spoiled else t)
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 0 and f"{spoiled} has " in result.output and "NaN or infinite values" in result.output
    assert "none: see fault" in result.output
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out"), "--to", to])
    assert result.exit_code == 2 and f"error: {spoiled} has " in result.output and not (tmp_path / "out").exists()


def test_convert_there_and_back(published: Path, tmp_path: Path) -> None:
    convert(published, tmp_path / "zoo", "zoo", shard_bytes=300_000)
    stored = Checkpoint.open(tmp_path / "zoo").tensors
    model = load(published)
    assert set(stored) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(stored[name].read(), p) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="convert --to hf` makes a checkpoint that loads"):
        load(tmp_path / "zoo")
    convert(tmp_path / "zoo", tmp_path / "back", "hf")
    assert differences(str(published), str(tmp_path / "back")) == []
    with pytest.raises(ValueError, match="not in the zoo's naming"):
        convert(published, tmp_path / "wrong", "hf")
    assert not (tmp_path / "wrong").exists()


def test_compare_of_two_forms_says_whether_their_weights_differ(published: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    version = load(published).weights_version
    convert(published, own, "zoo", shard_bytes=300_000)
    for pair in ((published, own), (own, published)):
        result = CliRunner().invoke(app, ["compare", *map(str, pair)])
        counts = [len(set(Checkpoint.open(x).tensors) - set(Checkpoint.open(y).tensors)) for x, y in (pair, pair[::-1])]
        assert result.exit_code == 1 and min(counts)
        sentence, *more = result.output.splitlines()
        # the zoo's own form is loaded by nobody, so it is not called that
        only = f"{counts[0]} names only in A, {counts[1]} names only in B"
        assert sentence == f"the same weights in two forms, of one content hash: {version} ({only})" and not more
    rewrite(own, lambda name, t: t + (t == t.max()) if name == "model.embed.weight" else t)  # the control
    output = CliRunner().invoke(app, ["compare", str(published), str(own)]).output
    assert output.startswith(f"content hash of A: {version}; of B: ") and output.count(version) == 1
    broken = shutil.copytree(own, tmp_path / "broken")
    for folder, name in ((own, "model.embed.weight"), (broken, "model.norm.weight")):  # two without a hash
        rewrite(folder, lambda given, t, name=name: None if given == name else t)
    output = CliRunner().invoke(app, ["compare", str(own), str(broken)]).output
    assert output.startswith("content hash of A: none: ") and "; of B: none: " in output and output.count("1 parameters missing") == 2


def test_compare_of_two_forms_lists_what_is_carried(tmp_path: Path) -> None:
    """The content hash knows nothing of it."""
    whole = make_tiny("qwen3_5", tmp_path / "whole", layers=4, vision=True)
    own = tmp_path / "own"
    convert(whole, own, "zoo")
    name = next(name for name in Checkpoint.open(whole).tensors if "visual" in name)
    assert len(CliRunner().invoke(app, ["compare", str(whole), str(own)]).output.splitlines()) == 1  # the control
    rewrite(own, lambda given, t: None if given == name else t)
    output = CliRunner().invoke(app, ["compare", str(whole), str(own)]).output
    assert output.startswith("the same weights in two forms") and "1 tensors beside them differ" in output
    assert output.count("only in A") == 2 and name in output


def test_shards_are_read_by_safetensors(published: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in published.glob("*.safetensors"):
        theirs = load_file(path)
        assert {t.name: t.shape for t in read_shard(path).tensors} == {n: tuple(t.shape) for n, t in theirs.items()}
        assert all(torch.equal(t.read(), theirs[t.name]) for t in read_shard(path).tensors)
    odd = {
        "b": torch.randn(3).double(),
        "a": torch.tensor(1),
        "c": torch.zeros(0, 4),
        "d": torch.randn(5).to(torch.float8_e4m3fn),
    }
    save_file(odd, tmp_path / "odd.safetensors")
    assert all(
        torch.equal(t.read().view(torch.uint8), odd[t.name].view(torch.uint8))
        for t in read_shard(tmp_path / "odd.safetensors").tensors
        if t.shape
    )


MEMORY_PROGRAM = """
import re, sys, zoo
from zoo.common.checkpoint import Checkpoint
small, big, copies = sys.argv[1:]
zoo.load(small, device="cpu")
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
held = [t.read() for t in Checkpoint.open(big).tensors.values()] if int(copies) == 2 else []
model = zoo.load(big, device="cpu")
print((peak() - before) / sum(2 * p.numel() for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_loading_needs_no_second_copy(copy: Path, tmp_path: Path) -> None:
    spoil_config(copy, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6)
    (tmp_path / "big").mkdir()
    shutil.move(copy / "config.json", tmp_path / "big" / "config.json")
    table = Qwen3ForRL.family.table(Qwen3ForRL.family.config.from_hf(json.loads((tmp_path / "big" / "config.json").read_text())))
    shapes = {piece.published: piece.shape for _, piece in table.pieces()}
    specs = [(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    write_shards(tmp_path / "big", specs, lambda name: torch.ones(shapes[name], dtype=torch.bfloat16), 10**8)
    small = make_tiny("qwen3", tmp_path / "small", layers=1, hidden=64)
    once, twice = (
        float(subprocess.check_output([sys.executable, "-c", MEMORY_PROGRAM, str(small), str(tmp_path / "big"), copies], text=True))
        for copies in ("1", "2")
    )
    assert once < 1.3 and twice > 1.8  # peak bytes over the model's own; the second run is the control
