"""GLM-5, 5.1 and 5.2."""

from zoo.glm5.config import SIZES, GLMConfig
from zoo.glm5.modeling_serve import GLMForServing
from zoo.glm5.modeling_train import GLMForRL

__all__ = ["SIZES", "GLMConfig", "GLMForRL", "GLMForServing"]
