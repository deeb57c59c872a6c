"""What a program fixes by the shape alone: how many parts K has in a narrow product."""

from __future__ import annotations

import pytest

from zoo.common.program import split_k

PARTS = [
    # wide products have one part, whatever their depth
    (257, 16384, 1),
    (4096, 4096, 1),
    # routers and mHC: one up to 4096, 8 up to 8192, 16 beyond
    (256, 2048, 1),
    (256, 4096, 1),
    (128, 4096 + 16, 8),
    (256, 6144, 8),
    (16, 8192, 8),
    (24, 8192 + 16, 16),
    (24, 16384, 16),
    # single gates: 8 from 1024 on
    (1, 2048, 8),
    (15, 1024, 8),
    (1, 1008, 1),
    # the next smaller power of two that divides K
    (1, 1028, 4),
    (1, 1025, 1),
    (128, 5000, 8),
    (24, 8200, 8),
]


@pytest.mark.parametrize(("outputs", "inputs", "parts"), PARTS)
def test_parts_of_a_narrow_product(outputs: int, inputs: int, parts: int) -> None:
    """Constants of the shape, frozen with the first program: another number of parts is another order of additions."""
    assert split_k(outputs, inputs) == parts and inputs % parts == 0
