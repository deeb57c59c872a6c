"""Qwen3.5 and Qwen3.6, dense and mixture of experts, text model or the published vision-language checkpoint around it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from zoo.common.memory import SlotPart
from zoo.qwen3_5 import Qwen35ForServing
from zoo.sglang_plugin.memory import KeyValuePool
from zoo.sglang_plugin.served import Served
from zoo.sglang_plugin.states import HybridPool

logger = logging.getLogger(__name__)


class ZooHybridForCausalLM(Served):
    """Its key-value pool holds the attention layers only, its other layers' state lies in slots."""

    zoo: Qwen35ForServing
    slots: list[SlotPart]

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        # SGLang's pool has the layers of this range, so the attention layers stand in it one after another
        self.start_layer = 0
        self.end_layer = sum(self.zoo.config.full)

    def reserve(self, requests: int) -> None:
        try:
            self.slots = self.zoo.slot_parts(requests + 1)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"the states of --max-running-requests {requests} don't fit the device's free memory") from error
        logger.info("zoo: %d slots of state, %.2f GiB", requests, sum(part.nbytes for part in self.slots) / 2**30)

    def pool(self, pages: KeyValuePool, requests: int) -> HybridPool:
        return HybridPool(self.zoo.layer_views([pages], self.slots), pages, self.slots, requests)


EntryClass = ZooHybridForCausalLM
