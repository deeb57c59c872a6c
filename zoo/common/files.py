"""Files and folders that are written for a user: checked before the work, whole or not at all, on the disk when they have their name.

What is being written stands in a folder of its own beside its place, `.NAME.xxxxxxxx.unfinished`, which its writer keeps locked. A
writer that is killed leaves it behind without a lock; the next one that writes into the same place removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_UNFINISHED = re.compile(r"\..*\.[a-z0-9_]{8}\.unfinished")


@contextmanager
def fresh_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block succeeds and vanishes when it fails, with parents that it needed.

    ValueError, before the block, for a `path` that `check_fresh` refuses; in one sentence too for what the block could not write.
    """
    target = check_fresh(path)
    absent = [folder for folder in target.parents if not os.path.lexists(folder)]
    try:
        with _one_sentence(path):
            target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as unfinished:
            with _one_sentence(path):
                unfinished.mkdir()
            try:
                yield unfinished
            except OSError as error:  # the disk is full
                raise ValueError(f"{path} can't be written: {error}") from error
            with _one_sentence(path):
                for inside, _, files in os.walk(unfinished, topdown=False):
                    for name in files:
                        _to_disk(Path(inside, name))
                    _to_disk(Path(inside))
                os.rename(unfinished, target)
                _to_disk(target.parent)
    finally:
        for folder in absent:
            with suppress(OSError):  # it has something in it, or was never made
                folder.rmdir()


def write_file(path: str | Path, text: str) -> None:
    """Replaces a file as a whole, where `written_in_place` says so in place. ValueError in one sentence."""
    place = Path(path)
    with _one_sentence(path):
        if written_in_place(place):
            place.write_text(text, encoding="utf-8")
            return
        target = place.absolute()
        with _beside(target) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
            _to_disk(unfinished)
            os.replace(unfinished, target)
            _to_disk(target.parent)


def written_in_place(path: Path) -> bool:
    """Whether `write_file` can't replace what is there: a pipe, a device, a symbolic link, a file in a folder that takes no other."""
    return path.is_symlink() or (path.exists() and not (path.is_file() and os.access(path.absolute().parent, os.W_OK)))


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """An absent path of the target's name on the target's file system, to be renamed from; what is left of it is removed."""
    with _one_sentence(target):
        for name in os.listdir(target.parent):
            if _UNFINISHED.fullmatch(name):
                _remove_abandoned(target.parent / name)
        work, lock = _locked_folder(target)
    try:
        yield work / target.name  # the folder around it is private to this user, what is inside has ordinary rights
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _locked_folder(target: Path) -> tuple[Path, int]:
    """A private folder beside the target and the open descriptor that holds its lock."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.", suffix=".unfinished", dir=target.parent))
        with suppress(FileNotFoundError):  # another writer took it for an abandoned one before it was locked
            lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = work.is_dir()
            except BlockingIOError:  # the other one is about to remove it
                mine = False
            except OSError:  # a file system without locks, where nobody can take it for abandoned
                mine = True
            if mine:
                return work, lock
            os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    """Removes what a killed writer of this user left; a folder whose lock is held, or is another's, stays."""
    with suppress(OSError):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
            return
        if any(not folder.name.startswith(f".{name[:40]}.") for name in os.listdir(folder)):
            return
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _to_disk(path: Path) -> None:
    """A rename may outlive a power cut that its content does not, so the content goes first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems have no fsync of folders
            raise
    finally:
        os.close(descriptor)


def check_fresh(path: str | Path) -> Path:
    """The absolute path of a folder for `fresh_folder`. ValueError where `check_folder` raises it, for a symbolic link and the
    working directory: what takes long asks before it begins."""
    target = check_folder(path)
    if target.is_symlink():
        raise ValueError(f"{target} is a symbolic link; give the folder itself")
    if target.exists() and target.samefile("."):
        raise ValueError(f"{target} is the working directory, which can't be replaced; give a folder inside it")
    return target


def check_folder(path: str | Path) -> Path:
    """The absolute path of a folder to be written. ValueError unless it is absent or empty, in a place where one can be written."""
    with _one_sentence(path):
        target = Path(path).expanduser().absolute()
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target} exists and is not an empty folder; nothing is overwritten")
        nearest = check_parents(target)
        with suppress(FileNotFoundError):
            os.lstat(nearest / target.name)  # a name too long
        if not os.access(target if target.exists() else nearest, os.W_OK):
            raise ValueError(f"{target} can't be written: permission denied")
    return target


def check_space(path: str | Path, needed: int) -> None:
    """ValueError naming both numbers if a folder of so many bytes does not fit where `path` is."""
    target = check_fresh(path)
    disk = shutil.disk_usage(next(folder for folder in target.parents if folder.is_dir()))
    if disk.total and needed > disk.free:  # some file systems say nothing of their size
        raise ValueError(f"{path} needs {needed:,} bytes, {disk.free:,} are free there")


def check_file(option: str, path: Path | None) -> None:
    """ValueError, before any work, if the file that a command-line option names can't be written."""
    if path is None:
        return
    with _one_sentence(f"{option} {path}"):
        place = path if path.exists() else path.resolve().parent  # what exists may be a pipe, which has no folder
        if path.is_dir():
            raise ValueError(f"{option} {path} is a folder, it must be a file")
        if not place.exists() or (place is not path and not place.is_dir()):
            raise ValueError(f"{option} {path}: its folder does not exist")
        with suppress(FileNotFoundError):
            os.lstat(path)  # a name too long
        if not os.access(place, os.W_OK):
            raise ValueError(f"{option} {path} can't be written: permission denied")


def check_parents(target: Path) -> Path:
    """The nearest folder above an absolute path that exists. ValueError if what exists is no folder."""
    with _one_sentence(target):
        nearest = next((place for place in target.parents if os.path.lexists(place)), target)
        if not nearest.is_dir():
            raise ValueError(f"{target} can't be written: {nearest} is no folder")
    return nearest


@contextmanager
def _one_sentence(path: object) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, TypeError) as error:  # RuntimeError: no home folder, a loop of links; TypeError: no path
        raise ValueError(f"{path} can't be written: {error}") from error
