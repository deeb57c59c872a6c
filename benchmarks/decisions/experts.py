"""Grouped products, and B: the experts by Triton, torch and DeepGEMM, and the place of the route weight."""
import torch
import triton
import triton.language as tl

from benchmarks.common import relative_error as rel
from benchmarks.decisions.measure import BF, DEV, DRY, F32, F64, cdiv, diff, emit, graph_us, late, rnd, sect


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
