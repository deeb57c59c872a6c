"""Qwen3.5 and Qwen3.6 configurations (dense and mixture of experts): the text part, read field by field from config.json."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from zoo.common.config import IGNORED, LAYERS, FieldReader, check_tokens
from zoo.common.reading import shown

CONV_WIDTH = 4
# fields around a published vision-language config's text part: model_type, text_config, tie_word_embeddings and the ends are read,
# the others by nobody here; all are written back as they were
WRAPPER = IGNORED | {
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings",
    "language_model_only", "text_config",
}  # fmt: skip
TYPES = {
    "qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe", "qwen3_5_moe_text": "qwen3_5_moe",
}  # fmt: skip


@dataclass(frozen=True)
class Qwen35Config:
    """Geometry of a Qwen3.5 or 3.6 text model. `full` marks the layers of full attention; `experts` is 0 for the dense family.

    wrapped    the names that are written carry the vision-language model's prefix; both are read
    published  config.json as it was read
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    intermediate: int
    eps: float
    theta: float
    positions: int
    tied: bool
    full: tuple[bool, ...]
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    eos: tuple[int, ...] = ()
    wrapped: bool = False
    published: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_tokens("qwen3_5", "eos_token_id", self.eos, self.eos, self.vocabulary)

    @property
    def model_type(self) -> str:
        return "qwen3_5_moe" if self.experts else "qwen3_5"

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def first_layers(self, layers: int) -> Qwen35Config:
        """The text model with the first `layers` layers only. ValueError unless one of them has full attention."""
        if not any(self.full[:layers]):
            raise ValueError(f"qwen3_5: the first {layers} layers have none of full attention, {self.full.index(True) + 1} are needed")
        return replace(self, layers=layers, full=self.full[:layers], wrapped=False, published={})

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> Qwen35Config:
        """Reads a config.json, of the text model or the vision-language model around it. ValueError names field and value."""
        wrapped = "text_config" in fields
        text = fields
        if wrapped:
            outer = FieldReader("qwen3_5", fields, WRAPPER)
            around = outer.one_of("model_type", "qwen3_5", "qwen3_5_moe")
            outer.is_not_quantised()
            outer.finish()
            if not isinstance(fields["text_config"], dict):
                raise ValueError(f"qwen3_5: text_config must be an object, it is {shown(fields['text_config'])}")
            text = {"tie_word_embeddings": False, **fields["text_config"]}
        read = FieldReader("qwen3_5", text, IGNORED | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
        kind, tied = TYPES[read.one_of("model_type", *TYPES)], read.boolean("tie_word_embeddings")
        if wrapped and around != kind:
            raise ValueError(f"qwen3_5: model_type is {around!r}, and {shown(text['model_type'])} in text_config")
        if wrapped and "tie_word_embeddings" in fields:
            tied = outer.boolean("tie_word_embeddings")  # the vision-language class obeys this one, whatever the inner one is
        read.is_not_quantised()
        read.trains_as_published()
        read.only("hidden_act", "silu")
        read.only("attention_bias", False, absent=False)
        read.only("attn_output_gate", True, absent=True)
        read.only("output_gate_type", "swish", absent="swish")
        read.only("linear_conv_kernel_dim", CONV_WIDTH)
        read.only("mamba_ssm_dtype", "float32", absent="float32")
        read.only("norm_topk_prob", True, absent=True)
        read.only("mlp_only_layers", [], absent=[])
        layers, vocabulary = read.integer("num_hidden_layers", LAYERS), read.integer("vocab_size")
        heads, kv_heads = read.integer("num_attention_heads"), read.integer("num_key_value_heads")
        if heads % kv_heads:
            raise ValueError(f"qwen3_5: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        key_heads, value_heads = read.integer("linear_num_key_heads"), read.integer("linear_num_value_heads")
        if value_heads % key_heads:
            raise ValueError(f"qwen3_5: linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")
        head_dim = read.integer("head_dim")
        mixture: dict[str, Any] = {"intermediate": 0}
        if kind == "qwen3_5_moe":
            mixture |= {
                "experts": read.experts("num_experts", layers),
                "experts_per_token": read.integer("num_experts_per_tok"),
                "expert_intermediate": read.integer("moe_intermediate_size"),
                "shared_intermediate": read.integer("shared_expert_intermediate_size"),
            }
            read.raw("intermediate_size", None)  # of the dense family; published beside the experts' own
            if mixture["experts_per_token"] > mixture["experts"]:
                raise ValueError(f"qwen3_5: num_experts_per_tok {mixture['experts_per_token']} of num_experts {mixture['experts']}")
        else:
            mixture["intermediate"] = read.integer("intermediate_size")
        theta, rope_dim = read.partial_rope(head_dim)
        eos = read.tokens("eos_token_id", vocabulary)
        if wrapped:  # trainers add their ends outside text_config
            eos = tuple(dict.fromkeys(eos + outer.tokens("eos_token_id", vocabulary)))
        config = cls(
            vocabulary=vocabulary,
            hidden=read.integer("hidden_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=read.integer("linear_key_head_dim"),
            value_dim=read.integer("linear_value_head_dim"),
            eps=read.number("rms_norm_eps"),
            theta=theta,
            positions=read.integer("max_position_embeddings"),
            tied=tied,
            full=_full_layers(read, layers),
            eos=eos,
            wrapped=wrapped,
            published=fields,
            **mixture,
        )
        read.finish()
        return config

    def to_hf(self) -> dict[str, Any]:
        """The published fields of this geometry: as read if they still say the same, else those of the text model."""
        if self.published and type(self).from_hf(self.published) == self:
            return deepcopy(self.published)
        fields: dict[str, Any] = {
            "architectures": ["Qwen3_5MoeForCausalLM" if self.experts else "Qwen3_5ForCausalLM"],
            "model_type": f"{self.model_type}_text",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "linear_conv_kernel_dim": CONV_WIDTH,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "layer_types": ["full_attention" if full else "linear_attention" for full in self.full],
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": self.theta, "partial_rotary_factor": self.rope_dim / self.head_dim,
            },
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }  # fmt: skip
        interval = self.full.index(True) + 1
        if self.full == tuple((i + 1) % interval == 0 for i in range(self.layers)):
            fields["full_attention_interval"] = interval  # all that stock SGLang reads of the layers' kinds
        if self.eos:
            fields["eos_token_id"] = list(self.eos) if len(self.eos) > 1 else self.eos[0]
        if self.experts:
            fields |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_intermediate,
                "shared_expert_intermediate_size": self.shared_intermediate,
            }
        else:
            fields["intermediate_size"] = self.intermediate
        return fields


def _full_layers(read: FieldReader, layers: int) -> tuple[bool, ...]:
    """From layer_types, or every `full_attention_interval`-th layer; from both if they agree."""
    types, interval = read.raw("layer_types", None), read.raw("full_attention_interval", None)
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


def _size(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    intermediate: int,
    tied: bool,
    mixture: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> Qwen35Config:
    """`mixture`: experts, experts per token, their width, the shared expert's width."""
    full = tuple((i + 1) % 4 == 0 for i in range(layers))
    return Qwen35Config(
        248320, hidden, layers, heads, kv_heads, 256, 64, 16, value_heads, 128, 128, intermediate, 1e-6, 1e7, 262144, tied, full,
        *mixture, eos=(248044,),
    )  # fmt: skip


_TINY = (False, False, False, True)
SIZES = {
    "tiny": Qwen35Config(512, 128, 4, 4, 2, 64, 32, 2, 4, 32, 32, 256, 1e-6, 1e7, 4096, False, _TINY, eos=(2,)),
    "4b": _size(2560, 32, 16, 4, 32, 9216, True),
    "9b": _size(4096, 32, 16, 4, 32, 12288, False),
    "27b": _size(5120, 64, 24, 4, 48, 17408, False),
}
MOE_SIZES = {
    "tiny": Qwen35Config(512, 128, 4, 4, 2, 64, 32, 2, 4, 32, 32, 0, 1e-6, 1e7, 4096, False, _TINY, 8, 2, 64, 64, eos=(2,)),
    "35b-a3b": _size(2048, 40, 16, 2, 32, 0, False, (256, 8, 512, 512)),
    "122b-a10b": _size(3072, 48, 32, 2, 64, 0, False, (256, 8, 1024, 1024)),
    "397b-a17b": _size(4096, 60, 32, 2, 64, 0, False, (512, 10, 1024, 1024)),
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
    text = {name: value for name, value in fields.items() if name != "architectures"}
    whole = [name.replace("ForCausalLM", "ForConditionalGeneration") for name in fields["architectures"]]
    tied = fields["tie_word_embeddings"]
    kind = TYPES[fields["model_type"]]
    return {"architectures": whole, "model_type": kind, "text_config": text, **_VISION, "tie_word_embeddings": tied}
