"""Token slots: of a prefill where a page is not a power of two, which SGLang's kernel demands; of a decode step that starts no page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.sglang_plugin.names import PROGRAMS


def power_of_two(page: int) -> bool:
    return page & (page - 1) == 0


def extend_slots(prefix_N: Tensor, length_N: Tensor, last_N: Tensor, free_P: Tensor, total: int, page: int) -> Tensor:
    """int64 [total]: the slots of tokens prefix .. length - 1 of each sequence, without synchronising.

    First the rest of the page that holds the prefix's last token (slot last_N), then free pages in the order given.
    """
    prefix_N = prefix_N.long()
    length_N = length_N.long()
    count_N = length_N - prefix_N
    start_N = count_N.cumsum(0) - count_N
    first_N = (prefix_N + page - 1) // page  # the first block of a sequence that takes a free page
    taken_N = (length_N + page - 1) // page - first_N
    before_N = taken_N.cumsum(0) - taken_N
    sequence_R = torch.repeat_interleave(torch.arange(len(count_N), device=count_N.device), count_N, output_size=total)
    new_R = torch.arange(total, device=count_N.device) - start_N[sequence_R]
    token_R = prefix_N[sequence_R] + new_R
    block_R = token_R // page
    held_R = block_R < first_N[sequence_R]
    free_R = torch.where(held_R, 0, before_N[sequence_R] + block_R - first_N[sequence_R])
    # a prefill that only fills pages may meet an empty list
    page_R = free_P[free_R].long() if len(free_P) else torch.zeros_like(free_R)
    return torch.where(held_R, last_N.long()[sequence_R] + 1 + new_R, page_R * page + token_R % page)


def around_alloc_extend(
    original: Callable[..., Tensor | None],
    allocator: Any,
    prefix_lens: Tensor,
    prefix_lens_cpu: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    last_loc: Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Tensor | None:
    """Hook around `PagedTokenToKVPoolAllocator.alloc_extend`; None if there are too few free pages."""
    from sglang.srt.runtime_context import get_server_args

    page = allocator.page_size
    if power_of_two(page) or get_server_args().attention_backend not in PROGRAMS:
        return original(allocator, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages)
    pages = int(((seq_lens_cpu + page - 1) // page - (prefix_lens_cpu + page - 1) // page).sum())
    if allocator.need_sort and pages > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    if pages > len(allocator.free_pages):
        return None
    slots = extend_slots(prefix_lens, seq_lens, last_loc, allocator.free_pages, extend_num_tokens, page)
    allocator.free_pages = allocator.free_pages[pages:]
    return slots


def around_alloc_decode(
    original: Callable[..., Tensor | None], allocator: Any, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
) -> Tensor | None:
    """Hook around `PagedTokenToKVPoolAllocator.alloc_decode`; `seq_lens` count the token to come.

    Where no sequence starts a page, each takes the slot behind its last one and no page is taken: what SGLang's kernel gives, by one
    launch. SGLang's own runs for all else, and where it could sort its free pages or check itself.
    """
    from sglang.srt.runtime_context import get_server_args

    page = allocator.page_size
    if (
        get_server_args().attention_backend not in PROGRAMS
        or allocator.debug_mode
        or len(seq_lens) > len(allocator.free_pages)
        or any(length % page == 1 for length in seq_lens_cpu.tolist())
    ):
        return original(allocator, seq_lens, seq_lens_cpu, last_loc)
    return torch.add(last_loc, 1, out=torch.empty(last_loc.shape, dtype=torch.int64, device=last_loc.device))
