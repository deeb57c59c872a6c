"""The command line: what it writes, how it exits, and one sentence for whatever the user got wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zoo
from weights_tools.make_tiny import make_tiny
from zoo import load
from zoo.cli import main
from zoo.common import ops
from zoo.common.ops.contract import Provider, choices_changed
from zoo.common.ops.linear.reference import linear
from zoo.common.program import DECISIONS
from zoo.verify.asked import lengths_of, rungs_of
from zoo.verify.room import free
from zoo.verify.subject import build

ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["zoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return 0 if code is None else int(code)

    return call


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("checkpoint") / "tiny", layers=2)


class _Page(HTMLParser):
    """Counts tags and whatever would be fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]


def test_verify_writes_json_and_a_page(cli: Cli, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ladder.json"
    page = tmp_path / "r[" / "red].html"
    page.parent.mkdir()
    arguments = ("--device", "cpu", "--rungs", "1,3-4", "--lengths", "1,20,66", "--json", out, "--report", page)
    assert cli("verify", "qwen3", "--checkpoint", checkpoint, *arguments) == 0
    fields = json.loads(out.read_text())
    totals = ["values_compared", "bytes_compared", "bytes_differing"]
    assert list(fields) == ["arch", "device", "about", *totals, "fingerprint", "rungs", "not_run", "first_divergence"]
    assert fields["bytes_compared"] == sum(row["compared_bytes"] for row in fields["rungs"]) and fields["bytes_differing"] == 0
    assert fields["about"]["checkpoint"] == str(checkpoint) and fields["about"]["lengths"] == "1, 20, 66"
    assert fields["arch"] == "qwen3" and fields["first_divergence"] is None
    assert {row["rung"] for row in fields["rungs"]} == {1, 3, 4}
    for row in fields["rungs"]:
        assert set(row) == {"rung", "what", "compared", "compared_bytes", "differing", "k3", "ok"}
        assert row["ok"] is True and row["differing"] == 0 and row["compared_bytes"] > row["compared"] > 0
    assert [set(line) for line in fields["not_run"]] == [{"rung", "what", "reason"}]
    said = capsys.readouterr().out
    assert "which are all that a CPU has\n" in said and "unqualified" not in said
    assert "none differs" in said and f"wrote {page}\n" in said
    text = page.read_text()
    found = _Page(text)
    assert not found.outside and "http" not in text
    assert found.tags.count("section") == 5 and found.tags.count("rect") == 3 * 66


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_climb_that_can_t_be_written_is_no_verdict(cli: Cli, checkpoint: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    given = ("--checkpoint", checkpoint, "--device", "cpu", "--rungs", 1, "--lengths", 9, option, "/dev/full")
    assert cli("verify", "qwen3", *given) == 2
    out, said = capsys.readouterr()
    assert said == "error: /dev/full can't be written: [Errno 28] No space left on device\n" and "none differs" in out


def test_an_empty_run_exits_1(cli: Cli, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load(checkpoint, role="rl", device="cpu")
    with torch.no_grad():
        model.model.head.weight.zero_()
    model.save_pretrained(tmp_path / "zero-head")
    given = ("--checkpoint", tmp_path / "zero-head", "--device", "cpu", "--rungs", 3, "--lengths", "20,30")
    assert cli("verify", "qwen3", *given) == 1
    out = capsys.readouterr().out
    assert "(empty:" in out and "0 bytes differ" in out


def rows_dependent_linear(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """A planted provider: few rows come out a little larger."""
    y = linear(x_RK, weight_NK, out_dtype, k_parts)
    return y if x_RK.shape[0] > 16 else (y.float() * (1 + 2.0**-7)).to(out_dtype)


def test_differing_bytes_exit_1_and_leave_a_reproduction(
    cli: Cli, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = ops.CONTRACTS["linear"]
    usual = contract.providers[0].functions
    planted = Provider("rows_dependent", "reference", "cpu", lambda: usual._replace(forward=rows_dependent_linear), defining=True)
    replace(contract, providers=(planted,))
    choices_changed()
    folder = tmp_path / "found"
    out = tmp_path / "ladder.json"
    page = tmp_path / "page.html"
    given = ("--rungs", 3, "--lengths", "40,70", "--json", out, "--reproduction", folder, "--report", page)
    try:
        assert cli("verify", "qwen3", "--checkpoint", checkpoint, "--device", "cpu", *given) == 1
    finally:
        ops.CONTRACTS["linear"] = contract
        choices_changed()
    first = json.loads(out.read_text())["first_divergence"]
    assert first["op"] == "linear" and first["layer"] == "model.layers.0.attention.qkv" and first["elements"] > 0
    assert f"op linear, sequence {first['sequence']}" in capsys.readouterr().out
    # the fault needs many rows on one side: the reproduction keeps them
    done = subprocess.run(
        [sys.executable, str(folder / "reproduce.py")], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1 and f"{first['elements']} of 512 output elements differ" in done.stdout, done.stderr
    other = "prefill in odd chunks, shuffled pages of 128, NaN in dead pages."
    assert f"<h2>First divergence</h2><p>The packed batch of training was compared with {other}</p>" in page.read_text()
    assert f": the packed batch of training against {other}" in (folder / "reproduce.py").read_text()


GENERATE = ("generate", "--checkpoint", "CHECKPOINT", "--prompt")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("verify", "llama"), "unknown architecture 'llama'"),
        (("verify", "qwen3", "--size", "9b"), "no size '9b'"),
        (("verify", "qwen3", "--rungs", "6"), "the ladder has the rungs 1 to 5"),
        (("verify", "qwen3", "--rungs", "x"), "must be like 3, 1,3 or 1-5"),
        (("verify", "qwen3", "--rungs", "3-1"), "--rungs '3-1': 3-1 goes down, the ladder is climbed up: 1-3"),
        (("verify", "qwen3", "--revision", "main"), "--revision 'main' needs --checkpoint, a hub id"),
        (("verify", "qwen3", "--checkpoint", "CHECKPOINT", "--revision", "main"), "is a local folder and has no revisions"),
        (("map", "qwen3", "--revision", "main"), "--revision 'main' needs --checkpoint, a hub id"),
        (("map", "qwen3", "--checkpoint", "CHECKPOINT", "--revision", "main"), "is a local folder and has no revisions"),
        (("verify", "qwen3", "--lengths", "1,-2"), "--lengths '1,-2' must be whole numbers"),
        (("verify", "qwen3", "--lengths", "9000"), "--lengths 9000: a sequence has 1 to 4096 tokens here"),
        (("verify", "qwen3", "--lengths", "9", "--checkpoint", "CHECKPOINT", "--layers", "1"), "--layers is for random weights"),
        (("verify", "qwen3", "--checkpoint", "CHECKPOINT", "--size", "tiny"), "--size is for random weights; a checkpoint has its own"),
        (("verify", "qwen3", "--device", "tpu"), "--device 'tpu' must be cpu or cuda"),
        (("verify", "qwen3", "--engine", "vllm"), "--engine 'vllm' must be embedded or sglang"),
        (("verify", "qwen3", "--engine", "sglang", "--device", "cpu"), "--engine sglang needs a GPU, the ladder runs on cpu"),
        (("verify", "qwen3", "--layout", "tp=2"), "--layout 'tp=2' is not supported yet"),
        (("verify", "qwen3", "--json", "absent/folder/x.json"), "its folder does not exist"),
        (("verify", "qwen3", "--report", "CHECKPOINT"), "is a folder, it must be a file"),
        (("verify", "qwen3", "--json", "n" * 300), "File name too long"),
        (("verify", "qwen3", "--reproduction", "CHECKPOINT/config.json"), "exists and is not an empty folder"),
        (("verify", "qwen3", "--reproduction", "CHECKPOINT/config.json/x"), "config.json is no folder"),
        (("verify", "qwen3", "--store", "CHECKPOINT", "--device", "cpu"), "is a folder, qualifications are kept in a file"),
        (("qualify", "--store", "n" * 300, "--device", "cpu"), "File name too long"),
        (("qualify", "--store", "CHECKPOINT/config.json/x", "--device", "cpu"), "config.json is no folder"),
        (("qualify", "--store", "CHECKPOINT/config.json", "--device", "cpu"), "can't be read ('format')"),
        (("map", "qwen3", "--json", "absent/x"), "--json absent/x: its folder does not exist"),
        (("map", "qwen3", "--json", "CHECKPOINT"), "is a folder, it must be a file"),
        (("map", "qwen3", "--device", "tpu"), "--device 'tpu' must be cpu or cuda"),
        (("map", "qwen3", "--device", "cuda:99"), "no GPU here" if not torch.cuda.is_available() else "GPUs here"),
        (("map", "qwen3", "--device", "cpu:x"), "must be cpu, cuda or cuda:N"),
        (("lint", "--json", "absent/x"), "its folder does not exist"),
        ((*GENERATE, "x", "--json", "absent/x"), "error: --json absent/x: its folder does not exist"),
        ((*GENERATE, "x", "--json", "CHECKPOINT"), "error: --json CHECKPOINT is a folder, it must be a file"),
        ((*GENERATE, "x", "--revision", "main"), "is a local folder and has no revisions"),
        ((*GENERATE, "x", "--device", "tpu"), "must be cpu, cuda or cuda:N"),
        ((*GENERATE, "x", "--device", "cuda:99"), "GPUs here"),
        ((*GENERATE, "\udcff\udcfe"), "must be text in valid UTF-8"),
        (("verify", "qwen3_moe", "--device", "cpu", "--checkpoint", "CHECKPOINT"), "'qwen3' checkpoint, not 'qwen3_moe'"),
        (("qualify", "--op", "conv9"), "there is no op 'conv9'"),
        (("qualify", "--kernel", "a:b"), "--kernel needs --op"),
        (("qualify", "--device", "cpu", "--op", "linear", "--kernel", "absent:b"), "looked for among what is installed and in the"),
        (("qualify", "--size", "8b"), "--size needs --arch"),
        (("bench",), "no benchmark is named; there are ops, models and serve"),
        (("bench", "cakes"), "there is no benchmark 'cakes'; there are ops, models and serve"),
        (("bench", "ops", "--device", "cpu"), "--device cpu runs references on a wall clock: add --smoke"),
        (("bench", "ops", "cakes"), "there is no op 'cakes'"),
    ],
)
def test_bad_input_is_one_sentence(
    cli: Cli, checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert cli(*(a.replace("CHECKPOINT", str(checkpoint)) for a in arguments)) == 2
    out, said = capsys.readouterr()
    assert (
        sentence.replace("CHECKPOINT", str(checkpoint)) in said
        and said.startswith("error: ")
        and len(said.strip().splitlines()) == 1
        and not out
    )


LIGHT = """
import sys
from zoo.cli import main
arguments = sys.argv[1:]
sys.argv = ["zoo", *arguments]
try:
    main()
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "light"),
    [
        ("verify qwen3 --rungs 6", True),
        ("verify qwen3 --lengths 0,5", True),
        ("verify qwen3 --lengths x", True),
        ("bench", True),
        ("bench cakes", True),
        ("verify llama", False),  # the control: families are asked for their names
    ],
)
def test_what_needs_no_torch_is_refused_without_it(arguments: str, light: bool) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, *arguments.split()], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["2", str(not light)] and done.stderr.startswith("error: "), done.stderr


@pytest.mark.parametrize(("length", "builds"), [(9000, False), (9, True)])
def test_lengths_are_checked_before_models_are_built(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], length: int, builds: bool
) -> None:
    def built(*_: object, **__: object) -> None:
        raise ValueError("built")

    monkeypatch.setattr("zoo.verify.run.build", built)
    for more in ((), ("--checkpoint", checkpoint)):
        assert cli("verify", "qwen3", "--device", "cpu", "--lengths", length, *more) == 2
        assert ("error: built" in capsys.readouterr().err) == builds


@pytest.mark.parametrize(
    ("rungs", "copies", "what"),
    [
        ("3", (2, 0), "the weights of trainer and server take"),
        ("1-3", (2, 2), "the weights of trainer and server and all gradients twice take"),
        ("4", (3, 0), "the weights of trainer and server and of the scoring process take"),
        ("1-3 --shared-weights", (1, 2), "the shared weights of trainer and server and all gradients twice take"),
        ("1-5 --no-masters", (3, 3), "of the scoring process, all gradients and AdamW's two averages take"),
        ("1-5", (3, 3), "with FP32 masters, and server and of the scoring process, all gradients and AdamW's two averages take"),
    ],
)
@pytest.mark.parametrize("arch", ["qwen3", "glm5"])
def test_what_can_t_fit_is_refused_before_models_are_built(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arch: str, rungs: str, copies: tuple[int, int], what: str
) -> None:
    plain = build(arch, checkpoint=None, device="cpu").trainer
    trainer = build(arch, checkpoint=None, device="cpu", masters=rungs == "1-5").trainer
    sizes = [p.nbytes for p in plain.parameters()], [p.nbytes for p in trainer.parameters() if p.requires_grad]
    need = sum(count * sum(of) for count, of in zip(copies, sizes))
    need += sum(p.nbytes for old, p in zip(plain.parameters(), trainer.parameters()) if p.dtype != old.dtype)

    def built(*_: object, **__: object) -> None:
        raise ValueError("built")

    monkeypatch.setattr("zoo.verify.run.build", built)
    monkeypatch.setattr("zoo.verify.room.free", lambda device: need - 1)
    assert cli("verify", arch, "--device", "cpu", "--rungs", *rungs.split()) == 2
    said = capsys.readouterr().err
    assert f"{what} {need:,} bytes, {need - 1:,} are free on cpu; " in said and said.count("\n") == 1
    for room in (need, None):  # the controls: what just fits, and a system that doesn't say
        monkeypatch.setattr("zoo.verify.room.free", lambda device, room=room: room)
        assert cli("verify", arch, "--device", "cpu", "--rungs", *rungs.split()) == 2
        assert capsys.readouterr().err == "error: built\n"


def test_free_memory_is_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    here = free("cpu")
    assert here is None or (sys.platform == "linux" and 0 < here <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4)
    assert free("cuda") == 75


def test_rungs_and_lengths() -> None:
    assert rungs_of("3") == (3,) and rungs_of("1,3") == (1, 3)
    assert rungs_of("1-5") == (1, 2, 3, 4, 5) and rungs_of("4,1-2") == (1, 2, 4)
    assert lengths_of("1, 63,300") == (1, 63, 300) and lengths_of(None) is None


def test_map(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "map.json"
    assert cli("map", "qwen3_moe", "--device", "cpu", "--json", out) == 0
    fields = json.loads(out.read_text())
    order = [call["call"] for call in fields["calls"]]
    assert order[:5] == ["embed", "rms_norm", "linear", "norm_rope", "attention"]
    attention = fields["calls"][4]["launched"]
    assert "packed keys" in attention["training"] and "in pages of" in attention["prefill"] and attention["decode"].count("1 row")
    contracts = fields["contracts"]
    assert {"experts", "combine", "route", "log_prob"} <= set(contracts)
    words = ("shapes", "rounds", "adds", "laws", "backward", "launch")
    assert all(contract[word] for contract in contracts.values() for word in words)
    assert [set(decision) for decision in fields["decisions"]] == [{"question", "answer", "evidence"}] * len(DECISIONS)
    said = capsys.readouterr().out
    assert "K ascending in one FP32 accumulator" in said and "FP8 class" in said and "DeepGEMM's own order" in said


def test_qualify_on_a_cpu_has_nothing_to_admit(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("qualify", "--device", "cpu") == 0
    assert "only the reference" in capsys.readouterr().out


def test_generate(cli: Cli, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made.json"
    given = ("--prompt", "Guess\x1b[2J\nthe word", "--max-new-tokens", 4, "--ignore-eos", "--device", "cpu", "--json", out)
    assert cli("generate", "--checkpoint", checkpoint, *given) == 0
    assert capsys.readouterr().out.startswith("Guess\\x1b[2J\nthe word")  # what steers a terminal is shown, lines stay lines
    made = json.loads(out.read_text())["generations"]
    assert len(made) == 1 and len(made[0]["completion"]["output_ids"]) == 4


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["verify", "-h"], ["qualify", "-h"]])
def test_help_has_a_short_name(cli: Cli, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(*arguments) == 0 and "Usage: zoo" in capsys.readouterr().out


def test_the_version_is_one(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--version") == 0 and capsys.readouterr().out == f"zoo {zoo.__version__}\n"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == zoo.__version__
    assert f"\nversion: {zoo.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert all((ROOT / package / "py.typed").exists() for package in ("zoo", "weights_tools"))
