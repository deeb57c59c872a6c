"""DeepSeek-V4 Flash and Pro."""

from functools import partial

from zoo.common.family import Architecture, Family
from zoo.deepseek_v4.config import PUBLISHED_TINY, SIZES, DeepseekV4Config, in_form
from zoo.deepseek_v4.model import DeepseekV4Model, used_ops
from zoo.deepseek_v4.modeling_serve import DeepseekV4ForServing
from zoo.deepseek_v4.modeling_train import DeepseekV4ForRL
from zoo.deepseek_v4.weights import recipe, table, unused_tensors

__all__ = ["FAMILY", "SIZES", "DeepseekV4Config", "DeepseekV4ForRL", "DeepseekV4ForServing"]


def _page_size(config: DeepseekV4Config) -> int:
    """Whole compressed rows of both kinds, and at least 64 tokens."""
    return config.page * -(-64 // config.page)


FAMILY = Family(
    config=DeepseekV4Config,
    model=DeepseekV4Model,
    table=table,
    used_ops=used_ops,
    rl=DeepseekV4ForRL,
    serving=DeepseekV4ForServing,
    architectures=(
        # a layer of the published size's experts takes 13 GB: too large to be usual, or qualified by default
        Architecture(
            name="deepseek_v4",
            model_types=("deepseek_v4",),
            sizes=SIZES,
            usual_size="tiny",
            qualified_sizes=("tiny",),
            tiny=PUBLISHED_TINY,
            tiny_codes={"q_lora_rank": 128, "moe_intermediate_size": 128},
        ),
    ),
    page_size=_page_size,
    recipe=recipe,
    unused_tensors=unused_tensors,
    forms={"fp8": partial(in_form, False), "mxfp4": partial(in_form, True)},
)
