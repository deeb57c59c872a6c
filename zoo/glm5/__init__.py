"""GLM-5, 5.1 and 5.2."""

from zoo.common.family import Architecture, Family
from zoo.glm5.config import PUBLISHED_TINY, SIZES, GLMConfig
from zoo.glm5.model import GLMModel, used_ops
from zoo.glm5.modeling_serve import GLMForServing
from zoo.glm5.modeling_train import GLMForRL
from zoo.glm5.weights import recipe, table, unused_tensors

__all__ = ["FAMILY", "SIZES", "GLMConfig", "GLMForRL", "GLMForServing"]


def _page_size(config: GLMConfig) -> int:
    return 64


FAMILY = Family(
    config=GLMConfig,
    model=GLMModel,
    table=table,
    used_ops=used_ops,
    rl=GLMForRL,
    serving=GLMForServing,
    architectures=(
        # a layer of the published size's experts takes 19 GB: too large to be usual, or qualified by default
        Architecture(
            name="glm5",
            model_types=("glm_moe_dsa",),
            sizes=SIZES,
            usual_size="tiny",
            qualified_sizes=("tiny",),
            tiny=PUBLISHED_TINY,
            tiny_codes={"q_lora_rank": 128, "moe_intermediate_size": 128},
        ),
    ),
    page_size=_page_size,
    recipe=recipe,
    contributors=16,
    unused_tensors=unused_tensors,
)
