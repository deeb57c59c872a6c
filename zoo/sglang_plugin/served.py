"""What every EntryClass shares: SGLang's contract around a serving model of the zoo. Imported in the scheduler only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_server_args
from torch import Tensor, nn

from zoo.common import ops
from zoo.common.compilations import watch
from zoo.common.fingerprint import Fingerprint
from zoo.common.hub import read_config
from zoo.common.layers import RotaryTable
from zoo.common.program import resolve
from zoo.common.registry import model_class
from zoo.common.serving import PREFILL_ROWS, ForServing
from zoo.sglang_plugin.backend import PagedBackend
from zoo.sglang_plugin.capturer import capturer
from zoo.sglang_plugin.columns import WeightsColumn, WeightsState
from zoo.sglang_plugin.loading import absent, check, load
from zoo.sglang_plugin.memory import KeyValuePool, Step
from zoo.sglang_plugin.names import DRAWN, PROGRAMS, WEIGHTS, WEIGHTS_DIGITS
from zoo.sglang_plugin.scores import prompt_scores

logger = logging.getLogger(__name__)


class Served(nn.Module):
    """Parameters of the zoo under `zoo`, updated in place; rows through SGLang's pools."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        args = get_server_args()
        if args.attention_backend not in PROGRAMS:
            raise RuntimeError(f"the zoo's {type(self).__name__} was built in a server with --attention-backend {args.attention_backend}")
        if quant_config is not None:
            raise ValueError(f"the checkpoint asks for quantization ({quant_config}); the zoo's backend serves bfloat16 weights")
        fields = read_config(args.model_path, args.revision)
        serving = model_class(fields, "serving")
        assert issubclass(serving, ForServing)
        device = torch.empty(0).device  # SGLang builds models inside their device's context
        with _plain_defaults():
            program = resolve(PROGRAMS[args.attention_backend], device, torch.bfloat16, serving.family.contributors)
            self.zoo: ForServing = serving._on_meta(serving.family.config.from_hf(fields), program)
            self.zoo._allocate(device)
        # memory handed back and resumed restores buffers, and nothing else that weights don't
        for i, module in enumerate(m for m in self.zoo.modules() if isinstance(m, RotaryTable)):
            self.register_buffer(f"rotary_{i}", module.table_PC2, persistent=False)
        self._arrived: set[str] = set()  # published names, until all have been written once
        self.complete = False
        self.checking = False
        self.takes_requests = False
        self.refusal: str | None = None  # why no update may write now
        self.waiting: list[Any] = []  # SGLang's requests that need an idle scheduler
        self.weights = WeightsState(lambda: self.zoo.weights_version[:WEIGHTS_DIGITS])
        self._checked = False
        self._returns_routing = bool(args.enable_return_routed_experts)

    def reserve(self, requests: int) -> None:
        """Memory beside the key-value pool for `requests` at once; none here."""

    def pool(self, pages: KeyValuePool, requests: int) -> Any:
        """What the backend keeps for this model: pages alone here. requests: places in SGLang's table, padding counted."""
        return pages

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **kwargs: Any) -> LogitsProcessorOutput:
        if kwargs.get("input_embeds") is not None:
            raise ValueError("input embeddings are not served by the zoo's backend")
        backend = get_attn_backend()
        if not self._checked:
            self._check(backend)
        step = backend.step
        if forward_batch.forward_mode.is_decode_or_idle():
            output = LogitsProcessorOutput(next_token_logits=self.zoo.logits(self.hidden_rows(input_ids, step, backend)))
            if backend.captures:
                output.customized_info = {DRAWN: backend.draws.draw(output.next_token_logits, positions)}
            return output
        seen = watch()
        seen.look("between prefills")
        hidden_RD = backend.prefills.push(input_ids, step) if backend.prefills is not None else None
        if hidden_RD is None:
            hidden_RD = self.hidden_rows(input_ids, step, backend)
        last_N = step.rows.starts_N1[1:].long() - 1
        output = LogitsProcessorOutput(next_token_logits=self.zoo.logits(hidden_RD.index_select(0, last_N)))
        if forward_batch.is_prefill_only:  # no sampler comes after it
            output.customized_info = {WEIGHTS: WeightsColumn(self.weights)}
        if forward_batch.return_logprob:
            b = forward_batch
            scores = prompt_scores(
                self.zoo,
                hidden_RD,
                b.extend_input_logprob_token_ids_gpu,
                b.extend_seq_lens_cpu,
                b.extend_logprob_start_lens_cpu,
                b.top_logprobs_nums,
                b.token_ids_logprobs,
            )
            for name, value in vars(scores).items() if scores is not None else ():
                setattr(output, name, value)
        seen.look(f"a prefill of {step.rows.count} rows of {len(last_N)} sequences of up to {step.rows.max_length} tokens")
        return output

    @torch.no_grad()
    def hidden_rows(self, ids_R: Tensor, step: Step, backend: PagedBackend) -> Tensor:
        """Final rows [R, D] of a step, kernel by kernel: what runs eagerly and what graphs capture."""
        step.rows.renew()  # static rows change in place, and each captured graph derives its own
        with ops.watch(_CaptureRouting()) if self._returns_routing else nullcontext():
            return self.zoo.hidden_rows(ids_R, step.rows, backend.pool.during(step), step.table_NB)

    def most_rows(self, chunk: int) -> int:
        """Rows of the largest prefill to capture: what a forward can bring (`chunk`: --chunked-prefill-size), and the capturer holds."""
        most = chunk if chunk > 0 else max(PREFILL_ROWS)
        return min(most, capturer().rows) if self._returns_routing else most

    def _check(self, backend: Any) -> None:
        """At the first forward: what runs is what was asked for. RuntimeError otherwise."""
        from zoo.sglang_plugin.check import assert_active

        if not isinstance(backend, PagedBackend):
            raise RuntimeError(f"the zoo's model runs over {type(backend).__name__}, not over its own backend")
        assert_active(backend.runner)
        self._checked = True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Published names, whole tensors, in place: any part of them. A list is checked whole before its first write.

        ValueError in one sentence, `refusal` if there is one. While `checking`, the same without a write.
        """
        if self.refusal is not None:
            raise ValueError(self.refusal)
        if self.checking:
            check(self.zoo, weights)
            return
        before = self.weights.writes
        try:
            load(self.zoo, weights, self._wrote)
        except Exception as error:
            if self.weights.writes == before:
                raise
            self._arrived = set()
            self.complete = False
            raise RuntimeError(f"a part of the weights was written, push all of them again: {error}") from error

    def start(self, dummy: bool) -> None:
        """SGLang's loader is done: nothing is cached of other weights. ValueError if it had a checkpoint, and tensors are missing."""
        lacking = absent(self.zoo.table_of(), self._arrived) if not self.complete else ()
        if lacking and not dummy:
            some = ", ".join(sorted(lacking)[:4])
            raise ValueError(f"the checkpoint lacks {len(lacking)} tensors of this geometry: {some}")
        self.weights.flushed = self.complete

    def overwrite(self) -> None:
        """Parameters were or will be written: what the cache and running requests hold, if there are any, is of other weights."""
        self.zoo.weights_changed()
        self.weights.written()

    def _wrote(self, names: set[str]) -> None:
        self.overwrite()
        if not self.complete:
            self._arrived |= names
            self.complete = not absent(self.zoo.table_of(), self._arrived)

    def fingerprint(self) -> Fingerprint | None:
        """None while tensors have never been written, in a server that was started without a checkpoint's weights."""
        return self.zoo.fingerprint() if self.complete else None


class _CaptureRouting:
    """Hands each layer's routing to the capturer; it sees ops and changes none."""

    def __init__(self) -> None:
        self.layer = 0
        self.capturer = capturer()

    def __call__(self, contract: Any, arguments: dict[str, Any], result: Any) -> None:
        if contract.name == "route":
            self.capturer.write(self.layer, *result)
            self.layer += 1


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """SGLang builds models under default dtype bfloat16 on the GPU; the position table must be FP32 from the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
