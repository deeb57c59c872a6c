"""Training: an nn.Module that scores tokens. It chooses rows and memory and makes no number."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from zoo.common import ops
from zoo.common.inputs import Batch, Beside, integers, inverse_temperatures, read_batch
from zoo.common.ops.sample import score_filtered
from zoo.common.pretrained import Pretrained, own_dtypes
from zoo.common.processes import is_sharded, reshard_after_steps
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
    """What forward returns, by name (`out.logits`) and by item (`out["logits"]`); `out[0]` and slices are of (loss, logits), the loss
    left out where there is none.

    loss           None without labels
    hidden_states  final normed rows
    log_probs      FP32, of each row's label, 0 where there is none; None without labels
    entropy        FP32, in nats, of each row's distribution; None without labels
    logits         FP32, made when first asked for, before any temperature

    Those of tokens have the shape of input_ids first.
    """

    loss: Tensor | None
    hidden_states: Tensor
    log_probs: Tensor | None
    entropy: Tensor | None
    _model: ForRL
    _logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """FP32 logits [R, V], or [B, T, V] where the input was padded."""
        if self._logits is None:
            flat = self.hidden_states.flatten(0, -2)
            self._logits = self._model.logits(flat).unflatten(0, self.hidden_states.shape[:-1])
        return self._logits

    def keys(self) -> tuple[str, ...]:
        """The names of what is there."""
        return tuple(name for name in OUTPUTS if name == "logits" or getattr(self, name) is not None)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            if key not in OUTPUTS:
                raise KeyError(f"forward returns {', '.join(OUTPUTS)}, no {key!r}")
            return getattr(self, key)
        names = tuple(name for name in ("loss", "logits") if name in self.keys())[key]
        return getattr(self, names) if isinstance(names, str) else tuple(getattr(self, name) for name in names)


class NoAdapters(dict[str, Any]):
    """Adapters that a model does not have: empty, and refuses any in a sentence."""

    def update(self, *given: Any, **named: Any) -> None:
        raise ValueError(
            "LoRA is not built yet, it is coming with kernels of its own: train all weights, or merge an adapter before loading"
        )

    def __setitem__(self, name: str, adapter: Any) -> None:
        self.update({name: adapter})


OUTPUTS = ("loss", "logits", "log_probs", "entropy", "hidden_states")


def _rebuilt(leaves: Iterable[Any], model: ForRL) -> ModelOutput:
    loss, hidden_states, log_probs, entropy, logits = leaves
    return ModelOutput(loss, hidden_states, log_probs, entropy, model, logits)


def _leaves(out: ModelOutput) -> tuple[list[Any], ForRL]:
    return [out.loss, out.hidden_states, out.log_probs, out.entropy, out._logits], out._model


# FSDP2 and DDP find the tensors whose gradients they wait for by flattening what a module returns
register_pytree_node(Scores, lambda scores: (list(vars(scores).values()), None), lambda leaves, _: Scores(*leaves))
register_pytree_node(ModelOutput, _leaves, _rebuilt)


class ForRL(Pretrained, nn.Module):
    """Base of every architecture's training model; a subclass says what memory its layers have."""

    gradient_checkpointing = False
    # what transformers' Trainer asks of a model: its loss divides by num_items_in_batch, and scores no document's first token
    accepts_loss_kwargs = True
    loss_type = "ForCausalLM"

    @property
    def peft_config(self) -> dict[str, Any]:
        """Empty; peft writes its adapters here before it looks at a model."""
        return NoAdapters()

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

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, object] | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """`gradient_checkpointing_enable` as transformers' Trainer calls it. ValueError too for a choice of layers, and for offloading."""
        if every_n_layers != 1 or offload:
            raise ValueError(f"every layer is recomputed and nothing offloaded, not every_n_layers={every_n_layers}, offload={offload}")
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs)

    def sharding_units(self) -> list[nn.Module]:
        """What to give to FSDP2's `fully_shard`, in this order: modules with parameters that are FP32 in every program, the layers,
        the model.

        FSDP2 wants parameters of one dtype in a unit. The first take no mixed-precision policy. The others need none; with FP32
        masters one with `param_dtype` of the program's dtype gathers half the bytes, and rounds as the program does.
        """
        usual = self.program.torch_dtype
        own = {name for name, entry in self.table_of().parameters.items() if entry.fixed and entry.held(usual) != usual}
        wide = [m for path, m in self.named_modules() if any(f"{path}.{name}".removeprefix(".") in own for name in m._parameters)]
        return [*wide, *self.model.get_submodule("layers").children(), self]

    def check_arithmetic(self) -> None:
        """ValueError too where FSDP2 would cast what a unit hands on, or what the model returns, to another dtype.

        What it casts on the way in, parameters and arguments, each op refuses: this cast alone comes behind the last of them.
        """
        super().check_arithmetic()
        units = self._units()
        if units:
            reshard_after_steps(unit for _, unit in units)
        for name, unit in units:
            dtype = sys.modules["torch.distributed.fsdp"].fully_shard.state(unit)._mp_policy.output_dtype
            if dtype is not None and (unit is self or dtype != self.program.torch_dtype):
                what = "what the model returns, FP32 log-probabilities among it" if unit is self else f"what {name} hands on"
                raise ValueError(
                    f"FSDP2 would cast {what}, to {dtype}: shard with a MixedPrecisionPolicy whose output_dtype is None, "
                    f"program {self.program.name!r} names its own dtypes"
                )

    @own_dtypes
    def forward(
        self,
        input_ids: Tensor | Sequence[Any],
        cu_seqlens: Tensor | Sequence[int] | None = None,
        attention_mask: Tensor | Sequence[Any] | None = None,
        labels: Tensor | Sequence[Any] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        position_ids: Tensor | Sequence[Any] | None = None,
        **beside: Unpack[Beside],
    ) -> ModelOutput:
        """Hidden rows, logits if asked, and the loss, log-probabilities and entropy if labels are given.

        input_ids [R] or [1, R] with cu_seqlens [N + 1] (or with position_ids, which begin each document at 0), or [B, T]
        (attention_mask [B, T] of 0 and 1 marks padding), which is unpadded here and only here. labels have the shape of input_ids:
        label r + 1 is what row r is scored on, -100 is ignored; `shift_labels` say it for row r itself. All of them are int32 or int64,
        or lists; the mask may have any dtype. position_ids must be what bounds or mask make them. The loss is the mean negative
        log-probability, or the sum over `num_items_in_batch`, which is above 0. What else other trainers pass is in
        `zoo.common.inputs.Beside`. ValueError for shapes, dtypes, ids, labels or bounds that do not fit each other or the model, and for
        what the model does not do. Runs eagerly, also under torch.compile.
        """
        device = self.device
        batch = read_batch(input_ids, cu_seqlens, attention_mask, position_ids, beside, device)
        targets = self._targets(labels, beside.get("shift_labels"), batch)
        rows = self.packed_rows(batch.ids_R, batch.starts_N1)
        inverse_R = inverse_temperatures(beside.get("temperature"), batch)
        hidden_RD = self.hidden_rows(batch.ids_R, rows)
        if targets is None:
            return ModelOutput(None, batch.back(hidden_RD), None, None, self)
        targets_R = targets if labels is None else next_in_document(targets, rows, IGNORE)
        scores = self._scored(hidden_RD, targets_R, inverse_R)
        loss = _mean_loss(scores.log_prob_R, targets_R, num_items_in_batch)
        assert scores.entropy_R is not None
        return ModelOutput(loss, batch.back(hidden_RD), batch.back(scores.log_prob_R), batch.back(scores.entropy_R), self)

    def _targets(self, labels: Any, shift_labels: Any, batch: Batch) -> Tensor | None:
        if labels is not None and shift_labels is not None:
            raise ValueError("labels and shift_labels are the same tokens, one row apart: give one of them")
        for name, given in (("labels", labels), ("shift_labels", shift_labels)):
            if given is not None:
                targets = integers(name, given, self.device)
                if tuple(targets.shape) != batch.shape:
                    raise ValueError(f"{name} has shape {tuple(targets.shape)}, input_ids {batch.shape}")
                return batch.rows(targets)
        return None

    def _scored(self, hidden_RD: Tensor, targets_R: Tensor, inverse_temperature_R: Tensor | None) -> Scores:
        """Log-probabilities, 0 where there is no target, and entropy."""
        valid_R = targets_R != IGNORE
        targets_R = torch.where(valid_R, targets_R, 0).long()
        check_ids(targets_R, self.config.vocabulary)
        head = self.model.head_weight_VD
        found = ops.log_prob(hidden_RD, head, targets_R, program=self.program, inverse_temperature_R=inverse_temperature_R)
        return Scores(torch.where(valid_R, found.log_prob_R, 0.0), found.entropy_R)

    @own_dtypes
    def score(
        self,
        input_ids: Tensor | Sequence[int],
        cu_seqlens: Tensor | Sequence[int],
        target_ids: Tensor | Sequence[int] | None = None,
        sampling: DrawParams | Sequence[DrawParams] | None = None,
        *,
        entropy: bool = False,
        top_k: int = 0,
    ) -> Tensor | Scores:
        """FP32 log-probabilities [R], differentiable. Entry r is that of `target_ids[r]` after reading row r; by default the
        document's next token, and 0.0 on a document's last row. Ids and bounds are int32 or int64, or lists. Runs eagerly, also
        under torch.compile.

        `sampling` (one for all, or one per document) replays the sampler's program: temperature, then top-k, top-p and min-p
        jointly; a token outside the support scores -inf. With `entropy` or `top_k` a `Scores` is returned; both describe the
        distribution after the temperature and before the filters, for every row; only the entropy has a gradient. ValueError for
        ids outside the vocabulary, cu_seqlens that do not ascend, or a top_k beyond the vocabulary.
        """
        if isinstance(top_k, bool) or not isinstance(top_k, int):
            raise ValueError(f"top_k must be an integer, not {top_k!r:.40}")
        input_ids = integers("input_ids", input_ids, self.device)
        rows = self.packed_rows(input_ids, integers("cu_seqlens", cu_seqlens, self.device))
        hidden_RD = self.hidden_rows(input_ids, rows)
        scored_R = torch.ones_like(input_ids, dtype=torch.bool)
        if target_ids is None:
            target_ids = next_in_document(input_ids, rows, IGNORE)
            scored_R = target_ids != IGNORE
        else:
            target_ids = integers("target_ids", target_ids, self.device)
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
        """FP32 logits [R, V] of final rows, differentiable. Without autograd the head is gathered where FSDP2 has sharded it."""
        weight = self.model.vocabulary_head.weight
        if not is_sharded(weight) or torch.is_grad_enabled():
            return ops.logits(hidden_RD, self.model.head_weight_VD, program=self.program)
        [name] = [name for name, parameter in self.named_parameters() if parameter is weight]
        return ops.logits(hidden_RD, self._reader()(name), program=self.program)

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


def _mean_loss(log_prob_R: Tensor, targets_R: Tensor, items: Tensor | int | None) -> Tensor:
    """Minus the log-probabilities of the rows that have a target, over their count or over `items`."""
    if items is not None and (not isinstance(items, Tensor | Real) or (isinstance(items, Tensor) and items.numel() != 1)):
        given = f"a tensor of {items.numel()}" if isinstance(items, Tensor) else type(items).__name__
        raise ValueError(f"num_items_in_batch must be one number, not {given}")
    if items is not None:
        number = items.item() if isinstance(items, Tensor) else items
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ValueError(f"num_items_in_batch must be one number, not {number!r}")
        if not 0 < number < math.inf:
            raise ValueError(f"num_items_in_batch must be above 0 and finite, it is {number:g}")
    valid = targets_R != IGNORE
    total = -torch.where(valid, log_prob_R, 0.0).sum()
    return total / (valid.sum().clamp(min=1) if items is None else items)
