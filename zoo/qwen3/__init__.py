"""Qwen3 (dense) and Qwen3-MoE."""

from zoo.qwen3.config import MOE_SIZES, SIZES, Qwen3Config
from zoo.qwen3.modeling_serve import Qwen3ForServing
from zoo.qwen3.modeling_train import Qwen3ForRL

__all__ = ["MOE_SIZES", "SIZES", "Qwen3Config", "Qwen3ForRL", "Qwen3ForServing"]
