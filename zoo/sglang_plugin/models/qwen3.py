"""Qwen3 and Qwen3-MoE under their published architecture names."""

from __future__ import annotations

from zoo.sglang_plugin.served import Served


class Qwen3ForCausalLM(Served):
    pass


class Qwen3MoeForCausalLM(Served):
    pass


EntryClass = [Qwen3ForCausalLM, Qwen3MoeForCausalLM]
