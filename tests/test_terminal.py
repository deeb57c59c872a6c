"""What the command lines print and how they end: hostile text, full disks, closed streams."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from weights_tools.cli import app
from weights_tools.make_tiny import make_tiny
from zoo.common.reading import printable
from zoo.common.shards import header_of, read_shard, write_shard
from zoo.common.terminal import Command, Terminal, run

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "[/x]\x1b[2J\x07\r\nall tensors have the same bytes\u202e:smile:"
SHOWN = r"[/x]\x1b[2J\x07\r\nall tensors have the same bytes\u202e:smile:"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("terminal") / "tiny", layers=1, hidden=64)


@pytest.fixture
def hostile(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose folder, config field and a tensor's name would style, steer and forge."""
    folder = tmp_path / "a[/bold]b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**json.loads((checkpoint / "config.json").read_text()), HOSTILE: HOSTILE}))
    shards = [read_shard(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    stored = {t.name: t.read() for shard in shards for t in shard.tensors}
    named = {**stored, HOSTILE: next(iter(stored.values()))}
    header = header_of((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items())
    write_shard(folder / "model.safetensors", header, list(named), named.__getitem__)
    return folder


def started(*arguments: object, module: str = "weights_tools", cwd: Path = ROOT, **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(command, cwd=cwd, env={"PYTHONPATH": str(ROOT)}, text=True, **given)  # type: ignore[call-overload,no-any-return]


def test_printable() -> None:
    assert printable(HOSTILE) == SHOWN and printable("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert printable("\udcff\x9b\u2028") == r"\udcff\x9b\u2028"
    ordinary = "Grüße 日本語\u3000 👩\u200d🔬 שלום\u200cב 100 %"
    assert printable(ordinary) == ordinary


def flat(text: str) -> str:
    """Without the frames of tables and the folds in their cells."""
    return "".join(part.strip() for line in text.splitlines() for part in line.split("│"))


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_text_of_a_checkpoint_is_shown_as_text(command: str, hostile: Path, checkpoint: Path) -> None:
    given = [str(hostile)] if command == "inspect" else [str(hostile), str(checkpoint)]
    done = CliRunner().invoke(app, [command, *given])
    assert done.exit_code == (command == "compare") and (done.exception is None or isinstance(done.exception, SystemExit))
    assert SHOWN.replace(" ", "") in flat(done.output).replace(" ", "") and not {"\x1b", "\x07", "\r", "\u202e"} & set(done.output)
    assert "all tensors have the same bytes" not in done.output.splitlines()
    assert command == "compare" or str(hostile) in done.output


def test_an_error_is_one_line_whatever_it_quotes(hostile: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(hostile), str(tmp_path / "out")])
    assert done.exit_code == 2 and SHOWN.split(":")[0] in done.output
    assert len(done.output.splitlines()) == 1 and "\x1b" not in done.output


def test_a_terminal_s_cells_titles_and_lines_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    Terminal(200).print(table)
    Terminal(200).print(HOSTILE, soft_wrap=True)
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 4 and "\x1b" not in out


@pytest.mark.parametrize("module", ["zoo", "zoo.verify", "weights_tools"])
def test_modules_of_the_working_directory_are_not_run(module: str, tmp_path: Path) -> None:
    for name in ("typer", "torch", "rich", "json"):
        (tmp_path / f"{name}.py").write_text("print('planted')\n")
    given = [] if module == "zoo.verify" else ["verify"] if module == "zoo" else ["inspect"]
    done = started(*given, "--help", module=module, cwd=tmp_path)
    assert done.returncode == 0 and "planted" not in done.stdout + done.stderr and "Usage: " in done.stdout
    planted = subprocess.run([sys.executable, "-c", "import typer"], cwd=tmp_path, capture_output=True, text=True)
    assert planted.stdout == "planted\n"  # the control


def test_console_scripts_have_an_entry() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"zoo", "weights-tools"}
    for place in scripts.values():
        module, name = place.split(":")
        assert callable(vars(import_module(module))[name])


@needs_full
@pytest.mark.parametrize(
    ("module", "arguments"),
    [("zoo", ["lint"]), ("zoo", ["lint", "--json", "/dev/full"]), ("zoo", ["--help"]), ("weights_tools", ["inspect", "CHECKPOINT"])],
)
def test_a_full_disk_is_one_sentence_and_status_2(checkpoint: Path, module: str, arguments: list[str]) -> None:
    given = [str(checkpoint) if argument == "CHECKPOINT" else argument for argument in arguments]
    with Path("/dev/full").open("w") as full:
        done = started(*given, module=module, **({} if "--json" in given else {"stdout": full}))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and "can't be written: [Errno 28] No space left on device" in done.stderr
    with Path("/dev/full").open("w") as full:
        assert started("verify", "llama", module="zoo", stderr=full).returncode == 2  # a full stderr changes no status


PRINTS = """
import typer
from zoo.common.terminal import Command, run

application = typer.Typer(add_completion=False)
application.command(cls=Command)(lambda: print("a verdict that waits in the buffer"))
run(application, "x")
"""


@needs_full
def test_what_waits_in_the_buffer_is_written_before_the_status_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        given = {"stdout": full, "stderr": subprocess.PIPE, "env": {"PYTHONPATH": str(ROOT)}}  # not that of who runs it unbuffered
        done = subprocess.run([sys.executable, "-c", PRINTS], text=True, cwd=ROOT, **given)
    assert done.returncode == 2 and done.stderr == "error: the output can't be written: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", ["make-tiny", "convert"])
def test_a_checkpoint_that_fills_the_disk_leaves_nothing(command: str, checkpoint: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that is nearly full."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); from weights_tools.cli import main; main()"
    given = ["make-tiny", "qwen3"] if command == "make-tiny" else ["convert", str(checkpoint)]
    done = subprocess.run([sys.executable, "-c", limited, *given, str(tmp_path / "deep" / "out")], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr == f"error: {tmp_path}/deep/out can't be written: [Errno 27] File too large\n"
    assert not list(tmp_path.iterdir())


def test_a_reader_that_goes_is_no_verdict() -> None:
    program = "import sys; from zoo.cli import main; sys.stdin.readline(); main(['lint'])"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.close()
    assert process.stderr.read() == "" and process.wait() == 2
    process.stderr.close()


def test_a_closed_output_is_none_at_all() -> None:
    closed = "import os, sys; os.close(1); sys.stdout = None; from zoo.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", closed], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize(("error", "status"), [(KeyError("x"), 2), (ValueError("x"), 2), (typer.Exit(1), 1), (MemoryError(), 2)])
def test_only_a_verdict_ends_with_status_1(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @application.command(cls=Command)
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(application, "x", [])
    assert ended.value.code == status
    said = capsys.readouterr().err
    assert ("Traceback" in said) == isinstance(error, KeyError) and (status == 1) == (not said)
