"""Which class serves which config.json; nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.common.pretrained import Pretrained

ROLES = ("rl", "serving")

_CLASSES = {
    "qwen3": "zoo.qwen3:Qwen3",
    "qwen3_moe": "zoo.qwen3:Qwen3",
    "qwen3_5": "zoo.qwen3_5:Qwen35",
    "qwen3_5_text": "zoo.qwen3_5:Qwen35",
    "qwen3_5_moe": "zoo.qwen3_5:Qwen35",
    "qwen3_5_moe_text": "zoo.qwen3_5:Qwen35",
    "glm_moe_dsa": "zoo.glm5:GLM",
}
_PLANNED = ("deepseek_v4",)


def model_class(fields: dict[str, Any], role: str = "rl") -> type[Pretrained]:
    """The class for a config.json and a role. ValueError for a model_type or role that there is not."""
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
    kind = fields.get("model_type")
    if kind in _PLANNED:
        raise ValueError(f"model_type {kind!r} is planned but not built yet; there are {', '.join(_CLASSES)}")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ValueError(f"model_type {kind!r} is not supported; there are {', '.join(_CLASSES)}")
    module, stem = _CLASSES[kind].split(":")
    found: type[Pretrained] = vars(importlib.import_module(module))[stem + {"rl": "ForRL", "serving": "ForServing"}[role]]
    return found
