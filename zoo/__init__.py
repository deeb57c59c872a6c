"""Models whose trainer and server give the same log-probability bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from zoo.common.pretrained import Pretrained

__all__ = ["__version__", "load"]

__version__ = "0.1.0"


def load(path_or_hub_id: str | Path, role: str = "rl", **kwargs: Any) -> Pretrained:
    """The ForRL or ForServing (`role` "rl" or "serving") model of a checkpoint, the class chosen by its config.json.

    Other arguments are those of `from_pretrained`. ValueError for an unknown role or model_type, or a faulty checkpoint.
    """
    from zoo.common.hub import read_config
    from zoo.common.registry import model_class

    fields = read_config(path_or_hub_id, kwargs.get("revision"))
    return model_class(fields, role).from_pretrained(path_or_hub_id, **kwargs)
