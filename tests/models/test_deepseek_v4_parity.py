"""DeepSeek-V4 against transformers' own class: values, gradients, files under both name sets and both forms of config.json, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parity_harness import Checkpoints, assert_packed_parity, assert_parity, gradients_of, relative, theirs, whole
from torch import Tensor

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.shards import read_shard
from zoo.deepseek_v4 import SIZES, DeepseekV4Config, DeepseekV4ForRL, DeepseekV4ForServing
from zoo.deepseek_v4.config import HEAVY, PUBLISHED_TINY, SPARSE, WINDOW, Rates
from zoo.deepseek_v4.weights import saved

TOKENS = 140
# 32 index heads: with few of them scores of exactly 0 are common, and transformers has no rule for equal scores
GEOMETRY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 2,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "qk_rope_head_dim": 8,
    "max_position_embeddings": 4096,
    "hc_mult": 4,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1},
}
SHORT_ROWS: dict[str, Any] = {
    "compress_ratios": None,
    "layer_types": [WINDOW, SPARSE, HEAVY, SPARSE],
    "compress_rates": {SPARSE: 4, HEAVY: 16},
}
KINDS: dict[str, dict[str, Any]] = {
    "published ratios": {},
    "short heavy rows": SHORT_ROWS,
    "all hashed, no window alone": {"num_hash_layers": 4, "compress_ratios": [128, 128, 4, 128], "o_groups": 4, "sliding_window": 5},
    "all learned, a small limit": {"num_hash_layers": 0, "swiglu_limit": 0.7, "hc_sinkhorn_iters": 3, "compress_ratios": [4, 0, 0, 4]},
}
CODES = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
FP32: dict[str, Any] = {"program": "transformers", "dtype": torch.float32, "device": "cpu"}


def build(kind: str, seed: int) -> Any:
    """transformers' model with every parameter and buffer drawn: its own start hides errors, a table of zeros most of all."""
    config = transformers.DeepseekV4Config(**{name: v for name, v in {**GEOMETRY, **KINDS[kind]}.items() if v is not None})
    model = transformers.DeepseekV4ForCausalLM(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if tensor.dtype == torch.int64:
                tensor.copy_(torch.rand(len(tensor), config.n_routed_experts, generator=random).argsort(1)[:, : tensor.shape[1]])
                continue
            drawn = torch.randn(tensor.shape, generator=random)
            if "norm" in name and tensor.dim() == 1:
                tensor.copy_(1 + 0.1 * drawn)
            elif name.endswith("scale"):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=random))
            elif "e_score_correction_bias" in name:
                tensor.copy_(0.1 * drawn)
            elif tensor.dim() == 1 or name.endswith(("position_bias", "base")):
                tensor.copy_(0.3 * drawn)
            elif "embed" in name:
                tensor.copy_(drawn)
            else:
                tensor.copy_(drawn * tensor.shape[-1] ** -0.5 * (2.5 if "lm_head" in name else 1))
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("deepseek_v4"), build)


def ids_of(seed: int, count: int = TOKENS) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(100 + seed))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_and_log_probabilities(kind: str, checkpoint: Checkpoints) -> None:
    """Beyond the first heavy row, and to where the index discards."""
    model = DeepseekV4ForRL.from_pretrained(checkpoint(kind), **FP32)
    assert_parity(model, checkpoint(kind), checkpoint(kind, seed=1), ids_of(0), 5e-5)


@torch.no_grad()
def test_packed_documents(checkpoint: Checkpoints) -> None:
    path = checkpoint("short heavy rows")
    model = DeepseekV4ForRL.from_pretrained(path, **FP32)
    documents = [ids_of(1, 65), ids_of(2, 1), ids_of(3, 30), ids_of(4, 17)]
    assert_packed_parity(model, theirs(path, torch.float32), documents, 5e-5)


def test_gradients(checkpoint: Checkpoints) -> None:
    """Of every parameter that both train: transformers holds no gradient back from the streams' mixers either."""
    path = checkpoint("short heavy rows")
    ours = DeepseekV4ForRL.from_pretrained(path, **FP32)
    ids = ids_of(5, 70)
    (-ours.score(ids, whole(ids))[:-1].mean()).backward()
    reference = theirs(path, torch.float32)
    reference(ids[None], labels=ids[None]).loss.backward()
    table = ours.table_of()
    for parameter in ours.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    mine = {name: gradient for name, gradient in gradients_of(ours).items() if table.known[name][0].trainable}
    expected = published_gradients(reference, ours)
    assert set(mine) <= set(expected)
    for name, gradient in mine.items():
        assert relative(gradient, expected[name]) < 2e-4, name


def published_gradients(reference: Any, ours: Any) -> dict[str, Tensor]:
    """transformers' gradients by published name: a model of ours loads them as if they were weights, from its own saved names."""
    names = {
        "self_attn": "attn",
        "mlp": "ffn",
        "q_a_proj": "wq_a",
        "q_a_norm": "q_norm",
        "q_b_proj": "wq_b",
        "kv_proj": "wkv",
        "gate_proj": "wgate",
        "o_a_proj": "wo_a",
        "o_b_proj": "wo_b",
        "position_bias": "ape",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "sinks": "attn_sink",
        "embed_tokens": "embed",
        "lm_head": "head",
    }
    found: dict[str, Tensor] = {}
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        grad = parameter.grad
        if ".experts." in name:
            layer = name.split(".")[2]
            for e, each in enumerate(grad):
                parts = each.chunk(2) if "gate_up" in name else [each]
                for part, w in zip(parts, ("w1", "w3") if "gate_up" in name else ("w2",), strict=True):
                    found[f"layers.{layer}.ffn.experts.{e}.{w}.weight"] = part
            continue
        if ".shared_experts." in name:
            inner = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
            pieces = [inner.get(piece, names.get(piece, piece)) for piece in name.removeprefix("model.").split(".")]
        else:
            pieces = [names.get(piece, piece) for piece in name.removeprefix("model.").split(".")]
        published = ".".join(pieces)
        published = published.replace("compressor.kv_norm", "compressor.norm")
        published = published.replace("attn_hc.", "hc_attn_").replace("ffn_hc.", "hc_ffn_").replace("hc_head.hc_", "hc_head_")
        found[published] = grad
    return found


# files


def upstream(path: Path, folder: Path, fields: dict[str, Any]) -> Path:
    """The same checkpoint under the published names and form of config.json."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    back = {
        saved(name): name for name in DeepseekV4ForRL.from_pretrained(path, device="cpu").table_of().known if not name.startswith("model.")
    }
    save_file({back[name]: tensor for name, tensor in load_file(path / "model.safetensors").items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


PUBLISHED_FORM = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rms_norm_eps": 1e-6,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "dspark_depth": 3,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


@torch.no_grad()
def test_both_name_sets_and_both_forms_are_one_model(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = checkpoint("published ratios", dtype=torch.bfloat16)
    fields = {**GEOMETRY, **PUBLISHED_FORM, "compress_ratios": [0, 4, 128, 4, 0]}
    published = upstream(path, tmp_path / "published", fields)
    one, other = (DeepseekV4ForRL.from_pretrained(each, device="cpu") for each in (path, published))
    assert replace(one.config, published={}) == replace(other.config, published={})
    assert one.fingerprint() == other.fingerprint()
    ids = ids_of(6, 60)
    assert torch.equal(one.score(ids, whole(ids)), other.score(ids, whole(ids)))
    for source, model in ((path, one), (published, other)):
        target = tmp_path / f"{source.name}-back"
        model.save_pretrained(target)
        for name in ("model.safetensors", "config.json"):
            assert (target / name).read_bytes() == (source / name).read_bytes(), name
    assert read_shard(published / "model.safetensors").header != read_shard(path / "model.safetensors").header


@torch.no_grad()
def test_what_we_write_transformers_reads(tmp_path: Path) -> None:
    model = DeepseekV4ForRL.from_config(SIZES["tiny"], seed=3, device="cpu", program="transformers")
    model.save_pretrained(tmp_path / "ours")
    ids = ids_of(7, 50)
    expected = theirs(tmp_path / "ours", torch.float32)(ids[None]).logits[0]
    assert (model(ids, cu_seqlens=whole(ids)).logits - expected).abs().max() < 5e-5


@torch.no_grad()
def test_a_tiny_published_folder(tmp_path: Path) -> None:
    """With a drafter's tensors, which are carried; served and trained by the classes that `zoo.load` finds."""
    make_tiny("deepseek_v4", tmp_path / "tiny", seed=4)
    trainer = zoo.load(tmp_path / "tiny", role="rl", device="cpu")
    assert isinstance(trainer, DeepseekV4ForRL)
    assert isinstance(zoo.load(tmp_path / "tiny", role="serving", device="cpu"), DeepseekV4ForServing)
    assert replace(trainer.config, published={}) == replace(SIZES["tiny"], rates=Rates(4, 128), mtp_layers=1)
    trainer.save_pretrained(tmp_path / "back")
    for file in (tmp_path / "tiny").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


# refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v41"}, "model_type 'deepseek_v41' is not supported, only 'deepseek_v4'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"weight_block_size None in quantization_config .* only \[128, 128\]"),
        ({"quantization_config": {**CODES, "scale_fmt": None}}, "scale_fmt None in quantization_config is not supported, only 'ue8m0'"),
        ({"quantization_config": CODES, "expert_dtype": "fp6"}, "expert_dtype 'fp6' is not supported, only 'fp8' or 'fp4'"),
        ({"quantization_config": {**CODES, "expert_dtype": "fp8"}, "expert_dtype": "fp4"}, "expert_dtype is 'fp4', and 'fp8' in"),
        ({"quantization_config": {**CODES, "surprise": 1}}, "quantization_config has the unknown field 'surprise'"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object, it is 'fp8'"),
        ({"compress_ratios": [0, 4, 16, 4]}, "compress_ratios has 4 entries, there are 5 layers"),
        ({"compress_ratios": [0, 4, 16, 4, 32]}, r"compress_ratios holds \[16, 32\] beside 0 and 4, there is one heavy ratio"),
        ({"compress_ratios": [0, 4, 16, 4, -1]}, "compress_ratios must be a list of integers of at least 0"),
        ({"layer_types": [WINDOW, SPARSE, SPARSE, SPARSE, HEAVY]}, f"layer_types makes layer 2 {SPARSE}, compress_ratios {HEAVY}"),
        ({"layer_types": [WINDOW, SPARSE]}, "layer_types must name 5 layers 'sliding_attention' or"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types must name 5 layers"),
        ({"compress_rates": {SPARSE: 4, HEAVY: 16}}, "compress_ratios holds 128, the rate of heavily_compressed_attention is 16"),
        ({"compress_rates": {SPARSE: 4, HEAVY: 4}, "compress_ratios": [0, 4, 4, 4, 4]}, "both have rows of 4 tokens"),
        ({"mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"]}, "mlp_layer_types and num_hash_layers 2 disagree"),
        ({"num_hash_layers": -1}, "num_hash_layers must be an integer of at least 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of n_routed_experts 8"),
        ({"o_groups": 3}, "num_attention_heads 4 is not a multiple of o_groups 3"),
        ({"qk_rope_head_dim": 18}, "the rotated width must be even and at most 16, it is 18"),
        ({"partial_rotary_factor": 0.5}, r"must say one width in 32, they say \[8, 16\]"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' of rope_scaling is not supported"),
        ({"rope_scaling": {**PUBLISHED_TINY["rope_scaling"], "mscale": 1}}, "rope_scaling has unknown fields 'mscale'"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 is not supported"),
        ({"hc_mult": 1}, "hc_mult must be at least 2, it is 1"),
        ({"engram": 1}, "config.json has unknown fields engram=1"),
    ],
)
def test_refusals_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^deepseek_v4: .*{message}"):
        DeepseekV4Config.from_hf({**PUBLISHED_TINY, **change})


def test_schedules_may_be_absent_once() -> None:
    fields = {name: value for name, value in PUBLISHED_TINY.items() if name not in ("compress_ratios", "num_hash_layers")}
    with pytest.raises(ValueError, match="neither 'layer_types' nor 'compress_ratios'"):
        DeepseekV4Config.from_hf(fields)
    with pytest.raises(ValueError, match="neither 'mlp_layer_types' nor 'num_hash_layers'"):
        DeepseekV4Config.from_hf({**fields, "compress_ratios": [0] * 5})


def test_published_sizes_are_read() -> None:
    """Flash and Pro as their config.json files have it, and as we write them."""
    for size, ratios in (("flash", [0, 0, *[4, 128] * 20, 4, 0]), ("pro", [128, 128, *[4, 128] * 29, 4, 0])):
        config = SIZES[size]
        fields = {name: v for name, v in config.to_hf().items() if name not in ("layer_types", "compress_rates", "mlp_layer_types")}
        del fields["rope_parameters"], fields["partial_rotary_factor"]
        scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
        found = DeepseekV4Config.from_hf({**fields, "compress_ratios": ratios, "num_hash_layers": 3, "rope_scaling": scaling})
        assert replace(found, published={}) == config
        assert replace(DeepseekV4Config.from_hf(config.to_hf()), published={}) == config


def test_a_table_that_names_no_experts_is_refused(checkpoint: Checkpoints) -> None:
    model = DeepseekV4ForRL.from_pretrained(checkpoint("published ratios"), **FP32)
    before = model.weights_version
    name = "layers.0.ffn.gate.tid2eid"
    table = dict(model.published_tensors())[name].clone()
    for change, message in ((table * 0, "zeros alone"), (table + 1, "there are 8"), (table[:, :1].expand(-1, 2), "twice")):
        with pytest.raises(ValueError, match=f"^{name} .*{message}"):
            model.load_weights([(name, change.contiguous())])
    assert model.weights_version == before
