"""Measurements that freeze DECISIONS (zoo/common/program.py), for one H200.

  python benchmarks/decisions.py            all sections: parallel compile pass, then each section alone in a process
  python benchmarks/decisions.py A1 D       only these   (A1 decode, A2 training forward, A3 backward, A4 head dim 256, B, C, D, E, F)
Environment: NOWARM=1 skips the compile pass, BUDGET seconds in all (230), OUT folder of decisions.jsonl.
Times named `graph` are of CUDA-graph replays (several calls in one graph, L2 warm); `bench` are triton do_bench medians.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback

T0 = time.time()
ALL = ["A1", "A2", "A3", "A4", "B", "D", "C", "E", "F"]
OUT = os.environ.get("OUT", ".")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", os.path.join(tempfile.gettempdir(), "decisions_fa4_cache"))
os.environ.setdefault("DG_JIT_CACHE_DIR", os.path.join(tempfile.gettempdir(), "decisions_dg_cache"))
DRY = os.environ.get("DECISIONS_DRY") == "1"
DEADLINE = float(os.environ.get("DECISIONS_DEADLINE", "0"))
ROWS, SECTION = [], "?"


def driver(names):
    end = T0 + float(os.environ.get("BUDGET", "230"))
    me = [sys.executable, os.path.abspath(__file__), "--section"]
    open(os.path.join(OUT, "decisions.jsonl"), "w").close()
    if os.environ.get("NOWARM") != "1":
        ps = []
        for n in names:
            env = dict(os.environ, DECISIONS_DRY="1", DECISIONS_DEADLINE=str(time.time() + 85))
            ps.append((n, subprocess.Popen(me + [n], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
        stop = time.time() + 95
        for n, p in ps:
            try:
                p.communicate(timeout=max(0.1, stop - time.time()))
            except subprocess.TimeoutExpired:
                p.kill()
                p.communicate()
            print(f"# compile pass {n}: rc {p.returncode} at {time.time() - T0:.0f} s", flush=True)
    group = [n for n in names if n[0] == "A"], [n for n in names if n[0] == "B"], [n for n in names if n[0] not in "AB"]
    for g in group:
        left = end - time.time()
        if not g or left < 8:
            continue
        rest = any(group[group.index(g) + 1:])
        left *= 0.55 if rest else 1.0   # no group may eat the later ones' time
        env = dict(os.environ, DECISIONS_DRY="0", DECISIONS_DEADLINE=str(time.time() + left - 4))
        p = subprocess.Popen(me + g, env=env)
        try:
            p.wait(timeout=left)
        except subprocess.TimeoutExpired:
            p.kill()
        print(f"# {g}: rc {p.poll()} at {time.time() - T0:.0f} s", flush=True)
    print("\n==== table ====")
    for line in open(os.path.join(OUT, "decisions.jsonl")):
        r = json.loads(line)
        print(" ".join([r.pop("section"), r.pop("what")] + [f"{k}={v}" for k, v in r.items()]))
    print(f"total {time.time() - T0:.0f} s")


if __name__ == "__main__" and "--section" not in sys.argv:
    driver(sys.argv[1:] or ALL)
    sys.exit(0)

import torch
import triton
import triton.language as tl

DEV = "cuda" if torch.cuda.is_available() else "cpu"
BF, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def emit(what, **kw):
    r = dict(section=SECTION, what=what, **{k: (float(f"{v:.5g}") if isinstance(v, float) else v) for k, v in kw.items()})
    ROWS.append(r)
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


def rel(a, ref):
    return float((a.double() - ref).norm() / ref.norm())


def cdiv(a, b):
    return -(-a // b)


# ------------------------------------------------------------------ A: attention
@triton.jit
def merge_kernel(O, L, NSEG, OFF, OUT, LSE, T, STRIDE, LR, LH, S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, TRAIN: tl.constexpr):
    """Left to right over key segments in FP32, one rounding. TRAIN: part s of row r lies at distance NSEG[r]-1-s."""
    r = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, H)
    d = tl.arange(0, D)
    n = tl.load(NSEG + r)
    if not TRAIN:
        n = (n + S - 1) // S
    m = tl.full((H,), -float("inf"), tl.float32)
    for s in range(n):
        if TRAIN:
            off = tl.load(OFF + (n - 1 - s))
            li = (n - 1 - s).to(tl.int64) * H * T + h * (T - off) + (r - off)
        else:
            li = (r * STRIDE + s) * LR + h * LH
        m = tl.maximum(m, tl.load(L + li))
    acc = tl.zeros((H, D), tl.float32)
    den = tl.zeros((H,), tl.float32)
    for s in range(n):
        if TRAIN:
            off = tl.load(OFF + (n - 1 - s))
            li = (n - 1 - s).to(tl.int64) * H * T + h * (T - off) + (r - off)
            oi = ((n - 1 - s).to(tl.int64) * T + r) * H * D
        else:
            li = (r * STRIDE + s) * LR + h * LH
            oi = (r * STRIDE + s) * H * D
        w = tl.exp(tl.load(L + li) - m)
        o = tl.load(O + oi + h[:, None] * D + d[None, :]).to(tl.float32)
        acc = acc + w[:, None] * o
        den = den + w
    tl.store(OUT + r * H * D + h[:, None] * D + d[None, :], (acc / den[:, None]).to(OUT.dtype.element_ty))
    tl.store(LSE + h * T + r, m + tl.log(den))


def i32(x):
    return torch.tensor(x, dtype=torch.int32, device=DEV)


class SegTrain:
    """Packed documents; key segments of S positions. Distance d pairs query chunk c with key chunk c-d: one varlen call a distance,
    on plain views (no copies); pairs that would cross documents get seqused_k = 0 and are never read by the merge."""
    def __init__(self, lens, S):
        chunks = [(i, min(S, n - j)) for i, n in enumerate(lens) for j in range(0, n, S)]
        self.S, self.T, self.nd = S, sum(lens), max(cdiv(n, S) for n in lens)
        self.cu = [0]
        for _, n in chunks:
            self.cu.append(self.cu[-1] + n)
        C = len(chunks)
        rank, seen = [], {}
        for i, _ in chunks:
            rank.append(seen.get(i, 0)); seen[i] = rank[-1] + 1
        self.nseg = torch.cat([torch.full((n,), rank[c] + 1, dtype=torch.int32) for c, (_, n) in enumerate(chunks)]).to(DEV)
        self.off = i32([self.cu[d] for d in range(self.nd)])
        self.cuq = [i32([x - self.cu[d] for x in self.cu[d:]]) for d in range(self.nd)]
        self.cuk = [i32(self.cu[:C - d + 1]) for d in range(self.nd)]
        self.used = [i32([chunks[c - d][1] if chunks[c][0] == chunks[c - d][0] else 0 for c in range(d, C)]) for d in range(self.nd)]
        self.kend = [self.cu[C - d] for d in range(self.nd)]

    def alloc(self, H, D):
        self.o = torch.empty(self.nd, self.T, H, D, dtype=BF, device=DEV)
        self.l = torch.empty(self.nd, H * self.T, dtype=F32, device=DEV)
        self.out = torch.empty(self.T, H, D, dtype=BF, device=DEV)
        self.lse = torch.empty(H, self.T, dtype=F32, device=DEV)

    def parts(self, call, q, k, v):
        H = q.shape[1]
        for d in range(self.nd):
            a, b = self.cu[d], self.kend[d]
            call(q[a:], k[:b], v[:b], self.o[d, a:], self.l[d, :H * (self.T - a)].view(H, self.T - a), self.cuq[d], self.cuk[d],
                 None if d == 0 else self.used[d], d == 0)

    def merge(self):
        _, T, H, D = self.o.shape
        merge_kernel[(T,)](self.o, self.l, self.nseg, self.off, self.out, self.lse, T, 0, 0, 0, S=self.S, H=H, D=D, TRAIN=True, num_warps=4)
        return self.out, self.lse


def fwd():
    from flash_attn.cute.interface import _flash_attn_fwd
    return _flash_attn_fwd


def seg_train(st, q, k, v):
    f = fwd()
    def call(q, k, v, o, l, cq, ck, used, causal):
        f(q, k, v, cu_seqlens_q=cq, cu_seqlens_k=ck, seqused_k=used, max_seqlen_q=st.S, max_seqlen_k=st.S, causal=causal, num_splits=1,
          out=o, lse=l)
    st.parts(call, q, k, v)
    return st.merge()


def one_train(q, k, v, cu, mx, lse=True):
    r = fwd()(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=mx, max_seqlen_k=mx, causal=True, num_splits=1, return_lse=lse)
    return r[0], r[1]


BATCH_FORM = True   # A1 sets it to False should FA4 refuse q [N, 1, H, D] with a page table


class Decode:
    """N sequences, one query each, paged cache; `lens` includes the query's own position."""
    def __init__(self, lens, H, HK, D, page, S=None, kv=None, seed=0):
        g = torch.Generator(device=DEV).manual_seed(seed)
        N, per = len(lens), (S or page) // page
        B = cdiv(cdiv(max(lens), page), per) * per
        npages = [cdiv(n, page) for n in lens]
        tot = sum(npages)
        perm = torch.randperm(tot, generator=torch.Generator().manual_seed(seed)).tolist()
        self.k = torch.empty(tot, page, HK, D, dtype=BF, device=DEV)
        self.v = torch.empty(tot, page, HK, D, dtype=BF, device=DEV)
        if kv is None:
            self.k.normal_(generator=g); self.v.normal_(generator=g)
        table, p = torch.zeros(N, B, dtype=torch.int32), 0
        for i in range(N):
            table[i, :npages[i]] = torch.tensor(perm[p:p + npages[i]], dtype=torch.int32); p += npages[i]
            if kv is not None:
                for j in range(npages[i]):
                    lo, hi = j * page, min((j + 1) * page, kv[0].shape[0])
                    self.k[int(table[i, j]), :hi - lo] = kv[0][lo:hi]; self.v[int(table[i, j]), :hi - lo] = kv[1][lo:hi]
        self.table, self.lens, self.N, self.B, self.S, self.H, self.D = table.to(DEV), i32(lens), N, B, S, H, D
        self.q = torch.empty(N, 1, H, D, dtype=BF, device=DEV).normal_(generator=g)
        self.mk = B * page
        if S:
            self.ns = B // per
            self.vt = self.table.view(N * self.ns, per)
            self.seg0 = torch.arange(self.ns, device=DEV, dtype=torch.int32)[None, :] * S
            self.o = torch.empty(N * self.ns, 1, H, D, dtype=BF, device=DEV)
            self.l = torch.empty(N * self.ns, H, 1, dtype=F32, device=DEV)
            self.cus = torch.arange(N * self.ns + 1, dtype=torch.int32, device=DEV)
        self.out = torch.empty(N, 1, H, D, dtype=BF, device=DEV)
        self.lse = torch.empty(H, N, dtype=F32, device=DEV)
        self.cu = torch.arange(N + 1, dtype=torch.int32, device=DEV)

    def one(self, batch=None, lse=None, **kw):
        """One pass: batch form q [N,1,H,D], or the packed form with cu_seqlens_q that the laws were checked with."""
        batch = BATCH_FORM if batch is None else batch
        q, o = (self.q, self.out) if batch else (self.q[:, 0], self.out[:, 0])
        a = {} if batch else dict(cu_seqlens_q=self.cu, max_seqlen_q=1)
        fwd()(q, self.k, self.v, seqused_k=self.lens, page_table=self.table, max_seqlen_k=self.mk, causal=True, num_splits=1, out=o,
              lse=lse, **a, **kw)
        return self.out

    def parts(self, **kw):
        used = (self.lens[:, None] - self.seg0).clamp(0, self.S).view(-1)
        q = self.q.expand(self.N, self.ns, self.H, self.D).reshape(self.N * self.ns, 1, self.H, self.D)
        return q, used

    def seg(self, causal=True, batch=None, **kw):
        q, used = self.parts()
        batch = BATCH_FORM if batch is None else batch
        o, l, a = self.o, self.l, {}
        if not batch:
            q, o, l, a = q[:, 0], o[:, 0], self.l.view(self.H, -1), dict(cu_seqlens_q=self.cus, max_seqlen_q=1)
        fwd()(q, self.k, self.v, seqused_k=used, page_table=self.vt, max_seqlen_k=self.S, causal=causal, num_splits=1, out=o, lse=l, **a, **kw)
        return self.merge(batch)

    def merge(self, batch=True):
        lr, lh = (self.H, 1) if batch else (1, self.N * self.ns)
        merge_kernel[(self.N,)](self.o, self.l, self.lens, self.lens, self.out, self.lse, self.N, self.ns, lr, lh, S=self.S, H=self.H, D=self.D,
                                TRAIN=False, num_warps=4)
        return self.out


def attn_ref(q, k, v, heads):
    """float64 causal attention of one document, a few query heads: [T, len(heads), D]."""
    g, T = q.shape[1] // k.shape[1], q.shape[0]
    out = []
    for h in heads:
        s = q[:, h].double() @ k[:, h // g].double().T / q.shape[2] ** 0.5
        s.masked_fill_(torch.ones(T, T, dtype=torch.bool, device=q.device).triu_(1), -float("inf"))
        out.append(torch.softmax(s, -1) @ v[:, h // g].double())
        del s
    return torch.stack(out, 1)


def rnd(*s, seed=0, scale=1.0):
    g = torch.Generator(device=DEV).manual_seed(seed)
    return (torch.randn(*s, generator=g, device=DEV) * scale).to(BF)


POS = [0, 1, 127, 128, 1023, 1024, 2047, 2048, 2049, 4095]


def A1():
    global BATCH_FORM
    H, HK, D, T = 32, 8, 128, 4096
    with sect("batch form"):
        BATCH_FORM = False
        Decode([5, 300], H, HK, D, 128).one(batch=True)
        torch.cuda.synchronize()
        BATCH_FORM = True
    q, k, v = rnd(T, H, D, seed=1, scale=2.0), rnd(T, HK, D, seed=2), rnd(T, HK, D, seed=3)
    cu = i32([0, T])
    with sect("one pass bytes"):
        o, l = one_train(q, k, v, cu, T)
        emit("training o with lse vs without, one pass", differ=diff(o, one_train(q, k, v, cu, T, False)[0]))
        dc = Decode([p + 1 for p in POS], H, HK, D, 128, kv=(k, v))
        dc.q.copy_(q[POS][:, None])
        a = dc.one().clone()[:, 0]
        emit("decode (batch form) row vs training row, one pass", differ=[diff(a[i], o[p]) for i, p in enumerate(POS)], pos=POS)
        emit("decode packed (cu_seqlens_q) vs batch form, one pass", differ=diff(dc.one(batch=False)[:, 0], a))
        l2 = torch.empty(*((len(POS), H, 1) if BATCH_FORM else (H, len(POS))), dtype=F32, device=DEV)
        emit("decode with lse vs without, one pass", differ=diff(dc.one(lse=l2)[:, 0], a), lse_differ=diff(l2[:, :, 0] if BATCH_FORM else l2.T, l[:, POS].T))
        with sect("pack_gqa=False"):
            emit("decode pack_gqa=False vs default True, one pass", differ=diff(dc.one(pack_gqa=False)[:, 0], a))
        ref = attn_ref(q, k, v, [0, 13, 31])
        emit("accuracy one pass, training 4096", rel=rel(o[:, [0, 13, 31]], ref), floor=rel(ref.to(BF), ref), max=float((o[:, [0, 13, 31]] - ref).abs().max()))
    for S in (1024, 2048):
        with sect(f"segment {S} bytes"):
            st = SegTrain([T], S); st.alloc(H, D)
            os_, ls = seg_train(st, q, k, v)
            os_, ls = os_.clone(), ls.clone()
            emit(f"accuracy segments {S}, training 4096", rel=rel(os_[:, [0, 13, 31]], ref), max=float((os_[:, [0, 13, 31]] - ref).abs().max()))
            emit(f"segments {S} first segment = one pass", differ=diff(os_[:S], o[:S]), lse_max=float((ls - l).abs().max()))
            dc = Decode([p + 1 for p in POS], H, HK, D, 128, S=S, kv=(k, v))
            dc.q.copy_(q[POS][:, None])
            b = dc.seg().clone()
            emit(f"decode row vs training row, segments {S}", differ=[diff(b[i, 0], os_[p]) for i, p in enumerate(POS)], lse_differ=diff(dc.lse, ls[:, POS]))
            emit(f"segments {S} repeat", differ=diff(dc.seg(), b))
            with sect("seg packed"):
                emit(f"segments {S} decode packed (cu_seqlens_q) form", differ=diff(dc.seg(batch=False), b))
            with sect("seg pack_gqa"):
                emit(f"segments {S} decode pack_gqa=False", differ=diff(dc.seg(pack_gqa=False), b))
            with sect("seg noncausal"):
                emit(f"segments {S} decode causal=False", differ=diff(dc.seg(causal=False), b))
    if DRY:
        return
    for L in (600, 1536, 4096, 32768):
        for N in (1, 8, 64):
            with sect(f"decode time {N}x{L}"):
                row, n = {}, 4 if N * L > 500000 else 10
                dc = Decode([L] * N, H, HK, D, 128)
                row["one_packed"] = graph_us(lambda: dc.one(batch=False), n)
                row["one_batch"] = graph_us(lambda: dc.one(), n) if BATCH_FORM else None
                row["one_nopack_gqa"] = graph_us(lambda: dc.one(pack_gqa=False), n)
                del dc
                for S in (1024, 2048):
                    ds = Decode([L] * N, H, HK, D, 128, S=S)
                    row[f"seg{S}"] = graph_us(lambda: ds.seg(), n)
                    row[f"seg{S}_merge"] = graph_us(lambda: ds.merge(BATCH_FORM), n)
                    if S == 1024:
                        row["seg1024_packed"] = graph_us(lambda: ds.seg(batch=False), n)
                        row["seg1024_prep"] = graph_us(lambda: ds.parts(), n)
                        row["seg1024_causalFalse"] = graph_us(lambda: ds.seg(causal=False), n)
                    del ds
                row["kv_floor_at_4.0TB/s"] = N * L * HK * D * 4 / 4.0e6
                emit(f"decode graph us batch {N} context {L}", **row)
                torch.cuda.empty_cache()


def A2():
    H, HK, D = 32, 8, 128
    for name, lens in (("1x4096", [4096]), ("8x4096", [4096] * 8), ("ragged", [3000, 1, 1024, 1025, 129]), ("1x32768", [32768])):
        with sect("train " + name):
            T = sum(lens)
            q, k, v = rnd(T, H, D, seed=1), rnd(T, HK, D, seed=2), rnd(T, HK, D, seed=3)
            cu = i32([0] + torch.tensor(lens).cumsum(0).tolist())
            row = dict(one_pass=bench_us(lambda: one_train(q, k, v, cu, max(lens), False)),
                       one_pass_lse=bench_us(lambda: one_train(q, k, v, cu, max(lens))))
            o = one_train(q, k, v, cu, max(lens))[0]
            for S in (1024, 2048):
                st = SegTrain(lens, S); st.alloc(H, D)
                row[f"seg{S}"] = bench_us(lambda: seg_train(st, q, k, v))
                row[f"seg{S}_merge"] = bench_us(lambda: st.merge())
                row[f"seg{S}_rel_to_one"] = rel(st.out, o.double()) if T < 20000 else None
                row[f"seg{S}_scratch_GB"] = st.o.numel() * 2 / 1e9
                if name == "ragged":   # packed = alone
                    whole, at = st.out.clone(), 0
                    bad = []
                    for n in lens:
                        s1 = SegTrain([n], S); s1.alloc(H, D)
                        bad.append(diff(seg_train(s1, q[at:at + n].contiguous(), k[at:at + n].contiguous(), v[at:at + n].contiguous())[0], whole[at:at + n]))
                        at += n
                    row[f"seg{S}_packed_vs_alone_differ"] = bad
                del st
            emit("training forward bench us " + name, **row)
            torch.cuda.empty_cache()


def bwd(q, k, v, o, do, lse, cu, mx, det=True):
    from flash_attn.cute.interface import _flash_attn_bwd
    return _flash_attn_bwd(q, k, v, o, do, lse, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=mx, max_seqlen_k=mx, deterministic=det)


def A3():
    for S in (None, 128):
        with sect(f"backward check S={S}"):
            T, H, HK, D = 300, 4, 1, 128
            q, k, v, do = (rnd(T, h, D, seed=s) for s, h in ((1, H), (2, HK), (3, HK), (4, H)))
            cu = i32([0, T])
            if S is None:
                o, l = one_train(q, k, v, cu, T)
            else:
                st = SegTrain([T], S); st.alloc(H, D)
                o, l = seg_train(st, q, k, v)
            got = bwd(q, k, v, o, do, l, cu, T)
            a = [x.double().requires_grad_() for x in (q, k, v)]
            r = attn_ref(*a, range(H))
            want = torch.autograd.grad(r, a, do.double())
            emit(f"backward vs float64 autograd, {'one pass' if S is None else f'segments {S}'}", o=rel(o, r.detach()), dq=rel(got[0], want[0]),
                 dk=rel(got[1], want[1]), dv=rel(got[2], want[2]), floor=[rel(w.to(BF), w) for w in want])
            again = [bwd(q, k, v, o, do, l, cu, T) for _ in range(3)]
            emit("backward repeat (deterministic) differ", differ=[sum(diff(x[i], got[i]) for x in again) for i in range(3)])
    if DRY:
        return
    H, HK, D = 32, 8, 128
    for name, lens in (("1x4096", [4096]), ("8x4096", [4096] * 8), ("1x32768", [32768])):
        with sect("backward time " + name):
            T = sum(lens)
            q, k, v, do = (rnd(T, h, D, seed=s) for s, h in ((1, H), (2, HK), (3, HK), (4, H)))
            cu = i32([0] + torch.tensor(lens).cumsum(0).tolist())
            o, l = one_train(q, k, v, cu, max(lens))
            row = dict(deterministic=bench_us(lambda: bwd(q, k, v, o, do, l, cu, max(lens))))
            g = bwd(q, k, v, o, do, l, cu, max(lens))
            row["repeat_differ"] = [diff(x, y) for x, y in zip(g, bwd(q, k, v, o, do, l, cu, max(lens)))]
            emit("backward bench us " + name, **row)
    if not DRY:
        with sect("backward packed = alone"):
            lens, at, bad = [700, 300, 1025], 0, []
            T = sum(lens)
            q, k, v, do = (rnd(T, h, D, seed=s) for s, h in ((1, H), (2, HK), (3, HK), (4, H)))
            cu = i32([0, 700, 1000, 2025])
            o, l = one_train(q, k, v, cu, 1025)
            g = bwd(q, k, v, o, do, l, cu, 1025)
            for n in lens:
                s = slice(at, at + n); at += n
                g1 = bwd(q[s].contiguous(), k[s].contiguous(), v[s].contiguous(), o[s].contiguous(), do[s].contiguous(), l[:, s].contiguous(), i32([0, n]), n)
                bad.append([diff(x[s], y) for x, y in zip(g, g1)])
            emit("backward packed vs alone differ [dq,dk,dv] a document", differ=bad)


def A4():
    H, HK, D, T, page = 16, 2, 256, 2048, 80
    q, k, v = rnd(T, H, D, seed=1), rnd(T, HK, D, seed=2), rnd(T, HK, D, seed=3)
    pos = [0, 1, 79, 80, 1023, 1024, 2047]
    with sect("hd256 bytes"):
        o, _ = one_train(q, k, v, i32([0, T]), T, False)
        dc = Decode([p + 1 for p in pos], H, HK, D, page, kv=(k, v)); dc.q.copy_(q[pos][:, None])
        emit("hd256 page 80 decode row vs training row", differ=[diff(dc.one()[i, 0], o[p]) for i, p in enumerate(pos)])
    if DRY:
        return
    for L in (1536, 4096, 32768):
        for N in (1, 8, 64):
            with sect(f"hd256 time {N}x{L}"):
                if N * L > 600000 and L == 32768 and N > 8:
                    continue
                dc = Decode([L] * N, H, HK, D, page)
                emit(f"hd256 decode graph us batch {N} context {L}", one_batch=graph_us(lambda: dc.one()))


# ------------------------------------------------------------------ GEMMs
@triton.jit
def gemm_kernel(A, B, C, M, N, K, KP, sa, sb, sc, sp, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C[p] = A @ B.T over k in [p*KP, (p+1)*KP), ascending, one FP32 accumulator (p = program 2; one part: KP = K)."""
    pm, pn, p = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    rm, rn, rk = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), p * KP + tl.arange(0, BK)
    a = A + (rm % M).to(tl.int64)[:, None] * sa + rk[None, :]
    b = B + (rn % N).to(tl.int64)[None, :] * sb + rk[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, KP, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK
    c = C + p.to(tl.int64) * sp + rm.to(tl.int64)[:, None] * sc + rn[None, :]
    tl.store(c, acc.to(C.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def tree_kernel(P, C, MN, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.zeros((BLOCK,), tl.float32)
    s0 = t
    s1 = t
    s2 = t
    s3 = t
    for p in tl.static_range(PARTS):
        t = tl.load(P + p * MN + i, mask=i < MN, other=0.0)
        if p & 1 == 0:
            s0 = t
        else:
            t = s0 + t
            if (p >> 1) & 1 == 0:
                s1 = t
            else:
                t = s1 + t
                if (p >> 2) & 1 == 0:
                    s2 = t
                else:
                    t = s2 + t
                    if (p >> 3) & 1 == 0:
                        s3 = t
                    else:
                        t = s3 + t
    tl.store(C + i, t.to(C.dtype.element_ty), mask=i < MN)


@triton.jit
def parts_kernel(A, B, C, M, N, KP, sa, sb, sc, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """All parts in one program, the adjacent-pair tree kept as a binary counter."""
    rm, rn, rk = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    a = A + (rm % M).to(tl.int64)[:, None] * sa + rk[None, :]
    b = B + (rn % N).to(tl.int64)[None, :] * sb + rk[:, None]
    t = tl.zeros((BM, BN), tl.float32)
    s0 = t
    s1 = t
    s2 = t
    s3 = t
    for p in tl.static_range(PARTS):
        t = tl.zeros((BM, BN), tl.float32)
        for _ in range(0, KP, BK):
            t = tl.dot(tl.load(a), tl.load(b), t)
            a += BK
            b += BK
        if p & 1 == 0:
            s0 = t
        else:
            t = s0 + t
            if (p >> 1) & 1 == 0:
                s1 = t
            else:
                t = s1 + t
                if (p >> 2) & 1 == 0:
                    s2 = t
                else:
                    t = s2 + t
                    if (p >> 3) & 1 == 0:
                        s3 = t
                    else:
                        t = s3 + t
    tl.store(C + rm.to(tl.int64)[:, None] * sc + rn[None, :], t.to(C.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


def gemm(a, b, c, BM, BN, parts=1, warps=None, stages=4, BK=64):
    M, K = a.shape
    N = b.shape[0]
    sp = c.stride(0) if c.dim() == 3 else 0
    gemm_kernel[(cdiv(N, BN), cdiv(M, BM), parts)](a, b, c, M, N, K, K // parts, a.stride(0), b.stride(0), c.stride(-2), sp, BM=BM, BN=BN, BK=BK,
                                                   num_warps=warps or (8 if BM * BN >= 16384 else 4), num_stages=stages)
    return c


@triton.jit
def grouped_kernel(A, W, C, TE, TR, TN, N, sa, sw, sc, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    t, pn = tl.program_id(1), tl.program_id(0)
    e = tl.load(TE + t)
    if e < 0:
        return
    r0, n = tl.load(TR + t), tl.load(TN + t)
    i, rn, rk = tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    live = i < n
    a = A + (r0 + i).to(tl.int64)[:, None] * sa + rk[None, :]
    b = W + e.to(tl.int64) * sw + rn.to(tl.int64)[None, :] * K + rk[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(a, mask=live[:, None], other=0.0), tl.load(b), acc)
        a += BK
        b += BK
    tl.store(C + (r0 + i).to(tl.int64)[:, None] * sc + rn[None, :], acc.to(C.dtype.element_ty), mask=live[:, None])


def tile_table(ids, X, BM, tiles):
    """ids [R] int64 expert of each sorted row -> (expert or -1, first row, rows) of each row tile; device only, no sync."""
    cnt = torch.zeros(X, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    nt = (cnt + BM - 1) // BM
    end, off = nt.cumsum(0), cnt.cumsum(0) - cnt
    t = torch.arange(tiles, device=ids.device)
    e = torch.searchsorted(end, t, right=True)
    ec = e.clamp(max=X - 1)
    j = t - (end - nt)[ec]
    dead = e >= X
    return (torch.where(dead, -1, e).int(), torch.where(dead, 0, off[ec] + j * BM).int(), torch.where(dead, 0, (cnt[ec] - j * BM).clamp(max=BM)).int())


def grouped(a, w, c, tab, BM, BN, BK=64, stages=4):
    X, N, K = w.shape
    grouped_kernel[(cdiv(N, BN), tab[0].numel())](a, w, c, *tab, N, a.stride(0), w.stride(0), c.stride(0), K=K, BM=BM, BN=BN, BK=BK,
                                                  num_warps=8 if BM * BN >= 16384 else 4, num_stages=stages)
    return c


def placements(X, D, F, T, seed=0):
    """Relative errors against float64 of the three places of the route weight (small expert count in use, FP32 GEMMs)."""
    g = torch.Generator(device=DEV).manual_seed(seed)
    x = torch.randn(T, D, generator=g, device=DEV).to(BF)
    ids = torch.rand(T, X, generator=g, device=DEV).argsort(1)[:, :8].sort(1)[0]
    wt = torch.softmax(torch.randn(T, 8, generator=g, device=DEV), 1)
    res = {k: torch.empty(T, D, dtype=F64, device=DEV) for k in "ref a b c a_contrib b_contrib".split()}
    W = {}
    def con(y, e):  # y [8, D] FP32 addends in slot order -> contributor roundings, FP64 adjacent pairs
        per, parts = cdiv(X, 8), []
        for j in range(8):
            s = torch.zeros(D, dtype=F32, device=DEV)
            for i in range(8):
                if int(e[i]) // per == j:
                    s = s + y[i]
            parts.append(s.to(BF).double())
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
        return parts[0].to(F32).to(BF)
    def plain(y):
        s = y[0]
        for i in range(1, 8):
            s = s + y[i]
        return s.to(BF)
    sw = lambda g_, u: g_ / (1 + torch.exp(-g_)) * u
    idl = ids.tolist()
    for t in range(T):
        ya, yb, yc, yr = [], [], [], torch.zeros(D, dtype=F64, device=DEV)
        for i, e in enumerate(idl[t]):
            if e not in W:
                ge = torch.Generator(device=DEV).manual_seed(1000 + e)
                W[e] = ((torch.randn(2 * F, D, generator=ge, device=DEV) / D ** 0.5).to(BF), (torch.randn(D, F, generator=ge, device=DEV) / F ** 0.5).to(BF))
            w1, w2 = W[e]
            h64 = w1.double() @ x[t].double()
            yr += float(wt[t, i]) * (w2.double() @ sw(h64[:F], h64[F:]))
            h = h64.float().to(BF).float()
            act = sw(h[:F], h[F:])
            down = (w2.double() @ act.to(BF).double()).float()
            ya.append(down * wt[t, i])
            yb.append((w2.double() @ (act * wt[t, i]).to(BF).double()).float().to(BF).float())
            yc.append(down.to(BF).float() * wt[t, i])
        for k, val in dict(ref=yr, a=plain(ya), b=plain(yb), c=con(yc, idl[t]), a_contrib=con(ya, idl[t]), b_contrib=con(yb, idl[t])).items():
            res[k][t] = val.double()
    ref = res.pop("ref")
    return dict({k: rel(v_, ref) for k, v_ in res.items()}, floor=rel(ref.to(BF), ref), c_max=float((res["c"] - ref).abs().max()),
                a_max=float((res["a"] - ref).abs().max()), b_max=float((res["b"] - ref).abs().max()))


def B():
    import deep_gemm as dg
    with sect("alignment"):
        emit("deep_gemm", version=dg.__version__, mk_alignment=int(dg.get_mk_alignment_for_contiguous_layout()),
             theoretical={m: int(dg.get_theoretical_mk_alignment_for_contiguous_layout(m)) for m in (1, 16, 64, 256)})
    shapes = (("30B-A3B", 128, 2048, 768), ("35B-A3B", 256, 2048, 512))
    for name, X, D, F in shapes:
        if not DRY:
            with sect("placements " + name):
                late()
                emit("route weight placement, relative error " + name, **placements(X, D, F, 12))
        w1, w2 = rnd(X, 2 * F, D, seed=1, scale=D ** -0.5), rnd(X, D, F, seed=2, scale=F ** -0.5)
        for T in (1, 8, 64, 4096):
            R, nset = T * 8, (4 if T <= 8 else 1)
            sets = []
            for s in range(nset):
                g = torch.Generator(device=DEV).manual_seed(10 + s)
                sets.append(torch.rand(T, X, generator=g, device=DEV).argsort(1)[:, :8].reshape(-1).sort()[0])
            for part, w in (("gate_up", w1), ("down", w2)):
                with sect(f"experts {name} {part} T={T}"):
                    N, K = w.shape[1:]
                    a, row = rnd(R, K, seed=3), {}
                    # ---- Triton, best of a few tiles; every output kept to compare
                    base = None
                    for BM, BN in (((16, 64), (16, 128), (16, 256)) if T <= 64 else ((64, 128), (128, 128), (64, 256), (128, 256))):
                        with sect(f"triton {BM}x{BN}"):
                            if N % BN:
                                continue
                            tiles = min(R, R // BM + X)
                            tabs = [tile_table(i, X, BM, tiles) for i in sets]
                            outs = [torch.zeros(R, N, dtype=BF, device=DEV) for _ in sets]
                            fs = [lambda t=t, o=o: grouped(a, w, o, t, BM, BN) for t, o in zip(tabs, outs)]
                            row[f"triton{BM}x{BN}"] = graph_us(fs, 8)
                            if base is None:
                                base = outs[0]
                            elif diff(base, outs[0]):
                                row[f"DIFFER_triton{BM}x{BN}"] = diff(base, outs[0])
                    if part == "gate_up":
                        row["table_us"] = graph_us(lambda: tile_table(sets[0], X, 64, min(R, R // 64 + X)), 4)
                    # ---- torch._grouped_mm
                    with sect("torch._grouped_mm"):
                        offs = [torch.bincount(i, minlength=X).cumsum(0).int() for i in sets]
                        o2 = [torch._grouped_mm(a, w.transpose(1, 2), offs=f) for f in offs]
                        row["torch"] = graph_us([lambda f=f: torch._grouped_mm(a, w.transpose(1, 2), offs=f) for f in offs], 8)
                        row["torch_differ"] = diff(base, o2[0])
                    # ---- DeepGEMM contiguous: rows of an expert padded to 128, the padded rows -1
                    cnts = [torch.bincount(i, minlength=X) for i in sets]
                    for al in ((128,) if T == 4096 else (128, 64)):
                        with sect(f"dg contiguous align {al}"):
                            if al != 128:
                                dg.set_mk_alignment_for_contiguous_layout(al)
                            Mp = min(R * al, cdiv(R, al) * al + X * al)
                            calls = []
                            for ids, cnt in zip(sets, cnts):
                                pad = (cnt + al - 1) // al * al
                                start, off = pad.cumsum(0) - pad, cnt.cumsum(0) - cnt
                                dst = start[ids] + torch.arange(R, device=DEV) - off[ids]
                                lay = torch.full((Mp,), -1, dtype=torch.int32, device=DEV)
                                blk = torch.repeat_interleave(torch.arange(X, device=DEV, dtype=torch.int32), pad)
                                lay[:blk.numel()] = blk
                                ap = torch.zeros(Mp, K, dtype=BF, device=DEV); ap[dst] = a
                                d = torch.zeros(Mp, N, dtype=BF, device=DEV)
                                calls.append((ap, d, lay, dst))
                            fs = [lambda c=c: dg.m_grouped_bf16_gemm_nt_contiguous(c[0], w, c[1], c[2]) for c in calls]
                            key = "dg_contig" + ("" if al == 128 else str(al))
                            row[key] = graph_us(fs, 8)
                            row[key + "_differ"] = diff(base, calls[0][1][calls[0][3]])
                            with sect("no zero padding"):
                                row[key + "_nozero"] = graph_us([lambda c=c: dg.m_grouped_bf16_gemm_nt_contiguous(c[0], w, c[1], c[2], ensure_zero_padding=False) for c in calls], 8)
                            if T == 4096 and part == "down" and not DRY:
                                o0 = (cnts[0].cumsum(0) - cnts[0]).tolist()
                                bad = 0
                                for e in (0, 5, X - 1):
                                    n = int(cnts[0][e]); de = torch.empty(n, N, dtype=BF, device=DEV)
                                    dg.bf16_gemm_nt(a[o0[e]:o0[e] + n].contiguous(), w[e], de)
                                    bad += diff(de, base[o0[e]:o0[e] + n])
                                row["dg_plain_per_expert_differ"] = bad
                            del calls
                        if al != 128:
                            dg.set_mk_alignment_for_contiguous_layout(128)
                    # ---- DeepGEMM masked: [X, Mmax, K]
                    with sect("dg masked"):
                        Mx = 128 if T <= 128 else cdiv(int(cnts[0].max()), 128) * 128
                        calls = []
                        for ids, cnt in zip(sets, cnts):
                            off = cnt.cumsum(0) - cnt
                            dst = ids * Mx + torch.arange(R, device=DEV) - off[ids]
                            ap = torch.zeros(X * Mx, K, dtype=BF, device=DEV); ap[dst] = a
                            calls.append((ap.view(X, Mx, K), torch.zeros(X, Mx, N, dtype=BF, device=DEV), cnt.int(), dst))
                        em = max(1, cdiv(R, X))
                        row["dg_masked"] = graph_us([lambda c=c: dg.m_grouped_bf16_gemm_nt_masked(c[0], w, c[1], c[2], em) for c in calls], 8)
                        row["dg_masked_differ"] = diff(base, calls[0][1].view(X * Mx, N)[calls[0][3]])
                        del calls
                    row["weight_floor_4.0TB/s"] = float((cnts[0] > 0).sum()) * N * K * 2 / 4.0e6
                    emit(f"experts graph us {name} {part} tokens {T}", **row)
                    torch.cuda.empty_cache()


def C():
    for N, K in ((128, 2048), (256, 2048), (64, 2048), (1, 2048), (24, 16384), (256, 6144), (256, 4096)):
        w = rnd(N, K, seed=1, scale=K ** -0.5)
        for M in (1, 64, 4096):
            with sect(f"k_parts {N}x{K} rows {M}"):
                a, row, BN = rnd(M, K, seed=2), {}, min(64, max(16, triton.next_power_of_2(N)))
                tm = [(16, BN)] if M == 1 else [(16, BN), (64, BN)] if M == 64 else [(64, BN), (128, BN)]
                ref = a.double() @ w.double().T
                for P in (1, 2, 4, 8, 16):
                    c, pc = torch.empty(M, N, dtype=F32, device=DEV), torch.empty(P, M, N, dtype=F32, device=DEV)
                    best, bestall, outs = (1e9, ""), (1e9, ""), []
                    for BM, bn in tm:
                        if P == 1:
                            f = lambda: gemm(a, w, c, BM, bn)
                        else:
                            def f():
                                gemm(a, w, pc, BM, bn, P)
                                tree_kernel[(cdiv(M * N, 1024),)](pc, c, M * N, PARTS=P, BLOCK=1024)
                        best = min(best, (graph_us(f, 20, 5), f"{BM}x{bn}"))
                        outs.append(c.clone())
                        if P > 1:
                            def g():
                                parts_kernel[(cdiv(N, bn), cdiv(M, BM))](a, w, c, M, N, K // P, a.stride(0), w.stride(0), c.stride(0), PARTS=P, BM=BM, BN=bn,
                                                                         BK=64, num_warps=4, num_stages=4)
                            bestall = min(bestall, (graph_us(g, 20, 5), f"{BM}x{bn}"))
                            outs.append(c.clone())
                    row[f"p{P}"] = round(best[0], 2)
                    if P > 1:
                        row[f"p{P}_one_kernel"] = round(bestall[0], 2)
                    if M == 4096:
                        row[f"p{P}_rel"] = rel(outs[0], ref)
                    if any(diff(outs[0], o) for o in outs):
                        row[f"p{P}_DIFFER"] = [diff(outs[0], o) for o in outs]
                row["cublas_bf16"] = graph_us(lambda: torch.matmul(a, w.T), 20, 5)
                if N % 8 == 0:
                    with sect("dg"):
                        import deep_gemm as dg
                        d = torch.empty(M, N, dtype=F32, device=DEV)
                        row["dg_f32"] = graph_us(lambda: dg.bf16_gemm_nt(a, w, d), 20, 5)
                        row["dg_vs_p1_differ"] = diff(d, gemm(a, w, torch.empty_like(d), tm[-1][0], BN))
                emit(f"narrow linear graph us {N}x{K} rows {M}", **row)


def D():
    import deep_gemm as dg
    V, K, CH = 151936, 4096, 16384
    w = rnd(V, K, seed=1, scale=K ** -0.5)
    for M in (1, 64):
        with sect(f"head rows {M}"):
            a, row = rnd(M, K, seed=2), {}
            d32, dbf, t32 = (torch.empty(M, V, dtype=t, device=DEV) for t in (F32, BF, F32))
            row["dg_f32"] = graph_us(lambda: dg.bf16_gemm_nt(a, w, d32), 4)
            row["dg_bf16"] = graph_us(lambda: dg.bf16_gemm_nt(a, w, dbf), 4)
            row["cublas_bf16"] = graph_us(lambda: torch.matmul(a, w.T), 4)
            for BM, BN in ((16, 128), (64, 128)):
                row[f"triton_f32_{BM}x{BN}"] = graph_us(lambda: gemm(a, w, t32, BM, BN), 4)
                row[f"f32_differ_{BM}x{BN}"] = diff(d32, t32)
            row["bf16_is_rounded_f32_differ"] = diff(dbf, d32.to(BF))
            emit(f"head graph us 151936x4096 rows {M}", **row)
    with sect("head chunks rows 4096"):
        M, row = 4096, {}
        a = rnd(M, K, seed=2)
        d32, dbf, t32 = (torch.empty(M, CH, dtype=t, device=DEV) for t in (F32, BF, F32))
        wc = w[CH:2 * CH]
        row["dg_f32_chunk"] = bench_us(lambda: dg.bf16_gemm_nt(a, wc, d32))
        row["dg_bf16_chunk"] = bench_us(lambda: dg.bf16_gemm_nt(a, wc, dbf))
        row["cublas_bf16_chunk"] = bench_us(lambda: torch.matmul(a, wc.T))
        for BM, BN in ((128, 128), (128, 256)):
            row[f"triton_f32_{BM}x{BN}"] = bench_us(lambda: gemm(a, wc, t32, BM, BN, stages=3))
            row[f"f32_differ_{BM}x{BN}"] = diff(d32, t32)
        row["bf16_is_rounded_f32_differ"] = diff(dbf, d32.to(BF))
        full = torch.empty(64, V, dtype=F32, device=DEV)
        dg.bf16_gemm_nt(a[:64].contiguous(), w, full)
        row["chunk_vs_full_width_64_rows_differ"] = diff(full[:, CH:2 * CH], d32[:64])
        tail = w[(V // CH) * CH:]
        dt = torch.empty(M, tail.shape[0], dtype=F32, device=DEV)
        dg.bf16_gemm_nt(a, tail, dt)
        row["tail_chunk_differ"] = diff(full[:, (V // CH) * CH:], dt[:64])
        if not DRY:
            def whole():
                for j in range(0, V, CH):
                    b = w[j:j + CH]
                    dg.bf16_gemm_nt(a, b, d32 if b.shape[0] == CH else dt)
            row["dg_f32_all_chunks"] = bench_us(whole)
        emit("head bench us chunk 16384 rows 4096", **row)
    with sect("host overhead"):
        a, b, d = rnd(1, 4096, seed=5), rnd(4096, 4096, seed=6), torch.empty(1, 4096, dtype=BF, device=DEV)
        def host(f):
            for _ in range(20):
                f()
            torch.cuda.synchronize(); t = time.perf_counter()
            for _ in range(200):
                f()
            t = time.perf_counter() - t
            torch.cuda.synchronize()
            return t * 1e6 / 200
        emit("host us a call (un-graphed; queueing only)", dg=host(lambda: dg.bf16_gemm_nt(a, b, d)), cublas=host(lambda: torch.mm(a, b.T, out=d)),
             triton=host(lambda: gemm(a, b, d, 16, 128)), dg_graph_us=graph_us(lambda: dg.bf16_gemm_nt(a, b, d), 20))
        x = torch.empty_like(d)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            dg.bf16_gemm_nt(a, b, x)
        x.zero_(); g.replay(); dg.bf16_gemm_nt(a, b, d)
        torch.cuda.synchronize()
        emit("deep_gemm captured in a graph", differ=diff(x, d), repeat=sum(diff(d, (dg.bf16_gemm_nt(a, b, x), x)[1]) for _ in range(5)))


@triton.jit
def norm_kernel(X, W, Y, SS, eps, M, R: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr, KIND: tl.constexpr):
    r, c = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, N)
    live = r[:, None] < M
    x = tl.load(X + r[:, None] * N + c[None, :], mask=live, other=0.0).to(tl.float32)
    s = x * x
    if KIND == 0:
        ss = tl.sum(s, axis=1)
    else:
        for i in tl.static_range(LOG):
            if KIND == 1:
                s = tl.sum(tl.reshape(s, (R, N >> (i + 1), 2)), axis=2)
            else:
                lo, hi = tl.split(tl.reshape(s, (R, N >> (i + 1), 2)))
                s = lo + hi
        ss = tl.sum(s, axis=1)  # one element a row
    inv = tl.rsqrt(ss / N + eps)
    y = x * inv[:, None] * tl.load(W + c)[None, :].to(tl.float32)
    tl.store(Y + r[:, None] * N + c[None, :], y.to(Y.dtype.element_ty), mask=live)
    tl.store(SS + r, ss, mask=r < M)


def pair_tree(x):
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def E():
    for N, heads in ((4096, 1), (128, 40)):
        w = rnd(N, seed=1)
        for M0 in (1, 64, 4096):
            M = M0 * heads
            x = rnd(M, N, seed=2)
            want = pair_tree(x.float() ** 2)
            wy = (x.float() * torch.rsqrt(want / N + 1e-6)[:, None] * w.float()).to(BF)
            row = {}
            for kind, kn in ((0, "sum"), (1, "pairsum"), (2, "split"))[:2 if N == 4096 else 3]:  # split at 4096: 160 s to compile
                for warps in (4, 8):
                    for fuse in (True, False):
                        with sect(f"norm {N} {kn} warps {warps} fuse {fuse}"):
                            R = 1 if N == 4096 else 8
                            y, ss = torch.empty_like(x), torch.empty(M, dtype=F32, device=DEV)
                            f = lambda: norm_kernel[(cdiv(M, R),)](x, w, y, ss, 1e-6, M, R=R, N=N, LOG=N.bit_length() - 1, KIND=kind, num_warps=warps, enable_fp_fusion=fuse)
                            row[f"{kn}_w{warps}{'' if fuse else '_nofma'}"] = [round(graph_us(f, 20, 5), 2), diff(ss, want), diff(y, wy)]
            emit(f"rms_norm width {N} rows {M}: [graph us, sum differs, y differs]", **row)


def F():
    import deep_gemm as dg
    from deep_gemm.utils.math import per_block_cast_to_fp8, per_token_cast_to_fp8
    N = K = 4096
    w = rnd(N, K, seed=1, scale=K ** -0.5)
    w8 = per_block_cast_to_fp8(w, use_ue8m0=False)
    for M in (1, 64, 4096):
        with sect(f"fp8 rows {M}"):
            a = rnd(M, K, seed=2)
            a8 = per_token_cast_to_fp8(a, use_ue8m0=False)
            d, db = torch.empty(M, N, dtype=BF, device=DEV), torch.empty(M, N, dtype=BF, device=DEV)
            row = dict(fp8_raw_scales=graph_us(lambda: dg.fp8_gemm_nt(a8, w8, d)), bf16=graph_us(lambda: dg.bf16_gemm_nt(a, w, db)))
            row["rel_to_bf16"] = rel(d, db.double())
            with sect("scales laid out before"):
                at = (a8[0], dg.utils.layout.get_mn_major_tma_aligned_tensor(a8[1]))
                d2 = torch.empty_like(d)
                row["fp8_scales_ready"] = graph_us(lambda: dg.fp8_gemm_nt(at, w8, d2))
                row["scales_ready_differ"] = diff(d, d2)
            emit(f"fp8 graph us 4096x4096 rows {M}", **row)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    for SECTION in sys.argv[sys.argv.index("--section") + 1:]:
        t = time.time()
        with sect("section"):
            late()
            globals()[SECTION]()
        torch.cuda.empty_cache()
        if not DRY:
            print(f"# {SECTION} took {time.time() - t:.1f} s", flush=True)
