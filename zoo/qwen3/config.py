"""Qwen3 and Qwen3-MoE configurations, read field by field from config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zoo.common.config import IGNORED, LAYERS, FieldReader, check_tokens


@dataclass(frozen=True)
class Qwen3Config:
    """Geometry of a Qwen3 model. `experts` is 0 for the dense family."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    theta: float
    positions: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    renormalise: bool = True
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_tokens("qwen3", "eos_token_id", self.eos, self.eos, self.vocabulary)

    @property
    def model_type(self) -> str:
        return "qwen3_moe" if self.experts else "qwen3"

    def first_layers(self, layers: int) -> Qwen3Config:
        """The same geometry with the first `layers` layers only."""
        return replace(self, layers=layers)

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> Qwen3Config:
        """Reads a config.json. ValueError for a missing, unknown or unsupported field, naming it and its value."""
        read = FieldReader("qwen3", fields, IGNORED | {"max_window_layers"})
        kind = read.one_of("model_type", "qwen3", "qwen3_moe")
        read.is_not_quantised()
        read.trains_as_published()
        read.only("hidden_act", "silu")
        read.only("attention_bias", False)
        read.only("use_sliding_window", False, absent=False)
        read.only("sliding_window", None, absent=None)
        layers, vocabulary = read.integer("num_hidden_layers", LAYERS), read.integer("vocab_size")
        read.only("layer_types", ["full_attention"] * layers, absent=["full_attention"] * layers)
        heads, kv_heads = read.integer("num_attention_heads"), read.integer("num_key_value_heads")
        if heads % kv_heads:
            raise ValueError(f"qwen3: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        mixture: dict[str, Any] = {}
        if kind == "qwen3_moe":
            read.only("decoder_sparse_step", 1)
            read.only("mlp_only_layers", [])
            mixture = {
                # transformers 5 writes num_local_experts
                "experts": read.experts("num_experts" if "num_experts" in fields else "num_local_experts", layers),
                "experts_per_token": read.integer("num_experts_per_tok"),
                "expert_intermediate": read.integer("moe_intermediate_size"),
                "renormalise": read.boolean("norm_topk_prob"),
            }
            if mixture["experts_per_token"] > mixture["experts"]:
                raise ValueError(f"qwen3: {mixture['experts_per_token']} experts per token of {mixture['experts']}")
        config = cls(
            vocabulary=vocabulary,
            hidden=read.integer("hidden_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=read.integer("head_dim"),
            intermediate=read.integer("intermediate_size"),
            eps=read.number("rms_norm_eps"),
            theta=read.rope_theta(),
            positions=read.integer("max_position_embeddings"),
            tied=read.boolean("tie_word_embeddings"),
            eos=read.tokens("eos_token_id", vocabulary),
            **mixture,
        )
        read.finish()
        return config

    def to_hf(self) -> dict[str, Any]:
        """The published fields of this geometry."""
        fields: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
        }
        if self.eos:
            fields["eos_token_id"] = list(self.eos) if len(self.eos) > 1 else self.eos[0]
        if self.experts:
            fields |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_intermediate,
                "norm_topk_prob": self.renormalise,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return fields


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
