"""SGLang's sampler and its batched parameters, with the zoo's program: imported in the scheduler only."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers import sampler as stock
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from zoo.common import ops
from zoo.common.program import Program
from zoo.common.row_sampling import RowSampling
from zoo.sglang_plugin.columns import HostColumn, SharedColumn, WeightsColumn, WeightsState, joined, on_device
from zoo.sglang_plugin.draws import taken
from zoo.sglang_plugin.names import DRAWN, FILTERED, WEIGHTS
from zoo.sglang_plugin.requests import sampling_params


@dataclasses.dataclass
class RowsBatchInfo(SamplingBatchInfo):
    """SGLang's batch of parameters, and the same requests' rows of the zoo's sampler (positions are filled in at each step).

    bounds  (scales, filters) of each request: a batch that lost its last filter is one without
    """

    rows: RowSampling | None = None
    bounds: list[tuple[bool, bool]] = dataclasses.field(default_factory=list)

    def adjusted_filter_batch(self, keep_indices: list[int], keep_indices_device: Tensor) -> None:
        assert self.rows is not None
        self.bounds = [self.bounds[i] for i in keep_indices]
        scales, filters = map(any, zip(*self.bounds, strict=True))
        self.rows = dataclasses.replace(self.rows[keep_indices_device], scales=scales, filters=filters)

    def adjusted_merge_batch(self, other: SamplingBatchInfo) -> None:
        assert self.rows is not None and isinstance(other, RowsBatchInfo) and other.rows is not None
        self.rows = joined(self.rows, other.rows)
        self.bounds = self.bounds + other.bounds


def with_rows(info: SamplingBatchInfo, requests: list[Any], device: torch.device | str) -> RowsBatchInfo:
    """The batch's parameters from the requests themselves: SGLang's tensors hold temperature and top_p rounded to FP32."""
    params = [sampling_params(request.sampling_params) for request in requests]
    rows = RowSampling.of(params, [0] * len(params), "cpu")
    moved = {f.name: on_device(getattr(rows, f.name), device) for f in dataclasses.fields(rows) if f.name.endswith("_R")}
    fields = {f.name: getattr(info, f.name) for f in dataclasses.fields(SamplingBatchInfo)}
    bounds = [(p.scales, p.filters) for p in params]
    return RowsBatchInfo(**fields, rows=RowSampling(**moved, scales=rows.scales, filters=rows.filters, seeded=rows.seeded), bounds=bounds)


class RowSampler(stock.Sampler):
    """Draws by `ops.sample`, or takes what a decode graph drew by it.

    FP32 log-probabilities after the temperature in SGLang's field, after the filters too in FILTERED.
    `program` and `weights` are set once the model is loaded.
    """

    program: Program
    weights: WeightsState

    def __init__(self) -> None:
        super().__init__()
        if stock.SGLANG_RETURN_ORIGINAL_LOGPROB:
            raise ValueError("SGLANG_RETURN_ORIGINAL_LOGPROB is set: returned log-probabilities would not be the sampler's")

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(sampling_info, RowsBatchInfo) or sampling_info.rows is None:
            raise RuntimeError("the zoo's sampler got a batch without its rows: the hook on SamplingBatchInfo is not active")
        logits_RV = logits_output.next_token_logits
        rows = sampling_info.rows
        drawn = taken((logits_output.customized_info or {}).get(DRAWN), rows, len(logits_RV))
        if drawn is None:
            drawn = ops.sample(logits_RV, dataclasses.replace(rows, position_R=positions.long() + 1), self.program)
        # without filters it is the column that SGLang copies anyway
        shared = return_logprob and drawn.filtered_log_prob_R is drawn.log_prob_R
        # always, since a request's list must have one entry for each of its tokens; anew, since a graph's is one over all replays
        logits_output.customized_info = {
            FILTERED: SharedColumn(logits_output) if shared else HostColumn(drawn.filtered_log_prob_R),
            WEIGHTS: WeightsColumn(self.weights),
        }
        if return_logprob:
            logits_output.next_token_logprobs = drawn.log_prob_R
            self._return_others(logits_output, rows, drawn.token_R, top_logprobs_nums, token_ids_logprobs)
        return drawn.token_R

    def compute_logprobs_only(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
    ) -> None:
        """What SGLang asks for instead of a draw, where a batch's requests all have max_new_tokens 0."""
        assert isinstance(sampling_info, RowsBatchInfo) and sampling_info.rows is not None
        logits_RV = logits_output.next_token_logits
        none_R = torch.zeros(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
        self._return_others(logits_output, sampling_info.rows, none_R, top_logprobs_nums, token_ids_logprobs)

    def _return_others(
        self, output: LogitsProcessorOutput, rows: RowSampling, token_R: Tensor, tops: list[int], wanted: list[list[int]]
    ) -> None:
        """Log-probabilities, after the temperature, of the likeliest tokens or of those named, where a request asks."""
        if not any(n > 0 for n in tops) and all(ids is None for ids in wanted):
            return
        every_RV = ops.every_log_prob(output.next_token_logits, rows.inverse_temperature_or_none(), program=self.program)
        more = self.output_logprob_processor.compute_logprobs(every_RV, tops, wanted, token_R)
        more.token_logprobs = None
        if more.token_ids_logprobs_val is not None:
            # SGLang 0.5.17 leaves a list where a request named none, and would end as it reads a tensor of every request
            none = every_RV.new_empty(0)
            more.token_ids_logprobs_val = [none if isinstance(v, list) else v for v in more.token_ids_logprobs_val]
        more.write_output_to(output)
