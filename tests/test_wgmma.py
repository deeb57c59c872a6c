"""The reader of machine code: descriptors that are whole, and ones into which an assembler put another register."""

from __future__ import annotations

import pytest

from benchmarks import wgmma

# shortened from a kernel of two products [64, 64] x [64, 64]^T and [64, 64] x [64, 32] as ptxas 12.8 assembled it for an H200
BASE = """
        /*0160*/                   S2UR UR20, SR_CgaCtaId ;
        /*0180*/                   UMOV UR4, 0x400 ;
        /*0220*/                   ULEA UR20, UR20, UR4, 0x18 ;
        /*0380*/                   UIADD3 UR4, UR20, 0x4000, URZ ;
        /*03a0*/                   USHF.R.U32.HI UR10, URZ, 0x4, UR20 ;
        /*03b0*/                   USHF.R.U32.HI UR4, URZ, 0x4, UR4 ;
        /*03c0*/                   USGXT.U32 UR10, UR10, 0xe ;
        /*03d0*/                   USGXT.U32 UR8, UR4, 0xe ;
        /*03f0*/                   UMOV UR11, 0x80000020 ;
        /*0400*/                   UMOV UR9, 0x40000040 ;
        /*0cb0*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8].tnspB, RZ, !UPT ;
        /*0cc0*/                   UIADD3 UR16, UP1, UR8, 0x2, URZ ;
        /*0cd0*/                   UIADD3.X UR17, URZ, 0x40000040, URZ, UP1, !UPT ;
"""
STEP = """
        /*0ce0*/                   UIADD3 UR18, UP0, {low}, 0x40, URZ ;
        /*0cf0*/                   UIADD3.X UR19, {high}, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0d00*/                   UIADD3.64 UR6, UR18, 0x40, URZ ;
        /*0d10*/                   UIADD3.64 UR4, UR16, 0x2, URZ ;
        /*0d20*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR16].tnspB, R24 ;
        /*0d30*/                   HGMMA.64x32x16.F32.BF16 R24, R56, gdesc[UR4].tnspB, R24, gsb0 ;
"""


def read(text: str) -> list[str]:
    return [str(product).split("  ", 1)[1] for product in wgmma.products(text)]


def test_descriptors_are_followed() -> None:
    text = BASE + STEP.format(low="UR10", high="URZ")
    assert read(text) == ["0x40000040:0x440  x  0x80000020:0x40", "0x40000040:0x442  x  0x80000020:0x80", "0x80000020:0xc0"]
    assert not any(operand.broken or not operand.known for product in wgmma.products(text) for operand in product.operands)


@pytest.mark.parametrize(
    ("before", "source", "fault"),
    [
        ("", "UR21", "nothing wrote"),
        ("S2UR UR21, SR_CTAID.X", "UR21", "another value"),
        ("ULDC UR21, c[0x0][0x238]", "UR21", "another value"),
        ("R2UR UR21, R0", "UR21", "another value"),
    ],
)
def test_another_register_is_seen(before: str, source: str, fault: str) -> None:
    """The words of a step are made from a register that was never the base's."""
    text = f"/*0010*/ {before} ;\n" * bool(before) + BASE + STEP.format(low=source, high=source)
    first, second, third = wgmma.products(text)
    assert not any(operand.broken for operand in first.operands)
    assert [operand.broken for operand in second.operands] == [False, True]
    assert fault in str(second) and fault in str(third)


def test_a_word_that_was_put_aside_is_known() -> None:
    """A vector register may hold a uniform one's word for a while."""
    aside = "/*0cd8*/ IMAD.U32 R7, RZ, RZ, UR10 ;\n/*0cda*/ UMOV UR10, URZ ;\n/*0cdc*/ R2UR UR21, R7 ;\n"
    assert read(BASE + aside + STEP.format(low="UR21", high="URZ")) == read(BASE + STEP.format(low="UR10", high="URZ"))
    lost = aside.replace("UMOV UR10, URZ", "LDG.E R7, desc[UR22][R2.64]")
    assert "another value" not in read(BASE + lost + STEP.format(low="UR21", high="URZ"))[1]  # an address may come from anywhere
    assert "another value" in read(BASE + lost + STEP.format(low="UR10", high="UR21"))[1]


def test_a_width_of_no_swizzle_is_seen() -> None:
    assert any(operand.broken for product in wgmma.products(BASE.replace("0x80000020", "0x80000021")) for operand in product.operands)
