"""What every section uses: rows, steps that may fail, timers, random operands, and how far results are apart."""
import json
import os
import tempfile
import time
import traceback

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", os.path.join(tempfile.gettempdir(), "decisions_fa4_cache"))
os.environ.setdefault("DG_JIT_CACHE_DIR", os.path.join(tempfile.gettempdir(), "decisions_dg_cache"))

import torch
import triton

from benchmarks.decisions import OUT

DRY = os.environ.get("DECISIONS_DRY") == "1"
DEADLINE = float(os.environ.get("DECISIONS_DEADLINE", "0"))
SECTION = "?"  # the running one, set by sections.run
DEV = "cuda" if torch.cuda.is_available() else "cpu"
BF, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def emit(what, **kw):
    r = dict(section=SECTION, what=what, **{k: (float(f"{v:.5g}") if isinstance(v, float) else v) for k, v in kw.items()})
    if not DRY:
        with open(os.path.join(OUT, "decisions.jsonl"), "a") as f:
            f.write(json.dumps(r) + "\n")


class Late(Exception):
    pass


class sect:
    """`with sect(name):` one step; an error becomes a row, and the next step goes on."""
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        return self

    def __exit__(self, t, e, tb):
        if t is None or t is KeyboardInterrupt:
            return False
        line = (str(e).strip().splitlines() or [""])[-1][:240]
        at = traceback.extract_tb(tb)[-1]
        emit("ERROR " + self.name, error=f"{t.__name__}: {line}", at=f"{os.path.basename(at.filename)}:{at.lineno}")
        print(f"# {SECTION} {self.name}: {t.__name__}: {line}", flush=True)
        return True


def late():
    if DEADLINE and time.time() > DEADLINE:
        raise Late("out of time")


def graph_us(fns, n=10, reps=7):
    """Median us per call of CUDA-graph replays; fns: one callable or a list that is cycled inside the graph."""
    late()
    fns = fns if isinstance(fns, list) else [fns]
    for f in fns:
        f()
    torch.cuda.synchronize()
    if DRY:
        return 0.0
    n = max(n, len(fns))
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(n):
            fns[i % len(fns)]()
    ts = []
    for i in range(reps + 2):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); b.synchronize()
        ts.append(a.elapsed_time(b) * 1000 / n)
    return sorted(ts[2:])[reps // 2]


def bench_us(f, rep=30, warmup=10):
    late()
    f(); torch.cuda.synchronize()
    if DRY:
        return 0.0
    return triton.testing.do_bench(f, rep=rep, warmup=warmup, return_mode="median") * 1000


def diff(a, b):
    """How many elements differ in bytes."""
    iv = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(iv) != b.contiguous().view(iv)).sum())


def cdiv(a, b):
    return -(-a // b)


def i32(x):
    return torch.tensor(x, dtype=torch.int32, device=DEV)


def rnd(*s, seed=0, scale=1.0):
    g = torch.Generator(device=DEV).manual_seed(seed)
    return (torch.randn(*s, generator=g, device=DEV) * scale).to(BF)
