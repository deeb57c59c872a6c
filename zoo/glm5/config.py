"""GLM-5, 5.1 and 5.2 configurations, read field by field from config.json."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from zoo.common.config import FieldReader
from zoo.common.geometry import Fixed, Geometry, Published, eos_of
from zoo.common.ops.biased_route import Choice, check_groups
from zoo.common.quantisation import FIELD, Quantisation, read_quantisation, write_quantisation
from zoo.common.reading import shown

# head_dim is overwritten by transformers with qk_rope_head_dim, and published as something else; the others say how to run, not what.
# num_experts and num_local_experts are other names of n_routed_experts: see `GLMConfig.check`.
UNREAD = frozenset({"head_dim", "ep_size", "pretraining_tp", "index_share_for_mtp_iteration"})
MTP_LAYERS = 16
ATTENTION = ("indexed_attention", "deepseek_sparse_attention")  # one kind: transformers 5.12 writes the second, others the first
LATENT_EPS = 1e-6  # of the norms between two projections, whatever rms_norm_eps is


def _kinds(read: FieldReader, name: str, yes: str, no: str) -> tuple[bool, ...] | None:
    """Which layers are of the first of two kinds, from a list of names; None where it is absent."""
    layers = read.found["layers"]
    kinds = read.raw(name, None)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (yes, no) for kind in kinds):
        raise ValueError(f"glm5: {name} must name {layers} layers {yes!r} or {no!r}, it is {shown(kinds)}")
    return tuple(kind == yes for kind in kinds)


def _full(read: FieldReader, name: str) -> tuple[bool, ...]:
    """From indexer_types, else from a pattern, else from a frequency and an offset, as transformers reads it: the first of them that
    is there counts alone, for published configs have more than one of them."""
    source, full = _first_full(read)
    if not full[0]:
        raise ValueError(f"glm5: {source} makes layer 0 shared, but no layer below it chooses tokens for it")
    return full


def _first_full(read: FieldReader) -> tuple[str, tuple[bool, ...]]:
    """(the field that says so, the layers that choose their tokens)"""
    layers = read.found["layers"]
    named = _kinds(read, "indexer_types", "full", "shared")
    pattern = read.raw("index_topk_pattern", None)
    frequency = read.raw("index_topk_freq", None)
    offset = read.raw("index_skip_topk_offset", None)
    if named is not None:
        return "indexer_types", named
    if isinstance(pattern, list):
        named = _kinds(read, "index_topk_pattern", "full", "shared")
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


def _sparse(read: FieldReader, name: str) -> tuple[bool, ...]:
    """From mlp_layer_types, else from a count of leading dense layers, which transformers writes beside them and does not read."""
    named = _kinds(read, name, "sparse", "dense")
    dense = read.raw("first_k_dense_replace", None)
    if named is not None:
        return named
    if dense is None:
        raise ValueError("glm5: config.json has neither 'mlp_layer_types' nor 'first_k_dense_replace'")
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise ValueError(f"glm5: first_k_dense_replace must be an integer of at least 0, it is {shown(dense)}")
    return tuple(i >= dense for i in range(read.found["layers"]))


def _shared_intermediate(read: FieldReader, name: str) -> int:
    width: int = read.found["expert_intermediate"]
    return width * read.integer(name)


def _shared_experts(config: GLMConfig) -> dict[str, Any]:
    return {"n_shared_experts": config.shared_intermediate // config.expert_intermediate}


def _choice(read: FieldReader, name: str) -> Choice:
    return Choice(
        read.integer(name),
        read.integer("n_group"),
        read.integer("topk_group"),
        read.boolean("norm_topk_prob"),
        read.number("routed_scaling_factor"),
    )


def _choice_of(config: GLMConfig) -> dict[str, Any]:
    return {
        "num_experts_per_tok": config.choice.top_k,
        "n_group": config.choice.groups,
        "topk_group": config.choice.open_groups,
        "norm_topk_prob": config.choice.renormalise,
        "routed_scaling_factor": config.choice.scale,
    }


def _theta_of(config: GLMConfig) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config.theta}}


def _mtp_layers(read: FieldReader, name: str) -> int:
    return 0 if read.raw(name, 0) in (0, None) else read.integer(name, MTP_LAYERS)


def _heads_of(config: GLMConfig) -> dict[str, Any]:
    return {"num_attention_heads": config.heads, "num_key_value_heads": config.heads}


def _full_of(config: GLMConfig) -> dict[str, Any]:
    return {"indexer_types": ["full" if full else "shared" for full in config.full]}


def _sparse_of(config: GLMConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"mlp_layer_types": ["sparse" if sparse else "dense" for sparse in config.sparse]}
    dense = config.sparse.count(False)
    if not any(config.sparse[:dense]):  # else a count can't say which are dense
        out["first_k_dense_replace"] = dense
    return out


@dataclass(frozen=True)
class GLMConfig(Geometry):
    """Geometry of a GLM-5 model.

    query_rank, kv_rank  widths that queries, and keys with values, go through
    nope_dim, rope_dim   columns of a query or key head without and with positions; `value_dim` those of a value head
    full                 layers that choose the tokens they read; the others read what the last of them below chose
    sparse               layers with routed experts; the others have one dense MLP
    mtp_layers           published layers behind the last, which are carried and not used
    published            config.json as it was read
    """

    family: ClassVar = "glm5"
    kinds: ClassVar = {"glm_moe_dsa": "glm_moe_dsa"}
    # the published list has indexers_proj, of the tensor indexer.weights_proj
    kept: ClassVar = ("lm_head", "embed_tokens", "mlp.gate", "indexers_proj")
    architectures: ClassVar = {"glm_moe_dsa": "GlmMoeDsaForCausalLM"}
    ignored: ClassVar = UNREAD
    fixed: ClassVar = (
        Fixed("hidden_act", "silu", absent=False, written=True),
        Fixed("attention_bias", False, written=True),
        Fixed("mlp_bias", False),
        Fixed("rope_interleave", True),
        Fixed("indexer_rope_interleave", True),
        Fixed("scoring_func", "sigmoid", written=True),
        Fixed("topk_method", "noaux_tc", written=True),
        Fixed("moe_router_dtype", "float32"),
        Fixed("moe_layer_freq", 1),
    )

    vocabulary: Annotated[int, Published("vocab_size", FieldReader.integer, divided="tp")]
    hidden: Annotated[int, Published("hidden_size", FieldReader.integer)]
    layers: Annotated[int, Published("num_hidden_layers", FieldReader.layers)]
    heads: Annotated[int, Published("num_attention_heads", FieldReader.integer, _heads_of, divided="tp")]
    query_rank: Annotated[int, Published("q_lora_rank", FieldReader.integer)]
    kv_rank: Annotated[int, Published("kv_lora_rank", FieldReader.integer)]
    nope_dim: Annotated[int, Published("qk_nope_head_dim", FieldReader.integer)]
    rope_dim: Annotated[int, Published("qk_rope_head_dim", FieldReader.integer)]
    value_dim: Annotated[int, Published("v_head_dim", FieldReader.integer)]
    index_heads: Annotated[int, Published("index_n_heads", FieldReader.integer)]
    index_dim: Annotated[int, Published("index_head_dim", FieldReader.integer)]
    index_top_k: Annotated[int, Published("index_topk", FieldReader.integer)]
    full: Annotated[tuple[bool, ...], Published("indexer_types", _full, _full_of)]
    sparse: Annotated[tuple[bool, ...], Published("mlp_layer_types", _sparse, _sparse_of)]
    intermediate: Annotated[int, Published("intermediate_size", FieldReader.integer, divided="tp")]
    experts: Annotated[int, Published("n_routed_experts", FieldReader.experts, divided="ep")]
    expert_intermediate: Annotated[int, Published("moe_intermediate_size", FieldReader.integer)]
    shared_intermediate: Annotated[int, Published("n_shared_experts", _shared_intermediate, _shared_experts, divided="tp")]
    choice: Annotated[Choice, Published("num_experts_per_tok", _choice, _choice_of)]
    eps: Annotated[float, Published("rms_norm_eps", FieldReader.number)]
    theta: Annotated[float, Published("rope_theta", FieldReader.rope_theta, _theta_of)]
    positions: Annotated[int, Published("max_position_embeddings", FieldReader.integer)]
    tied: Annotated[bool, Published("tie_word_embeddings", FieldReader.boolean)] = False
    mtp_layers: Annotated[int, Published("num_nextn_predict_layers", _mtp_layers)] = 0
    eos: Annotated[tuple[int, ...], Published("eos_token_id", FieldReader.tokens, eos_of)] = ()
    quantised: Annotated[Quantisation | None, Published(FIELD, read_quantisation, write_quantisation)] = None
    published: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def model_type(self) -> str:
        return "glm_moe_dsa"

    @property
    def cached(self) -> int:
        """Columns of a token's latent row: keys and values before their up-projection, and the rotated part of all heads' keys."""
        return self.kv_rank + self.rope_dim

    @property
    def keys_apart(self) -> bool:
        """Whether the selector's keys and its heads' weights are two parameters: where matrices are codes, and the latter are not."""
        return self.quantised is not None

    def first_layers(self, layers: int) -> GLMConfig:
        """The same geometry with the first `layers` layers only."""
        return replace(self, layers=layers, full=self.full[:layers], sparse=self.sparse[:layers], mtp_layers=0, published={})

    @classmethod
    def check(cls, reader: FieldReader) -> None:
        found = reader.found
        _kinds(reader, "layer_types", *ATTENTION)
        reader.only("num_key_value_heads", found["heads"])
        rope_dim = found["rope_dim"]
        if rope_dim % 2:
            raise ValueError(f"glm5: qk_rope_head_dim must be even, it is {rope_dim}")
        width = found["nope_dim"] + rope_dim
        reader.only("qk_head_dim", width, absent=width)
        if found["index_dim"] < rope_dim:
            raise ValueError(f"glm5: index_head_dim {found['index_dim']} is below qk_rope_head_dim {rope_dim}")
        for name in ("num_experts", "num_local_experts"):
            reader.only(name, found["experts"], absent=found["experts"])
        check_groups("glm5", found["experts"], found["choice"])


def _published(theta: float, positions: int, full: tuple[bool, ...]) -> GLMConfig:
    return GLMConfig(
        vocabulary=154880,
        hidden=6144,
        layers=78,
        heads=64,
        query_rank=2048,
        kv_rank=512,
        nope_dim=192,
        rope_dim=64,
        value_dim=256,
        index_heads=32,
        index_dim=128,
        index_top_k=2048,
        full=full,
        sparse=tuple(i >= 3 for i in range(78)),
        intermediate=12288,
        experts=256,
        expert_intermediate=2048,
        shared_intermediate=2048,
        choice=Choice(8, scale=2.5),
        eps=1e-5,
        theta=theta,
        positions=positions,
        mtp_layers=1,
        eos=(154820, 154827, 154829),
    )


SIZES = {
    "tiny": GLMConfig(
        vocabulary=512,
        hidden=128,
        layers=5,
        heads=4,
        query_rank=96,
        kv_rank=64,
        nope_dim=32,
        rope_dim=16,
        value_dim=32,
        index_heads=32,
        index_dim=32,
        index_top_k=24,
        full=(True, False, True, False, False),
        sparse=(False, True, True, True, True),
        intermediate=256,
        experts=8,
        expert_intermediate=64,
        shared_intermediate=64,
        choice=Choice(2, scale=2.5),
        eps=1e-5,
        theta=8e6,
        positions=4096,
        eos=(2,),
    ),
    "5": _published(1e6, 202752, (True,) * 78),
    "5.2": _published(8e6, 1048576, tuple(max(i - 2, 0) % 4 == 0 for i in range(78))),
}

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
