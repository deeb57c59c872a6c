"""DeepSeek-V4 in serving: rows through pages of token rows and of compressed rows, and slots of the windows that are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.common.memory import CompressedLayer, OpenSlots, PagePart, Pages, SlotPart
from zoo.common.ops.compress.windows import Window
from zoo.common.serving import ForServing
from zoo.deepseek_v4.config import HEAVY, SPARSE


class DeepseekV4ForServing(ForServing):
    """Token ids, pages and slots in, final rows or logits out. `prefill`, `decode`: see ForServing."""

    parts = ("window", "csa", "hca", "csa_open", "hca_open")

    @property
    def captured_length(self) -> int:
        return 0

    @property
    def takes_any_page(self) -> bool:
        """Whether the page sizes that are usually tried, multiples of 16, hold whole compressed rows."""
        return 16 % int(self.config.page) == 0

    def page_parts(self, pages: int, page_size: int) -> list[PagePart]:
        c = self.config
        row = (self.program.torch_dtype, (c.head_dim,))
        index = (self.program.torch_dtype, (c.index_dim,))
        sparse, heavy = (c.kinds_of_layers.count(kind) for kind in (SPARSE, HEAVY))
        return [
            PagePart("window", c.layers, pages, page_size, {"window": row}, self.device),
            PagePart("csa", sparse, pages, page_size, {"csa": row, "index": index}, self.device, c.rates.sparse),
            PagePart("hca", heavy, pages, page_size, {"hca": row}, self.device, c.rates.heavy),
        ]

    def slot_parts(self, slots: int) -> list[SlotPart]:
        """Values and gates of a token go side by side; of overlapping windows each has two parts."""
        c = self.config
        wide = self.program.wide_dtype
        sparse, heavy = (c.kinds_of_layers.count(kind) for kind in (SPARSE, HEAVY))
        columns = {"csa": 4 * c.head_dim, "index": 4 * c.index_dim}
        return [
            OpenSlots("csa_open", sparse, slots, Window(c.rates.sparse, True), columns, wide, self.device),
            OpenSlots("hca_open", heavy, slots, Window(c.rates.heavy, False), {"hca": 2 * c.head_dim}, wide, self.device),
        ]

    def layer_views(self, pages: Sequence[Pages], slots: Sequence[SlotPart]) -> list[Any]:
        c = self.config
        windows, short, long = pages
        short_slots, long_slots = slots
        parts = {SPARSE: (short, short_slots, ("csa", "index")), HEAVY: (long, long_slots, ("hca",))}
        found = []
        for layer, kind in enumerate(c.kinds_of_layers):
            rows, held, names = parts.get(kind, (short, short_slots, ()))
            place = c.kinds_of_layers[:layer].count(kind)
            found.append(CompressedLayer(windows, layer, rows, held, place, names, c.rate(kind)))
        return found
