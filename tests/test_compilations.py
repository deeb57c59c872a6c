"""What was compiled is counted once, with what was being done; what stood on disk before is not."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from zoo.common import compilations
from zoo.common.compilations import Compilations


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    cache = tmp_path / "cache"
    cache.mkdir()
    return cache


def test_folders_of_deep_gemm_are_counted_once(folder: Path) -> None:
    (folder / "kernel.old").mkdir()
    seen = Compilations()
    assert not seen.look("beginning")
    (folder / "kernel.fresh").mkdir()
    [one] = seen.look("64 rows")
    assert (one.compiler, one.kernel, one.doing) == ("deep_gemm", "kernel.fresh", "64 rows")
    assert not seen.look("64 rows again")


def test_tables_of_flash_attention_are_counted_by_their_growth(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(cache={"a": 1})
    module = SimpleNamespace(_flash_attn_fwd=SimpleNamespace(compile_cache=table), _flash_attn_bwd=SimpleNamespace())
    monkeypatch.setitem(sys.modules, compilations.FA4_MODULE, module)  # type: ignore[arg-type]
    seen = Compilations()
    assert len(seen.look("first")) == 1
    table.cache.update(b=1, c=1)
    assert [one.compiler for one in seen.look("two more")] == ["flash_attn", "flash_attn"]


def test_after_ready_each_is_one_too_many_and_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = Compilations()
    seen.heard("_early")
    seen.ready()
    assert (len(seen.found), seen.after_ready) == (1, 0)
    seen.heard("_late")
    with caplog.at_level(logging.WARNING, logger="zoo.compilations"):
        seen.look("3 prompt rows")
    assert seen.after_ready == 1
    assert "_late" in caplog.text
    assert "3 prompt rows" in caplog.text


def test_triton_tells_of_what_no_cache_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    heard_before = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: heard_before.append(told))
    seen = compilations.watch.__wrapped__()
    for name, hit in (("_from_disk", True), ("_compiled", False)):
        knobs.compilation.listener(src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert [one.kernel for one in seen.look("a step")] == ["_compiled"]
    assert len(heard_before) == 2
