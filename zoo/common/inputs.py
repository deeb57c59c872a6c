"""What callers hand to a trainer's `forward`: tokens, bounds or padding, and what other trainers pass beside them, all checked.

verl, miles, prime-rl, TRL and transformers' own Trainer each name the same things in their own way. Everything that could move a number
must agree with the rest, or is refused in a sentence; what a model without a cache has no use for may say so (`use_cache=False`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from zoo.common.reading import shown
from zoo.common.row_sampling import TEMPERATURES, DrawParams
from zoo.common.rows import check_integers


class Beside(TypedDict, total=False):
    """Arguments of `forward` by name only.

    shift_labels            as `labels`, already shifted: entry r is what row r is scored on, -100 is ignored
    temperature             of the log-probabilities, entropy and loss: one number, or one a token in the shape of input_ids
    cu_seq_lens_q, cu_seq_lens_k, cu_seqlens_cpu, max_length_q, max_length_k
                            transformers' and verl's other names of bounds, which must agree
    return_dict             True: the output is read by name and by item
    use_cache, output_attentions, output_hidden_states, output_router_logits
                            False
    past_key_values, inputs_embeds
                            None
    """

    shift_labels: Tensor | Sequence[Any] | None
    temperature: float | Tensor | None
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    cu_seqlens_cpu: Tensor | None
    max_length_q: int | None
    max_length_k: int | None
    return_dict: bool | None
    use_cache: bool | None
    output_attentions: bool | None
    output_hidden_states: bool | None
    output_router_logits: bool | None
    past_key_values: None
    inputs_embeds: None


BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_cpu")
LONGEST = ("max_length_q", "max_length_k")
ABSENT = {
    "use_cache": "a trainer keeps no cache",
    "output_attentions": "attention weights are never held",
    "output_hidden_states": "only the final rows are kept, as hidden_states",
    "output_router_logits": "the routers have no loss of their own",
    "past_key_values": "a trainer keeps no cache",
    "inputs_embeds": "documents begin as token ids",
}


@dataclass(frozen=True)
class Batch:
    """Tokens as packed rows, and the way back.

    shape    of input_ids: [R], [1, R] with bounds, or [B, T]
    keep_BT  bool, the tokens among the padding; None where input_ids are packed already
    """

    ids_R: Tensor
    starts_N1: Tensor
    shape: tuple[int, ...]
    keep_BT: Tensor | None

    def rows(self, given: Tensor) -> Tensor:
        """The rows of something in the shape of input_ids."""
        return given.flatten() if self.keep_BT is None else given[self.keep_BT]

    def back(self, rows: Tensor) -> Tensor:
        """Rows [R, ...] in the shape of input_ids, +0 where there is padding."""
        if self.keep_BT is None:
            return rows if self.shape == rows.shape[:1] else rows.unflatten(0, self.shape)  # FSDP2 warns of views
        padded = rows.new_zeros(*self.shape, *rows.shape[1:])
        return padded.masked_scatter(self.keep_BT.view(*self.shape, *[1] * (rows.dim() - 1)), rows)


def read_batch(
    input_ids: Tensor | Sequence[Any],
    cu_seqlens: Tensor | Sequence[int] | None,
    attention_mask: Tensor | Sequence[Any] | None,
    position_ids: Tensor | Sequence[Any] | None,
    beside: Beside,
    device: torch.device,
) -> Batch:
    """The packed rows of what `forward` was given. ValueError, with both numbers, for what does not fit together."""
    _check_absent(beside)
    ids = integers("input_ids", input_ids, device)
    if ids.dim() not in (1, 2):
        raise ValueError(f"input_ids must be packed rows [R] or a batch [B, T], not {list(ids.shape)}")
    positions = None if position_ids is None else same_shape("position_ids", integers("position_ids", position_ids, device), ids)
    starts = _bounds(cu_seqlens, beside, device)
    one_line = ids.dim() == 1 or ids.shape[0] == 1
    if starts is None and attention_mask is None and positions is not None and one_line:
        starts = _starts_of(positions.flatten())
    if starts is None and ids.dim() == 1:
        raise ValueError("input_ids [R] need cu_seqlens or position_ids: rows without document bounds would read each other")
    if starts is not None and not one_line:
        raise ValueError(f"cu_seqlens bound packed rows [R] or [1, R], input_ids is a batch {list(ids.shape)}")
    if starts is not None:
        if attention_mask is not None:
            raise ValueError(f"attention_mask marks padding of a batch [B, T], input_ids {list(ids.shape)} are packed by their bounds")
        batch = Batch(ids.flatten(), starts, tuple(ids.shape), None)
    else:
        mask = None if attention_mask is None else same_shape("attention_mask", torch.as_tensor(attention_mask, device=device), ids)
        keep = _kept(ids, mask)
        batch = Batch(ids[keep], torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0)), tuple(ids.shape), keep)
    if positions is not None:
        said_by = "cu_seqlens" if batch.keep_BT is None else "a batch without a mask" if attention_mask is None else "attention_mask"
        _check_positions(batch.rows(positions), batch.starts_N1, said_by)
    _check_longest(batch.starts_N1, beside)
    return batch


def integers(name: str, given: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """An int32 or int64 tensor as it is, lists of integers as int64. ValueError for anything else."""
    tensor: Any = given
    if isinstance(given, list | tuple):
        try:
            tensor = torch.tensor(given, device=device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(f"{name} must hold integers, in lists of equal lengths, not {shown(given)}") from None
        if not tensor.numel():
            tensor = tensor.long()
    check_integers(name, tensor)
    return tensor


def same_shape(name: str, given: Tensor, ids: Tensor) -> Tensor:
    """ValueError unless it has the shape of input_ids."""
    if given.shape != ids.shape:
        raise ValueError(f"{name} has shape {tuple(given.shape)}, input_ids {tuple(ids.shape)}")
    return given


WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def inverse_temperatures(temperature: float | Tensor | None, batch: Batch) -> Tensor | None:
    """FP32 [R], what logits are multiplied by, as a sampler has it of the same number; None where that is 1 throughout.

    An FP32 temperature stands for the shortest decimal that rounds to it: 0.7 in a tensor is a sampler's 0.7. ValueError for what is no
    number or one a token, or lies outside of what is drawn with.
    """
    if temperature is None:
        return None
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        if tuple(temperature.shape) != batch.shape:
            given = list(temperature.shape)
            raise ValueError(f"temperature is one number or one a token, {list(batch.shape)}; it has shape {given}")
        if not temperature.dtype.is_floating_point and temperature.dtype not in WHOLE:
            raise ValueError(f"temperature must be numbers, not {temperature.dtype}")
        values_R = batch.rows(temperature).detach()
    else:
        number = temperature.item() if isinstance(temperature, Tensor) else temperature
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ValueError(f"temperature must be a number, not {shown(temperature)}")
        exact = not isinstance(temperature, Tensor) or temperature.dtype == torch.float64
        values_R = torch.full(batch.ids_R.shape, float(number), dtype=torch.float64 if exact else torch.float32, device=batch.ids_R.device)
    known, place_R = values_R.unique(return_inverse=True)
    inverses = [_inverse(value, values_R.dtype) for value in known.tolist()]
    if all(value == 1.0 for value in inverses):
        return None
    return torch.tensor(inverses, dtype=torch.float32, device=values_R.device)[place_R]


def _inverse(value: float, dtype: torch.dtype) -> float:
    low, high = TEMPERATURES
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"temperature must be between {low:g} and {high:g}, not {value!r}: greedy draws are scored at 1")
    if dtype == torch.float32:  # the decimal that a caller wrote, as far as FP32 tells it: six digits, most of seven
        value = float(f"{value:.7g}") if torch.tensor(float(f"{value:.7g}"), dtype=dtype).item() == value else value
    return DrawParams(temperature=value).inverse_temperature


def _check_absent(beside: Beside) -> None:
    known = Beside.__annotations__
    for name, value in beside.items():
        if name not in known:
            raise ValueError(f"forward takes no {name}; beside its tokens it takes {', '.join(known)}")
        if name in ABSENT and value is not None and value is not False:
            given = type(value).__name__ if isinstance(value, Tensor) else shown(value)
            raise ValueError(f"{name}={given}: {ABSENT[name]}")
    if beside.get("return_dict") not in (None, True):
        raise ValueError(f"return_dict={shown(beside['return_dict'])}: what forward returns is read by name and by item, and is no tuple")


def _bounds(cu_seqlens: Tensor | Sequence[int] | None, beside: Beside, device: torch.device) -> Tensor | None:
    """cu_seqlens under whichever name; where it has several, they must agree."""
    named: dict[str, Any] = {"cu_seqlens": cu_seqlens} | {name: beside.get(name) for name in BOUNDS}
    found = {name: integers(name, value, device) for name, value in named.items() if value is not None}
    if not found:
        return None
    first, *others = found
    for other in others:
        mine = found[first].tolist()
        theirs = found[other].tolist()
        if mine != theirs:
            raise ValueError(f"{first} and {other} bound other documents: {shown(mine)} and {shown(theirs)}")
    return found[first]


def _starts_of(positions_R: Tensor) -> Tensor:
    """Bounds of documents that lie one after another, each counted from 0."""
    if positions_R.numel() and int(positions_R[0]) != 0:
        raise ValueError(f"position_ids begin at {int(positions_R[0])}: a document's first token is at 0")
    starts = (positions_R == 0).nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([positions_R.numel()])])


def _check_positions(positions_R: Tensor, starts_N1: Tensor, said_by: str) -> None:
    starts = starts_N1.to(positions_R.device).long()
    if int(starts[-1]) != positions_R.numel():
        return  # the bounds themselves are wrong, which is said where they are read
    document_R = torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), (starts[1:] - starts[:-1]).clamp(min=0))
    due_R = torch.arange(positions_R.numel(), device=starts.device) - starts[document_R]
    wrong = (positions_R != due_R).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        raise ValueError(
            f"position_ids has {int(positions_R[row])} for token {int(due_R[row])} of document {int(document_R[row])}, "
            f"by {said_by} it is at {int(due_R[row])}"
        )


def _check_longest(starts_N1: Tensor, beside: Beside) -> None:
    for name in LONGEST:
        most = beside.get(name)
        if most is None:
            continue
        longest = int((starts_N1[1:] - starts_N1[:-1]).max()) if len(starts_N1) > 1 else 0
        if int(most) < longest:  # type: ignore[call-overload]
            raise ValueError(f"{name} is {int(most)}, the longest document has {longest} tokens")  # type: ignore[call-overload]


def _kept(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Bool [B, T]: the rows that are tokens. Each sequence is one run of them, padded on either side."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    other = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
    if other.numel():
        raise ValueError(f"attention_mask holds 0 (padding) and 1 (a token) only, not {other[0].item()}: additive masks are not taken")
    keep = attention_mask.bool()
    empty = (~keep.any(1)).nonzero()
    if empty.numel():
        raise ValueError(f"sequence {int(empty[0])} of the batch has no token: its attention_mask is all zero")
    begins = keep & ~torch.nn.functional.pad(keep[:, :-1], (1, 0))
    holes = (begins.sum(1) > 1).nonzero()
    if holes.numel():
        sequence = int(holes[0])
        first, after = begins[sequence].nonzero()[:2, 0].tolist()
        hole = first + int((~keep[sequence, first:]).nonzero()[0])
        raise ValueError(f"attention_mask of sequence {sequence} has a hole at position {hole}, before the token at {after}")
    return keep
