"""The sections by name, and their run one after another in this process."""
import time

import torch

from benchmarks.decisions import measure
from benchmarks.decisions.attention import A1, A4
from benchmarks.decisions.experts import B
from benchmarks.decisions.measure import DRY, late, sect
from benchmarks.decisions.norm import E
from benchmarks.decisions.products import C, D, F
from benchmarks.decisions.training import A2, A3

SECTIONS = {section.__name__: section for section in (A1, A2, A3, A4, B, C, D, E, F)}


def run(names):
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in names:
        measure.SECTION = name
        t = time.time()
        with sect("section"):
            late()
            SECTIONS[name]()
        torch.cuda.empty_cache()
        if not DRY:
            print(f"# {name} took {time.time() - t:.1f} s", flush=True)
