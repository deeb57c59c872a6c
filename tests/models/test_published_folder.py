"""What lies beside a checkpoint's weights: ends of generation, adapters, stray files, an index that is wrong about itself."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from weights_tools.convert import convert
from weights_tools.make_tiny import make_tiny
from zoo.common.checkpoint import Checkpoint
from zoo.common.ends import GENERATION, end_tokens, read_generation
from zoo.common.engine import Engine
from zoo.common.generate import generate_command
from zoo.common.rollouts import SamplingParams
from zoo.common.shards import INDEX, header_of, write_shard
from zoo.qwen3.config import SIZES


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("folder") / "made", layers=2, hidden=64)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def recast(folder: Path, dtype: torch.dtype, *, scales: bool = False) -> None:
    """Every matrix of the first shard in another dtype, with scales of its blocks if asked."""
    shard = Checkpoint.open(folder).shards[0]
    kept = {t.name: t.read().to(dtype) if len(t.shape) == 2 else t.read() for t in shard.tensors}
    if scales:
        kept |= {f"{name}_scale_inv": torch.ones(1, 1) for name, tensor in kept.items() if tensor.dim() == 2}
    write_shard(folder / shard.name, header_of((n, t.dtype, tuple(t.shape)) for n, t in kept.items()), list(kept), kept.__getitem__)
    grown = sum(t.nbytes for t in kept.values()) - sum(t.nbytes for t in shard.tensors)
    index = json.loads((folder / INDEX).read_text())
    weight_map = index["weight_map"] | dict.fromkeys(kept, shard.name)
    change(folder / INDEX, metadata={"total_size": index["metadata"]["total_size"] + grown}, weight_map=weight_map)


# --- end tokens


@pytest.mark.parametrize(("value", "ends"), [(7, (2, 7)), ([7, 2, 9], (2, 7, 9)), ([], (2,)), (None, (2,))])
def test_ends_are_those_of_both_files(value: Any, ends: tuple[int, ...], folder: Path, tmp_path: Path) -> None:
    change(folder / GENERATION, eos_token_id=value)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = zoo.load(folder, "serving", device="cpu")
    assert model.end_tokens == ends and model.config.eos == (2,)
    model.save_pretrained(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_ends_without_a_generation_config(folder: Path) -> None:
    (folder / GENERATION).unlink()
    assert read_generation(folder) is None
    assert zoo.load(folder, device="cpu").end_tokens == (2,) == type(zoo.load(folder, device="cpu")).from_config(SIZES["tiny"]).end_tokens
    assert end_tokens(SIZES["tiny"], {"eos_token_id": 5}) == (2, 5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"eos_token_id": 512}', "generation_config.json: eos_token_id 512 is outside the vocabulary of 512"),
        ('{"eos_token_id": "2"}', "generation_config.json: eos_token_id must be token ids of at least 0, it is '2'"),
        ("[]", "generation_config.json holds a list, not an object"),
        ("{", "generation_config.json is not valid JSON"),
    ],
)
def test_ends_that_are_none_are_refused(text: str, sentence: str, folder: Path) -> None:
    (folder / GENERATION).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        zoo.load(folder, device="cpu")


def test_the_engine_and_generate_stop_at_an_end_of_generation_config(folder: Path) -> None:
    """With the control that without it they go on."""
    params = SamplingParams(max_new_tokens=6, seed=1, stop_token_ids=())
    prompt = [5, 6, 7]
    whole = Engine(zoo.load(folder, "serving", device="cpu")).generate([prompt], params)[0]  # type: ignore[arg-type]
    said = generate_command(folder, "a", 6, seed=1, device="cpu")[0].completion
    assert whole.finish_reason == said.finish_reason == "length"
    change(folder / GENERATION, eos_token_id=[whole.output_ids[2], said.output_ids[2]])
    ended = Engine(zoo.load(folder, "serving", device="cpu")).generate([prompt], params)[0]  # type: ignore[arg-type]
    assert ended.finish_reason == "stop" and len(ended.output_ids) <= 3
    assert ended.output_ids == whole.output_ids[: len(ended.output_ids)]
    again = generate_command(folder, "a", 6, seed=1, device="cpu")[0].completion
    assert again.finish_reason == "stop" and again.output_ids == said.output_ids[: len(again.output_ids)]


# --- files that are not of the checkpoint


@pytest.mark.parametrize(
    "names",
    [
        ("adapter_config.json",),
        ("adapter_model.safetensors",),
        ("adapter_model.bin",),
        ("adapter_config.json", "adapter_model.safetensors"),
    ],
)
def test_an_adapter_beside_full_weights_is_refused_by_name(names: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    for name in names:
        (folder / name).write_text("{}")
    sentence = f"has {' and '.join(names)}: merge the adapter into the weights, or move its files away"
    with pytest.raises(ValueError, match=sentence):
        zoo.load(folder, device="cpu")
    with pytest.raises(ValueError, match=sentence):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def said_once(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        zoo.load(folder, device="cpu")
        zoo.load(folder, "serving", device="cpu")
    return [str(warning.message) for warning in caught]


def test_a_stray_shard_and_a_wrong_total_are_said_once(folder: Path, tmp_path: Path) -> None:
    assert said_once(folder) == []
    (folder / "consolidated.safetensors").write_bytes(b"of another form")
    index = json.loads((folder / INDEX).read_text())
    right = index["metadata"]["total_size"]
    change(folder / INDEX, metadata={"total_size": 5})
    strange, wrong = said_once(folder)
    assert strange == f"{folder}: not read, since they are not of this checkpoint: consolidated.safetensors"
    assert wrong == f"{folder}: {INDEX} has total_size 5, the tensors have {right} bytes"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zoo.load(folder, device="cpu").save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / INDEX).read_bytes() == (folder / INDEX).read_bytes()
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()


@pytest.mark.parametrize("metadata", [None, [], "text", 5, {"made by": "somebody"}])
def test_an_odd_metadata_is_no_obstacle_to_saving_rounded_weights(metadata: Any, folder: Path, tmp_path: Path) -> None:
    recast(folder, torch.float32)
    change(folder / INDEX, metadata=metadata)
    model = zoo.load(folder, device="cpu", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "out")
    found = json.loads((tmp_path / "out" / INDEX).read_text())["metadata"]
    total = sum(t.nbytes for t in Checkpoint.open(tmp_path / "out").tensors.values())
    assert found == {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}
    assert zoo.load(tmp_path / "out", device="cpu").weights_version == model.weights_version


@pytest.mark.parametrize("scales", [True, False])
def test_codes_without_a_quantization_config_get_advice_that_works(scales: bool, folder: Path, made: Path) -> None:
    """`dtype` would not help, and isn't advised; the BF16 checkpoint loads."""
    recast(folder, torch.float8_e4m3fn, scales=scales)
    for dtype in (None, torch.bfloat16):
        with pytest.raises(ValueError, match=r"\d+ tensors are codes of one byte, .* or load the model's BF16 checkpoint$") as caught:
            zoo.load(folder, device="cpu", dtype=dtype)
        assert "dtype" not in str(caught.value)
    zoo.load(made, device="cpu")


# --- arguments


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_a_dtype_may_be_a_name(name: str, folder: Path) -> None:
    recast(folder, torch.float32)
    model = zoo.load(folder, "serving", device="cpu", dtype=name)
    want = zoo.load(folder, "serving", device="cpu", dtype=torch.bfloat16)
    assert model.weights_version == want.weights_version
    assert Engine(want).update_weights(folder, dtype=name) == model.weights_version  # type: ignore[arg-type]
    assert type(model).from_config(model.config, dtype=name).weights_version == type(model).from_config(model.config).weights_version
    for other, sentence in (("float16", "not torch.float16"), ("fp8", "dtype 'fp8' must be torch.bfloat16 or"), (16, "dtype 16 must be")):
        with pytest.raises(ValueError, match=sentence):
            zoo.load(folder, device="cpu", dtype=other)


def test_weights_under_the_models_own_names_are_told_the_right_call(made: Path) -> None:
    model = zoo.load(made, "serving", device="cpu")
    engine = Engine(model)  # type: ignore[arg-type]
    before = model.weights_version
    for given in (model.named_parameters(), list(model.named_parameters())):
        with pytest.raises(ValueError, match=r"model.embed.weight is a name of this model's own parameters: .* published_tensors\(\) does"):
            engine.update_weights(given)
    assert engine.update_weights(model.published_tensors()) == before


@pytest.mark.parametrize("size", [None, "5GB", 0, -1, True, 1.5])
def test_a_size_of_files_that_is_none_is_refused(size: Any, made: Path, tmp_path: Path) -> None:
    model = zoo.load(made, device="cpu")
    new = type(model).from_config(model.config, device="cpu")
    for one in (model, new):
        with pytest.raises(ValueError, match="shard_bytes must be an integer of at least 1, not "):
            one.save_pretrained(tmp_path / "out", shard_bytes=size)
    with pytest.raises(ValueError, match="shard_bytes must be an integer of at least 1, not "):
        convert(made, tmp_path / "out", shard_bytes=size)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda ids: ids.to("meta"), "one on meta"),
        (lambda ids: ids.to_sparse(), "torch.sparse_coo"),
    ],
    ids=["meta", "sparse"],
)
def test_ids_without_data_are_refused(spoil: Any, kind: str, made: Path) -> None:
    ids = torch.tensor([5, 6, 7])
    starts = torch.tensor([0, 3])
    model = zoo.load(made, device="cpu")

    def refused(name: str, call: Any) -> None:
        with pytest.raises(ValueError, match=f"{name} must be a dense tensor with data, whole on one device, not {kind}"):
            call()

    def score(*args: Tensor) -> Any:
        return model.score(*args)  # type: ignore[operator]

    score(ids, starts)
    refused("input_ids", lambda: score(spoil(ids), starts))
    refused("cu_seqlens", lambda: score(ids, spoil(starts)))
    refused("target_ids", lambda: score(ids, starts, spoil(ids)))
    refused("labels", lambda: model(ids, starts, labels=spoil(ids)))
    engine = Engine(zoo.load(made, "serving", device="cpu"))  # type: ignore[arg-type]
    refused("a prompt", lambda: engine.add(spoil(ids)))
    assert not engine.busy
