"""Whether what a climb holds for certain fits the memory that is free: asked before any model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zoo.common.program import resolve
from zoo.common.quantisation import usual_program
from zoo.common.registry import model_class


def needed(
    fields: dict[str, Any], config: Any, device: str, rungs: tuple[int, ...], engine: str, *, masters: bool = False, shared: bool = False
) -> tuple[int, str]:
    """Bytes that the rung which holds most has on the device at once, and of what: weights, gradients, averages.

    `shared`: trainer and server hold them once. With `masters` the trainer's parameters are FP32, and what is rounded of them lies
    beside. Activations and caches are not counted, so that nothing is refused which fits. Nothing is allocated.
    """
    made = model_class(fields, "rl")
    with torch.device("meta"):
        trainer = made._on_meta(config, resolve(usual_program(config), device, torch.bfloat16, made.family.contributors))
    table = trainer.table_of()
    if masters:
        table = table.with_masters(torch.float32, trainer.program.torch_dtype)
    weights = sum(p.nbytes for p in trainer.parameters())
    widths = {name: table.parameters[name].held(p.dtype).itemsize * p.numel() for name, p in trainer.named_parameters()}
    gradients = sum(size for name, size in widths.items() if table.parameters[name].trainable)
    both = "the weights of trainer, with FP32 masters, and server" if masters else "the weights of trainer and server"
    copies = 1 if shared else 2
    both = "the shared weights of trainer and server" if shared else both
    once = copies * weights + (sum(size for name, size in widths.items() if table.parameters[name].is_master) if masters else 0)
    held = {3: (once, both)}
    # the first of two passes is kept on the CPU, where a GPU's own gradients don't lie
    twice, times = (2, " twice") if device == "cpu" else (1, "")
    held |= dict.fromkeys((1, 2), (once + twice * gradients, f"{both} and all gradients{times}"))
    live = once + (2 if engine == "sglang" else 1) * weights
    scored = f"{both}, of SGLang and of the scoring process" if engine == "sglang" else f"{both} and of the scoring process"
    held |= {4: (live, scored), 5: (live + 3 * gradients, f"{scored}, all gradients and AdamW's two averages")}
    return max(held[rung] for rung in rungs)


def free(device: str) -> int | None:
    """Bytes that this process may still take; None where the system doesn't say."""
    if device.startswith("cuda"):
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def check_room(
    fields: dict[str, Any],
    config: Any,
    device: str,
    rungs: tuple[int, ...],
    engine: str,
    *,
    masters: bool = False,
    shared: bool = False,
) -> None:
    """ValueError naming both numbers if the climb can't fit."""
    room = free(device)
    need, what = needed(fields, config, device, rungs, engine, masters=masters, shared=shared)
    if room is not None and need > room:
        ways = ["fewer --layers of random weights"]
        ways += ["--no-masters"] if masters else []
        ways += [] if shared or 5 in rungs else ["--shared-weights"]
        less = f"{', '.join(ways)} or --rungs 3"
        raise ValueError(f"{what} take {need:,} bytes, {room:,} are free on {device}; {less} take less")
