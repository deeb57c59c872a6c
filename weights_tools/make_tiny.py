"""Small random checkpoints in published format, as a hub repository would hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.common.files import fresh_folder
from zoo.common.hashing import key64, normal_
from zoo.common.pretrained import draw_piece
from zoo.common.registry import model_class
from zoo.common.shards import write_shards

_QWEN3: dict[str, Any] = {
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
}
_QWEN3_5: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "use_cache": True,
}
_GLM5: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 48,
    "v_head_dim": 32,
    "head_dim": 192,  # published, and read by nobody
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 24,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 2,
    "intermediate_size": 256,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "dtype": "bfloat16",
    "use_cache": True,
}
# the fields of a published config.json, at tiny sizes
ARCHS: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_QWEN3, "max_window_layers": 3},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_QWEN3,
        "max_window_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_QWEN3_5,
        "intermediate_size": 256,
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **_QWEN3_5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "glm5": {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **_GLM5},
}
# what a published vision-language checkpoint has around its text model, and tensors that the text model doesn't use
_VISION: dict[str, Any] = {
    "image_token_id": 4,
    "video_token_id": 5,
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
    "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 32, "patch_size": 2, "out_hidden_size": 128},
}
_UNUSED: dict[str, tuple[int, ...]] = {
    "model.visual.patch_embed.proj.weight": (32, 3, 2, 2, 2),
    "model.visual.blocks.0.norm1.bias": (32,),
    "model.visual.blocks.0.attn.qkv.weight": (96, 32),
    "mtp.fc.weight": (64, 128),
    "mtp.layers.0.self_attn.q_norm.weight": (64,),
}
# tensors of the published layer that predicts a second token
_MTP: dict[str, tuple[int, ...]] = {
    "eh_proj.weight": (128, 256), "enorm.weight": (128,), "hnorm.weight": (128,), "shared_head.norm.weight": (128,),
    "self_attn.q_a_proj.weight": (96, 128), "mlp.gate.weight": (8, 128),
}  # fmt: skip
SHARDS = 3
SPECIAL = ("<unk>", "<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>")
_CORPUS = (
    "The trainer and the sampler read the same weights and must score every token with the same bytes.",
    "Guess the word: five letters, green for the right place, yellow for the wrong place, grey for absent.",
    "One row is one token; a chunk of rows, a page of keys and values, a step of the optimizer, a new version.",
    "0 1 2 3 4 5 6 7 8 9 10 100 1000; def add(a, b): return a + b",
)
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny(
    arch: str,
    out: str | Path,
    *,
    hidden: int | None = None,
    layers: int | None = None,
    tied: bool = False,
    vision: bool = False,
    seed: int = 0,
) -> Path:
    """Writes the folder and returns it; equal arguments, equal bytes. `vision`: as the text part of a vision-language checkpoint.

    ValueError for an unknown arch, a non-empty `out`, or a vision-language model that there isn't.
    """
    if arch not in ARCHS:
        raise ValueError(f"unknown architecture {arch!r}; there are {', '.join(ARCHS)}")
    fields = {**ARCHS[arch], "tie_word_embeddings": tied}
    fields |= {"hidden_size": hidden} if hidden is not None else {}
    if layers is not None:
        fields["num_hidden_layers"] = layers
        if "max_window_layers" in fields:
            fields["max_window_layers"] = layers
        if "layer_types" in fields:  # every fourth, and the last
            full = [i % 4 == 3 or i == layers - 1 for i in range(layers)]
            fields["layer_types"] = ["full_attention" if f else "linear_attention" for f in full]
    vocabulary = fields["vocab_size"]
    if vision:
        fields = _with_vision(arch, fields)
    made = model_class(fields)
    table = made.family.table(made.family.config.from_hf(fields))
    places = {piece.published: (entry, piece) for entry, piece in table.pieces()}
    specs = [(name, torch.float32 if table.is_fp32(entry.ours) else torch.bfloat16, piece.shape) for name, (entry, piece) in places.items()]
    unused = dict(_UNUSED) if vision else {}
    if fields.get("num_nextn_predict_layers"):
        unused |= {f"model.layers.{fields['num_hidden_layers']}.{name}": shape for name, shape in _MTP.items()}
    specs += [(name, torch.bfloat16, shape) for name, shape in unused.items()]

    def draw(name: str) -> Tensor:
        if name not in places:
            return normal_(torch.empty(unused[name], dtype=torch.bfloat16), key64(seed, name), 1.0, 0.0)
        entry, piece = places[name]
        tensor = torch.empty(piece.shape, dtype=dtypes[name])
        return draw_piece(piece, tensor, seed, table, entry, made.family.recipe)

    dtypes = {name: dtype for name, dtype, _ in specs}
    total = sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in specs)
    with fresh_folder(out) as folder:
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        generation = {
            "bos_token_id": 1,
            "eos_token_id": [2],
            "pad_token_id": 3,
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
        }
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        write_tokenizer(folder, vocabulary)
        write_shards(folder, specs, draw, -(-total // SHARDS))
    return Path(out)


def _with_vision(arch: str, fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of the vision-language model around a text model."""
    if not arch.startswith("qwen3_5"):
        raise ValueError(f"{arch!r} has no vision-language model; qwen3_5 and qwen3_5_moe have")
    text = {name: value for name, value in fields.items() if name != "architectures"}
    whole = [name.replace("ForCausalLM", "ForConditionalGeneration") for name in fields["architectures"]]
    tied = fields["tie_word_embeddings"]
    return {"architectures": whole, "model_type": arch, "text_config": text, **_VISION, "tie_word_embeddings": tied}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens that AutoTokenizer loads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() <= vocab_size, f"{tokenizer.get_vocab_size()} tokens for a vocabulary of {vocab_size}"
    tokenizer.save(str(folder / "tokenizer.json"))
    unknown, bos, eos, pad, *_ = SPECIAL
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
