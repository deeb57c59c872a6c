"""Training: an nn.Module that scores tokens. It chooses rows and memory and makes no number."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from zoo.common import ops
from zoo.common.ops.sample import score_filtered
from zoo.common.pretrained import Pretrained, own_dtypes
from zoo.common.row_sampling import DrawParams, RowSampling
from zoo.common.rows import Rows, check_cu_seqlens, check_ids, check_integers
from zoo.common.walk import walk

IGNORE = -100


@dataclass
class Scores:
    """FP32 per row: log-probability of the target, entropy in nats, and the k most likely tokens with theirs."""

    log_prob_R: Tensor
    entropy_R: Tensor | None = None
    top_ids_RK: Tensor | None = None
    top_log_prob_RK: Tensor | None = None


@dataclass
class ModelOutput:
    """What forward returns. `logits` are made when first asked for; the loss does not need them."""

    loss: Tensor | None
    hidden_states: Tensor
    _model: ForRL
    _logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """FP32 logits [R, V], or [B, T, V] where the input was padded."""
        if self._logits is None:
            flat = self.hidden_states.flatten(0, -2)
            self._logits = self._model.logits(flat).unflatten(0, self.hidden_states.shape[:-1])
        return self._logits

    def __getitem__(self, key: int | str) -> Tensor | None:
        return getattr(self, ("loss", "logits", "hidden_states")[key] if isinstance(key, int) else key)


def _rebuilt(leaves: Iterable[Any], model: ForRL) -> ModelOutput:
    loss, hidden, logits = leaves
    return ModelOutput(loss, hidden, model, logits)


# FSDP2 and DDP find the tensors whose gradients they wait for by flattening what a module returns
register_pytree_node(Scores, lambda scores: (list(vars(scores).values()), None), lambda leaves, _: Scores(*leaves))
register_pytree_node(ModelOutput, lambda out: ([out.loss, out.hidden_states, out._logits], out._model), _rebuilt)


class ForRL(Pretrained, nn.Module):
    """Base of every architecture's training model; a subclass says what memory its layers have."""

    gradient_checkpointing = False

    def layer_memory(self, layer: int, rows: Rows) -> Any:
        """The view of a layer for whole documents packed one after another: what `append` is given is the whole history."""
        raise AssertionError("written by each architecture")

    def layer_memory_after(self, layer: int, rows: Rows, start: Any) -> Any:
        """The same where other ranks have the documents' beginnings, and `start` is what the layer hands on from there.

        ValueError for a layer that hands on nothing.
        """
        raise ValueError(f"layer {layer} of {type(self).__name__} hands on no state, a start was given for it")

    def packed_memory(self, rows: Rows, start: Mapping[int, Any] | None = None) -> list[Any]:
        """One view a layer for documents packed one after another, whole ones unless `start` says by layer what stands before them.

        ValueError for a start of a layer that hands on nothing, or that isn't there.
        """
        given = {} if start is None else start
        layers = self.config.layers
        absent = [layer for layer in given if not 0 <= layer < layers]
        if absent:
            raise ValueError(f"a start is given for layer {absent[0]}, the model has layers 0 .. {layers - 1}")
        return [
            self.layer_memory_after(layer, rows, given[layer]) if layer in given else self.layer_memory(layer, rows)
            for layer in range(layers)
        ]

    def hidden_rows(self, ids_R: Tensor, rows: Rows, start: Mapping[int, Any] | None = None) -> Tensor:
        """Token ids to final normed rows [R, D]; `start`: see packed_memory."""
        recompute = self.gradient_checkpointing and self.training
        hidden_RD = walk(self.model, ids_R, rows, self.packed_memory(rows, start), recompute=recompute)
        rows.check_flags()  # what follows looks at ids on the device, and waits for it too
        return hidden_RD

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, object] | None = None) -> None:
        """Recompute each layer in the backward pass, by torch's non-reentrant checkpoint. The bytes stay.

        ValueError for any other setting than {"use_reentrant": False}.
        """
        if gradient_checkpointing_kwargs not in (None, {}, {"use_reentrant": False}):
            raise ValueError(f"gradient checkpointing has the setting use_reentrant=False only, not {gradient_checkpointing_kwargs!r}")
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False

    def sharding_units(self) -> list[nn.Module]:
        """What to give to FSDP2's `fully_shard`, in this order: modules with FP32 parameters of their own, the layers, the model.

        FSDP2 wants parameters of one dtype in a unit. FP32 ones take no mixed-precision policy; the others need none.
        """
        wide = [m for m in self.modules() if any(p.dtype != self.program.torch_dtype for p in m.parameters(recurse=False))]
        return [*wide, *self.model.get_submodule("layers").children(), self]

    def check_arithmetic(self) -> None:
        """ValueError too where FSDP2 would cast what a unit hands on, or what the model returns, to another dtype.

        What it casts on the way in, parameters and arguments, each op refuses: this cast alone comes behind the last of them.
        """
        super().check_arithmetic()
        fsdp = sys.modules.get("torch.distributed.fsdp")  # it takes long to import: where nobody did, nothing is sharded
        if fsdp is None:
            return
        for name, unit in self.named_modules():
            if not isinstance(unit, fsdp.FSDPModule):
                continue
            dtype = fsdp.fully_shard.state(unit)._mp_policy.output_dtype
            if dtype is not None and (unit is self or dtype != self.program.torch_dtype):
                what = "what the model returns, FP32 log-probabilities among it" if unit is self else f"what {name} hands on"
                raise ValueError(
                    f"FSDP2 would cast {what}, to {dtype}: shard with a MixedPrecisionPolicy whose output_dtype is None, "
                    f"program {self.program.name!r} names its own dtypes"
                )

    @own_dtypes
    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ModelOutput:
        """Hidden rows, logits if asked, and the loss if labels are given.

        input_ids [R] with cu_seqlens [N + 1], or [B, T] (attention_mask [B, T] of 0 and 1 marks padding), which is unpadded here
        and only here. labels have the shape of input_ids: label r + 1 is what row r is scored on, -100 is ignored. All of them
        are int32 or int64; the mask may have any dtype. The loss is the mean negative log-probability, or the sum over
        `num_items_in_batch`, which is above 0. ValueError for shapes, dtypes, ids, labels or bounds that do not fit each other or
        the model. Runs eagerly, also under torch.compile.
        """
        _check_shapes(input_ids, cu_seqlens, attention_mask, labels)
        if cu_seqlens is not None:
            ids_R = input_ids
            starts = cu_seqlens
            keep = None
        else:
            keep = _kept(input_ids, attention_mask)
            ids_R = input_ids[keep]
            starts = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
        rows = self.packed_rows(ids_R, starts)
        hidden_RD = self.hidden_rows(ids_R, rows)
        loss = None
        if labels is not None:
            targets_R = next_in_document(labels if keep is None else labels[keep], rows, IGNORE)
            loss = self._loss(hidden_RD, targets_R, num_items_in_batch)
        if keep is not None:
            padded = hidden_RD.new_zeros(*input_ids.shape, hidden_RD.shape[1])
            hidden_RD = padded.masked_scatter(keep[..., None], hidden_RD)
        return ModelOutput(loss, hidden_RD, self)

    def _loss(self, hidden_RD: Tensor, targets_R: Tensor, items: Tensor | int | None) -> Tensor:
        valid = targets_R != IGNORE
        targets_R = torch.where(valid, targets_R, 0).long()
        check_ids(targets_R, self.config.vocabulary)
        if items is not None and (not isinstance(items, Tensor | Real) or (isinstance(items, Tensor) and items.numel() != 1)):
            given = f"a tensor of {items.numel()}" if isinstance(items, Tensor) else type(items).__name__
            raise ValueError(f"num_items_in_batch must be one number, not {given}")
        if items is not None and not bool(items > 0):
            raise ValueError(f"num_items_in_batch must be above 0, it is {float(items):g}")
        scores = ops.log_prob(hidden_RD, self.model.head_weight_VD, targets_R, program=self.program)
        total = -torch.where(valid, scores.log_prob_R, 0.0).sum()
        return total / (valid.sum().clamp(min=1) if items is None else items)

    @own_dtypes
    def score(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        target_ids: Tensor | None = None,
        sampling: DrawParams | Sequence[DrawParams] | None = None,
        *,
        entropy: bool = False,
        top_k: int = 0,
    ) -> Tensor | Scores:
        """FP32 log-probabilities [R], differentiable. Entry r is that of `target_ids[r]` after reading row r; by default the
        document's next token, and 0.0 on a document's last row. Ids and bounds are int32 or int64. Runs eagerly, also under
        torch.compile.

        `sampling` (one for all, or one per document) replays the sampler's program: temperature, then top-k, top-p and min-p
        jointly; a token outside the support scores -inf. With `entropy` or `top_k` a `Scores` is returned; both describe the
        distribution after the temperature and before the filters, for every row; only the entropy has a gradient. ValueError for
        ids outside the vocabulary, cu_seqlens that do not ascend, or a top_k beyond the vocabulary.
        """
        if isinstance(top_k, bool) or not isinstance(top_k, int):
            raise ValueError(f"top_k must be an integer, not {top_k!r:.40}")
        rows = self.packed_rows(input_ids, cu_seqlens)
        hidden_RD = self.hidden_rows(input_ids, rows)
        scored_R = torch.ones_like(input_ids, dtype=torch.bool)
        if target_ids is None:
            target_ids = next_in_document(input_ids, rows, IGNORE)
            scored_R = target_ids != IGNORE
        else:
            check_integers("target_ids", target_ids)
            if target_ids.shape != input_ids.shape:
                raise ValueError(f"target_ids has shape {tuple(target_ids.shape)}, input_ids {tuple(input_ids.shape)}")
        targets_R = torch.where(scored_R, target_ids, 0).long()
        check_ids(targets_R, self.config.vocabulary)
        head = self.model.head_weight_VD
        params = self._sampling_rows(sampling, rows)
        inverse = None if params is None else params.inverse_temperature_or_none()
        if params is not None and params.filters:
            scores = score_filtered(hidden_RD, head, targets_R, params, self.program)
        else:
            scores = ops.log_prob(hidden_RD, head, targets_R, program=self.program, inverse_temperature_R=inverse)
        log_prob_R = torch.where(scored_R, scores.log_prob_R, 0.0)
        if not entropy and not top_k:
            return log_prob_R
        top = (None, None)
        if top_k:
            top = ops.top_log_prob(hidden_RD, head, scores.lse_R, top_k, program=self.program, inverse_temperature_R=inverse)
        return Scores(log_prob_R, scores.entropy_R if entropy else None, *top)

    @own_dtypes
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """FP32 logits [R, V] of final rows, differentiable."""
        return ops.logits(hidden_RD, self.model.head_weight_VD, program=self.program)

    def packed_rows(self, ids_R: Tensor, cu_seqlens: Tensor) -> Rows:
        """The rows of packed documents. ValueError for what `score` refuses of them."""
        check_integers("input_ids", ids_R)
        if ids_R.dim() != 1:
            raise ValueError(f"input_ids must be packed rows [R], not {list(ids_R.shape)}")
        starts = check_cu_seqlens(cu_seqlens)
        if starts[-1] != ids_R.shape[0]:
            raise ValueError(f"cu_seqlens ends at {starts[-1]}, there are {ids_R.shape[0]} tokens")
        check_ids(ids_R, self.config.vocabulary)
        longest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
        if longest > self.config.positions:
            raise ValueError(f"a document of {longest} tokens is longer than the position table of {self.config.positions}")
        return Rows.packed(cu_seqlens)

    def _sampling_rows(self, sampling: DrawParams | Sequence[DrawParams] | None, rows: Rows) -> RowSampling | None:
        if sampling is None:
            return None
        documents = rows.lengths_N.shape[0]
        each = [sampling] * documents if isinstance(sampling, DrawParams) else sampling
        if not isinstance(each, Sequence) or not all(isinstance(params, DrawParams) for params in each):
            raise ValueError(f"sampling must be SamplingParams, one or one per document, not {type(sampling).__name__}")
        if len(each) != documents:
            raise ValueError(f"{len(each)} sampling parameters for {documents} documents")
        by_row = [each[n] for n in rows.sequence_R.tolist()]
        return RowSampling.of(by_row, rows.positions_R + 1, rows.positions_R.device)


def next_in_document(values_R: Tensor, rows: Rows, last: int) -> Tensor:
    """values[r + 1] inside a document, `last` on its last row."""
    shifted = torch.roll(values_R, -1)
    shifted[rows.starts_N1[1:].long() - 1] = last
    return shifted


def _check_shapes(ids: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, labels: Tensor | None) -> None:
    for name, given in (("input_ids", ids), ("labels", labels)):
        if given is not None:
            check_integers(name, given)
    if ids.dim() not in (1, 2):
        raise ValueError(f"input_ids must be packed rows [R] or a batch [B, T], not {list(ids.shape)}")
    if ids.dim() == 1 and cu_seqlens is None:
        raise ValueError("input_ids [R] need cu_seqlens: rows without document bounds would read each other")
    if ids.dim() == 2 and cu_seqlens is not None:
        raise ValueError(f"cu_seqlens bound packed rows [R], input_ids is a batch {list(ids.shape)}")
    if ids.dim() == 1 and attention_mask is not None:
        raise ValueError(f"attention_mask marks the padding of a batch [B, T], input_ids is packed {list(ids.shape)}")
    for name, given in (("attention_mask", attention_mask), ("labels", labels)):
        if given is not None and given.shape != ids.shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}, input_ids {tuple(ids.shape)}")


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
