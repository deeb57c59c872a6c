"""The embedded engine: `Engine` serves requests, `Completion` records one."""

from zoo.common.engine.engine import Engine, Stats
from zoo.common.engine.record import Completion, check_draws

__all__ = ["Completion", "Engine", "Stats", "check_draws"]
