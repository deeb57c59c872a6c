"""Qwen3 and Qwen3-MoE configurations, read field by field from config.json."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from zoo.common.config import FieldReader
from zoo.common.geometry import Fixed, Geometry, Published, eos_of
from zoo.common.quantisation import FIELD, Quantisation, read_quantisation, write_quantisation

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
    quantised: Annotated[Quantisation | None, Published(FIELD, read_quantisation, write_quantisation)] = None
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


def _published(**sizes: Any) -> Qwen3Config:
    return Qwen3Config(vocabulary=151936, head_dim=128, eps=1e-6, theta=1e6, positions=40960, eos=(151645,), **sizes)


SIZES = {
    "0.6b": _published(hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072, tied=True),
    "1.7b": _published(hidden=2048, layers=28, heads=16, kv_heads=8, intermediate=6144, tied=True),
    "4b": _published(hidden=2560, layers=36, heads=32, kv_heads=8, intermediate=9728, tied=True),
    "8b": _published(hidden=4096, layers=36, heads=32, kv_heads=8, intermediate=12288, tied=False),
    "14b": _published(hidden=5120, layers=40, heads=40, kv_heads=8, intermediate=17408, tied=False),
    "32b": _published(hidden=5120, layers=64, heads=64, kv_heads=8, intermediate=25600, tied=False),
    "tiny": Qwen3Config(
        vocabulary=512,
        hidden=128,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=256,
        eps=1e-6,
        theta=1e6,
        positions=4096,
        tied=False,
        eos=(2,),
    ),
}
MOE_SIZES = {
    "30b-a3b": _published(
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        intermediate=6144,
        tied=False,
        experts=128,
        experts_per_token=8,
        expert_intermediate=768,
    ),
    "235b-a22b": _published(
        hidden=4096,
        layers=94,
        heads=64,
        kv_heads=4,
        intermediate=12288,
        tied=False,
        experts=128,
        experts_per_token=8,
        expert_intermediate=1536,
    ),
    "tiny": replace(SIZES["tiny"], experts=8, experts_per_token=2, expert_intermediate=64),
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
