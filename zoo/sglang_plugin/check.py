"""Is it on? Read back what a scheduler really runs."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as every_module

from zoo.common.serving import ForServing
from zoo.sglang_plugin.hooked import assert_hooked
from zoo.sglang_plugin.names import PROGRAMS
from zoo.sglang_plugin.options import CHECKED


def assert_unhooked(model: nn.Module) -> None:
    """RuntimeError naming the first module whose output another may change: a hook of torch's, or a `forward` of its own."""
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        if getattr(every_module, name):
            raise RuntimeError("a forward hook is on every module of this process: it may move bytes that the fingerprint can't show")
    for path, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise RuntimeError(f"a forward hook is on the model's {path or 'root'}: it may move bytes that the fingerprint can't show")


def assert_active(runner: Any) -> None:
    """RuntimeError naming the first part of a model runner that is not the zoo's."""
    from zoo.sglang_plugin.sampler import RowSampler

    args = runner.server_args
    if args.attention_backend not in PROGRAMS:
        raise RuntimeError(f"the server's attention backend is {args.attention_backend}")
    if not getattr(args, CHECKED, False):
        raise RuntimeError("the server's options were not checked: the hook on ServerArgs is not active")
    if not isinstance(vars(runner.model).get("_modules", {}).get("zoo"), ForServing):
        raise RuntimeError(f"the model is {type(runner.model).__module__}.{type(runner.model).__name__}, not the zoo's")
    if not isinstance(runner.sampler, RowSampler):
        raise RuntimeError(f"the sampler is {type(runner.sampler).__name__}, not the zoo's")
    assert_hooked()
    assert_unhooked(runner.model)
    wanted = PROGRAMS[args.attention_backend]
    if runner.model.zoo.program.name != wanted or runner.sampler.program != runner.model.zoo.program:
        raise RuntimeError(f"the model runs program {runner.model.zoo.program.name}, not {wanted}")
