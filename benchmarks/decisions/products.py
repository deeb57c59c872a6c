"""Matrix products, and C, D and F: narrow linears in K parts, the head, FP8."""
import time

import torch
import triton
import triton.language as tl

from benchmarks.common import relative_error as rel
from benchmarks.decisions.measure import BF, DEV, DRY, F32, bench_us, cdiv, diff, emit, graph_us, rnd, sect


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
