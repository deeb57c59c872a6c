"""What the plugin's tests share: a stand-in of SGLang's arguments."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from zoo.sglang_plugin import options


def stand_in_sglang(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.17") -> None:
    """What the hook on ServerArgs asks SGLang for: its version, and a view of the resolved options (here the options themselves)."""
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    overrides = types.SimpleNamespace(resolved_view=lambda args: args)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)  # type: ignore[arg-type]


def arguments(**changed: Any) -> Any:
    """A stand-in of ServerArgs: SGLang's defaults for every field that the plugin looks at."""
    values: dict[str, Any] = {refusal.field: refusal.served[0] for refusal in options.REFUSALS}
    graphs = types.SimpleNamespace(prefill=types.SimpleNamespace(backend="disabled"), decode=types.SimpleNamespace(backend="full"))
    values |= {
        "attention_backend": "zoo", "model_path": "/nowhere", "revision": None, "sampling_backend": None, "page_size": None,
        "grammar_backend": None, "disable_cuda_graph": False, "disable_prefill_cuda_graph": False,
        "cuda_graph_backend_prefill": None, "prefill_attention_backend": None, "decode_attention_backend": None,
        "context_length": None, "cuda_graph_config": graphs, "chunked_prefill_size": None, "model_config_parser": "auto",
        "enable_return_routed_experts": False, "disable_radix_cache": False, "max_running_requests": None,
    }  # fmt: skip
    return types.SimpleNamespace(**(values | changed))
