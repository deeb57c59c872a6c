"""Rollouts: what a request asks (`SamplingParams`), the record of what came of it (`Completion`), and whether it was drawn so.

Engines write these, trainers and clients of servers read them; nothing here knows an engine.
"""

from zoo.common.rollouts.completion import Completion
from zoo.common.rollouts.draws import check_draws
from zoo.common.rollouts.packing import Packed, pack
from zoo.common.rollouts.params import SamplingParams, seed_of_sample

__all__ = ["Completion", "Packed", "SamplingParams", "check_draws", "pack", "seed_of_sample"]
