"""Which of SGLang's methods are hooked: what was registered, and whether SGLang applied it."""

from __future__ import annotations

import pkgutil
from typing import Any

SRT = "sglang.srt"
REGISTRY = "sglang.srt.plugins.hook_registry"
REGISTERED: list[str] = []  # targets below SRT, as `register` gave them to SGLang's registry in this process


def assert_hooked() -> None:
    """RuntimeError naming the first hook that is not active in this process: SGLang only logs one that it could not apply."""
    if not REGISTERED:
        raise RuntimeError("the zoo's hooks were not registered in this process: SGLang did not load its plugins")
    for target in REGISTERED:
        try:
            found = pkgutil.resolve_name(f"{SRT}.{target}")
        except (ImportError, AttributeError):
            found = None
        if not is_hooked(found):
            raise RuntimeError(f"the hook on {target} is not active: this SGLang has no such method, or its plugins were not loaded")


def is_hooked(method: Any) -> bool:
    """Whether the outermost function is SGLang's registry's: its decorators leave `__wrapped__` too."""
    return hasattr(method, "__wrapped__") and getattr(method, "__globals__", {}).get("__name__") == REGISTRY
