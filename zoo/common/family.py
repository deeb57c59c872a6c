"""The record of a family of models: all that the rest of the zoo knows about it. It stands in the family's `__init__.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zoo.common.recipe import Draw, usual_recipe

if TYPE_CHECKING:
    from zoo.common.serving import ForServing
    from zoo.common.training import ForRL
    from zoo.common.walk import CausalModel
    from zoo.common.weights import WeightTable


def _none(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """One architecture of a family, as the command line names it.

    name             of `zoo verify NAME`
    model_types      of config.json, the one that is written first
    sizes            geometries by lower-case published name, `tiny` among them
    usual_size       what a benchmark takes where none is asked for: one that a single GPU holds
    qualified_sizes  whose shapes `zoo qualify` tries by default
    tiny             a published config.json at tiny sizes, for `weights_tools make-tiny`
    tiny_codes       what is different in it where matrices are codes, whose blocks want wider ones
    """

    name: str
    model_types: tuple[str, ...]
    sizes: Mapping[str, Any]
    usual_size: str
    qualified_sizes: tuple[str, ...]
    tiny: Mapping[str, Any]
    tiny_codes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Family:
    """What one folder of the zoo gives to all the others. Both classes get the record as their `family`.

    config          class of the geometry, with `from_hf` and `to_hf`
    model           class of the parameters and layers, made as model(config, program)
    table           config -> the checkpoint's names
    used_ops        config -> names of the ops that the layers call, for fingerprints
    rl, serving     the classes that users name
    architectures   at least one
    page_size       config -> tokens of a page where nobody asks for another
    recipe          how random weights are drawn, by published name
    contributors    leaves of the routed experts' sum (see Program)
    sglang          whether the plugin serves it
    with_vision     config.json of a text model -> that of the vision-language model around it; None: there is none
    unused_tensors  config.json -> shapes of tensors that a tiny checkpoint has beside those of the text model
    forms           config.json of a BF16 checkpoint -> that of one in codes, by the name of the form: "mxfp4", and "fp8" where the
                    families' usual form is not this one's
    """

    config: Any
    model: Callable[..., CausalModel]
    table: Callable[[Any], WeightTable]
    used_ops: Callable[[Any], tuple[str, ...]]
    rl: type[ForRL]
    serving: type[ForServing]
    architectures: tuple[Architecture, ...]
    page_size: Callable[[Any], int]
    recipe: Callable[[str, tuple[int, ...], bool], Draw] = usual_recipe
    contributors: int = 8
    sglang: bool = False
    with_vision: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    unused_tensors: Callable[[dict[str, Any]], dict[str, tuple[int, ...]]] = _none
    forms: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rl.family = self
        self.serving.family = self
