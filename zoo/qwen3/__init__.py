"""Qwen3 (dense) and Qwen3-MoE."""

from zoo.common.family import Architecture, Family
from zoo.qwen3.config import MOE_SIZES, PUBLISHED_TINY, PUBLISHED_TINY_MOE, SIZES, Qwen3Config
from zoo.qwen3.model import Qwen3Model, used_ops
from zoo.qwen3.modeling_serve import Qwen3ForServing
from zoo.qwen3.modeling_train import Qwen3ForRL
from zoo.qwen3.weights import table

__all__ = ["FAMILY", "MOE_SIZES", "SIZES", "Qwen3Config", "Qwen3ForRL", "Qwen3ForServing"]


def _page_size(config: Qwen3Config) -> int:
    """FlashAttention 4's key tile at head dim 128, its fastest page."""
    return 128


FAMILY = Family(
    config=Qwen3Config,
    model=Qwen3Model,
    table=table,
    used_ops=used_ops,
    rl=Qwen3ForRL,
    serving=Qwen3ForServing,
    architectures=(
        Architecture(
            name="qwen3",
            model_types=("qwen3",),
            sizes=SIZES,
            usual_size="8b",
            qualified_sizes=("tiny", "4b", "8b", "32b"),
            tiny=PUBLISHED_TINY,
        ),
        Architecture(
            name="qwen3_moe",
            model_types=("qwen3_moe",),
            sizes=MOE_SIZES,
            usual_size="30b-a3b",
            qualified_sizes=("tiny", "30b-a3b"),
            tiny=PUBLISHED_TINY_MOE,
            tiny_codes={"moe_intermediate_size": 128},
        ),
    ),
    page_size=_page_size,
    sglang=True,
)
