"""nn.Modules that own parameters and call ops, shared by the architectures. No arithmetic of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.codecs import PACKED, BlockScaled
from zoo.common.masters import computed
from zoo.common.program import Program, split_k


class Embedding(nn.Module):
    """weight [V, D]."""

    def __init__(self, vocabulary: int, width: int, program: Program) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width, dtype=program.torch_dtype))
        self.program = program

    def forward(self, ids_R: Tensor) -> Tensor:
        return ops.embed(ids_R, computed(self), program=self.program)


class Linear(nn.Module):
    """weight [N, K]; several projections of one input are one Linear (the column law makes that exact).

    Where the weight is FP8 codes, weight_scale_inv has a scale for each block of it, and `rule` is that of the rows' scales.
    """

    weight_scale_inv: nn.Parameter

    def __init__(self, inputs: int, outputs: int, program: Program, *, out_dtype: torch.dtype | None = None, k_parts: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=program.torch_dtype))
        self.rule: ops.ScaleRule | None = None
        self.program = program
        self.out_dtype = out_dtype
        self.k_parts = k_parts

    def take_codes(self, name: str, codec: BlockScaled, rule: ops.ScaleRule) -> None:
        """From now on the weight is codes with scales beside them. `rule`: of the scales of rows. ValueError for an FP32 result."""
        if self.k_parts != 1 or self.out_dtype is not None:
            raise ValueError("a router or gate with FP32 rows is no product of FP8 codes")
        hold_codes(self, name, codec)
        self.rule = rule

    def forward(self, x_RK: Tensor) -> Tensor:
        if self.rule is not None:
            return ops.fp8_linear(x_RK, self.weight, self.weight_scale_inv, self.rule, program=self.program)
        return ops.linear(x_RK, computed(self), program=self.program, out_dtype=self.out_dtype, k_parts=self.k_parts)


def logits(inputs: int, outputs: int, program: Program) -> Linear:
    """A narrow Linear whose rows stay FP32: a router's, or a gate's."""
    return Linear(inputs, outputs, program, out_dtype=torch.float32, k_parts=split_k(outputs, inputs))


class RMSNorm(nn.Module):
    """weight [D]. With a branch it first adds it to the residual stream: forward(residual, branch) -> (normed, new residual)."""

    def __init__(self, width: int, eps: float, program: Program, *, zero_centred: bool = False, dtype: torch.dtype | None = None) -> None:
        """dtype  of a weight that is FP32 in every program; None: the program's."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype or program.torch_dtype))
        self.eps = eps
        self.program = program
        self.zero_centred = zero_centred

    def forward(self, residual_RD: Tensor, branch_RD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weight_D = computed(self)
        if branch_RD is None:
            normed = ops.rms_norm(residual_RD, weight_D, self.eps, program=self.program, zero_centred=self.zero_centred)
            return normed, residual_RD
        return ops.add_rms_norm(branch_RD, residual_RD, weight_D, self.eps, program=self.program, zero_centred=self.zero_centred)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x); gate and up are one Linear, gate rows first. `limit`: see ops.swiglu."""

    def __init__(self, hidden: int, intermediate: int, program: Program, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.gate_up = Linear(hidden, 2 * intermediate, program)
        self.down = Linear(intermediate, hidden, program)
        self.program = program

    def forward(self, x_RD: Tensor) -> Tensor:
        return self.down(ops.swiglu(self.gate_up(x_RD), program=self.program, limit=self.limit))


class Experts(nn.Module):
    """gate_up [X, 2F, D] (gate rows first) and down [X, D, F]. `limit`: see ops.swiglu.

    Where they are FP8 codes, gate_up_scale_inv and down_scale_inv have a scale for each block, and `rule` is that of the rows' scales.
    """

    gate_up_scale_inv: nn.Parameter
    down_scale_inv: nn.Parameter

    def __init__(self, count: int, hidden: int, intermediate: int, program: Program, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.gate_up = nn.Parameter(torch.empty(count, 2 * intermediate, hidden, dtype=program.torch_dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, intermediate, dtype=program.torch_dtype))
        self.rule: ops.ScaleRule | None = None
        self.program = program

    def take_codes(self, name: str, codec: BlockScaled, rule: ops.ScaleRule) -> None:
        """From now on a weight is codes with scales beside them; both of them must be. `rule`: of the scales of rows."""
        hold_codes(self, name, codec)
        self.rule = rule

    def forward(self, x_RD: Tensor, weights_RK: Tensor, experts_RK: Tensor, shared_RD: Tensor | None = None) -> Tensor:
        slots_RKD = self._slots(x_RD, experts_RK)
        return ops.combine(slots_RKD, weights_RK, experts_RK, self.gate_up.shape[0], program=self.program, shared_RD=shared_RD)

    def _slots(self, x_RD: Tensor, experts_RK: Tensor) -> Tensor:
        """A slot row for every choice."""
        if self.rule is None:
            weights = (computed(self, "gate_up"), computed(self, "down"))
            return ops.experts(x_RD, experts_RK, *weights, program=self.program, limit=self.limit)
        return ops.fp8_experts(
            x_RD,
            experts_RK,
            self.gate_up,
            self.gate_up_scale_inv,
            self.down,
            self.down_scale_inv,
            self.rule,
            program=self.program,
            limit=self.limit,
        )


class PackedExperts(nn.Module):
    """`Experts` in MXFP4: gate_up int8 [X, 2F, D / 2] and down [X, D, F / 2] of two codes a byte, each with its exponents in `..._scale`.

    None of them is trained. `limit`: see ops.swiglu.
    """

    def __init__(self, count: int, hidden: int, intermediate: int, program: Program, limit: float | None = None) -> None:
        super().__init__()
        self.gate_up, self.gate_up_scale = _packed(count, 2 * intermediate, hidden)
        self.down, self.down_scale = _packed(count, hidden, intermediate)
        self.program = program
        self.limit = limit

    def forward(self, x_RD: Tensor, weights_RK: Tensor, experts_RK: Tensor, shared_RD: Tensor | None = None) -> Tensor:
        codes = (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        slots_RKD = ops.packed_experts(x_RD, experts_RK, *codes, program=self.program, limit=self.limit)
        return ops.combine(slots_RKD, weights_RK, experts_RK, self.gate_up.shape[0], program=self.program, shared_RD=shared_RD)


def _packed(*values: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Codes and exponents of values of this shape, not filled."""
    shape = PACKED.packed(values)
    codes = torch.empty(shape, dtype=PACKED.held)
    scales = torch.empty(PACKED.scales(shape), dtype=torch.float8_e8m0fnu)
    return nn.Parameter(codes, requires_grad=False), nn.Parameter(scales, requires_grad=False)


def hold_codes(module: nn.Module, name: str, codec: BlockScaled) -> None:
    """A parameter becomes codes, and its scales are another beside it; neither is trained."""
    weight = module.get_parameter(name)
    codes = torch.empty_like(weight, dtype=codec.held)
    scales = weight.new_empty(codec.scales(tuple(weight.shape)), dtype=torch.float32)
    module.register_parameter(name, nn.Parameter(codes, requires_grad=False))
    module.register_parameter(f"{name}_scale_inv", nn.Parameter(scales, requires_grad=False))


class RotaryTable(nn.Module):
    """The whole FP32 table, made on the CPU and moved where it is first used; not a buffer, since .to(bfloat16) would round it."""

    def __init__(self, positions: int, rope_dim: int, theta: float, program: Program, yarn: ops.Yarn | None = None) -> None:
        super().__init__()
        self.yarn = yarn
        self.positions = positions
        self.rope_dim = rope_dim
        self.theta = theta
        self.program = program
        self.table_PC2 = torch.empty(0)

    def reset_buffers(self, device: torch.device | str) -> None:
        with torch.device("cpu"):
            size = (self.positions, self.rope_dim, self.theta)
            table = ops.rope_table(*size) if self.yarn is None else ops.yarn_table(*size, self.yarn)
            self.table_PC2 = table.to(device)

    def on(self, device: torch.device) -> Tensor:
        """The table on a device, made there unless it is."""
        if not self.table_PC2.numel() or self.table_PC2.device != device:
            self.reset_buffers(device)
        return self.table_PC2


class HeadNormRope(nn.Module):
    """Splits fused rows into query, key and value heads; norms and rotates queries and keys. Weights q [E] and k [E]."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        width: int,
        eps: float,
        program: Program,
        *,
        query_width: int | None = None,
        zero_centred: bool = False,
    ) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.empty(width, dtype=program.torch_dtype))
        self.k = nn.Parameter(torch.empty(width, dtype=program.torch_dtype))
        self.heads = heads
        self.kv_heads = kv_heads
        self.query_width = query_width
        self.eps = eps
        self.program = program
        self.zero_centred = zero_centred

    def forward(self, qkv_RC: Tensor, rotary: RotaryTable, positions_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ops.norm_rope(
            qkv_RC,
            computed(self, "q"),
            computed(self, "k"),
            rotary.on(qkv_RC.device),
            positions_R,
            heads=self.heads,
            kv_heads=self.kv_heads,
            eps=self.eps,
            program=self.program,
            query_width=self.query_width,
            zero_centred=self.zero_centred,
        )
