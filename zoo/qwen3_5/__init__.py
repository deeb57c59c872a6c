"""Qwen3.5 and Qwen3.6: Gated DeltaNet with exact replay, gated attention, dense and mixture of experts."""

from zoo.qwen3_5.config import MOE_SIZES, SIZES, Qwen35Config
from zoo.qwen3_5.modeling_serve import Qwen35ForServing
from zoo.qwen3_5.modeling_train import Qwen35ForRL

__all__ = ["MOE_SIZES", "SIZES", "Qwen35Config", "Qwen35ForRL", "Qwen35ForServing"]
