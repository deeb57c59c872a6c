"""The toy's geometry."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from zoo.common.config import FieldReader
from zoo.common.geometry import Geometry, Published, eos_of


@dataclass(frozen=True)
class ToyConfig(Geometry):
    family: ClassVar = "toy"
    kinds: ClassVar = {"toy": "toy"}
    architectures: ClassVar = {"toy": "ToyForCausalLM"}

    vocabulary: Annotated[int, Published("vocab_size", FieldReader.integer, divided="tp")]
    hidden: Annotated[int, Published("hidden_size", FieldReader.integer)]
    layers: Annotated[int, Published("num_hidden_layers", FieldReader.layers)]
    channels: Annotated[int, Published("channels", FieldReader.integer)]
    head_dim: Annotated[int, Published("head_dim", FieldReader.integer)]
    eps: Annotated[float, Published("rms_norm_eps", FieldReader.number)]
    positions: Annotated[int, Published("max_position_embeddings", FieldReader.integer)]
    tied: Annotated[bool, Published("tie_word_embeddings", FieldReader.boolean)]
    eos: Annotated[tuple[int, ...], Published("eos_token_id", FieldReader.tokens, eos_of)] = ()
    published: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def first_layers(self, layers: int) -> ToyConfig:
        return replace(self, layers=layers, published={})


SIZES = {"tiny": ToyConfig(320, 64, 2, 48, 16, 1e-6, 1024, False, eos=(2,))}
TINY = SIZES["tiny"].to_hf()
