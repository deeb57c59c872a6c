"""The embedded engine: `Engine` serves requests and returns a `Completion` of each, the record that `zoo.common.rollouts` describes."""

from zoo.common.engine.engine import DrawnToken, Engine, Stats
from zoo.common.rollouts import Completion

__all__ = ["Completion", "DrawnToken", "Engine", "Stats"]
