"""gated_delta: the gated delta rule in chunks of 64 positions, each row replayed from cached rows and the state before the chunk.

Sources: the rule, Gated Delta Networks, Yang, Kautz and Hatamizadeh, ICLR 2025 (arXiv 2412.06464), section 3.1, and its chunks, section
3.3; the triangular inverse of a chunk, Yang et al. 2024 (arXiv 2406.06484); transformers' `torch_chunk_gated_delta_rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.common.history import DeltaState, PackedDelta
from zoo.common.ops.contract import PROGRAM, WIDE, Arguments, Contract, OpFunction, Provider, Witness, checked, closed_form, observed
from zoo.common.ops.gated_delta.witness import OPERANDS, SlotWitness
from zoo.common.program import Program
from zoo.common.rows import Rows


def _serves(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> bool:
    # unequal widths (K = 32, E = 16) once poisoned an H200, cause unknown: equal ones only, as published models have
    return key_dim == value_dim and key_dim in (16, 32, 64, 128)


def _shape(arguments: Arguments) -> tuple[int, ...]:
    _, key_heads, key_dim = arguments["q_RHK"].shape
    _, value_heads, value_dim = arguments["v_RVE"].shape
    return key_heads, value_heads, key_dim, value_dim


def _witness(arguments: Arguments, document: slice) -> Witness:
    operands = tuple(arguments[name].detach()[document] for name in OPERANDS)
    return SlotWitness(operands, arguments["program"], gated_delta, gated_delta_states)


class Functions(NamedTuple):
    """What a provider brings.

    forward   q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, initial_NVKE, rows
    backward  grad_RVE, grad_final_NVKE, q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, initial_NVKE, rows
    serve     q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, state, rows
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Rows], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Rows],
        tuple[Tensor | None, ...],
    ]
    serve: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, DeltaState, Rows], Tensor]


def _reference() -> Functions:
    from zoo.common.ops.gated_delta import backward, reference

    return Functions(reference.gated_delta, backward.gated_delta_backward, reference.serve)


def _triton() -> Functions:
    from zoo.common.ops.gated_delta import kernels, kernels_backward

    return Functions(kernels.gated_delta, kernels_backward.gated_delta_backward, kernels.serve)


def _fla() -> Functions:
    from zoo.common.ops.gated_delta import rival_fla

    return Functions(rival_fla.gated_delta, rival_fla.gated_delta_backward, rival_fla.serve)


def _tokens() -> Functions:
    from zoo.common.ops.gated_delta import kernels_backward, rival_tokens

    return Functions(rival_tokens.gated_delta, kernels_backward.gated_delta_backward, rival_tokens.serve)


CONTRACT = Contract(
    name="gated_delta",
    version=1,
    shapes="q_RHK, k_RHK (L2-normalised rows), v_RVE in the program's dtype, log_decay_RV (<= 0), beta_RV in FP32 -> o_RVE; "
    "V a multiple of H, value head n reads key head n // (V / H). States [V, K, E] in FP32 at each document's "
    "multiples of 64 positions",
    reads={"q_RHK": PROGRAM, "k_RHK": PROGRAM, "v_RVE": PROGRAM, "log_decay_RV": WIDE, "beta_RV": WIDE, "initial_NVKE": WIDE},
    rounds="to the program's dtype: the state as rows read it; the operands T_ij (beta_j exp(G_j)) and T_ij beta_j;"
    " w; u, the difference of two FP32 products; the operands exp(G_i - G_j) (q_i . k_j) and exp(G_63 - G_j) k_j; the"
    " output, once, after K^-0.5 in FP32. G, a, T and the state stay FP32",
    adds="inside a chunk. G: left fold. a_ij = (k_i . k_j) exp(G_i - G_j) beta_i. T_i = e_i - sum a_ij T_j: one chain of "
    "FMAs per element, j ascending (reference: product and sum rounded one by one). Products on tensor cores in FP32,"
    " K or j ascending in steps of 16, from zero unless said, lanes beyond the row cut by select (reference: "
    "adjacent-pair trees). w_i = sum T_ij beta_j exp(G_j) k_j. u_i = (sum T_ij beta_j v_j) - w_i state. o_i = exp(G_i) "
    "(q_i state), which starts the accumulator of + sum exp(G_i - G_j) (q_i . k_j) u_j. Closing: exp(G_63) state + sum "
    "exp(G_63 - G_j) k_j u_j, the sum from zero, then one FMA: the decayed state starts no accumulator",
    laws=("row", "split", "place", "shard", "repeat"),
    backward="by chunk in FP32, states recomputed, fixed order; of an initial state too. On CUDA operands of products are rounded to "
    "the program's dtype, once: exp(G) grad, grad_r, in the scan grad_u and the states' gradients; as two operands each: P, T, else "
    "grad_u, the gradients of q_i . k_j and k_i . k_j. w, u, the states as rows read them and exp(G_63 - G_j) k_j are the forward's. "
    "log_decay's is a sum less another: where it should vanish FP32 noise is left, about 1e-7 of max |q . grad_q|",
    launch="whole chunks in parallel around a scan of states; decode: one row a sequence, row 63 closes the chunk in the same launch",
    providers=(
        Provider("reference", "reference", "cpu", _reference, defining=True),
        Provider("triton", "chunk_replay", "cuda", _triton, serves=_serves, defining=True),
        Provider("fla", "recurrent", "cuda", _fla, needs=("fla.ops.gated_delta_rule",), defining=True),
        Provider("tokens", "recurrent", "cuda", _tokens, serves=_serves, defining=True),
    ),
    shape=_shape,
    history="history",
    witness=_witness,
)


class _GatedDelta(OpFunction):
    """Training: (o, the state after each document's last whole chunk)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None, rows: Rows, provider: Provider
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, log_decay, beta, *(() if initial is None else (initial,)))
        ctx.rows = rows
        ctx.functions = provider.functions
        ctx.set_materialize_grads(False)
        return provider.functions.forward(q, k, v, log_decay, beta, initial, rows)

    @staticmethod
    @closed_form
    def backward(ctx: Any, grad: Tensor | None, grad_final: Tensor | None) -> Any:
        functions: Functions = ctx.functions
        q, k, v, log_decay, beta, initial = (*ctx.saved_tensors, None)[:6]
        grad = torch.zeros_like(v) if grad is None else grad
        *grads, grad_initial = functions.backward(grad, grad_final, q, k, v, log_decay, beta, initial, ctx.rows)
        return *grads, None if initial is None else grad_initial, None, None


def _check(q_RHK: Tensor, k_RHK: Tensor, v_RVE: Tensor, log_decay_RV: Tensor, beta_RV: Tensor, rows: Rows) -> None:
    """ValueError for what doesn't fit."""
    count, heads, _ = v_RVE.shape
    if q_RHK.shape != k_RHK.shape:
        raise ValueError(f"gated_delta: q {tuple(q_RHK.shape)} and k {tuple(k_RHK.shape)} differ")
    if not q_RHK.shape[0] == count == rows.count:
        raise ValueError(f"gated_delta: q has {q_RHK.shape[0]} rows, v {count}, there are {rows.count}")
    if heads % k_RHK.shape[1]:
        raise ValueError(f"gated_delta: {heads} value heads are not a multiple of {k_RHK.shape[1]} key heads")
    for name, gate in (("log_decay", log_decay_RV), ("beta", beta_RV)):
        if gate.shape != (count, heads):
            raise ValueError(f"gated_delta: {name} {tuple(gate.shape)} for values of {tuple(v_RVE.shape)}")


@observed(CONTRACT)
def gated_delta(
    q_RHK: Tensor,
    k_RHK: Tensor,
    v_RVE: Tensor,
    log_decay_RV: Tensor,
    beta_RV: Tensor,
    history: DeltaState | PackedDelta | None,
    rows: Rows,
    *,
    program: Program,
) -> Tensor:
    """o_RVE in v's dtype. With a `DeltaState` (serving) its slots advance in place and nothing carries a gradient.

    Without one (training) rows are whole documents, or parts cut on the 64-grid with `PackedDelta.initial_NVKE` before them.
    ValueError for head counts, rows, shapes or dtypes that don't fit, an initial state's too; a `DeltaState`'s are not looked
    at. Where a chunk's running sum of log-decays passes FP32's range (-3.4e38), its differences and the output are NaN.
    """
    if not isinstance(history, DeltaState):
        initial = history.initial_NVKE if history else None
        return gated_delta_states(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, initial, rows, program=program)[0]
    _check(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, rows)
    with torch.no_grad():
        return _provider(q_RHK, v_RVE, program).functions.serve(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, history, rows)


@checked(CONTRACT)
def gated_delta_states(
    q_RHK: Tensor,
    k_RHK: Tensor,
    v_RVE: Tensor,
    log_decay_RV: Tensor,
    beta_RV: Tensor,
    initial_NVKE: Tensor | None,
    rows: Rows,
    *,
    program: Program,
) -> tuple[Tensor, Tensor]:
    """The seam of context parallelism: (o_RVE, final_NVKE in FP32), differentiable in all operands and the initial state.

    A rank holds rows that begin at a multiple of 64 of each document. `initial_NVKE` (FP32, None: zero) is the state there,
    `final_NVKE` the one after the document's last whole chunk here: the next rank's initial state, if this part is whole chunks.
    """
    _check(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, rows)
    states = (rows.starts_N1.shape[0] - 1, v_RVE.shape[1], k_RHK.shape[2], v_RVE.shape[2])
    if initial_NVKE is not None and initial_NVKE.shape != states:
        raise ValueError(f"gated_delta: initial states {tuple(initial_NVKE.shape)}, the rows need {states}")
    return _GatedDelta.run(q_RHK, k_RHK, v_RVE, log_decay_RV, beta_RV, initial_NVKE, rows, _provider(q_RHK, v_RVE, program))


def _provider(q_RHK: Tensor, v_RVE: Tensor, program: Program) -> Provider[Functions]:
    return CONTRACT.provider(program, _shape({"q_RHK": q_RHK, "v_RVE": v_RVE}))
