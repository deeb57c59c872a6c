"""Qwen3.5 and Qwen3.6: Gated DeltaNet with exact replay, gated attention, dense and mixture of experts."""

from zoo.common.family import Architecture, Family
from zoo.qwen3_5.config import MOE_SIZES, PUBLISHED_TINY, PUBLISHED_TINY_MOE, SIZES, Qwen35Config, with_vision
from zoo.qwen3_5.model import Qwen35Model, used_ops
from zoo.qwen3_5.modeling_serve import Qwen35ForServing
from zoo.qwen3_5.modeling_train import Qwen35ForRL
from zoo.qwen3_5.weights import recipe, table, unused_tensors

__all__ = ["FAMILY", "MOE_SIZES", "SIZES", "Qwen35Config", "Qwen35ForRL", "Qwen35ForServing"]


def _page_size(config: Qwen35Config) -> int:
    """FlashAttention 4's key tile: 80 at head dim 256, where it is the only page that is taken."""
    return 80 if config.head_dim > 128 else 128


FAMILY = Family(
    config=Qwen35Config,
    model=Qwen35Model,
    table=table,
    used_ops=used_ops,
    rl=Qwen35ForRL,
    serving=Qwen35ForServing,
    architectures=(
        Architecture(
            name="qwen3_5",
            model_types=("qwen3_5", "qwen3_5_text"),
            sizes=SIZES,
            usual_size="4b",
            qualified_sizes=("tiny", "4b", "9b", "27b"),
            tiny=PUBLISHED_TINY,
        ),
        Architecture(
            name="qwen3_5_moe",
            model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
            sizes=MOE_SIZES,
            usual_size="35b-a3b",
            qualified_sizes=("tiny", "35b-a3b"),
            tiny=PUBLISHED_TINY_MOE,
            tiny_codes={"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
        ),
    ),
    page_size=_page_size,
    recipe=recipe,
    sglang=True,
    with_vision=with_vision,
    unused_tensors=unused_tensors,
)
