"""Kernels of the recurrent layers' small ops and of gates in Triton's interpreter, in FP32, against the CPU references.

Bytes must be equal where no exp is taken; numpy's exp and torch's differ in the last bits. Heads are columns of wider rows, as a fused
projection leaves them.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.common import ops
from zoo.common.history import ConvCarry
from zoo.common.ops.causal_conv import kernels as conv
from zoo.common.ops.causal_conv import reference as conv_reference
from zoo.common.ops.delta_gate import kernels as delta_gate
from zoo.common.ops.delta_gate import reference as delta_gate_reference
from zoo.common.ops.gated_rms_norm import kernels as gated_rms_norm
from zoo.common.ops.gated_rms_norm import reference as gated_rms_norm_reference
from zoo.common.ops.l2_norm import kernels as l2_norm
from zoo.common.ops.l2_norm import reference as l2_norm_reference
from zoo.common.ops.output_gate import kernels as output_gate
from zoo.common.ops.output_gate import reference as output_gate_reference
from zoo.common.program import resolve
from zoo.common.rows import Rows

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


def same(got: Tensor, wanted: Tensor) -> bool:
    return got.dtype == wanted.dtype and torch.equal(got.contiguous().view(torch.int32), wanted.contiguous().view(torch.int32))


def close(got: Tensor, wanted: Tensor) -> None:
    """A few ulps of FP32."""
    assert got.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=2**-20, atol=2**-23)


def heads_of(rows: int, heads: int, width: int) -> Tensor:
    return torch.randn(rows, heads * width + 11)[:, 3 : 3 + heads * width].unflatten(1, (heads, width))


@pytest.mark.parametrize("carried", ["no", "by sequence", "by slot"])
@pytest.mark.parametrize("channels", [5, 513])
def test_causal_conv(carried: str, channels: int) -> None:
    """Sequences of 1 to 6 rows: taps before a document's start, from the carry, from the push."""
    counts = [6, 1, 2, 4]
    slots = torch.tensor([3, 1, 4, 2])
    rows = Rows.pushed(counts, None if carried == "no" else [9, 3, 1, 64], "cpu")
    x = torch.randn(rows.count, channels + 7)[:, :channels]
    weight = torch.randn(channels, 4)
    carry = None if carried == "no" else torch.randn(len(counts) + (carried == "by slot"), 3, channels)
    slots_N = slots if carried == "by slot" else None
    got = conv.causal_conv(x, weight, carry, slots_N, rows)
    close(got, conv_reference.causal_conv(x, weight, carry, slots_N, rows))
    with pytest.raises(AssertionError):  # the control: taps newest first
        close(got, conv_reference.causal_conv(x, weight.flip(1), carry, slots_N, rows))
    if carried == "by sequence":
        assert same(got, conv.causal_conv(x, weight, torch.cat([carry, carry], 2)[:, :, :channels], None, rows))  # strided
    if carry is not None:
        with pytest.raises(AssertionError):  # the control: another sequence's rows before the push
            close(got, conv_reference.causal_conv(x, weight, carry.roll(1, 0), slots_N, rows))


@triton.jit
def _first_inside(sequence_ptr, starts_ptr, first, rows, ROWS: tl.constexpr):
    """`_all_inside` of a tile's first row alone."""
    sequence = tl.load(sequence_ptr + first)
    return (first + ROWS <= rows) & (first - tl.load(starts_ptr + sequence) >= 3)


@pytest.mark.parametrize("carried", [False, True])
def test_tiles_of_causal_conv_move_no_byte(monkeypatch: pytest.MonkeyPatch, carried: bool) -> None:
    """Tiles of 16 rows inside a document, across a start, at the end; documents that start on a tile's rows 0, 3, 13 and 14."""
    counts = [35, 13, 13, 1, 18, 41]
    rows = Rows.pushed(counts, [2] * len(counts) if carried else None, "cpu")
    x = torch.randn(rows.count, 40)[:, 3:36]
    weight = torch.randn(33, 4)
    x[torch.rand(x.shape) < 0.1] = -0.0
    x[50] = torch.nan  # of the third document
    carry = torch.randn(len(counts), 3, 33) if carried else None
    tiles = conv.causal_conv(x, weight, carry, None, rows)
    with monkeypatch.context() as broken:  # the control: tiles that slide over a document's start
        broken.setattr(conv, "_all_inside", _first_inside)
        slid = conv.causal_conv(x, weight, carry, None, rows)
    monkeypatch.setattr(conv, "SHAPES", ((1, 512), (1, 512)))
    by_row = conv.causal_conv(x, weight, carry, None, rows)
    assert same(tiles, by_row)
    off = (slid.view(torch.int32) != by_row.view(torch.int32)).any(1).nonzero().flatten()
    assert off.tolist() == [35, 36, 37]  # of the starts 35 alone is in a tile that begins inside a document
    close(tiles[rows.sequence_R != 2], conv_reference.causal_conv(x, weight, carry, None, rows)[rows.sequence_R != 2])


def test_carries_advance() -> None:
    counts = [6, 1, 2, 3]
    slots = torch.tensor([3, 1, 4, 2])
    rows = Rows.pushed(counts, [9, 3, 1, 64], "cpu")
    x = torch.randn(rows.count, 520)[:, :515]
    carry = torch.randn(6, 3, 515)
    got = carry.clone()
    wanted = carry.clone()
    before = carry
    conv.advance(x, got, slots, rows)
    conv_reference.advance(x, wanted, slots, rows)
    assert same(got, wanted)
    assert same(got[[0, 5]], before[[0, 5]])
    assert not any(same(got[s], before[s]) for s in slots.tolist())


def test_a_strided_pool_is_refused_before_it_advances() -> None:
    """Its rows would be written to other slots and columns."""
    rows = Rows.pushed([2, 3], [9, 5], "cpu")
    slots = torch.tensor([1, 2])
    x = torch.randn(rows.count, 8)
    weight = torch.randn(8, 4)
    wide = torch.randn(3, 3, 16)
    program = replace(resolve("aligned", "cuda", torch.bfloat16), dtype="float32")
    before = wide.clone()
    dense = wide[:, :, :8].clone()
    wanted = wide[:, :, :8].clone()
    message = re.escape("a pool of carried rows must be contiguous, of strides (24, 8, 1), not (48, 16, 1)")
    with pytest.raises(ValueError, match=message):
        ops.causal_conv(x, weight, ConvCarry(wide[:, :, :8], slots), rows, program=program)
    assert same(wide, before)
    ops.causal_conv(x, weight, ConvCarry(dense, slots), rows, program=program)
    conv_reference.advance(x, wanted, slots, rows)
    assert same(dense, wanted)
    conv.advance(x, wide[:, :, :8], slots, rows)  # the control: what is refused
    assert not same(wide[:, :, :8], wanted) and not same(wide[:, :, 8:], before[:, :, 8:])


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (3, 16), (9, 128), (5, 100)])
def test_l2_norm(heads: int, width: int) -> None:
    x = heads_of(4, heads, width)
    x[1, 0] = 0.0
    x[2, 0] = -0.0
    got = l2_norm.l2_norm(x, 1e-6)
    assert same(got, l2_norm_reference.l2_norm(x, 1e-6))
    assert not same(got, l2_norm_reference.l2_norm(x, 1e-2))
    assert l2_norm.l2_norm(x[:0], 1e-6).shape == (0, heads, width)


# NumPy, where the hardware says nothing: exp(200) is infinite on purpose, and 0 / 0 of a log1p that is not taken
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered in:RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize("heads", [1, 5, 32])
def test_delta_gate(heads: int) -> None:
    wide = torch.randn(7, 2 * heads + 9) * 5
    a = wide[:, :heads]
    b = wide[:, heads : 2 * heads]
    a[:4] = torch.tensor([-200.0, -17.0, 30.0, 200.0])[:, None]
    b[:4] = torch.tensor([-200.0, -1.0, 30.0, 200.0])[:, None]
    a_log = torch.randn(heads)
    dt_bias = torch.randn(heads)
    got = delta_gate.delta_gate(a, b, a_log, dt_bias)
    wanted = delta_gate_reference.delta_gate(a, b, a_log, dt_bias)
    swapped = delta_gate_reference.delta_gate(b, a, a_log, dt_bias)
    for one, other, wrong in zip(got, wanted, swapped, strict=True):
        close(one, other)
        with pytest.raises(AssertionError):  # the control: the two columns of the projection exchanged
            close(one, wrong)


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (3, 16), (9, 128), (5, 100)])
def test_gated_rms_norm(heads: int, width: int) -> None:
    x = torch.randn(4, heads, width)
    gate = heads_of(4, heads, width)
    weight = torch.randn(width)
    got = gated_rms_norm.gated_rms_norm(x, gate, weight, 1e-6)
    close(got, gated_rms_norm_reference.gated_rms_norm(x, gate, weight, 1e-6))
    with pytest.raises(AssertionError):
        close(got, gated_rms_norm_reference.gated_rms_norm(x, gate, 1 + weight, 1e-6))


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (3, 16), (5, 300)])
@pytest.mark.parametrize("gate_of", ["columns", "heads", "row"])
def test_output_gate(heads: int, width: int, gate_of: str) -> None:
    """A gate for every column, of rows or of strided heads, or one for the whole row (the shared expert's)."""
    x = torch.randn(4, heads, width)
    gate = heads_of(4, heads, width)
    if gate_of != "heads":
        x = x.flatten(1)
        gate = gate.flatten(1) if gate_of == "columns" else torch.randn(4, 1)
    got = output_gate.output_gate(x, gate)
    close(got, output_gate_reference.output_gate(x, gate))
    with pytest.raises(AssertionError):  # the control: another row's gate
        close(got, output_gate_reference.output_gate(x, gate.roll(1, 0)))
