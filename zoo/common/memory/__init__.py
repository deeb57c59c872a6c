"""Memory: the one seam between training and serving. It moves bytes and computes nothing.

A layer's ops see a view: `append` writes the new rows' state and returns what the op reads. Packed views (training) return the live
tensors, so that gradients flow and a recomputation under checkpointing changes nothing. Paged views (serving) write pages.

A server's memory is put together from parts. The engine owns which page and slot belongs to whom and knows nothing of what they hold;
it speaks `ServingMemory`:
- A sequence's tokens b * page_size .. (b + 1) * page_size - 1 live in its page b, in every page part. Pages of one prefix may be
  shared by sequences.
- A memory with state that is not a row of a page (a recurrent state, an open compressor window) has slot parts and `slots`, one per
  running sequence, slot 0 for padding. `table` writes slot and pages of a batch into one int32 tensor, opaque to drivers and graphs.
- Without slots, a sequence may start after any cached full pages. With slots it may start after L tokens iff a `snapshot` was
  taken when exactly L had been pushed, L a multiple of `grain`. A snapshot holds all of the sequence that its full pages don't:
  the slot, and copies of the rows of the page that L lies in. So a start shares full pages only, writes into none of them, and
  needs nothing of the sequence that the snapshot is of. `restore` writes it into the slot and the open page of another.
"""

from zoo.common.memory.compressed import CompressedLayer, CompressedMemory, OpenSlots, PackedCompressed, PagedCompressed
from zoo.common.memory.delta import CarrySlots, DeltaSlots
from zoo.common.memory.parts import RESERVED_PAGE, RESERVED_SLOT, Kept, PagePart, SlotPart
from zoo.common.memory.views import (
    DeltaLayer,
    DeltaMemory,
    KeyValueLayer,
    KeyValueMemory,
    LatentLayer,
    LatentMemory,
    PackedKeyValues,
    PackedLatents,
    PagedKeyValues,
    PagedLatents,
    PagedRows,
    Pager,
    Pages,
    TablePager,
    views_of,
)
from zoo.common.memory.whole import Memory, ServingMemory, Snapshot

__all__ = [
    "RESERVED_PAGE",
    "RESERVED_SLOT",
    "CarrySlots",
    "CompressedLayer",
    "CompressedMemory",
    "DeltaLayer",
    "DeltaMemory",
    "DeltaSlots",
    "Kept",
    "KeyValueLayer",
    "KeyValueMemory",
    "LatentLayer",
    "LatentMemory",
    "Memory",
    "OpenSlots",
    "PackedCompressed",
    "PackedKeyValues",
    "PackedLatents",
    "PagePart",
    "PagedCompressed",
    "PagedKeyValues",
    "PagedLatents",
    "PagedRows",
    "Pager",
    "Pages",
    "ServingMemory",
    "SlotPart",
    "Snapshot",
    "TablePager",
    "views_of",
]
