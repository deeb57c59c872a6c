"""A family outside the zoo, as its package would hold it: squeezed rows of four tokens, carried rows in a slot, a block-scaled weight."""

from toy.config import SIZES, TINY, ToyConfig
from toy.model import ToyModel, used_ops
from toy.modeling import ToyForRL, ToyForServing
from toy.weights import table
from zoo.common.family import Architecture, Family


def _page_size(config: ToyConfig) -> int:
    return 32


FAMILY = Family(
    config=ToyConfig,
    model=ToyModel,
    table=table,
    used_ops=used_ops,
    rl=ToyForRL,
    serving=ToyForServing,
    architectures=(Architecture(name="toy", model_types=("toy",), sizes=SIZES, usual_size="tiny", qualified_sizes=("tiny",), tiny=TINY),),
    page_size=_page_size,
)
