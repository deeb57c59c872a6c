"""Checkpoints in FP8 codes: kept as they are, computed with by program `fp8`, or rounded once to BF16; faulty ones leave nothing behind."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weights_tools.make_tiny import make_tiny
from zoo.common.checkpoint import Checkpoint
from zoo.common.engine import Engine
from zoo.common.quantisation import BLOCKS, SCALES, Quantisation, in_codes
from zoo.common.registry import architectures, model_class
from zoo.common.rollouts import SamplingParams
from zoo.common.values import values
from zoo.testing import as_integers

ARCHITECTURES = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "glm5")
IDS = torch.arange(3, 143)
STARTS = torch.tensor([0, 75, 140])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param) / "fp8", form="fp8")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what is the same in every family."""
    return make_tiny("qwen3", tmp_path_factory.mktemp("small") / "fp8", form="fp8")


def load(path: Path, role: str = "rl", **given: Any) -> Any:
    fields = json.loads((path / "config.json").read_text())
    return model_class(fields, role).from_pretrained(path, device="cpu", **{"program": "fp8", **given})


def scored(model: Any) -> Tensor:
    return model.score(IDS, STARTS, IDS.roll(-1))


def copied(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None] = lambda tensors: None) -> Path:
    """The checkpoint in one file, its tensors changed."""
    tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def names_of_codes(path: Path) -> list[str]:
    return [name for name, tensor in Checkpoint.open(path).tensors.items() if tensor.dtype == "F8_E4M3"]


def test_codes_and_scales_come_back_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    assert names_of_codes(folder)
    load(folder).save_pretrained(tmp_path / "again")
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    assert filecmp.cmpfiles(folder, tmp_path / "again", names, shallow=False) == (names, [], [])


def test_the_engine_draws_what_the_trainer_scores(folder: Path) -> None:
    trainer = load(folder)
    engine = Engine(load(folder, "serving"), pages=32)
    [record] = engine.generate([IDS[:70].tolist()], SamplingParams(max_new_tokens=12, seed=1))
    ids = torch.tensor([*record.prompt_ids, *record.output_ids])
    mine = trainer.score(ids[:-1], torch.tensor([0, len(ids) - 1]), ids[1:])[-12:]
    assert torch.equal(mine, torch.tensor(record.log_probs))
    name = names_of_codes(folder)[0]
    wider = dict(trainer.published_tensors())[f"{name}{SCALES}"].clone()
    wider[-1, -1] *= 1.5
    trainer.load_weights([(f"{name}{SCALES}", wider)])  # the control: one scale of one block
    assert not torch.equal(trainer.score(ids[:-1], torch.tensor([0, len(ids) - 1]), ids[1:])[-12:], mine)


def test_an_update_takes_codes_and_scales_and_the_hash_covers_both(folder: Path) -> None:
    trainer = load(folder)
    server = load(folder, "serving")
    assert trainer.weights_version == server.weights_version
    name = names_of_codes(folder)[-1]
    published = dict(trainer.published_tensors())
    assert published[name].dtype is torch.float8_e4m3fn
    for changed in (name, f"{name}{SCALES}"):
        flipped = published[changed].clone()
        as_integers(flipped).view(-1)[0] ^= 1
        before = server.weights_version
        server.load_weights([(changed, flipped)])
        assert server.weights_version != before
        server.load_weights([(changed, published[changed])])
        assert server.weights_version == before


@pytest.mark.parametrize(("spoilt", "said"), [(-1.0, "is not below 0"), (1e36, "no BF16 number"), (float("inf"), "NaN or infinite")])
def test_an_update_with_scales_that_no_code_can_have_is_refused(folder: Path, spoilt: float, said: str) -> None:
    server = load(folder, "serving")
    before = server.weights_version
    name = f"{names_of_codes(folder)[-1]}{SCALES}"
    scales = dict(server.published_tensors())[name].clone()
    scales.view(-1)[-1] = spoilt
    with pytest.raises(ValueError, match=f"{name} has .*{said}"):
        server.load_weights([(name, scales)])
    assert server.weights_version == before
    scales.view(-1)[-1] = 0.0  # a block of zeros may have it
    server.load_weights([(name, scales)])
    assert server.weights_version != before


def test_a_frozen_base_trains_what_is_beside_it(folder: Path) -> None:
    trainer = load(folder)
    frozen = {name for name, parameter in trainer.named_parameters() if not parameter.requires_grad}
    coded = {entry.ours for entry in trainer.table_of().entries if entry.codec is BLOCKS}
    beside = {f"{name}{SCALES}" for name in coded}
    others = {entry.ours for entry in trainer.table_of().entries if not entry.trainable} - coded - beside
    assert frozen == coded | beside | others
    assert all("indexer" in name or name.endswith("route.bias") for name in others)  # which nobody trains in BF16 either
    trainer(IDS, STARTS).logits.square().sum().backward()
    missing = [name for name, parameter in trainer.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert not missing


def test_bf16_is_rounded_once_and_saved_without_codes(folder: Path, tmp_path: Path) -> None:
    trainer = load(folder, program="aligned", dtype=torch.bfloat16)
    codes = load(folder)
    published = dict(codes.published_tensors())
    rounded = dict(trainer.published_tensors())
    for name in names_of_codes(folder):
        assert torch.equal(rounded[name], BLOCKS.decode(published[name], published[f"{name}{SCALES}"]).bfloat16())
    assert not any(name.endswith(SCALES) for name in rounded)
    trainer.save_pretrained(tmp_path / "bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    again = load(tmp_path / "bf16", program="aligned")
    assert torch.equal(scored(again), scored(trainer))
    assert not torch.equal(scored(again), scored(codes))  # the control: another arithmetic
    assert (tmp_path / "bf16" / "tokenizer.json").exists()


def _without(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(next(name for name in sorted(tensors) if name.endswith(suffix)))

    return change


def _spoiled(suffix: str, spoil: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in sorted(tensors) if name.endswith(suffix))
        tensors[name] = spoil(tensors[name]).contiguous()

    return change


def _nan_code(codes: Tensor) -> Tensor:
    spoiled = codes.clone()
    spoiled.view(torch.uint8)[0, 0] = 0x7F
    return spoiled


CODES = "down_proj.weight"
FAULTS = [
    pytest.param(_without(f"{CODES}{SCALES}"), "1 tensors missing", id="a scale is missing"),
    pytest.param(_spoiled(f"{CODES}{SCALES}", lambda t: t[:, :0]), "wrong shape", id="no scale"),
    pytest.param(_spoiled(f"{CODES}{SCALES}", lambda t: torch.cat([t, t])), "wrong shape", id="more scales"),
    pytest.param(_spoiled(f"{CODES}{SCALES}", lambda t: t * torch.nan), "NaN or infinite", id="a NaN as scale"),
    pytest.param(_spoiled(f"{CODES}{SCALES}", lambda t: -t), "a scale of FP8 codes is not below 0", id="a negative scale"),
    pytest.param(_spoiled(f"{CODES}{SCALES}", lambda t: t * 0 + 1e36), "beyond 7.56.*no BF16 number", id="too large a scale"),
    pytest.param(_spoiled(CODES, lambda t: t.bfloat16()), "BF16 where the program needs F8_E4M3", id="no codes"),
    pytest.param(_spoiled(CODES, _nan_code), "NaN or infinite", id="a NaN among the codes"),
]


@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_faulty_codes_and_scales_are_named(small: Path, tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(copied(small, tmp_path / "faulty", change))


CONFIGS = [
    ({"quant_method": "gptq"}, "quant_method 'gptq' in quantization_config is not supported, only 'fp8'"),
    ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\] in quantization_config is not supported, only \[128, 128\]"),
    ({"activation_scheme": "static"}, "activation_scheme 'static'"),
    ({"surprise": 1}, "unknown field 'surprise'"),
    ({"modules_to_not_convert": [3]}, "must be names of modules"),
    ({"modules_to_not_convert": "lm_head"}, "must be names of modules"),
    ({"modules_to_not_convert": 7}, "must be names of modules"),
    ({"ignored_layers": {"lm_head": 1}}, "ignored_layers in quantization_config must be names of modules"),
]


@pytest.mark.parametrize(("fields", "said"), CONFIGS)
def test_what_is_not_built_is_refused_by_name(small: Path, fields: dict[str, Any], said: str) -> None:
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"] |= fields
    with pytest.raises(ValueError, match=said):
        model_class(config, "rl").family.config.from_hf(config)


def test_programs_and_weights_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="program='fp8' computes with them, dtype=torch.bfloat16 rounds"):
        load(folder, program="aligned")
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    arch = next(name for name, (_, architecture) in architectures().items() if kind in architecture.model_types)
    plain = make_tiny(arch, tmp_path / "plain")
    with pytest.raises(ValueError, match="has no quantization_config"):
        load(plain)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    silent = copied(folder, tmp_path / "silent")
    (silent / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="put the published config.json with its quantization_config there"):
        load(silent, program="aligned")


def test_a_part_of_a_fused_matrix_that_is_kept_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    name = next(name for name in names_of_codes(folder) if "q_proj" in name or "q_a_proj" in name)
    config["quantization_config"]["modules_to_not_convert"] = [name.removesuffix(".weight")]
    family = model_class(config, "rl").family
    with pytest.raises(ValueError, match="keeps a part of it as it is: .*self_attn.q(_a)?_proj.weight"):
        family.table(family.config.from_hf(config))


def test_names_that_are_kept() -> None:
    how = Quantisation(("lm_head", "model.layers.0.mlp", "linear_attn.in_proj_a"))
    for kept in ("lm_head", "model.layers.0.mlp.gate_proj", "model.layers.7.linear_attn.in_proj_a", "model.layers.0.mlp"):
        assert how.keeps(kept)
    for coded in ("model.layers.0.mlp_gate", "model.layers.10.mlp.gate_proj", "model.layers.7.linear_attn.in_proj_ab"):
        assert not how.keeps(coded)


def test_a_vision_language_model_has_its_codes_beside_text_config(tmp_path: Path) -> None:
    """Names that are kept begin as the whole model's do; they are the text model's names too."""
    path = make_tiny("qwen3_5", tmp_path / "whole", form="fp8", vision=True)
    config = json.loads((path / "config.json").read_text())
    assert "quantization_config" in config and "quantization_config" not in config["text_config"]
    layer = "model.language_model.layers.0.linear_attn"
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", f"{layer}.in_proj_a", f"{layer}.in_proj_b", f"{layer}.out_proj"]
    family = model_class(config, "rl").family
    table = family.table(family.config.from_hf(config))
    codes = {piece.published for entry in table.entries if entry.codec == BLOCKS for pieces in entry.layouts for piece in pieces}
    assert f"{layer}.in_proj_qkv.weight" in codes and f"{layer}.out_proj.weight" not in codes
    assert "model.layers.0.linear_attn.out_proj.weight" not in codes and "model.layers.1.linear_attn.out_proj.weight" in codes
    trainer = load(path)
    trainer.save_pretrained(tmp_path / "again")
    names = sorted(file.name for file in path.iterdir())
    assert filecmp.cmpfiles(path, tmp_path / "again", names, shallow=False) == (names, [], [])
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    with pytest.raises(ValueError, match="quantization_config stands inside text_config"):
        family.config.from_hf(config)


def test_decay_and_strength_stay_bf16_and_train(tmp_path: Path) -> None:
    trainer = load(make_tiny("qwen3_5", tmp_path / "fp8", form="fp8"))
    parameters = dict(trainer.named_parameters())
    apart = parameters["model.layers.0.mixer.ba.weight"]
    assert apart.dtype is torch.bfloat16 and apart.requires_grad
    assert parameters["model.layers.0.mixer.qkvz.weight"].dtype is torch.float8_e4m3fn


def test_what_is_decoded_once_is_decoded_again_after_an_update(tmp_path: Path) -> None:
    """GLM-5's up-projection of latent rows and its selector's keys: no product of codes, hence values kept beside them."""
    path = make_tiny("glm5", tmp_path / "fp8", form="fp8")
    trainer = load(path)
    attention = trainer.get_submodule("model.layers.0.attention")
    codes = attention.get_parameter("latent_up")
    assert codes.dtype is torch.float8_e4m3fn
    before = scored(trainer)
    held = values(attention, "latent_up")
    assert torch.equal(held, BLOCKS.decode(codes, attention.get_parameter(f"latent_up{SCALES}")).bfloat16())
    published = {name: tensor.clone() for name, tensor in trainer.published_tensors()}
    for name in ("self_attn.kv_b_proj.weight", "self_attn.indexer.wk.weight"):
        scale = f"model.layers.0.{name}{SCALES}"
        server = load(path, "serving")
        trainer.load_weights([(scale, published[scale] * 2)])
        assert trainer.weights_version != server.weights_version
        assert values(attention, "latent_up").data_ptr() == held.data_ptr()  # a CUDA graph reads it there
        assert name.endswith("wk.weight") or not torch.equal(scored(trainer), before)
        trainer.load_weights([(scale, published[scale])])
        assert trainer.weights_version == server.weights_version
        assert torch.equal(scored(trainer), before)
    with torch.no_grad():
        attention.get_parameter(f"latent_up{SCALES}").mul_(2)  # a write that torch counts
    assert not torch.equal(scored(trainer), before)


def test_the_parts_of_a_fused_matrix_have_their_own_rows_of_scales() -> None:
    """GLM-5.2's q_a (2048 rows, 16 of scales) and kv_a (576 rows, 5): the last block is half a one."""
    family, architecture = architectures()["glm5"]
    config = in_codes(architecture.sizes["5.2"].first_layers(1))
    scales = {entry.ours: entry for entry in family.table(config).entries}["model.layers.0.attention.down.weight_scale_inv"]
    assert [(piece.start, piece.shape) for piece in scales.layouts[0]] == [(0, (16, 48)), (16, (5, 48))]
    assert BLOCKS.scales((2048 + 576, 6144)) == (21, 48)


def test_masters_beside_codes_are_computed_with_rounded(tmp_path: Path) -> None:
    """Each matrix of GLM-5's selector: codes, and what has a master beside them."""
    path = make_tiny("glm5", tmp_path / "fp8", form="fp8", layers=2)
    assert torch.equal(scored(load(path, master_dtype=torch.float32)), scored(load(path)))
