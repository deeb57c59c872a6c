"""DeepSeek-V4 in FP8 and with experts in MXFP4: files come back byte for byte, every way to push is training, faults are refused."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import assert_alone_is_packed, assert_same_states, pushed, rows_in_training
from safetensors.torch import load_file, save_file
from torch import Tensor

from weights_tools.compare import differences
from weights_tools.convert import convert
from weights_tools.inspect import content_hash_of
from weights_tools.make_tiny import make_tiny
from weights_tools.quantize import dequantize, quantize
from zoo.common import ops
from zoo.common.checkpoint import Checkpoint
from zoo.common.engine import Engine
from zoo.common.ops.contract import Contract
from zoo.common.quantisation import POWER_BLOCKS, in_codes
from zoo.common.rollouts import SamplingParams
from zoo.common.values import values
from zoo.deepseek_v4 import SIZES, DeepseekV4Config, DeepseekV4ForRL, DeepseekV4ForServing
from zoo.deepseek_v4.config import HEAVY, PUBLISHED_TINY, SPARSE, WINDOW
from zoo.deepseek_v4.weights import saved
from zoo.testing import LawBroken, assert_same_bytes, split_plans
from zoo.verify.ladder import Ladder
from zoo.verify.subject import Settings, build

FORMS = ("fp8", "mxfp4")
IDS = torch.arange(3, 93)
STARTS = torch.tensor([0, 61, 90])
SMALL = replace(
    SIZES["tiny"],
    heads=3,
    groups=3,
    head_dim=24,
    query_rank=128,
    group_rank=16,
    index_heads=4,
    index_top_k=3,
    expert_intermediate=128,
    layers=4,
    kinds_of_layers=(WINDOW, SPARSE, HEAVY, SPARSE),
    hashed=(True, False, False, True),
)


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("deepseek_v4", tmp_path_factory.mktemp("v4") / request.param, form=request.param)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("deepseek_v4", tmp_path_factory.mktemp("packed") / "mxfp4", form="mxfp4")


def load(path: Path, kind: Any = DeepseekV4ForRL, **given: Any) -> Any:
    return kind.from_pretrained(path, device="cpu", **{"program": path.name.split("-")[0], **given})


def scored(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.score(IDS, STARTS, IDS.roll(-1))
    return found


def tensors_of(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def copied(source: Path, target: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """The checkpoint in one file, its tensors changed in place."""
    tensors = tensors_of(source)
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def same_files(a: Path, b: Path) -> bool:
    names = sorted(file.name for file in a.iterdir())
    assert names == sorted(file.name for file in b.iterdir())
    return filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])


# files


def test_what_is_in_codes(folder: Path) -> None:
    """As the published checkpoints have it: compressors, norms, routers, embedding and head are no codes."""
    stored = {name: tensor.dtype for name, tensor in Checkpoint.open(folder).tensors.items() if not name.startswith("mtp.")}
    inside = {name.partition(".")[2].partition(".")[2] for name in stored if name.startswith("layers.1.")}
    codes = {f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")}
    codes |= {f"ffn.shared_experts.w{n}" for n in (1, 2, 3)}
    experts = {f"ffn.experts.{e}.w{n}" for e in range(8) for n in (1, 2, 3)}
    assert {name.removesuffix(".scale") for name in inside if name.endswith(".scale")} == codes | experts
    for name in codes | experts:
        packed = folder.name == "mxfp4" and name in experts
        assert stored[f"layers.1.{name}.weight"] == ("I8" if packed else "F8_E4M3")
        assert stored[f"layers.1.{name}.scale"] == "F8_E8M0"
    left = {name for name, dtype in stored.items() if dtype == "BF16"}
    assert {"embed.weight", "head.weight", "layers.1.attn.compressor.wkv.weight", "layers.1.attn.indexer.weights_proj.weight"} <= left
    assert "layers.1.ffn.gate.weight" in left and len([name for name in left if "compressor.w" in name]) == 2 * (2 + 4)


def test_codes_and_scales_come_back_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    model.save_pretrained(tmp_path / "again")
    assert same_files(folder, tmp_path / "again")
    assert content_hash_of(Checkpoint.open(folder)) == model.weights_version == load(folder, DeepseekV4ForServing).weights_version
    for to, source, target in (("zoo", folder, "own"), ("hf", tmp_path / "own", "back")):
        convert(source, tmp_path / target, to)
    assert not differences(str(folder), str(tmp_path / "back"))
    assert content_hash_of(Checkpoint.open(tmp_path / "own")) == model.weights_version
    name = "layers.1.attn.wq_a.scale"
    other = copied(folder, tmp_path / f"{folder.name}-other", lambda tensors: tensors[name].view(torch.uint8).view(-1)[:1].add_(1))
    assert [line.name for line in differences(str(folder), str(other))] == [name]  # the control: one scale
    assert content_hash_of(Checkpoint.open(other)) != model.weights_version


def test_the_names_that_transformers_saves_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    def renamed(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if not name.startswith("mtp."):
                tensors[saved(name)] = tensors.pop(name)

    other = copied(folder, tmp_path / f"{folder.name}-saved", renamed)
    assert "model.layers.0.attn.wq_a.scale" in tensors_of(other)
    model = load(other)
    assert_same_bytes(scored(model), scored(load(folder)))
    model.save_pretrained(tmp_path / "again")
    assert same_files(other, tmp_path / "again")


def test_exponents_may_be_stored_as_plain_bytes(mxfp4: Path, tmp_path: Path) -> None:
    def plain(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.view(torch.uint8) for name, tensor in tensors.items() if name.endswith(".scale")})

    other = copied(mxfp4, tmp_path / "mxfp4-bytes", plain)
    model = load(other)
    assert_same_bytes(scored(model), scored(load(mxfp4)))
    model.save_pretrained(tmp_path / "again")
    assert same_files(other, tmp_path / "again")


@pytest.mark.parametrize("form", FORMS)
def test_quantised_and_back(form: str, tmp_path: Path) -> None:
    fields = {"q_lora_rank": 128, "moe_intermediate_size": 128}
    config = DeepseekV4Config.from_hf({**PUBLISHED_TINY, **fields})
    plain = DeepseekV4ForRL.from_config(config, seed=2, device="cpu")
    plain.save_pretrained(tmp_path / "bf16")
    quantize(tmp_path / "bf16", tmp_path / form, form)
    model = load(tmp_path / form)
    assert not torch.equal(scored(model), scored(plain))
    dequantize(tmp_path / form, tmp_path / "again")
    again = load(tmp_path / "again", program="aligned")
    rounded = load(tmp_path / form, program="aligned", dtype=torch.bfloat16)
    assert again.weights_version == rounded.weights_version
    assert_same_bytes(scored(again), scored(rounded))
    quantize(tmp_path / "again", tmp_path / "twice", form)
    dequantize(tmp_path / "twice", tmp_path / "last")
    assert not differences(str(tmp_path / "again"), str(tmp_path / "last"))  # values of codes have codes of these values


# bytes


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_way_to_push_is_training(form: str) -> None:
    config = in_codes(SMALL, packed=form == "mxfp4")
    trainer, server = (kind.from_config(config, seed=1, device="cpu", program=form) for kind in (DeepseekV4ForRL, DeepseekV4ForServing))
    lengths = (21, 1, 37)
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(512, (length,), generator=generator) for length in lengths]
    together = assert_alone_is_packed(trainer, documents)
    states = None
    plans = split_plans(lengths, (4, 16))
    for name in ("whole", "a row at a time", "in pieces of 7", "at random"):
        found, seen = pushed(server, documents, plans[name], 16)
        assert_same_bytes(found, together, name)
        states = seen if states is None else states
        assert_same_states(seen, states, name)
    scale = "layers.2.attn.wo_a.scale"  # of what is decoded once
    stored = dict(server.published_tensors())[scale]
    wider = (stored.float() * 2).to(stored.dtype)
    server.load_weights([(scale, wider)])
    with pytest.raises(LawBroken):
        assert_same_bytes(pushed(server, documents, plans["whole"], 16)[0], together)


@pytest.mark.parametrize("form", FORMS)
def test_all_five_rungs(form: str) -> None:
    """Steps train what is no code; a server takes them up."""
    subject = build("deepseek_v4", checkpoint=None, device="cpu", program=form, layers=3)
    settings = Settings((1, 33), tail=5, page_sizes=(), steps=1, requests=2, drawn=3)
    result = Ladder(subject, settings).climb((1, 2, 3, 4, 5))
    assert result.ok and {row.rung for row in result.rows} == {1, 2, 3, 4, 5}
    assert all(row.compared > 0 and row.differing == 0 for row in result.rows)
    assert result.fingerprint["program"]["program"].startswith(f"{form}/")


def test_the_engine_draws_what_the_trainer_scores(folder: Path) -> None:
    trainer = load(folder)
    engine = Engine(load(folder, DeepseekV4ForServing), pages=8)
    [record] = engine.generate([IDS[:40].tolist()], SamplingParams(max_new_tokens=6, seed=1))
    ids = torch.tensor([*record.prompt_ids, *record.output_ids])

    def mine() -> Tensor:
        found: Tensor = trainer.score(ids[:-1], torch.tensor([0, len(ids) - 1]), ids[1:])[-6:]
        return found

    assert torch.equal(mine(), torch.tensor(record.log_probs))
    name = "layers.0.ffn.experts.0.w2.scale"
    halved = dict(trainer.published_tensors())[name].clone()
    halved = (halved.float() * 2**-3).to(halved.dtype)
    for e in range(8):
        trainer.load_weights([(name.replace("experts.0", f"experts.{e}"), halved)])
    assert not torch.equal(mine(), torch.tensor(record.log_probs))  # the control: scales of the experts alone


# arithmetic


def test_what_is_computed_with_codes(folder: Path) -> None:
    """W8A8 linears with scales of rows that are powers of two; compressors in FP32 and group projections in BF16 have none."""
    model = load(folder)
    calls: list[tuple[Contract, Any, Any]] = []

    def observe(contract: Contract, arguments: Any, result: Any) -> None:
        calls.append((contract, arguments["args"], result))

    with ops.watch(observe):
        scored(model)
    layers = 5
    chosen = 2  # layers with an index
    names = [contract.name for contract, _, _ in calls]
    products = [args for contract, args, _ in calls if contract.name == "fp8_linear"]
    assert len(products) == 5 * layers + chosen  # down, up, out, gate and up, down; the index's queries
    assert all(args[3] == ops.POWERS_OF_TWO == ops.ScaleRule(1e-4, True) for args in products)
    experts = "packed_experts" if folder.name == "mxfp4" else "fp8_experts"
    assert names.count(experts) == layers and not {"experts", "fp8_experts", "packed_experts"} - {experts} & set(names)
    wide = [result for contract, args, result in calls if contract.name == "linear" and args[1].shape[0] >= 64 and args[1].shape[0] < 512]
    assert wide and all(result.dtype is torch.float32 for result in wide)  # compressors
    attention = model.get_submodule("model.layers.1.attention")
    decoded = POWER_BLOCKS.decode(attention.grouped, attention.grouped_scale_inv).bfloat16()
    groups = [args for contract, args, _ in calls if contract.name == "head_linear"]
    assert len(groups) == layers and groups[1][0].dtype is torch.bfloat16
    assert_same_bytes(groups[1][1].flatten(0, 1).detach(), decoded.detach())
    assert values(attention, "grouped").data_ptr() == groups[1][1].data_ptr()  # decoded once
    seen = rows_in_training(model, [IDS])
    assert seen["code_round"] > 0 and seen["hadamard"] > 0  # cached rows and the index as in `aligned`


def test_codes_are_frozen_and_all_else_trains(folder: Path) -> None:
    model = load(folder)
    entries = model.table_of().parameters
    ids = torch.arange(3, 143)  # a whole row of 128 tokens among them
    (-model.score(ids, torch.tensor([0, 135, 140])).mean()).backward()
    for name, parameter in model.named_parameters():
        coded = parameter.dtype in (torch.float8_e4m3fn, torch.int8, torch.float8_e8m0fnu) or name.endswith("_scale_inv")
        frozen = coded or ".indexer." in name or name.endswith(("route.bias", "route.table"))
        assert (parameter.grad is None) == (not parameter.requires_grad) == (not entries[name].trainable) == frozen, name
        assert parameter.grad is None or (bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any())), name


def test_masters_beside_codes_are_computed_with_rounded(folder: Path) -> None:
    assert_same_bytes(scored(load(folder, master_dtype=torch.float32)), scored(load(folder)))


# refusals


def byte(name: str, value: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8).view(-1)[-1] = value

    return change


def other(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


EXPERT = "layers.2.ffn.experts.3.w2"
LINEAR = "layers.2.attn.wq_b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (byte(f"{EXPERT}.scale", 255), f"{EXPERT}.scale .*NaN"),
        (byte(f"{LINEAR}.scale", 255), f"{LINEAR}.scale .*NaN"),
        (byte(f"{EXPERT}.scale", 253), f"{EXPERT}.scale has the scale byte 253, beyond 252"),
        (byte(f"{LINEAR}.scale", 247), f"{LINEAR}.scale has the scale byte 247, beyond 246"),
        (other(f"{EXPERT}.weight", lambda t: t[:, 1:]), "wrong shape"),
        (other(f"{EXPERT}.scale", lambda t: t[:, 1:]), "wrong shape"),
        (lambda tensors: tensors.pop(f"{EXPERT}.scale"), "1 tensors missing"),
        (lambda tensors: tensors.pop("layers.2.ffn.gate.bias"), "1 tensors missing"),
        (other("layers.0.ffn.gate.tid2eid", lambda t: t + 1), "tid2eid sends token .* to expert 8, there are 8"),
        (other("layers.0.ffn.gate.tid2eid", lambda t: t * 0), "tid2eid holds zeros alone"),
        (other("layers.0.ffn.gate.tid2eid", lambda t: t[:, :1].expand(-1, 2)), "tid2eid sends token 0 to expert . twice"),
    ],
)
def test_faulty_files_are_named(mxfp4: Path, tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(copied(mxfp4, tmp_path / "mxfp4-faulty", change))


def test_programs_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    form = folder.name
    for program in ("aligned", "transformers"):
        with pytest.raises(ValueError, match=f"program='{form}' computes with them, dtype=torch.bfloat16 rounds"):
            load(folder, program=program)
    another = {"fp8": "mxfp4", "mxfp4": "fp8"}[form]
    with pytest.raises(ValueError, match=f"which program '{another}' does not compute with: take '{form}'"):
        load(folder, program=another)
    plain = make_tiny("deepseek_v4", tmp_path / "plain")
    with pytest.raises(ValueError, match="has no quantization_config"):
        load(plain, program=form)


def test_widths_that_have_no_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="wkv.weight begins at row 48 of model.layers.0.attention.down.weight"):
        DeepseekV4ForRL.from_config(in_codes(SIZES["tiny"]), seed=0, device="cpu", program="fp8")
    narrow = replace(SMALL, expert_intermediate=144)
    with pytest.raises(ValueError, match="rows of 144 values are no whole groups of 32"):
        DeepseekV4ForRL.from_config(in_codes(narrow, packed=True), seed=0, device="cpu", program="mxfp4")


def test_both_places_of_expert_dtype_are_read(mxfp4: Path) -> None:
    """Beside quantization_config as published, inside it as transformers has it; without it experts are FP8."""
    fields = json.loads((mxfp4 / "config.json").read_text())
    config = DeepseekV4Config.from_hf(fields)
    assert config.packed and config.to_hf() == fields
    experts = fields.pop("expert_dtype")
    assert not DeepseekV4Config.from_hf(fields).packed
    inside = {**fields, "quantization_config": {**fields["quantization_config"], "expert_dtype": experts}}
    assert DeepseekV4Config.from_hf(inside) == config
    again = replace(config, published={}).to_hf()
    assert again["expert_dtype"] == "fp4" and DeepseekV4Config.from_hf(again) == config
