"""The fingerprint: which lines are compared, and what the hash of the weights depends on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zoo.common.fingerprint import Fingerprint, content_hash, products_of, weights_hash
from zoo.common.hashing import checksums
from zoo.common.ops.log_prob import head_shapes
from zoo.common.weights import Entry, Piece, WeightTable
from zoo.qwen3 import SIZES, Qwen3ForRL, Qwen3ForServing

MINE = Fingerprint({"program": "aligned/1", "dtype": "bfloat16"}, "ffff", {"torch": "2.13"}, {"layout": "one device"})


def refusal(mine: Fingerprint, theirs: Fingerprint) -> str:
    with pytest.raises(ValueError) as caught:
        mine.check(theirs)
    return str(caught.value)


def test_equal_fingerprints_pass_whatever_is_only_reported() -> None:
    MINE.check(MINE)
    MINE.check(replace(MINE, toolchain={"torch": "2.14"}, realisation={}))
    MINE.check(replace(MINE, program=dict(reversed(MINE.program.items()))))  # lines have no order


def test_a_line_that_one_side_lacks_is_refused_on_either_side() -> None:
    longer = replace(MINE, program={**MINE.program, "op.sink": "sink/1"})
    assert refusal(MINE, longer).startswith("fingerprints differ in 1 line(s): op.sink: absent against sink/1 (")
    assert refusal(longer, MINE).startswith("fingerprints differ in 1 line(s): op.sink: sink/1 against absent (")


def test_every_differing_line_is_listed() -> None:
    other = Fingerprint({"program": "aligned/2", "chunk": "64"}, "eeee", MINE.toolchain, MINE.realisation)
    lines = refusal(MINE, other).removeprefix("fingerprints differ in 4 line(s): ").removesuffix(" (this one's against the given one's)")
    assert sorted(lines.split("; ")) == [
        "chunk: absent against 64",
        "dtype: bfloat16 against absent",
        "program: aligned/1 against aligned/2",
        "weights: ffff against eeee",
    ]


PARTS = [("a.weight", "torch.bfloat16", (2, 3), 17), ("b.weight", "torch.float32", (6,), -1)]


def test_the_content_hash_is_one_of_all_that_a_tensor_is() -> None:
    """Spelled out once: name, dtype, shape and checksum of each tensor, by name."""
    text = "a.weight torch.bfloat16 [2, 3] 0000000000000011\nb.weight torch.float32 [6] ffffffffffffffff\n"
    assert content_hash(PARTS) == content_hash(reversed(PARTS)) == hashlib.sha256(text.encode()).hexdigest()[:32]


@pytest.mark.parametrize(
    "changed",
    [("c.weight", *PARTS[0][1:]), ("a.weight", "torch.float16", (2, 3), 17), (*PARTS[0][:2], (3, 2), 17), (*PARTS[0][:3], 18)],
    ids=["name", "dtype", "shape", "checksum"],
)
def test_the_content_hash_depends_on_each_part(changed: tuple[str, str, tuple[int, ...], int]) -> None:
    hashes = {content_hash(parts) for parts in (PARTS, [changed, PARTS[1]], [PARTS[1]], [*PARTS, changed])}
    assert len(hashes) == 4


TABLE = WeightTable(
    (
        Entry("fused", ((Piece("q", (4, 3)), Piece("k", (2, 3), start=4)),)),
        # experts that stand in our parameter in another order than they are published
        Entry(
            "experts", (tuple(Piece(f"expert.{e}.{n}", (2, 3), expert=2 - e, start=s) for e in range(3) for n, s in (("g", 0), ("u", 2))),)
        ),
        Entry("norm", ((Piece("norm", (5,)),),)),
        Entry("fused", ((Piece("alias", (6, 3)),),), optional_alias=True),
    ),
    carried=(),
)


def parameters(dtype: torch.dtype) -> dict[str, Tensor]:
    """The same bits of 16 for either dtype of that width, all of them different."""
    shapes = {"fused": (6, 3), "experts": (3, 4, 3), "norm": (5,)}
    bits = {name: torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape) for name, shape in shapes.items()}
    return {name: (x + 0x3000 + 100 * i).view(dtype) for i, (name, x) in enumerate(bits.items())}


def test_the_weights_hash_is_that_of_the_published_tensors_one_by_one() -> None:
    held = parameters(torch.bfloat16)
    parts = []
    for entry, piece in TABLE.pieces():
        tensor = piece.of(held[entry.ours])
        parts.append((piece.published, "torch.bfloat16", tuple(tensor.shape), int(checksums(tensor.reshape(1, tensor.shape[0], -1)))))
    assert len(parts) == 2 + 6 + 1 and weights_hash(held.__getitem__, TABLE) == content_hash(parts)


def test_the_weights_hash_sees_the_dtype_each_bit_and_each_place() -> None:
    seen = {weights_hash(parameters(torch.bfloat16).__getitem__, TABLE), weights_hash(parameters(torch.float16).__getitem__, TABLE)}
    assert len(seen) == 2
    for name, whole in parameters(torch.bfloat16).items():
        for place in range(whole.numel()):
            held = parameters(torch.bfloat16)
            held[name].view(torch.int16).view(-1)[place] ^= 1
            seen.add(weights_hash(held.__getitem__, TABLE))
    assert len(seen) == 2 + 18 + 36 + 5
    swapped = parameters(torch.bfloat16)
    swapped["experts"] = swapped["experts"][[1, 0, 2]]
    assert weights_hash(swapped.__getitem__, TABLE) not in seen


def test_the_weights_hash_takes_the_text_models_names() -> None:
    """Inside a larger model names begin otherwise, and equal weights have equal hashes."""
    inside = tuple(
        replace(entry, layouts=tuple(tuple(replace(p, published=f"model.text.{p.published}") for p in pieces) for pieces in entry.layouts))
        for entry in TABLE.entries
    )
    held = parameters(torch.bfloat16)
    assert weights_hash(held.__getitem__, WeightTable(inside, carried=(), prefix=("model.text.", ""))) == weights_hash(
        held.__getitem__, TABLE
    )
    assert weights_hash(held.__getitem__, WeightTable(inside, carried=())) != weights_hash(held.__getitem__, TABLE)


def test_the_vocabulary_head_is_among_the_products_that_are_qualified() -> None:
    """Whole in decode, by chunks in scoring: with more columns than a chunk there are three widths."""
    model = Qwen3ForRL.from_config(SIZES["tiny"], device="cpu")
    vocabulary = model.config.vocabulary
    hidden = model.config.hidden
    assert ("linear", (vocabulary, hidden, 1)) in products_of(model)
    assert model.fingerprint().realisation[f"linear {vocabulary}x{hidden}x1"] == "reference"
    widths = {16384, 151936, 151936 % 16384}
    assert head_shapes(151936, 64) == {(width, 64, 1) for width in widths}


def test_another_position_table_is_refused() -> None:
    """Two machines may compute it differently, with one config and one set of weights."""
    config = replace(SIZES["tiny"], layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, vocabulary=300, positions=24)
    mine, theirs = (Qwen3ForServing.from_config(config, device="cpu") for _ in range(2))
    mine.fingerprint().check(theirs.fingerprint())
    table_PC2 = theirs.model.rotary.table_PC2
    table_PC2[20, 3, 0] = torch.nextafter(table_PC2[20, 3, 0], torch.tensor(2.0))
    assert mine.weights_version == theirs.weights_version
    with pytest.raises(ValueError, match=r"^fingerprints differ in 1 line\(s\): rope\.model\.rotary: \w+ against \w+ \("):
        mine.fingerprint().check(theirs.fingerprint())
