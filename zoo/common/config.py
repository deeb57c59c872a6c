"""Reading config.json strictly: every field is read by name, ignored by name, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from zoo.common.ops.rope.table import MOST_RADIANS
from zoo.common.reading import clipped, shown, some

MISSING = object()
NO_NUMBERS = frozenset({"eos", "published", "wrapped"})  # fields of our configs that move no byte
MOST = MOST_RADIANS  # a RoPE table's fastest pair turns by one radian a position
LAYERS = 1024
EXPERTS = 4096  # of a layer
ALL_EXPERTS = 1 << 16  # of all layers: twice the published models' most

# fields of every family that move no number: token ids of a prompt's ends, what transformers keeps beside a geometry, and what
# others write into the config.json that they upload again
IGNORED = frozenset(
    {
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "router_aux_loss_coef",
        "num_local_experts",
        "_name_or_path",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "is_encoder_decoder",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "_attn_implementation",
        "_experts_implementation",
        "experts_implementation",
        "attn_implementation",
        "tokenizer_class",
        "unsloth_fixed",
        "unsloth_version",
    }
)
# also of every family; with another value the published class would train with dropout, or with the routers' loss beside its own
TRAINING = {"attention_dropout": 0.0, "output_router_logits": False}


class FieldReader:
    """Hands out fields of a published config and remembers which were read. ValueError names the family, field and value.

    `found` holds what was read so far under our names, for checks that look at more than one field.
    """

    def __init__(self, family: str, fields: dict[str, Any], ignored: frozenset[str]) -> None:
        self.family = family
        self.fields = fields
        self.seen = set(ignored)
        self.found: dict[str, Any] = {}

    def raw(self, name: str, absent: Any = MISSING) -> Any:
        self.seen.add(name)
        value = self.fields.get(name, absent)
        if value is MISSING:
            raise ValueError(f"{self.family}: config.json has no {name!r}")
        return value

    def integer(self, name: str, most: int = MOST) -> int:
        value = self.raw(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.family}: {name} must be an integer of at least 1, it is {shown(value)}")
        if value > most:
            given = f"{value:.6g}" if value < 10**300 else shown(value)  # an integer may be too large for a float
            raise ValueError(f"{self.family}: {name} must be at most {most}, it is {given}")
        return value

    def layers(self, name: str) -> int:
        return self.integer(name, LAYERS)

    def number(self, name: str) -> float:
        return self._positive(name, self.raw(name))

    def _positive(self, name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ValueError(f"{self.family}: {name} must be a number above 0, it is {shown(value)}")
        if value > torch.finfo(torch.float32).max:
            raise ValueError(f"{self.family}: {name} must be a number that FP32 holds, it is {shown(value)}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            raise ValueError(f"{self.family}: {name} must be true or false, it is {shown(value)}")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        """A token id of the vocabulary, a list of them, or nothing."""
        value = self.raw(name, None)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        check_tokens(self.family, name, value, ids, self.found["vocabulary"])
        return tuple(ids)

    def one_of(self, name: str, *values: Any) -> Any:
        value = self.raw(name)
        if value not in values:
            raise ValueError(f"{self.family}: {name} {shown(value)} is not supported, only {' or '.join(map(repr, values))}")
        return value

    def only(self, name: str, wanted: Any, absent: Any = MISSING) -> None:
        """Refuses any value but the one that the model file implements."""
        value = self.raw(name, absent)
        if value != wanted:
            raise ValueError(f"{self.family}: {name} {shown(value)} is not supported, only {shown(wanted)}")

    def experts(self, name: str) -> int:
        """How many routed experts each layer has."""
        layers = self.found["layers"]
        experts = self.integer(name, EXPERTS)
        if experts * layers > ALL_EXPERTS:
            raise ValueError(f"{self.family}: {name} {experts} in {layers} layers are more experts than {ALL_EXPERTS}, the most of a model")
        return experts

    def is_not_quantised(self) -> None:
        """Refuses weights that are stored as codes and scales."""
        value = self.raw("quantization_config", None)
        if value is not None:
            raise ValueError(
                f"{self.family}: quantization_config {shown(value)} is not supported, only null: load the model's BF16 checkpoint"
            )

    def trains_as_published(self) -> None:
        """Refuses what makes the published class train with other numbers than it scores with."""
        for name, value in TRAINING.items():
            self.only(name, value, absent=value)

    def rope_theta(self, name: str = "rope_theta") -> float:
        """Old configs have rope_theta, newer ones rope_parameters; scaled variants are refused."""
        return self._rope(name)[0]

    def partial_rope(self, head_dim: int) -> tuple[float, int]:
        """(theta, rotated columns) of a rotation of part of each head. Text rows have equal mrope positions: plain rope."""
        theta, part = self._rope("rope_theta", "partial_rotary_factor", ignored=("mrope_section", "mrope_interleaved"))
        rope_dim = int(head_dim * part)
        if rope_dim % 2 or not 0 < rope_dim <= head_dim:
            raise ValueError(f"{self.family}: partial_rotary_factor {part} of head_dim {head_dim} is not an even part of a head")
        return theta, rope_dim

    def _rope(self, *names: str, ignored: tuple[str, ...] = ()) -> list[float]:
        """Positive numbers that stand beside the other fields, in rope_parameters or rope_scaling, or in several with one value."""
        places = {place: self._plain_rope(place, {*names, *ignored}) for place in ("rope_scaling", "rope_parameters")}
        # transformers reads rope_scaling alone unless it is empty; what it misses there it takes from beside, never from rope_parameters
        place = "rope_scaling" if places["rope_scaling"] else "rope_parameters"
        hidden = {} if place == "rope_parameters" else places["rope_parameters"]
        values = []
        for name in names:
            flat = self.raw(name, None)
            here = places[place].get(name, flat)
            if flat is not None and here != flat:
                raise ValueError(f"{self.family}: {name} is {shown(flat)}, and {shown(here)} in {place}")
            if name in hidden and hidden[name] != here:
                found = "nothing" if here is None else shown(here)
                raise ValueError(
                    f"{self.family}: {name} is {shown(hidden[name])} in rope_parameters, and {found} in rope_scaling, which alone counts"
                )
            values.append(self._positive(name, here))
        return values

    def _plain_rope(self, place: str, known: set[str]) -> dict[str, Any]:
        """The fields of a rope that is not scaled, written as an object; empty where there is none."""
        parameters = self.raw(place, None)
        if parameters is None:
            return {}
        if not isinstance(parameters, dict):
            raise ValueError(f"{self.family}: {place} must be an object, it is {shown(parameters)}")
        for kind in ("rope_type", "type"):
            if parameters.get(kind, "default") != "default":
                raise ValueError(f"{self.family}: rope type {shown(parameters[kind])} is not supported in {place}, only 'default'")
        unknown = sorted(set(parameters) - {"rope_type", "type", *known})
        if unknown:
            raise ValueError(f"{self.family}: {place} has unknown fields {some(unknown)}")
        return parameters

    def divides(self, whole: str, part: str, names: tuple[str, str]) -> None:
        """Refuses a field of ours that is no multiple of another; `names` are their published ones."""
        if self.found[whole] % self.found[part]:
            raise ValueError(f"{self.family}: {names[0]} {self.found[whole]} is not a multiple of {names[1]} {self.found[part]}")

    def finish(self) -> None:
        unknown = sorted(set(self.fields) - self.seen)
        if unknown:
            listed = ", ".join(f"{clipped(name)}={shown(self.fields[name])}" for name in unknown[:5])
            raise ValueError(f"{self.family}: config.json has unknown fields {listed}")


def check_tokens(family: str, name: str, value: Any, ids: Sequence[Any], vocabulary: int) -> None:
    """ValueError unless all `ids`, given as `value`, are token ids of the vocabulary."""
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ValueError(f"{family}: {name} must be token ids of at least 0, it is {shown(value)}")
    if max(ids, default=0) >= vocabulary:
        raise ValueError(f"{family}: {name} {shown(max(ids))} is outside the vocabulary of {vocabulary}")


def config_lines(config: Any) -> dict[str, str]:
    """Every field of a geometry that can move a byte, as lines of a fingerprint."""
    return {f"config.{f.name}": repr(getattr(config, f.name)) for f in fields(config) if f.name not in NO_NUMBERS}


def differences(one: Any, other: Any) -> list[str]:
    """The fields in which two configs differ of those that can move a byte, with both values: "eps 1e-06 against 0.001".

    A dataclass's own == also wants one class and the same ends.
    """
    mine, theirs = ({f.name: getattr(config, f.name) for f in fields(config) if f.name not in NO_NUMBERS} for config in (one, other))
    return [f"{name} {mine.get(name)} against {theirs.get(name)}" for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
