"""E: the sum of RMS norm as the compiler's tree, as adjacent pairs by sums, and by splits."""
import torch
import triton
import triton.language as tl

from benchmarks.decisions.measure import BF, DEV, F32, cdiv, diff, emit, graph_us, rnd, sect


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
