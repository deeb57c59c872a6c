"""A family that the zoo has never heard of: a package in a folder of its own, announced by an entry point, climbs the ladder.

It has what none of the zoo's has: pages with one row for four tokens, an op of its own, and a weight of FP8 codes with block scales.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.common.checkpoint import Checkpoint

SOURCE = Path(__file__).parent / "outside_family"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as an installer leaves it: its folder, and beside it what says which entry points it has."""
    folder = tmp_path / "site"
    shutil.copytree(SOURCE / "toy", folder / "toy", ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / "toy-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[zoo.families]\ntoy = toy:FAMILY\n")
    return folder


def python(installed: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *([] if installed is None else [str(installed)])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def zoo(installed: Path | None, *arguments: str, module: str = "zoo") -> subprocess.CompletedProcess[str]:
    return python(installed, "-m", module, *arguments)


def test_it_is_unknown_until_it_is_installed(installed: Path) -> None:
    assert "unknown architecture 'toy'" in zoo(None, "verify", "toy").stderr
    assert "toy" in zoo(installed, "verify", "nothing").stderr


def test_it_climbs_rungs_1_to_5(installed: Path, tmp_path: Path) -> None:
    out = tmp_path / "toy.json"
    done = zoo(installed, "verify", "toy", "--rungs", "1-5", "--device", "cpu", "--lengths", "1,6,35,64,65", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rungs"]
    assert {row["rung"] for row in rows} == {1, 2, 3, 4, 5} and all(row["ok"] for row in rows)


def test_a_squeezed_row_of_another_value_is_seen(installed: Path, tmp_path: Path) -> None:
    """Control: serving squeezes the rows that it pushes together, and forgets what is open between two pushes."""
    text = (installed / "toy" / "modeling.py").read_text()
    assert text.count("PagedRows(pages[0].layer(layer), pager, TOKENS)") == 1
    spoilt = text.replace("PagedRows(pages[0].layer(layer), pager, TOKENS)", "Spoilt(PagedRows(pages[0].layer(layer), pager, TOKENS))")
    spoilt += """

class Spoilt:
    def __init__(self, pages: PagedRows) -> None:
        self.pages = pages

    def append(self, new: Sequence[Tensor], rows: Rows) -> tuple[TokenRows, ...]:
        return self.pages.append([row if rows.count > 1 else row * 1.5 for row in new], rows)
"""
    (installed / "toy" / "modeling.py").write_text(spoilt)
    done = zoo(installed, "verify", "toy", "--rungs", "3", "--device", "cpu", "--lengths", "6,35")
    assert done.returncode == 1 and "differ" in done.stdout, done.stdout + done.stderr


def test_its_checkpoint_is_made_loaded_and_saved(installed: Path, tmp_path: Path) -> None:
    """FP8 codes and scales among the files of a tiny checkpoint, and the same bytes behind a load and a save."""
    tiny = tmp_path / "tiny"
    again = tmp_path / "again"
    made = zoo(installed, "make-tiny", "toy", str(tiny), module="weights_tools")
    assert made.returncode == 0, made.stdout + made.stderr
    assert {tensor.dtype for tensor in Checkpoint.open(tiny).tensors.values()} == {"BF16", "F32", "F8_E4M3"}
    script = (
        f"import zoo; model = zoo.load({str(tiny)!r}, device='cpu'); model.save_pretrained({str(again)!r}); print(model.weights_version)"
    )
    saved = python(installed, "-c", script)
    assert saved.returncode == 0, saved.stderr
    looked = zoo(installed, "inspect", str(again), module="weights_tools")
    assert saved.stdout.strip() in looked.stdout, looked.stdout + looked.stderr
    files = {path.name: path.read_bytes() for path in tiny.glob("*.safetensors")}
    assert files and files == {path.name: path.read_bytes() for path in again.glob("*.safetensors")}


RANKS = """
import sys
import torch, zoo
from zoo.common.layout import Layout
from zoo.common.ranks import load_rank
whole = zoo.load(sys.argv[1], device="cpu")
degree = int(sys.argv[2])
ranks = [load_rank(whole.family, sys.argv[1], Layout(tp=degree), {"tp": rank}) for rank in range(degree)]
for name, parameter in whole.named_parameters():
    shares = [rank[name] for rank in ranks]
    joined = shares[0] if shares[0].shape == parameter.shape else torch.cat(shares)
    assert joined.shape == parameter.shape and torch.equal(joined.view(torch.uint8), parameter.detach().view(torch.uint8)), name
print(sorted({name.rpartition(".")[2] for name in ranks[0] if ranks[0][name].shape != whole.get_parameter(name).shape}))
"""


def test_ranks_read_its_codes_with_their_scales(installed: Path, tmp_path: Path) -> None:
    """Two ranks have two blocks of rows each, four have one; of eight each would have half of one."""
    tiny = tmp_path / "tiny"
    assert zoo(installed, "make-tiny", "toy", str(tiny), module="weights_tools").returncode == 0
    for degree in ("2", "4"):
        done = python(installed, "-c", RANKS, str(tiny), degree)
        assert done.stdout.strip() == "['weight', 'weight_scale_inv']", done.stderr
    refused = python(installed, "-c", RANKS, str(tiny), "8")
    assert "layers.0.out_proj.weight: 0 to 8 of 64 is no whole number of blocks of 16" in refused.stderr
