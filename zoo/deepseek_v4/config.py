"""DeepSeek-V4 configurations, read field by field from config.json: as published, and as transformers saves them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple

from zoo.common import ops
from zoo.common.config import FieldReader
from zoo.common.geometry import Fixed, Geometry, Published, eos_of
from zoo.common.ops import Sinkhorn, Yarn
from zoo.common.quantisation import FIELD, Quantisation, in_codes, read_exponents, write_exponents
from zoo.common.reading import shown

WINDOW = "sliding_attention"
SPARSE = "compressed_sparse_attention"  # overlapping windows, an indexer
HEAVY = "heavily_compressed_attention"  # all rows of long windows
KINDS = (WINDOW, SPARSE, HEAVY)
PUBLISHED_RATIOS = {SPARSE: 4, HEAVY: 128}
HASHED = ("hash_moe", "moe")
MTP_LAYERS = 16
# widths that transformers keeps under second names
UNREAD = frozenset({"intermediate_size", "num_local_experts", "ep_size", "pretraining_tp"})


class Rotation(NamedTuple):
    """width columns of each head are rotated; layers with compressed rows have a base of their own, and YaRN if there is one."""

    width: int
    theta: float
    compressed_theta: float
    yarn: Yarn | None


class Rates(NamedTuple):
    """Tokens of a compressed row."""

    sparse: int
    heavy: int


def _rate(value: Any, name: str, least: int = 2) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 1024:
        raise ValueError(f"deepseek_v4: {name} must be an integer of {least} to 1024, it is {shown(value)}")
    return value


def _schedule(read: FieldReader, name: str, kinds: tuple[str, ...]) -> tuple[str, ...] | None:
    """A list that names each layer's kind; None where it is absent."""
    layers = read.found["layers"]
    value = read.raw(name, None)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != layers or any(kind not in kinds for kind in value):
        raise ValueError(f"deepseek_v4: {name} must name {layers} layers {' or '.join(map(repr, kinds))}, it is {shown(value)}")
    return tuple(value)


def _ratios(read: FieldReader) -> list[int] | None:
    """The published schedule: tokens of a compressed row by layer, the drafter's behind them; None where it is absent."""
    layers = read.found["layers"]
    value = read.raw("compress_ratios", None)
    if value is None:
        return None
    if not isinstance(value, list) or any(not isinstance(ratio, int) or isinstance(ratio, bool) or ratio < 0 for ratio in value):
        raise ValueError(f"deepseek_v4: compress_ratios must be a list of integers of at least 0, it is {shown(value)}")
    if len(value) < layers:
        raise ValueError(f"deepseek_v4: compress_ratios has {len(value)} entries, there are {layers} layers")
    return value[:layers]


def _rates(read: FieldReader, name: str) -> Rates:
    """From compress_rates, else from the published schedule, whose larger ratio is the heavy one, else as published."""
    given = read.raw(name, None)
    if given is None:
        given = {}
    if not isinstance(given, dict) or set(given) - set(PUBLISHED_RATIOS):
        raise ValueError(f"deepseek_v4: {name} must be an object of {SPARSE} and {HEAVY}, it is {shown(given)}")
    flat = {SPARSE: read.raw("compress_rate_csa", None), HEAVY: read.raw("compress_rate_hca", None)}
    found = {kind: flat[kind] if flat[kind] is not None else given.get(kind, usual) for kind, usual in PUBLISHED_RATIOS.items()}
    ratios = _ratios(read)
    if ratios is not None:
        used = sorted(set(ratios) - {0, found[SPARSE]})
        if len(used) > 1:
            raise ValueError(f"deepseek_v4: compress_ratios holds {used} beside 0 and {found[SPARSE]}, there is one heavy ratio")
        if used and (HEAVY in given or flat[HEAVY] is not None) and used[0] != found[HEAVY]:
            raise ValueError(f"deepseek_v4: compress_ratios holds {used[0]}, the rate of {HEAVY} is {shown(found[HEAVY])}")
        found[HEAVY] = used[0] if used else found[HEAVY]
    rates = Rates(_rate(found[SPARSE], f"the rate of {SPARSE}"), _rate(found[HEAVY], f"the rate of {HEAVY}"))
    if rates.sparse == rates.heavy:
        raise ValueError(f"deepseek_v4: {SPARSE} and {HEAVY} both have rows of {rates.sparse} tokens, a schedule of ratios needs two")
    return rates


def _kinds(read: FieldReader, name: str) -> tuple[str, ...]:
    named = _schedule(read, name, KINDS)
    ratios = _ratios(read)
    if named is None and ratios is None:
        raise ValueError(f"deepseek_v4: config.json has neither {name!r} nor 'compress_ratios'")
    if ratios is None:
        assert named is not None
        return named
    by_ratio = {0: WINDOW, read.found["rates"].sparse: SPARSE, read.found["rates"].heavy: HEAVY}
    kinds = tuple(by_ratio[ratio] for ratio in ratios)
    if named is not None and named != kinds:
        layer = next(i for i, pair in enumerate(zip(named, kinds, strict=True)) if pair[0] != pair[1])
        raise ValueError(f"deepseek_v4: {name} makes layer {layer} {named[layer]}, compress_ratios {kinds[layer]}")
    return kinds


def _hashed(read: FieldReader, name: str) -> tuple[bool, ...]:
    layers = read.found["layers"]
    named = _schedule(read, name, HASHED)
    count = read.raw("num_hash_layers", None)
    if count is None and named is None:
        raise ValueError(f"deepseek_v4: config.json has neither {name!r} nor 'num_hash_layers'")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise ValueError(f"deepseek_v4: num_hash_layers must be an integer of at least 0, it is {shown(count)}")
    if named is None:
        assert count is not None
        return tuple(i < count for i in range(layers))
    hashed = tuple(kind == HASHED[0] for kind in named)
    if count is not None and hashed != tuple(i < count for i in range(layers)):
        raise ValueError(f"deepseek_v4: {name} and num_hash_layers {count} disagree")
    return hashed


def _number(read: FieldReader, where: str, fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ValueError(f"deepseek_v4: {name} of {where} must be a number above 0, it is {shown(value)}")
    return float(value)


def _yarn(read: FieldReader, where: str, fields: dict[str, Any]) -> Yarn | None:
    kind = fields.get("rope_type", fields.get("type", "default"))
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "attention_factor"}
    if kind == "yarn":
        known |= {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
    elif kind != "default":
        raise ValueError(f"deepseek_v4: rope type {shown(kind)} of {where} is not supported, only 'default' or 'yarn'")
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"deepseek_v4: {where} has unknown fields {', '.join(map(shown, unknown))}")
    if fields.get("attention_factor", 1.0) not in (None, 1.0):
        raise ValueError(f"deepseek_v4: attention_factor of {where} must be 1.0, it is {shown(fields['attention_factor'])}")
    if kind == "default":
        return None
    names = ("factor", "original_max_position_embeddings")
    factor, original = (_number(read, where, fields, name) for name in names)
    ends = {"beta_fast": 32.0, "beta_slow": 1.0}
    fast, slow = (_number(read, where, {**ends, **fields}, name) for name in ends)
    return Yarn(factor, int(original), fast, slow)


def _rotation(read: FieldReader, name: str) -> Rotation:
    """Flat fields with rope_scaling as published, or rope_parameters in two parts as transformers saves them; both must agree."""
    head_dim = read.found["head_dim"]
    parameters = read.raw(name, None)
    scaling = read.raw("rope_scaling", None)
    for where, value in ((name, parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"deepseek_v4: {where} must be an object, it is {shown(value)}")
    nested = parameters is not None and isinstance(parameters.get("main"), dict) and isinstance(parameters.get("compress"), dict)
    if nested and set(parameters) - {"main", "compress"}:
        raise ValueError(f"deepseek_v4: {name} has fields beside main and compress: {shown(sorted(parameters))}")
    main = parameters["main"] if nested else {}
    compressed = parameters["compress"] if nested else (scaling or parameters or {})
    if _yarn(read, f"{name}.main", main) is not None:
        raise ValueError(f"deepseek_v4: {name}.main is scaled, layers without compressed rows have no YaRN")
    thetas = []
    for flat, part, where in (("rope_theta", main, "main"), ("compress_rope_theta", compressed if nested else {}, "compress")):
        outside = read.raw(flat, None)
        inside = part.get("rope_theta", outside)
        if outside is not None and inside != outside:
            raise ValueError(f"deepseek_v4: {flat} is {shown(outside)}, and {shown(inside)} in {name}.{where}")
        thetas.append(_number(read, f"{name}.{where}", {flat: inside}, flat))
    widths = set()
    if (width := read.raw("qk_rope_head_dim", None)) is not None:
        widths.add(width)
    for fraction in (read.raw("partial_rotary_factor", None), main.get("partial_rotary_factor"), compressed.get("partial_rotary_factor")):
        if fraction is not None:
            widths.add(int(head_dim * _number(read, name, {"partial_rotary_factor": fraction}, "partial_rotary_factor")))
    if len(widths) != 1:
        found = sorted(widths) if widths else "nothing"
        raise ValueError(f"deepseek_v4: qk_rope_head_dim and partial_rotary_factor must say one width in {head_dim}, they say {found}")
    [width] = widths
    if not isinstance(width, int) or width % 2 or not 0 < width <= min(head_dim, read.found["index_dim"]):
        least = min(head_dim, read.found["index_dim"])
        raise ValueError(f"deepseek_v4: the rotated width must be even and at most {least}, it is {shown(width)}")
    return Rotation(width, thetas[0], thetas[1], _yarn(read, f"{name}.compress" if nested else "rope_scaling", compressed))


def _rotation_of(config: DeepseekV4Config) -> dict[str, Any]:
    rotation = config.rotation
    part = rotation.width / config.head_dim
    compressed: dict[str, Any] = {"rope_type": "default", "rope_theta": rotation.compressed_theta, "partial_rotary_factor": part}
    if rotation.yarn is not None:
        compressed |= {
            "rope_type": "yarn",
            "factor": rotation.yarn.factor,
            "original_max_position_embeddings": rotation.yarn.original,
            "beta_fast": rotation.yarn.fast,
            "beta_slow": rotation.yarn.slow,
            "attention_factor": 1.0,
        }
    return {
        "rope_theta": rotation.theta,
        "compress_rope_theta": rotation.compressed_theta,
        "qk_rope_head_dim": rotation.width,
        "partial_rotary_factor": part,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": rotation.theta, "partial_rotary_factor": part},
            "compress": compressed,
        },
    }


def _rates_of(config: DeepseekV4Config) -> dict[str, Any]:
    return {"compress_rates": {SPARSE: config.rates.sparse, HEAVY: config.rates.heavy}}


def _kinds_of(config: DeepseekV4Config) -> dict[str, Any]:
    return {"layer_types": list(config.kinds_of_layers)}


def _hashed_of(config: DeepseekV4Config) -> dict[str, Any]:
    return {"mlp_layer_types": [HASHED[0] if hashed else HASHED[1] for hashed in config.hashed]}


def _mixing(read: FieldReader, name: str) -> Sinkhorn:
    return Sinkhorn(read.number("rms_norm_eps"), read.number("hc_eps"), read.integer(name, 1024))


def _mixing_of(config: DeepseekV4Config) -> dict[str, Any]:
    return {"rms_norm_eps": config.mixing.eps, "hc_eps": config.mixing.floor, "hc_sinkhorn_iters": config.mixing.rounds}


def _mtp_layers(read: FieldReader, name: str) -> int:
    return 0 if read.raw(name, 0) in (0, None) else read.integer(name, MTP_LAYERS)


@dataclass(frozen=True)
class DeepseekV4Config(Geometry):
    """Geometry of a DeepSeek-V4 model.

    query_rank           width that queries go through
    groups, group_rank   heads of a group are projected together, to so many columns, before all meet in the last projection
    window               newest tokens that every layer reads
    kinds_of_layers      a layer reads its window alone, or also chosen rows of short windows, or all rows of long ones
    hashed               layers whose experts a table names by the token
    streams, mixing      residual streams, and how they mix
    mtp_layers           published layers of a drafter, which are carried and not used
    quantised            how its matrices are stored as codes, and whether its experts are packed
    published            config.json as it was read
    """

    family: ClassVar = "deepseek_v4"
    kinds: ClassVar = {"deepseek_v4": "deepseek_v4"}
    architectures: ClassVar = {"deepseek_v4": "DeepseekV4ForCausalLM"}
    ignored: ClassVar = UNREAD
    fixed: ClassVar = (
        Fixed("hidden_act", "silu", written=True),
        Fixed("attention_bias", False, written=True),
        Fixed("mlp_bias", False),
        Fixed("num_key_value_heads", 1, written=True),
        Fixed("scoring_func", "sqrtsoftplus", written=True),
        Fixed("topk_method", "noaux_tc"),
        Fixed("norm_topk_prob", True, written=True),
        Fixed("n_shared_experts", 1, written=True),
        Fixed("router_jitter_noise", 0.0),
        Fixed("tie_word_embeddings", False, written=True),
    )

    vocabulary: Annotated[int, Published("vocab_size", FieldReader.integer, divided="tp")]
    hidden: Annotated[int, Published("hidden_size", FieldReader.integer)]
    layers: Annotated[int, Published("num_hidden_layers", FieldReader.layers)]
    heads: Annotated[int, Published("num_attention_heads", FieldReader.integer, divided="tp")]
    head_dim: Annotated[int, Published("head_dim", FieldReader.integer)]
    query_rank: Annotated[int, Published("q_lora_rank", FieldReader.integer)]
    groups: Annotated[int, Published("o_groups", FieldReader.integer, divided="tp")]
    group_rank: Annotated[int, Published("o_lora_rank", FieldReader.integer)]
    window: Annotated[int, Published("sliding_window", FieldReader.integer)]
    index_heads: Annotated[int, Published("index_n_heads", FieldReader.integer)]
    index_dim: Annotated[int, Published("index_head_dim", FieldReader.integer)]
    index_top_k: Annotated[int, Published("index_topk", FieldReader.integer)]
    rates: Annotated[Rates, Published("compress_rates", _rates, _rates_of)]
    kinds_of_layers: Annotated[tuple[str, ...], Published("layer_types", _kinds, _kinds_of)]
    hashed: Annotated[tuple[bool, ...], Published("mlp_layer_types", _hashed, _hashed_of)]
    streams: Annotated[int, Published("hc_mult", FieldReader.integer)]
    mixing: Annotated[Sinkhorn, Published("hc_sinkhorn_iters", _mixing, _mixing_of)]
    experts: Annotated[int, Published("n_routed_experts", FieldReader.experts, divided="ep")]
    experts_per_token: Annotated[int, Published("num_experts_per_tok", FieldReader.integer)]
    expert_intermediate: Annotated[int, Published("moe_intermediate_size", FieldReader.integer)]
    route_scale: Annotated[float, Published("routed_scaling_factor", FieldReader.number)]
    limit: Annotated[float, Published("swiglu_limit", FieldReader.number)]
    rotation: Annotated[Rotation, Published("rope_parameters", _rotation, _rotation_of)]
    positions: Annotated[int, Published("max_position_embeddings", FieldReader.integer)]
    mtp_layers: Annotated[int, Published("num_nextn_predict_layers", _mtp_layers)] = 0
    eos: Annotated[tuple[int, ...], Published("eos_token_id", FieldReader.tokens, eos_of)] = ()
    quantised: Annotated[Quantisation | None, Published(FIELD, read_exponents, write_exponents)] = None
    published: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def shared_intermediate(self) -> int:
        """Width of the shared expert: a routed one's, but divided among the ranks that share matrices."""
        return self.layout.share("moe_intermediate_size", self.expert_intermediate, "tp")

    @property
    def model_type(self) -> str:
        return "deepseek_v4"

    @property
    def page(self) -> int:
        """Tokens of the smallest page that holds whole compressed rows of both kinds."""
        return math.lcm(self.rates.sparse, self.rates.heavy)

    @property
    def packed(self) -> bool:
        """Whether its experts are MXFP4."""
        return self.quantised is not None and self.quantised.packed

    def codes(self, packed: bool) -> Quantisation:
        return Quantisation((), ops.POWERS_OF_TWO, exponents=True, packed=packed)

    def rate(self, kind: str) -> int:
        """Tokens of a compressed row of a layer of this kind; 0: it has none."""
        return {WINDOW: 0, SPARSE: self.rates.sparse, HEAVY: self.rates.heavy}[kind]

    def first_layers(self, layers: int) -> DeepseekV4Config:
        """The same geometry with the first `layers` layers only."""
        kinds = self.kinds_of_layers[:layers]
        return replace(self, layers=layers, kinds_of_layers=kinds, hashed=self.hashed[:layers], mtp_layers=0, published={})

    @classmethod
    def check(cls, reader: FieldReader) -> None:
        found = reader.found
        reader.divides("heads", "groups", ("num_attention_heads", "o_groups"))
        if found["experts_per_token"] > found["experts"]:
            raise ValueError(f"deepseek_v4: num_experts_per_tok {found['experts_per_token']} of n_routed_experts {found['experts']}")
        if found["streams"] < 2:
            raise ValueError(f"deepseek_v4: hc_mult must be at least 2, it is {found['streams']}")
        for name in reader.fields:
            if name.startswith("dspark_"):  # of a drafter, whose tensors are carried
                reader.raw(name)


def in_form(packed: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of a BF16 checkpoint -> that of the same model in codes."""
    return {**fields, **write_exponents(in_codes(DeepseekV4Config.from_hf(fields), packed=packed))}


def _published(**sizes: Any) -> DeepseekV4Config:
    usual: dict[str, Any] = {
        "vocabulary": 129280,
        "head_dim": 512,
        "group_rank": 1024,
        "window": 128,
        "index_heads": 64,
        "index_dim": 128,
        "rates": Rates(4, 128),
        "streams": 4,
        "mixing": Sinkhorn(1e-6, 1e-6, 20),
        "experts_per_token": 6,
        "limit": 10.0,
        "rotation": Rotation(64, 1e4, 1.6e5, Yarn(16.0, 65536, 32.0, 1.0)),
        "positions": 1048576,
        "mtp_layers": 1,
        "eos": (1,),
    }
    return DeepseekV4Config(**usual, **sizes)


SIZES = {
    "tiny": DeepseekV4Config(
        vocabulary=512,
        hidden=64,
        layers=5,
        heads=4,
        head_dim=32,
        query_rank=48,
        groups=2,
        group_rank=32,
        window=16,
        index_heads=32,
        index_dim=16,
        index_top_k=8,
        rates=Rates(4, 16),
        kinds_of_layers=(WINDOW, SPARSE, HEAVY, SPARSE, HEAVY),
        hashed=(True, True, False, False, False),
        streams=4,
        mixing=Sinkhorn(1e-6, 1e-6, 20),
        experts=8,
        experts_per_token=2,
        expert_intermediate=32,
        route_scale=1.5,
        limit=10.0,
        rotation=Rotation(8, 1e4, 1.6e5, Yarn(16.0, 256, 32.0, 1.0)),
        positions=4096,
        eos=(2,),
    ),
    "flash": _published(
        hidden=4096,
        layers=43,
        heads=64,
        query_rank=1024,
        groups=8,
        index_top_k=512,
        kinds_of_layers=(WINDOW, WINDOW, *(SPARSE, HEAVY) * 20, SPARSE),
        hashed=tuple(i < 3 for i in range(43)),
        experts=256,
        expert_intermediate=2048,
        route_scale=1.5,
    ),
    "pro": _published(
        hidden=7168,
        layers=61,
        heads=128,
        query_rank=1536,
        groups=16,
        index_top_k=1024,
        kinds_of_layers=(HEAVY, HEAVY, *(SPARSE, HEAVY) * 29, SPARSE),
        hashed=tuple(i < 3 for i in range(61)),
        experts=384,
        expert_intermediate=3072,
        route_scale=2.5,
    ),
}

# a published config.json, at tiny sizes
PUBLISHED_TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "compress_rope_theta": 160000,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "num_hash_layers": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
