"""Qwen3 and Qwen3-MoE configurations, read field by field from config.json."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from zoo.common.config import FieldReader
from zoo.common.geometry import Fixed, Geometry, Published, eos_of

MOE = ("qwen3_moe",)


def _experts(reader: FieldReader, name: str) -> int:
    return reader.experts(name if name in reader.fields else "num_local_experts")  # transformers 5 writes the latter


@dataclass(frozen=True)
class Qwen3Config(Geometry):
    """Geometry of a Qwen3 model. `experts` is 0 for the dense family; `published` is config.json as it was read."""

    family: ClassVar = "qwen3"
    kinds: ClassVar = {"qwen3": "qwen3", "qwen3_moe": "qwen3_moe"}
    architectures: ClassVar = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    ignored: ClassVar = frozenset({"max_window_layers"})
    fixed: ClassVar = (
        Fixed("hidden_act", "silu", absent=False, written=True),
        Fixed("attention_bias", False, absent=False, written=True),
        Fixed("use_sliding_window", False, written=True),
        Fixed("sliding_window", None),
        Fixed("decoder_sparse_step", 1, absent=False, written=True, only=MOE),
        Fixed("mlp_only_layers", [], absent=False, written=True, only=MOE),
    )

    vocabulary: Annotated[int, Published("vocab_size", FieldReader.integer, divided="tp")]
    hidden: Annotated[int, Published("hidden_size", FieldReader.integer)]
    layers: Annotated[int, Published("num_hidden_layers", FieldReader.layers)]
    heads: Annotated[int, Published("num_attention_heads", FieldReader.integer, divided="tp")]
    kv_heads: Annotated[int, Published("num_key_value_heads", FieldReader.integer, divided="tp")]
    head_dim: Annotated[int, Published("head_dim", FieldReader.integer)]
    intermediate: Annotated[int, Published("intermediate_size", FieldReader.integer, divided="tp")]
    eps: Annotated[float, Published("rms_norm_eps", FieldReader.number)]
    theta: Annotated[float, Published("rope_theta", FieldReader.rope_theta)]
    positions: Annotated[int, Published("max_position_embeddings", FieldReader.integer)]
    tied: Annotated[bool, Published("tie_word_embeddings", FieldReader.boolean)]
    experts: Annotated[int, Published("num_experts", _experts, only=MOE, otherwise=0, divided="ep")] = 0
    experts_per_token: Annotated[int, Published("num_experts_per_tok", FieldReader.integer, only=MOE, otherwise=0)] = 0
    expert_intermediate: Annotated[int, Published("moe_intermediate_size", FieldReader.integer, only=MOE, otherwise=0)] = 0
    renormalise: Annotated[bool, Published("norm_topk_prob", FieldReader.boolean, only=MOE, otherwise=True)] = True
    eos: Annotated[tuple[int, ...], Published("eos_token_id", FieldReader.tokens, eos_of)] = ()
    published: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def model_type(self) -> str:
        return "qwen3_moe" if self.experts else "qwen3"

    def first_layers(self, layers: int) -> Qwen3Config:
        """The same geometry with the first `layers` layers only."""
        return replace(self, layers=layers, published={})

    @classmethod
    def check(cls, reader: FieldReader) -> None:
        layers = ["full_attention"] * reader.found["layers"]
        reader.only("layer_types", layers, absent=layers)
        reader.divides("heads", "kv_heads", ("num_attention_heads", "num_key_value_heads"))
        chosen = reader.found["experts_per_token"]
        if chosen > reader.found["experts"]:
            raise ValueError(f"qwen3: {chosen} experts per token of {reader.found['experts']}")


_DENSE = {
    "0.6b": (1024, 28, 16, 8, 3072, True),
    "1.7b": (2048, 28, 16, 8, 6144, True),
    "4b": (2560, 36, 32, 8, 9728, True),
    "8b": (4096, 36, 32, 8, 12288, False),
    "14b": (5120, 40, 40, 8, 17408, False),
    "32b": (5120, 64, 64, 8, 25600, False),
}
SIZES = {
    name: Qwen3Config(151936, hidden, layers, heads, kv, 128, intermediate, 1e-6, 1e6, 40960, tied, eos=(151645,))
    for name, (hidden, layers, heads, kv, intermediate, tied) in _DENSE.items()
}
SIZES["tiny"] = Qwen3Config(512, 128, 3, 4, 2, 64, 256, 1e-6, 1e6, 4096, False, eos=(2,))
MOE_SIZES = {
    "30b-a3b": Qwen3Config(151936, 2048, 48, 32, 4, 128, 6144, 1e-6, 1e6, 40960, False, 128, 8, 768, eos=(151645,)),
    "235b-a22b": Qwen3Config(151936, 4096, 94, 64, 4, 128, 12288, 1e-6, 1e6, 40960, False, 128, 8, 1536, eos=(151645,)),
    "tiny": Qwen3Config(512, 128, 3, 4, 2, 64, 256, 1e-6, 1e6, 4096, False, 8, 2, 64, eos=(2,)),
}

# the fields of a published config.json, at tiny sizes
PUBLISHED_TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "max_window_layers": 3,
}
PUBLISHED_TINY_MOE: dict[str, Any] = {
    **PUBLISHED_TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
