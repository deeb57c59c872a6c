"""Families with state that is not a row of a page: one slot per place in SGLang's request table. It moves bytes and computes nothing.

SGLang is shown a plain attention model (`served_fields`): its own pools for recurrent layers, and the prefix cache that goes with
them, would hold a state at other places than whole chunks. Slot 0 is its request table's padding row, and ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.common.delta_memory import DeltaLayer, DeltaMemory
from zoo.common.ends import end_tokens
from zoo.common.registry import model_class
from zoo.sglang_plugin.memory import KeyValuePool, PoolLayer, Step
from zoo.sglang_plugin.names import HYBRID_ARCHITECTURE


@dataclass(frozen=True)
class BoundHybrid:
    """What `hidden_rows` takes as memory: pages and slots during one step."""

    pool: HybridPool
    step: Step

    def view(self, page_table_NB: Tensor) -> list[PoolLayer | DeltaLayer]:
        attention = iter(self.pool.pages.during(self.step).view(page_table_NB))
        recurrent = iter(self.pool.delta.view(self.step.request_N.long()))
        return [next(attention) if full else next(recurrent) for full in self.pool.full]


class HybridPool:
    """SGLang's pages for the attention layers, the plugin's slots for the others; layer i has pages where `full[i]`.

    requests  places in SGLang's request table, the padding row counted
    ValueError if slots or layers are too few.
    """

    def __init__(self, full: Sequence[bool], pages: KeyValuePool, delta: DeltaMemory, requests: int) -> None:
        if requests > delta.slots:
            raise ValueError(f"{requests} requests have only {delta.slots} slots of state, one is for padding in both")
        if len(pages.k_pages) != sum(full):
            raise ValueError(f"the key-value pool has {len(pages.k_pages)} layers, the model has {sum(full)} of attention")
        self.full, self.pages, self.delta = tuple(full), pages, delta
        self._remembered = 4 * requests
        self._ends: dict[str, int] = {}

    def during(self, step: Step) -> BoundHybrid:
        return BoundHybrid(self, step)

    def begin(
        self, rids: Sequence[str] | None, request_N: Tensor, contexts_N: Tensor, counts: Sequence[int], contexts: Sequence[int]
    ) -> None:
        """Before a prefill's rows, on their stream: requests without a context get clean slots.

        RuntimeError unless every other one goes on where its own last piece ended: pages may come from another request, a state
        can't. A retracted request starts again without a context.
        """
        names = list(rids) if rids is not None else [""] * len(counts)
        for name, count, context in zip(names, counts, contexts, strict=True):
            if context and self._ends.get(name) != context:
                raise RuntimeError(
                    f"request {name!r} goes on after {context} tokens, its own pieces ended at {self._ends.get(name)}: "
                    "a state of another request can't be used"
                )
            self._ends.pop(name, None)
            self._ends[name] = context + count
        while len(self._ends) > self._remembered:  # finished ones; a request between two pieces is among the latest
            self._ends.pop(next(iter(self._ends)))
        fresh_N = torch.where(contexts_N == 0, request_N.long(), 0)
        self.delta.clear(torch.cat([fresh_N.new_zeros(1), fresh_N]))

    def clear_padding(self) -> None:
        """Zeroes page 0 and slot 0."""
        self.pages.clear_padding()
        self.delta.clear([0])


def served_fields(fields: dict[str, Any], generation: dict[str, Any] | None = None) -> dict[str, Any]:
    """What SGLang needs to know of a hybrid checkpoint, from the fields of config.json and generation_config.json, under names of its
    own configuration."""
    config = model_class(fields, "serving").family.config.from_hf(fields)
    seen = {
        "architectures": [HYBRID_ARCHITECTURE],
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.positions,
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(end_tokens(config, generation)) or None,
        "dtype": "bfloat16",
    }
    if config.experts:
        seen |= {"num_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    return seen
