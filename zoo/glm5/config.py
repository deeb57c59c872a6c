"""GLM-5, 5.1 and 5.2 configurations, read field by field from config.json."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from zoo.common.config import IGNORED, LAYERS, FieldReader, check_tokens
from zoo.common.ops.biased_route import Choice, check_groups
from zoo.common.reading import shown

# head_dim is overwritten by transformers with qk_rope_head_dim, and published as something else; the others say how to run, not what.
# num_experts and num_local_experts are other names of n_routed_experts: see `_experts`.
UNREAD = IGNORED | {"head_dim", "ep_size", "pretraining_tp", "index_share_for_mtp_iteration"}
MTP_LAYERS = 16
ATTENTION = ("indexed_attention", "deepseek_sparse_attention")  # one kind: transformers 5.12 writes the second, others the first
LATENT_EPS = 1e-6  # of the norms between two projections, whatever rms_norm_eps is


@dataclass(frozen=True)
class GLMConfig:
    """Geometry of a GLM-5 model.

    query_rank, kv_rank  widths that queries, and keys with values, go through
    nope_dim, rope_dim   columns of a query or key head without and with positions; `value_dim` those of a value head
    full                 layers that choose the tokens they read; the others read what the last of them below chose
    sparse               layers with routed experts; the others have one dense MLP
    mtp_layers           published layers behind the last, which are carried and not used
    published            config.json as it was read
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_top_k: int
    full: tuple[bool, ...]
    sparse: tuple[bool, ...]
    intermediate: int
    experts: int
    expert_intermediate: int
    shared_intermediate: int
    choice: Choice
    eps: float
    theta: float
    positions: int
    tied: bool = False
    mtp_layers: int = 0
    eos: tuple[int, ...] = ()
    published: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_tokens("glm5", "eos_token_id", self.eos, self.eos, self.vocabulary)

    @property
    def model_type(self) -> str:
        return "glm_moe_dsa"

    @property
    def cached(self) -> int:
        """Columns of a token's latent row: keys and values before their up-projection, and the rotated part of all heads' keys."""
        return self.kv_rank + self.rope_dim

    def first_layers(self, layers: int) -> GLMConfig:
        """The same geometry with the first `layers` layers only."""
        return replace(self, layers=layers, full=self.full[:layers], sparse=self.sparse[:layers], mtp_layers=0, published={})

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> GLMConfig:
        """Reads a config.json. ValueError for a missing, unknown or unsupported field, naming it and its value."""
        read = FieldReader("glm5", fields, UNREAD)
        read.one_of("model_type", "glm_moe_dsa")
        read.is_not_quantised()
        read.trains_as_published()
        read.only("hidden_act", "silu")
        for name in ("attention_bias", "mlp_bias"):
            read.only(name, False, absent=False)
        for name in ("rope_interleave", "indexer_rope_interleave"):
            read.only(name, True, absent=True)
        read.only("scoring_func", "sigmoid", absent="sigmoid")
        read.only("topk_method", "noaux_tc", absent="noaux_tc")
        read.only("moe_router_dtype", "float32", absent="float32")
        read.only("moe_layer_freq", 1, absent=1)
        layers, vocabulary = read.integer("num_hidden_layers", LAYERS), read.integer("vocab_size")
        _kinds(read, "layer_types", layers, *ATTENTION)
        heads = read.integer("num_attention_heads")
        read.only("num_key_value_heads", heads)
        nope_dim = read.integer("qk_nope_head_dim")
        rope_dim = read.integer("qk_rope_head_dim")
        if rope_dim % 2:
            raise ValueError(f"glm5: qk_rope_head_dim must be even, it is {rope_dim}")
        read.only("qk_head_dim", nope_dim + rope_dim, absent=nope_dim + rope_dim)
        index_dim = read.integer("index_head_dim")
        if index_dim < rope_dim:
            raise ValueError(f"glm5: index_head_dim {index_dim} is below qk_rope_head_dim {rope_dim}")
        expert_intermediate = read.integer("moe_intermediate_size")
        experts, choice = _experts(read, layers)
        config = cls(
            vocabulary=vocabulary,
            hidden=read.integer("hidden_size"),
            layers=layers,
            heads=heads,
            query_rank=read.integer("q_lora_rank"),
            kv_rank=read.integer("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=read.integer("v_head_dim"),
            index_heads=read.integer("index_n_heads"),
            index_dim=index_dim,
            index_top_k=read.integer("index_topk"),
            full=_full(read, layers),
            sparse=_sparse(read, layers),
            intermediate=read.integer("intermediate_size"),
            experts=experts,
            expert_intermediate=expert_intermediate,
            shared_intermediate=expert_intermediate * read.integer("n_shared_experts"),
            choice=choice,
            eps=read.number("rms_norm_eps"),
            theta=read.rope_theta(),
            positions=read.integer("max_position_embeddings"),
            tied=read.boolean("tie_word_embeddings"),
            mtp_layers=0 if read.raw("num_nextn_predict_layers", 0) in (0, None) else read.integer("num_nextn_predict_layers", MTP_LAYERS),
            eos=read.tokens("eos_token_id", vocabulary),
            published=fields,
        )
        read.finish()
        return config

    def to_hf(self) -> dict[str, Any]:
        """The published fields of this geometry: as read if they still say the same."""
        if self.published and type(self).from_hf(self.published) == self:
            return deepcopy(self.published)
        fields: dict[str, Any] = {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.expert_intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.index_top_k,
            "indexer_types": ["full" if full else "shared" for full in self.full],
            "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in self.sparse],
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared_intermediate // self.expert_intermediate,
            "num_experts_per_tok": self.choice.top_k,
            "n_group": self.choice.groups,
            "topk_group": self.choice.open_groups,
            "norm_topk_prob": self.choice.renormalise,
            "routed_scaling_factor": self.choice.scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "num_nextn_predict_layers": self.mtp_layers,
            "torch_dtype": "bfloat16",
        }
        dense = self.sparse.count(False)
        if not any(self.sparse[:dense]):  # else a count can't say which are dense
            fields["first_k_dense_replace"] = dense
        if self.eos:
            fields["eos_token_id"] = list(self.eos) if len(self.eos) > 1 else self.eos[0]
        return fields


def _experts(read: FieldReader, layers: int) -> tuple[int, Choice]:
    experts = read.experts("n_routed_experts", layers)
    for name in ("num_experts", "num_local_experts"):
        read.only(name, experts, absent=experts)
    choice = Choice(
        read.integer("num_experts_per_tok"),
        read.integer("n_group"),
        read.integer("topk_group"),
        read.boolean("norm_topk_prob"),
        read.number("routed_scaling_factor"),
    )
    check_groups("glm5", experts, choice)
    return experts, choice


def _kinds(read: FieldReader, name: str, layers: int, yes: str, no: str) -> tuple[bool, ...] | None:
    """Which layers are of the first of two kinds, from a list of names; None where it is absent."""
    kinds = read.raw(name, None)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (yes, no) for kind in kinds):
        raise ValueError(f"glm5: {name} must name {layers} layers {yes!r} or {no!r}, it is {shown(kinds)}")
    return tuple(kind == yes for kind in kinds)


def _full(read: FieldReader, layers: int) -> tuple[bool, ...]:
    """From indexer_types, else from a pattern, else from a frequency and an offset, as transformers reads it: the first of them that
    is there counts alone, for published configs have more than one of them."""
    source, full = _first_full(read, layers)
    if not full[0]:
        raise ValueError(f"glm5: {source} makes layer 0 shared, but no layer below it chooses tokens for it")
    return full


def _first_full(read: FieldReader, layers: int) -> tuple[str, tuple[bool, ...]]:
    """(the field that says so, the layers that choose their tokens)"""
    named = _kinds(read, "indexer_types", layers, "full", "shared")
    pattern = read.raw("index_topk_pattern", None)
    frequency = read.raw("index_topk_freq", None)
    offset = read.raw("index_skip_topk_offset", None)
    if named is not None:
        return "indexer_types", named
    if isinstance(pattern, list):
        named = _kinds(read, "index_topk_pattern", layers, "full", "shared")
        assert named is not None
        return "index_topk_pattern", named
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - {"F", "S"}:
            raise ValueError(f"glm5: index_topk_pattern must have {layers} letters F or S, it is {shown(pattern)}")
        return "index_topk_pattern", tuple(letter == "F" for letter in pattern)
    every = 1 if frequency is None else read.integer("index_topk_freq")
    skip = 2 if offset is None else offset
    if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
        raise ValueError(f"glm5: index_skip_topk_offset must be an integer of at least 0, it is {shown(skip)}")
    return "index_topk_freq", tuple(max(i - skip + 1, 0) % every == 0 for i in range(layers))


def _sparse(read: FieldReader, layers: int) -> tuple[bool, ...]:
    """From mlp_layer_types, else from a count of leading dense layers, which transformers writes beside them and does not read."""
    named = _kinds(read, "mlp_layer_types", layers, "sparse", "dense")
    dense = read.raw("first_k_dense_replace", None)
    if named is not None:
        return named
    if dense is None:
        raise ValueError("glm5: config.json has neither 'mlp_layer_types' nor 'first_k_dense_replace'")
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise ValueError(f"glm5: first_k_dense_replace must be an integer of at least 0, it is {shown(dense)}")
    return tuple(i >= dense for i in range(layers))


def _published(theta: float, positions: int, full: tuple[bool, ...]) -> GLMConfig:
    return GLMConfig(
        154880, 6144, 78, 64, 2048, 512, 192, 64, 256, 32, 128, 2048, full, tuple(i >= 3 for i in range(78)), 12288, 256, 2048, 2048,
        Choice(8, scale=2.5), 1e-5, theta, positions, mtp_layers=1, eos=(154820, 154827, 154829),
    )  # fmt: skip


SIZES = {
    "tiny": GLMConfig(
        512, 128, 5, 4, 96, 64, 32, 16, 32, 32, 32, 24, (True, False, True, False, False), (False, True, True, True, True), 256, 8, 64, 64,
        Choice(2, scale=2.5), 1e-5, 8e6, 4096, eos=(2,),
    ),
    "5": _published(1e6, 202752, (True,) * 78),
    "5.2": _published(8e6, 1048576, tuple(max(i - 2, 0) % 4 == 0 for i in range(78))),
}  # fmt: skip

# the fields of a published config.json, at tiny sizes
PUBLISHED_TINY: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
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
