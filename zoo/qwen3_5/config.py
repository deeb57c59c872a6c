"""Qwen3.5 and Qwen3.6 configurations (dense and mixture of experts): the text part, read field by field from config.json."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from zoo.common.config import IGNORED, FieldReader
from zoo.common.geometry import Fixed, Geometry, Published, eos_of
from zoo.common.quantisation import FIELD, Quantisation, read_quantisation, write_quantisation
from zoo.common.reading import shown

CONV_WIDTH = 4
# fields around a published vision-language config's text part: model_type, text_config, tie_word_embeddings and the ends are read,
# the others by nobody here; all are written back as they were
WRAPPER = IGNORED | {
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "tie_word_embeddings",
    "language_model_only",
    "text_config",
}
TYPES = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
DENSE = ("qwen3_5",)
MOE = ("qwen3_5_moe",)


def _full(read: FieldReader, name: str) -> tuple[bool, ...]:
    """From layer_types, or every `full_attention_interval`-th layer; from both if they agree."""
    layers = read.found["layers"]
    types = read.raw(name, None)
    interval = read.raw("full_attention_interval", None)
    if types is None or interval is not None:
        interval = read.integer("full_attention_interval")
        regular = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        types = regular if types is None else types
    if not isinstance(types, list):
        raise ValueError(f"qwen3_5: layer_types must be a list, it is {shown(types)}")
    unknown = [kind for kind in types if kind not in ("full_attention", "linear_attention")]
    if unknown or len(types) != layers:
        raise ValueError(f"qwen3_5: layer_types has {len(types)} entries for {layers} layers, unknown ones {shown(unknown)}")
    if len(set(types)) != 2:
        raise ValueError(f"qwen3_5: layer_types needs layers of both kinds, all {layers} are {types[0]!r}")
    if interval is not None and types != regular:
        found = [i for i, kind in enumerate(types) if kind == "full_attention"]
        raise ValueError(
            f"qwen3_5: full_attention_interval {interval} contradicts layer_types, whose layers of full attention are {shown(found)}"
        )
    return tuple(kind == "full_attention" for kind in types)


def _theta(reader: FieldReader, name: str) -> float:
    return reader.partial_rope(reader.found["head_dim"])[0]


def _rope_dim(reader: FieldReader, name: str) -> int:
    return reader.partial_rope(reader.found["head_dim"])[1]


def _rope(config: Qwen35Config) -> dict[str, Any]:
    part = config.rope_dim / config.head_dim
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config.theta, "partial_rotary_factor": part}}


def _nothing(config: Qwen35Config) -> dict[str, Any]:
    """Written with another field."""
    return {}


def _kinds_of_layers(config: Qwen35Config) -> dict[str, Any]:
    out: dict[str, Any] = {"layer_types": ["full_attention" if full else "linear_attention" for full in config.full]}
    interval = config.full.index(True) + 1
    if config.full == tuple((i + 1) % interval == 0 for i in range(config.layers)):
        out["full_attention_interval"] = interval  # all that stock SGLang reads of the layers' kinds
    return out


@dataclass(frozen=True)
class Qwen35Config(Geometry):
    """Geometry of a Qwen3.5 or 3.6 text model. `full` marks the layers of full attention; `experts` is 0 for the dense family.

    wrapped    the names that are written carry the vision-language model's prefix; both are read
    published  config.json as it was read
    """

    family: ClassVar = "qwen3_5"
    kinds: ClassVar = TYPES
    kept: ClassVar = ("lm_head", "embed_tokens", "in_proj_a", "in_proj_b", "conv1d", "mlp.gate", "shared_expert_gate")
    architectures: ClassVar = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
    # intermediate_size of the dense family is published beside the experts' own
    ignored: ClassVar = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "intermediate_size"})
    fixed: ClassVar = (
        Fixed("hidden_act", "silu", absent=False, written=True),
        Fixed("attention_bias", False, written=True),
        Fixed("attn_output_gate", True),
        Fixed("output_gate_type", "swish"),
        Fixed("linear_conv_kernel_dim", CONV_WIDTH, absent=False, written=True),
        Fixed("mamba_ssm_dtype", "float32"),
        Fixed("norm_topk_prob", True),
        Fixed("mlp_only_layers", []),
    )

    vocabulary: Annotated[int, Published("vocab_size", FieldReader.integer, divided="tp")]
    hidden: Annotated[int, Published("hidden_size", FieldReader.integer)]
    layers: Annotated[int, Published("num_hidden_layers", FieldReader.layers)]
    heads: Annotated[int, Published("num_attention_heads", FieldReader.integer, divided="tp")]
    kv_heads: Annotated[int, Published("num_key_value_heads", FieldReader.integer, divided="tp")]
    head_dim: Annotated[int, Published("head_dim", FieldReader.integer)]
    rope_dim: Annotated[int, Published("partial_rotary_factor", _rope_dim, _rope)]
    key_heads: Annotated[int, Published("linear_num_key_heads", FieldReader.integer, divided="tp")]
    value_heads: Annotated[int, Published("linear_num_value_heads", FieldReader.integer, divided="tp")]
    key_dim: Annotated[int, Published("linear_key_head_dim", FieldReader.integer)]
    value_dim: Annotated[int, Published("linear_value_head_dim", FieldReader.integer)]
    intermediate: Annotated[int, Published("intermediate_size", FieldReader.integer, only=DENSE, otherwise=0, divided="tp")]
    eps: Annotated[float, Published("rms_norm_eps", FieldReader.number)]
    theta: Annotated[float, Published("rope_theta", _theta, _nothing)]
    positions: Annotated[int, Published("max_position_embeddings", FieldReader.integer)]
    tied: Annotated[bool, Published("tie_word_embeddings", FieldReader.boolean)]
    full: Annotated[tuple[bool, ...], Published("layer_types", _full, _kinds_of_layers)]
    experts: Annotated[int, Published("num_experts", FieldReader.experts, only=MOE, otherwise=0, divided="ep")] = 0
    experts_per_token: Annotated[int, Published("num_experts_per_tok", FieldReader.integer, only=MOE, otherwise=0)] = 0
    expert_intermediate: Annotated[int, Published("moe_intermediate_size", FieldReader.integer, only=MOE, otherwise=0)] = 0
    shared_intermediate: Annotated[
        int, Published("shared_expert_intermediate_size", FieldReader.integer, only=MOE, otherwise=0, divided="tp")
    ] = 0
    eos: Annotated[tuple[int, ...], Published("eos_token_id", FieldReader.tokens, eos_of)] = ()
    quantised: Annotated[Quantisation | None, Published(FIELD, read_quantisation, write_quantisation)] = None
    wrapped: bool = False
    published: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def model_type(self) -> str:
        return "qwen3_5_moe" if self.experts else "qwen3_5"

    @property
    def written_type(self) -> str:
        return f"{self.model_type}_text"

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def gates_apart(self) -> bool:
        """Whether decay and strength have a projection of their own: where the others' weights are codes."""
        return self.quantised is not None

    def first_layers(self, layers: int) -> Qwen35Config:
        """The text model with the first `layers` layers only. ValueError unless one of them has full attention."""
        if not any(self.full[:layers]):
            raise ValueError(f"qwen3_5: the first {layers} layers have none of full attention, {self.full.index(True) + 1} are needed")
        return replace(self, layers=layers, full=self.full[:layers], wrapped=False, published={})

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> Qwen35Config:
        """Reads a config.json, of the text model or the vision-language model around it. ValueError names field and value."""
        if "text_config" not in fields:
            return cls(**cls.read(fields), published=fields)
        outer = FieldReader("qwen3_5", fields, WRAPPER)
        around = outer.one_of("model_type", "qwen3_5", "qwen3_5_moe")
        how = read_quantisation(outer, FIELD)
        outer.finish()
        if not isinstance(fields["text_config"], dict):
            raise ValueError(f"qwen3_5: text_config must be an object, it is {shown(fields['text_config'])}")
        text = {"tie_word_embeddings": False, **fields["text_config"]}
        if text.get(FIELD) is not None:
            raise ValueError(f"qwen3_5: {FIELD} stands inside text_config, a vision-language model has it beside text_config")
        found = outer.found = cls.read(text)
        if TYPES[text["model_type"]] != around:
            raise ValueError(f"qwen3_5: model_type is {around!r}, and {shown(text['model_type'])} in text_config")
        if "tie_word_embeddings" in fields:
            # the vision-language class obeys this one, whatever the inner one is
            found["tied"] = outer.boolean("tie_word_embeddings")
        found["eos"] = tuple(dict.fromkeys(found["eos"] + outer.tokens("eos_token_id")))  # trainers add theirs outside text_config
        return cls(**{**found, "quantised": how}, wrapped=True, published=fields)

    @classmethod
    def check(cls, reader: FieldReader) -> None:
        reader.divides("heads", "kv_heads", ("num_attention_heads", "num_key_value_heads"))
        reader.divides("value_heads", "key_heads", ("linear_num_value_heads", "linear_num_key_heads"))
        chosen = reader.found["experts_per_token"]
        if chosen > reader.found["experts"]:
            raise ValueError(f"qwen3_5: num_experts_per_tok {chosen} of num_experts {reader.found['experts']}")


def _published(layers: int, **sizes: Any) -> Qwen35Config:
    return Qwen35Config(
        vocabulary=248320,
        layers=layers,
        head_dim=256,
        rope_dim=64,
        key_heads=16,
        key_dim=128,
        value_dim=128,
        eps=1e-6,
        theta=1e7,
        positions=262144,
        full=tuple((i + 1) % 4 == 0 for i in range(layers)),
        eos=(248044,),
        **sizes,
    )


def _mixture(layers: int, experts_per_token: int, width: int, **sizes: Any) -> Qwen35Config:
    """`width` of an expert, and of the shared one."""
    return _published(
        layers,
        kv_heads=2,
        intermediate=0,
        tied=False,
        experts_per_token=experts_per_token,
        expert_intermediate=width,
        shared_intermediate=width,
        **sizes,
    )


SIZES = {
    "tiny": Qwen35Config(
        vocabulary=512,
        hidden=128,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        rope_dim=32,
        key_heads=2,
        value_heads=4,
        key_dim=32,
        value_dim=32,
        intermediate=256,
        eps=1e-6,
        theta=1e7,
        positions=4096,
        tied=False,
        full=(False, False, False, True),
        eos=(2,),
    ),
    "4b": _published(32, hidden=2560, heads=16, kv_heads=4, value_heads=32, intermediate=9216, tied=True),
    "9b": _published(32, hidden=4096, heads=16, kv_heads=4, value_heads=32, intermediate=12288, tied=False),
    "27b": _published(64, hidden=5120, heads=24, kv_heads=4, value_heads=48, intermediate=17408, tied=False),
}
MOE_SIZES = {
    "tiny": replace(SIZES["tiny"], intermediate=0, experts=8, experts_per_token=2, expert_intermediate=64, shared_intermediate=64),
    "35b-a3b": _mixture(40, 8, 512, hidden=2048, heads=16, value_heads=32, experts=256),
    "122b-a10b": _mixture(48, 8, 1024, hidden=3072, heads=32, value_heads=64, experts=256),
    "397b-a17b": _mixture(60, 10, 1024, hidden=4096, heads=32, value_heads=64, experts=512),
}

# the fields of a published config.json, at tiny sizes
_PUBLISHED_TINY: dict[str, Any] = {
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
PUBLISHED_TINY: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    **_PUBLISHED_TINY,
    "intermediate_size": 256,
}
PUBLISHED_TINY_MOE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    **_PUBLISHED_TINY,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
# what a published vision-language checkpoint has around its text model
_VISION: dict[str, Any] = {
    "image_token_id": 4,
    "video_token_id": 5,
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
    "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 32, "patch_size": 2, "out_hidden_size": 128},
}


def with_vision(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of the vision-language model around a text model's."""
    text = {name: value for name, value in fields.items() if name not in ("architectures", FIELD)}
    codes = {FIELD: fields[FIELD]} if FIELD in fields else {}
    whole = [name.replace("ForCausalLM", "ForConditionalGeneration") for name in fields["architectures"]]
    tied = fields["tie_word_embeddings"]
    kind = TYPES[fields["model_type"]]
    return {"architectures": whole, "model_type": kind, "text_config": text, **_VISION, **codes, "tie_word_embeddings": tied}
