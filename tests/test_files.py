"""What is written for a user: whole or not at all, nothing of the user's touched, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.common import verdicts
from zoo.common.files import fresh_folder, write_file

ROOT = Path(__file__).resolve().parents[1]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
WRITER = """
import os, signal, sys
from zoo.common.files import fresh_folder
with fresh_folder(sys.argv[1]) as folder:
    (folder / "half").write_text("half")
    print("inside", flush=True)
    sys.stdin.read()
"""


def writer(target: Path) -> subprocess.Popen[str]:
    """A process in the middle of writing a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "inside\n"
    return process


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_writer_left_is_removed_by_the_next_one_and_a_living_writer_s_is_not(tmp_path: Path) -> None:
    dead = writer(tmp_path / "dead")
    alive = writer(tmp_path / "alive")
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert len(names(tmp_path)) == 2 and all(name.endswith(".unfinished") for name in names(tmp_path))
    write_file(tmp_path / "other.json", "{}")
    left = names(tmp_path)
    assert len(left) == 2 and left[0].startswith(".alive.") and left[1] == "other.json"
    alive.communicate("")
    assert alive.returncode == 0 and names(tmp_path) == ["alive", "other.json"] and names(tmp_path / "alive") == ["half"]


def test_a_folder_that_only_looks_abandoned_stays(tmp_path: Path) -> None:
    for name, inside, rights in ((".x.abcdefgh.unfinished", "y", 0o700), (".x.abcdefgi.unfinished", "x", 0o755), (".x.part", "x", 0o700)):
        (tmp_path / name / inside).mkdir(parents=True)
        (tmp_path / name).chmod(rights)
    (tmp_path / ".x.abcdefgj.unfinished").symlink_to(tmp_path)
    (tmp_path / ".x.abcdefgk.unfinished" / "x").mkdir(parents=True)
    (tmp_path / ".x.abcdefgk.unfinished").chmod(0o700)
    before = names(tmp_path)
    write_file(tmp_path / "x", "")
    assert names(tmp_path) == sorted({*before, "x"} - {".x.abcdefgk.unfinished"})


def test_a_file_beside_is_not_the_writer_s(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    out = tmp_path / "r.json"
    victim.write_text("mine")
    (tmp_path / "r.json.part").symlink_to(victim)
    write_file(out, "one")
    write_file(out, "two")
    assert out.read_text() == "two" and victim.read_text() == "mine" and (tmp_path / "r.json.part").is_symlink()
    assert names(tmp_path) == ["r.json", "r.json.part", "victim"]


def test_a_store_truncates_no_file_beside_it(tmp_path: Path) -> None:
    for name in ("uv.lock", "uv.json.lock"):
        (tmp_path / name).write_text("mine")
    verdicts.write(tmp_path / "uv.json", [], {"toolchain": {}})
    assert json.loads((tmp_path / "uv.json").read_text())["verdicts"] == []
    assert all((tmp_path / name).read_text() == "mine" for name in ("uv.lock", "uv.json.lock"))


def test_a_link_and_a_device_are_written_in_place(tmp_path: Path) -> None:
    target = tmp_path / "target"
    link = tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_file(link, "through")
    assert link.is_symlink() and target.read_text() == "through"
    write_file(os.devnull, "gone")
    assert not Path(os.devnull).is_file()


@needs_full
def test_a_full_disk_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^/dev/full can't be written: \[Errno 28\] No space left on device$"):
        write_file(FULL, "x")


@needs_full
def test_a_folder_that_fills_the_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="out can't be written: .*No space left on device"),
        fresh_folder(tmp_path / "deep" / "out") as folder,
    ):
        (folder / "half").write_text("half")
        FULL.write_text("x")
    assert not names(tmp_path)


def test_content_reaches_the_disk_before_its_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync = os.fsync
    rename = os.rename
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), sync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append("rename"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    with fresh_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "shard").write_text("x")
    assert order == ["shard", "inner", "out", "rename", tmp_path.name]
    order.clear()
    write_file(tmp_path / "r.json", "x")
    assert order == ["r.json", "replace", tmp_path.name]
