"""Families with state that is not a row of a page: one slot per place in SGLang's request table. It moves bytes and computes nothing.

SGLang is shown a plain attention model (`served_fields`): its own pools for recurrent layers, and the prefix cache that goes with
them, would hold a state at other places than whole chunks. Slot 0 is its request table's padding row, and ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.common.ends import end_tokens
from zoo.common.memory import RESERVED_SLOT, KeyValueLayer, Pager, SlotPart
from zoo.common.registry import model_class
from zoo.sglang_plugin.memory import BoundPool, KeyValuePool, Step
from zoo.sglang_plugin.names import HYBRID_ARCHITECTURE


class HybridPool:
    """SGLang's pages for the layers that have keys and values, the plugin's slots for what the others hold.

    layers    the maker of each layer's view over both
    requests  places in SGLang's request table, the padding row counted
    ValueError if slots or layers are too few.
    """

    def __init__(
        self, layers: Sequence[Callable[[Pager, Tensor | None], Any]], pages: KeyValuePool, slots: Sequence[SlotPart], requests: int
    ) -> None:
        for part in slots:
            if requests > part.slots:
                raise ValueError(f"{requests} requests have only {part.slots} slots of {part.name}, one is for padding in both")
        paged = sum(isinstance(layer, KeyValueLayer) for layer in layers)
        if len(pages.k_pages) != paged:
            raise ValueError(f"the key-value pool has {len(pages.k_pages)} layers, the model has {paged} of attention")
        self.layers = tuple(layers)
        self.pages = pages
        self.slots = tuple(slots)
        self._remembered = 4 * requests
        self._ends: dict[str, int] = {}

    def during(self, step: Step) -> BoundPool:
        return BoundPool(self.layers, step, slots=True)

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
        cleared_N = torch.cat([fresh_N.new_zeros(1), fresh_N])
        for part in self.slots:
            part.clear(cleared_N)

    def clear_padding(self) -> None:
        """Zeroes page 0 and slot 0."""
        self.pages.clear_padding()
        for part in self.slots:
            part.clear([RESERVED_SLOT])


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
