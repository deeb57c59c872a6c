"""Integer hashing with torch ops: random weights and content checksums with the same bytes on every device and at any chunk size.

Everything is int64 arithmetic modulo 2^64 on counters; the only float steps are one exact conversion and one multiplication.
"""

from __future__ import annotations

import hashlib
import math
import struct

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}  # 64-bit words in flight: a cache's worth, or a GPU's; moves no byte

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_LANES = 0x0000FFFF0000FFFF
# four uniform 16-bit fields, doubled and centred: an integer of variance 4 * 4 * (2^32 - 1) / 12
_FIELDS_STD = math.sqrt(4 * (2**32 - 1) / 3)


def key64(*parts: object) -> int:
    """A signed 64-bit key from text."""
    digest = hashlib.sha256("\0".join(str(p) for p in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def normal_(out: Tensor, key: int, std: float, mean: float = 0.0, *, chunk: int | None = None) -> Tensor:
    """Fills a contiguous float tensor with near-normal numbers (four summed uniforms), element i from (key, i).

    Each element is rounded once to FP32 by the scale, once more by a mean other than 0, and once to out's dtype.
    """
    scale = struct.unpack("<f", struct.pack("<f", std / _FIELDS_STD))[0]  # an FP32 number, so every device multiplies by the same
    flat = out.detach().view(-1)
    chunk = chunk or CHUNK[out.device.type]
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        z = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=out.device)
        z.mul_(_signed(_GOLDEN)).add_(key)
        _mix_(z)
        pairs = (z & _LANES).add_((z.bitwise_right_shift_(16)).bitwise_and_(_LANES))  # two sums of two fields
        fields = (pairs & 0xFFFFFFFF).add_(pairs.bitwise_right_shift_(32))
        value = fields.mul_(2).sub_(4 * 0xFFFF).to(torch.float32).mul_(scale)
        part.copy_(value + mean if mean else value)
    return out


def distinct_(out: Tensor, key: int, below: int) -> Tensor:
    """Fills [R, K] of integers with different ones below `below` in each row, from (key, row). ValueError for more columns than that."""
    rows, columns = out.shape
    if columns > below:
        raise ValueError(f"{columns} different integers below {below}")
    z = torch.arange(1, 1 + 2 * rows, dtype=torch.int64, device=out.device).mul_(_signed(_GOLDEN)).add_(key)
    first, step = _shift(_mix_(z), 1).view(2, rows, 1)
    places = torch.arange(columns, dtype=torch.int64, device=out.device)
    # steps so small that a row does not come round to its first
    return out.copy_((first % below + places * (1 + step % max(1, (below - 1) // max(1, columns - 1)))) % below)


def checksums(rows_XRC: Tensor, *, chunk: int | None = None) -> Tensor:
    """int64 [X]: one position-dependent checksum of the bytes of each [R, C] block, a sum modulo 2^64 (order can't matter)."""
    if rows_XRC.numel() == 0:
        return torch.zeros(rows_XRC.shape[0], dtype=torch.int64, device=rows_XRC.device)
    blocks, rows, columns = rows_XRC.shape
    chunk = chunk or CHUNK[rows_XRC.device.type]
    row_bytes = columns * rows_XRC.element_size()
    # a multiple of 8 rows starts on a whole word whatever the width
    step = max(8, chunk * 8 // row_bytes // 8 * 8)
    together = max(1, chunk * 8 // (row_bytes * min(step, rows)))
    out = torch.zeros(blocks, dtype=torch.int64, device=rows_XRC.device)
    for first in range(0, blocks, together):
        for start in range(0, rows, step):
            part = rows_XRC[first : first + together, start : start + step]
            z = _words(part.reshape(part.shape[0], -1))
            z = z + torch.arange(1, 1 + z.shape[1], dtype=torch.int64, device=z.device).add_(start * row_bytes // 8).mul_(_signed(_GOLDEN))
            out[first : first + together] += _mix_(z).sum(1)
    return out


def _words(flat_XB: Tensor) -> Tensor:
    """The bytes of each row as int64 words, the last one filled up with zeros."""
    bytes_XB = flat_XB.contiguous().view(torch.uint8)
    padding = -bytes_XB.shape[1] % 8
    if padding:
        bytes_XB = F.pad(bytes_XB, (0, padding))
    elif bytes_XB.storage_offset() % 8:
        bytes_XB = bytes_XB.clone()
    return bytes_XB.view(torch.int64)


def _mix_(z: Tensor) -> Tensor:
    """splitmix64's finaliser, in place."""
    z.bitwise_xor_(_shift(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(_shift(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(_shift(z, 31))


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift: torch shifts int64 arithmetically."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
