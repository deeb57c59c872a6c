"""Attention in one pass and over key segments, and A1 and A4: whether a decode row has its training row's bytes, and decode's time."""
import torch
import triton
import triton.language as tl

from benchmarks.common import relative_error as rel
from benchmarks.decisions.measure import BF, DEV, DRY, F32, cdiv, diff, emit, graph_us, i32, rnd, sect


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
