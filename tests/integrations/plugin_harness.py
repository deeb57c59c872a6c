"""What the plugin's tests share: stand-ins of SGLang's arguments and modules."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from zoo.common.serving import ForServing
from zoo.sglang_plugin import options


def stand_in_sglang(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.17") -> None:
    """What the hook on ServerArgs asks SGLang for: its version, a view of the resolved options (here the options themselves), its hooks."""
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    overrides = types.SimpleNamespace(resolved_view=lambda args: args)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)  # type: ignore[arg-type]
    monkeypatch.setattr(options, "assert_hooked", lambda: None)


def arguments(**changed: Any) -> Any:
    """A stand-in of ServerArgs: SGLang's defaults for every field that the plugin looks at."""
    values: dict[str, Any] = {refusal.field: refusal.served[0] for refusal in options.REFUSALS}
    graphs = types.SimpleNamespace(prefill=types.SimpleNamespace(backend="disabled"), decode=types.SimpleNamespace(backend="full"))
    values |= {
        "attention_backend": "zoo",
        "model_path": "/nowhere",
        "revision": None,
        "sampling_backend": None,
        "page_size": None,
        "grammar_backend": None,
        "disable_cuda_graph": False,
        "disable_prefill_cuda_graph": False,
        "cuda_graph_backend_prefill": None,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "context_length": None,
        "cuda_graph_config": graphs,
        "chunked_prefill_size": None,
        "model_config_parser": "auto",
        "enable_return_routed_experts": False,
        "disable_radix_cache": False,
        "max_running_requests": None,
        "skip_server_warmup": True,
    }
    return types.SimpleNamespace(**(values | changed))


class Output:
    """Stands for SGLang's output of a forward, which can be referenced weakly."""

    def __init__(self, next_token_logits: Tensor) -> None:
        self.next_token_logits = next_token_logits
        self.next_token_logprobs: Any = None
        self.customized_info: dict[str, Any] | None = None


# what the plugin's page of the sampler takes from SGLang
SAMPLING: dict[str, dict[str, Any]] = {
    "layers": {"sampler": types.SimpleNamespace(Sampler=object, SGLANG_RETURN_ORIGINAL_LOGPROB=False)},
    "layers.logits_processor": {"LogitsProcessorOutput": Output},
    "sampling.sampling_batch_info": {"SamplingBatchInfo": dataclasses.make_dataclass("SamplingBatchInfo", [])},
}


def over_stand_ins(monkeypatch: pytest.MonkeyPatch, name: str, standing: dict[str, dict[str, Any]]) -> Any:
    """A page of the plugin, imported over stand-ins of SGLang's modules and forgotten after the test, with those that it imports."""
    from importlib import import_module

    for path, fields in standing.items():
        module = types.ModuleType(f"sglang.srt.{path}")
        vars(module).update(fields)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for page in ("backend", "sampler", "served"):
        monkeypatch.setitem(sys.modules, f"zoo.sglang_plugin.{page}", types.ModuleType(page))
        del sys.modules[f"zoo.sglang_plugin.{page}"]
    return import_module(f"zoo.sglang_plugin.{name}")


def served(monkeypatch: pytest.MonkeyPatch, serving: ForServing, folder: Path) -> tuple[Any, Any]:
    """(SGLang's arguments, the plugin's model of that configuration without weights), over stand-ins of SGLang's modules."""
    serving.save_pretrained(folder)
    args = types.SimpleNamespace(
        attention_backend="zoo",
        model_path=str(folder),
        revision=None,
        enable_return_routed_experts=False,
        skip_server_warmup=True,
    )
    page = over_stand_ins(
        monkeypatch,
        "served",
        {
            "layers.attention.base_attn_backend": {"AttentionBackend": object},
            "layers.logits_processor": {"LogitsProcessorOutput": object},
            "model_executor.forward_context": {"get_attn_backend": None},
            "runtime_context": {"get_server_args": lambda: args, "get_schedule": lambda: args},
        },
    )
    return args, page.Served(None)


def judged_options() -> list[str]:
    """Fields of SGLang's ServerArgs that somebody has judged and the plugin does not refuse. ValueError for one that is named twice."""
    lines = (Path(__file__).parent / "sglang_options.txt").read_text().splitlines()
    fields = [name for line in lines if line and line[0] not in "#[" for name in line.split()]
    twice = {name for name in fields if fields.count(name) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} are judged twice")
    return fields
