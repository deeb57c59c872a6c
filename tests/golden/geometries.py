"""The geometries whose bytes are stored, as published config.json files hold them: names of the checkpoints, none of ours."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

_COMMON: Fields = {
    "vocab_size": 512,
    "hidden_size": 128,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
# no size is a power of two, but the widths that kernels of attention and of the delta rule need
_ODD: Fields = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
_QWEN3: Fields = {
    **_COMMON,
    "num_hidden_layers": 3,
    "rope_theta": 1e6,
    "use_sliding_window": False,
}
_QWEN3_5: Fields = {
    **_COMMON,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_QWEN3_5_ODD: Fields = {
    **_QWEN3_5,
    **_ODD,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_num_value_heads": 6,
}
_DENSE: Fields = {"intermediate_size": 256}
_DENSE_ODD: Fields = {"intermediate_size": 160}
_EXPERTS: Fields = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_EXPERTS_ODD: Fields = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_QWEN3_EXPERTS: Fields = {"intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GLM5: Fields = {
    **{name: value for name, value in _COMMON.items() if name != "head_dim"},
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 24,
    "indexer_types": ["full", "shared", "full", "shared", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
}
_GLM5_ODD: Fields = {
    **_GLM5,
    "vocab_size": 300,
    "hidden_size": 96,
    "tie_word_embeddings": True,
    "num_hidden_layers": 2,
    "index_topk": 12,
    "indexer_types": ["full", "full"],
    "mlp_layer_types": ["sparse", "dense"],
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

_DEEPSEEK_V4: Fields = {
    **{name: value for name, value in _COMMON.items() if name != "head_dim"},
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 80,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "index_n_heads": 32,
    "index_head_dim": 64,
    "index_topk": 6,
    "num_hash_layers": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1},
}
_DEEPSEEK_V4_ODD: Fields = {
    **_DEEPSEEK_V4,
    "vocab_size": 300,
    "hidden_size": 96,
    "num_attention_heads": 3,
    "o_groups": 3,
    "head_dim": 24,
    "sliding_window": 5,
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "index_n_heads": 4,
    "index_head_dim": 16,
    "num_hash_layers": 0,
    "hc_mult": 2,
    "swiglu_limit": 0.7,
}


def _codes(*kept: str) -> Fields:
    """Of a checkpoint in FP8 codes, beside the fields of its model."""
    return {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", *kept],
        }
    }


_QWEN3_5_KEPT = ("embed_tokens", "in_proj_a", "in_proj_b", "conv1d", "mlp.gate", "shared_expert_gate")
_WIDER_EXPERTS: Fields = {**_EXPERTS, "moe_intermediate_size": 128}  # blocks of 128 want them
CODES = "codes"  # a geometry of the program fp8

# architecture -> geometry -> the fields of its config.json
GEOMETRIES: dict[str, dict[str, Fields]] = {
    "qwen3": {
        "tiny": {"model_type": "qwen3", **_QWEN3, **_DENSE},
        "odd": {"model_type": "qwen3", **_QWEN3, **_ODD, **_DENSE_ODD, "num_hidden_layers": 2},
        CODES: {"model_type": "qwen3", **_QWEN3, **_DENSE, **_codes()},
    },
    "qwen3_moe": {
        "tiny": {"model_type": "qwen3_moe", **_QWEN3, **_QWEN3_EXPERTS, **_EXPERTS},
        "odd": {"model_type": "qwen3_moe", **_QWEN3, **_ODD, **_QWEN3_EXPERTS, **_EXPERTS_ODD, "num_hidden_layers": 2},
    },
    "qwen3_5": {
        "tiny": {"model_type": "qwen3_5_text", **_QWEN3_5, **_DENSE},
        "odd": {"model_type": "qwen3_5_text", **_QWEN3_5_ODD, **_DENSE_ODD},
    },
    "qwen3_5_moe": {
        "tiny": {"model_type": "qwen3_5_moe_text", **_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 64},
        "odd": {"model_type": "qwen3_5_moe_text", **_QWEN3_5_ODD, **_EXPERTS_ODD, "shared_expert_intermediate_size": 80},
        CODES: {
            "model_type": "qwen3_5_moe_text",
            **_QWEN3_5,
            **_WIDER_EXPERTS,
            "shared_expert_intermediate_size": 128,
            **_codes(*_QWEN3_5_KEPT),
        },
    },
    "glm5": {
        "tiny": _GLM5,
        "odd": _GLM5_ODD,
        CODES: {
            **_GLM5,
            "q_lora_rank": 128,
            "moe_intermediate_size": 128,
            "index_head_dim": 128,
            **_codes("embed_tokens", "mlp.gate", "indexers_proj"),
        },
    },
    "deepseek_v4": {"tiny": _DEEPSEEK_V4, "odd": _DEEPSEEK_V4_ODD},
}
