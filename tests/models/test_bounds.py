"""Checkpoints that would exhaust time or memory: each is refused in one short sentence, within 2 s and 200 MiB."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoo
import zoo.glm5.weights as glm5
import zoo.qwen3_5.weights as qwen3_5
from weights_tools.make_tiny import make_tiny
from zoo.common import checkpoint as files
from zoo.common.checkpoint import Checkpoint
from zoo.common.generate import generate_command
from zoo.common.reading import CONFIG_BYTES, JSON_BYTES, JSON_VALUES, clipped, parse_object, read_bytes, shown, some
from zoo.common.shards import INDEX, read_shard

SECONDS = 2.0
BYTES = 200 << 20
SENTENCE = 1000  # characters, a folder's name among them
FIRST = "model-00001-of-00004.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bounds")
    for arch in ("qwen3", "qwen3_moe", "qwen3_5_moe", "glm5"):
        make_tiny(arch, root / arch)
    return root


def fields(**changed: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        kept = {name: value for name, value in config.items() if name not in changed or changed[name] is not None}
        (folder / "config.json").write_text(json.dumps(kept | {name: v for name, v in changed.items() if v is not None}))

    return spoil


def sparse(name: str, size: int) -> Callable[[Path], None]:
    """A file that is as long and takes no room."""

    def spoil(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, size)

    return spoil


def header(raw: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / FIRST).write_bytes(len(raw).to_bytes(8, "little") + raw)  # type: ignore[return-value]


def long_header(folder: Path) -> None:
    sparse(FIRST, 4 << 30)(folder)
    with (folder / FIRST).open("r+b") as file:
        file.write((3 << 30).to_bytes(8, "little"))


def index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_text(text)  # type: ignore[return-value]


def many_files(folder: Path) -> None:
    """Each in the index once: pairing names with files one by one would take their product."""
    names = [f"{i}.safetensors" for i in range(2000)]
    for name in names:
        (folder / name).touch()
    entries = {f"t{i}": names[i % 2000] for i in range(100_000)}
    (folder / INDEX).write_text(json.dumps({"weight_map": entries}))


HUGE = b"9" * 4000
TENSOR = b'{"dtype":"BF16","shape":[%s],"data_offsets":[0,%s]}'
CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "2^18 experts": ("qwen3_moe", fields(num_experts=1 << 18), "num_experts must be at most 4096, it is 262144"),
    "2^22 experts": ("qwen3_5_moe", fields(num_experts=1 << 22), "num_experts must be at most 4096"),
    "2^20 experts": ("glm5", fields(n_routed_experts=1 << 20), "n_routed_experts must be at most 4096"),
    "experts by layers": (
        "qwen3_moe",
        fields(num_experts=4096, num_hidden_layers=1024),
        "num_experts 4096 in 1024 layers are more experts than 65536",
    ),
    "most experts": (
        "qwen3_5_moe",
        fields(num_experts=4096, num_hidden_layers=16, layer_types=None, full_attention_interval=4),
        "tensors missing",
    ),
    "most layers": ("qwen3_moe", fields(num_experts=64, num_hidden_layers=1024), "205725 tensors missing"),
    "layers of prediction": ("glm5", fields(num_nextn_predict_layers=1024), "num_nextn_predict_layers must be at most 16, it is 1024"),
    "a long value": ("qwen3", fields(hidden_act="x" * 3_000_000), r"hidden_act 'x+\.\.\.x+' is not supported"),
    "a long list": ("qwen3", fields(layer_types=["full_attention"] * 100_000), "layer_types .* is not supported"),
    "long unknown fields": ("qwen3", fields(**{"y" * 1_000_000: ["z"] * 100_000}), "has unknown fields y+"),
    "a deep value": ("qwen3", fields(rope_parameters=json.loads("[" * 500 + "]" * 500)), "rope_parameters must be an object"),
    "config of gigabytes": ("qwen3", sparse("config.json", 5 << 30), "config.json has 5,368,709,120 bytes, 4,194,304 is the most"),
    "generation of gigabytes": ("qwen3", sparse("generation_config.json", 5 << 30), "generation_config.json has 5,368,709,120 bytes"),
    "index of gigabytes": ("qwen3", sparse(INDEX, 5 << 30), "index.json has 5,368,709,120 bytes, 33,554,432 is the most"),
    "header of gigabytes": ("qwen3", long_header, "has a header of 3,221,225,472 bytes, 33,554,432 is the most"),
    "config of lists": (
        "qwen3",
        lambda folder: (folder / "config.json").write_text("[" + "[]," * (CONFIG_BYTES // 3 - 9) + "[]]"),  # type: ignore[dict-item, return-value]
        "commas and brackets, 1,000,000 is the most",
    ),
    "index of lists": ("qwen3", index('{"a":[' + "[]," * (JSON_BYTES // 3 - 9) + "[]]}"), "commas and brackets, 1,000,000 is the most"),
    "index of objects": ("qwen3", index("[" + '{"":0},' * (JSON_VALUES // 2 - 9) + "0]"), "holds a list, not an object"),
    "index of names": (
        "qwen3",
        index('{"weight_map":{' + ",".join(f'"{i}":"a"' for i in range(JSON_VALUES - 9)) + "}}"),
        "names 999,991 tensors, 300,000 is the most",
    ),
    "index of wide text": ("qwen3", index('{"weight_map":{"a":"' + "a" * (JSON_BYTES // 2) + '\U0001f600"}}'), "not all of them ASCII"),
    "index of one name": ("qwen3", index('{"weight_map":{"' + "n" * (JSON_BYTES - 99) + '": 5}}'), "names no file for n+"),
    "a file for every name": ("qwen3", many_files, "0.safetensors is truncated or no safetensors file"),
    "header of objects": ("qwen3", header(b"[" + b'{"":0},' * (JSON_VALUES // 2 - 9) + b"0]"), "holds a list, not an object"),
    "header of huge integers": (
        "qwen3",
        header(b'{"t":' + TENSOR % (b",".join([HUGE] * 2000), b"8") + b"}"),
        "t has 2000 dimensions, 16 is the most",
    ),
    "header of few huge integers": (
        "qwen3",
        header(b'{"t":' + TENSOR % (b",".join([HUGE] * 8), b"8") + b"}"),
        r"t has 9+\.\.\.9+ in its shape or range",
    ),
    "header of a huge range": ("qwen3", header(b'{"t":' + TENSOR % (b"1", HUGE) + b"}"), "in its shape or range"),
    "header of a long name": ("qwen3", header(b'{"' + b"n" * 30_000_000 + b'":' + TENSOR % (b"1", b"8") + b"}"), "n+.* needs 2 bytes"),
    "header of a long dtype": ("qwen3", header(b'{"t":{"dtype":"' + b"n" * 30_000_000 + b'"}}'), "t has the unknown dtype 'n+"),
}


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        zoo.load(folder, device="cpu")
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_without_bounds_is_refused_at_once(case: str, made: Path, tmp_path: Path) -> None:
    arch, spoil, expected = CASES[case]
    folder = tmp_path / "spoiled"
    shutil.copytree(made / arch, folder)
    spoil(folder)
    begin = time.process_time()  # of this process: others share the machine
    said = refusal(folder)
    seconds = time.process_time() - begin
    for table in (qwen3_5.table, glm5.table):
        table.cache_clear()
    tracemalloc.start()
    try:
        refusal(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(said) < SENTENCE and "\n" not in said
    assert re.search(expected, said), said
    assert seconds < SECONDS and peak < BYTES, (seconds, peak)


def test_a_file_is_not_read_before_its_size_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="has 5 bytes, 4 is the most that is read of it"):
        read_bytes(path, 4)


@pytest.mark.parametrize(("value", "marks"), [(b"[[]]", 3), (b'{"a":{}}', 3), (b"1", 1)])
def test_brackets_count_as_values(value: bytes, marks: int) -> None:
    """A value inside others takes memory for each of them: commas alone would let three times as many through."""
    fits = JSON_VALUES // marks
    text = b'{"x":[' + b",".join([value] * (fits - 2)) + b"]}"
    assert len(parse_object(Path("x.json"), text)["x"]) == fits - 2
    with pytest.raises(ValueError, match="is the most that is read of JSON"):
        parse_object(Path("x.json"), text[:-2] + (b"," + value) * 4 + b"]}")


@pytest.mark.parametrize("second", [4, 8, 12], ids=["overlaps", "follows", "leaves a gap"])
def test_data_of_two_tensors_follow_one_another(second: int, tmp_path: Path) -> None:
    """Ranges that overlap are refused where the file's size is that of both tensors, too."""
    spec = {"dtype": "F32", "shape": [2]}
    fields = {"a": {**spec, "data_offsets": [0, 8]}, "b": {**spec, "data_offsets": [second, second + 8]}}
    raw = json.dumps(fields).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    if second == 8:
        assert [tensor.name for tensor in read_shard(path).tensors] == ["a", "b"]
    else:
        begin = 8 + len(raw)
        with pytest.raises(ValueError, match=f"data of b starts at byte {begin + second}, it should start at {begin + 8}"):
            read_shard(path)


def test_what_a_message_shows_is_short_and_printable() -> None:
    assert clipped("a" * 120) == "a" * 120 and clipped("a" * 121) == "a" * 120 + "..."
    assert clipped("\x1b[31m\n") == "\\x1b[31m\\n"
    assert shown("x") == "'x'" and shown([1, 2]) == "[1, 2]" and shown(10**5000) == "an integer of more than 4000 digits"
    assert len(shown({"k" * 10_000: ["v" * 10_000] * 1000})) < 130 and len(shown([[1] * 1000] * 1000)) < 130
    assert some(["a", "b"]) == "a, b" and some(list("abcdefg")) == "a, b, c, d and 3 more"


@pytest.mark.parametrize("held", [1 << 30, 2000])
def test_a_small_file_too_large_to_hold_is_copied_from_where_it_lies(
    held: int, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held outlives its source; what is not must be as it was."""
    monkeypatch.setattr(files, "HELD_BYTES", held)
    folder = tmp_path / "copy"
    shutil.copytree(made / "qwen3", folder)
    source = Checkpoint.open(folder)
    assert {name for name, file in source.files.items() if file.content is None} == (set() if held > 2000 else {"tokenizer.json"})
    model = zoo.load(folder, device="cpu")
    model.save_pretrained(tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / "tokenizer.json").write_text("{}")
    if held > 2000:
        model.save_pretrained(tmp_path / "later")
        assert (tmp_path / "later" / "tokenizer.json").read_bytes() == (tmp_path / "out" / "tokenizer.json").read_bytes()
        return
    with pytest.raises(ValueError, match="tokenizer.json has changed since it was loaded"):
        model.save_pretrained(tmp_path / "later")
    assert not (tmp_path / "later").exists()


def test_a_tokenizer_of_gigabytes_is_not_read(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made / "qwen3", folder)
    sparse("tokenizer.json", 8 << 30)(folder)
    with pytest.raises(ValueError, match="tokenizer.json has 8,589,934,592 bytes, 134,217,728 is the most that is read of it"):
        generate_command(folder, "a", device="cpu")


def test_a_sidecar_of_gigabytes_is_not_read(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made / "qwen3", folder)
    sparse("vocab.json", 8 << 30)(folder)
    tracemalloc.start()
    try:
        source = Checkpoint.open(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert source.files["vocab.json"].content is None and peak < BYTES
