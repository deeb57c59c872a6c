"""A2 and A3: training's attention forward over key segments, and its backward in one pass."""
import torch

from benchmarks.common import relative_error as rel
from benchmarks.decisions.attention import SegTrain, attn_ref, one_train, seg_train
from benchmarks.decisions.measure import BF, DRY, bench_us, diff, emit, i32, rnd, sect


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
