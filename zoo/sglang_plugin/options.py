"""What `--attention-backend zoo` implies, and what a server with it refuses: one sentence, before anything is loaded."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zoo.common.hub import read_config
from zoo.common.registry import model_class
from zoo.sglang_plugin.hooked import assert_hooked
from zoo.sglang_plugin.names import FAMILIES, HYBRID, PARSER, PROGRAMS, PROVEN, SAMPLER
from zoo.sglang_plugin.slots import power_of_two

logger = logging.getLogger(__name__)

PAGES = ((128, 128), (256, 80))  # widest head, FlashAttention 4's key tile for it
CHUNK_PROMPT = 512  # tokens of a prompt: a default chunk of SGLang's is so many of them, and keeps as many counted in whole pages
REQUESTS = 64  # running at once where each needs a slot of state
DUMMY = "dummy"  # --load-format of a server whose weights are pushed: it claims nothing before all of them were
CHECKED = "_zoo_checked"  # left on the server's arguments by `around_resolution`; the scheduler asserts it


@dataclass(frozen=True)
class Refusal:
    """A server argument and the values that are served. `inexact`: others run, but untested or with other bytes."""

    field: str
    served: tuple[Any, ...]
    why: str
    inexact: bool = False

    def sentence(self, value: Any, backend: str) -> str:
        flag = "--" + self.field.replace("_", "-")
        served = " or ".join(repr(v) for v in self.served)
        return f"--attention-backend {backend} serves {flag} {served}, not {value!r}: {self.why}"


ONE_DEVICE = "the model runs on one device"
WEIGHTS = "weights are served as the trainer holds them"
LOADED = "weights are read as a checkpoint's files, or pushed"
DUMPED = "it runs code inside the model's forward, which may move bytes that no fingerprint shows"
ELSEWHERE = "history kept elsewhere is untested"
CHECKED_REQUESTS = "requests must come through the process that checks them"
BYTES = "history would be stored in other bytes than the trainer's"
REFUSALS = (
    Refusal("device", ("cuda",), "the aligned kernels are CUDA's"),
    *(Refusal(name, (1,), ONE_DEVICE) for name in ("tp_size", "pp_size", "ep_size", "dcp_size", "attn_cp_size", "moe_dp_size")),
    Refusal("enable_dp_attention", (False,), ONE_DEVICE),
    Refusal("attn_dp_size", (1,), ONE_DEVICE),
    Refusal("dtype", ("auto", "bfloat16"), "the program has bfloat16 weights and activations"),
    Refusal("quantization", (None,), WEIGHTS),
    Refusal("torchao_config", ("", None), WEIGHTS),
    Refusal("kv_cache_dtype", ("auto", "bfloat16", "bf16"), BYTES),
    Refusal("enable_page_major_kv_layout", (False,), "pages must lie in one piece per layer"),
    Refusal("enable_unified_memory", (False,), "pages must lie in one piece per layer"),
    Refusal("enable_hisparse", (False,), "attention reads the whole history"),
    Refusal("enable_hierarchical_cache", (False,), "history moved to the host and back is untested", inexact=True),
    Refusal("enable_lmcache", (False,), ELSEWHERE, inexact=True),
    Refusal("enable_flexkv", (False,), ELSEWHERE, inexact=True),
    Refusal("enable_unified_cache_external_linker", (False,), ELSEWHERE, inexact=True),
    Refusal("speculative_algorithm", (None,), "drafted tokens are verified by rows that the plugin does not build yet"),
    Refusal("dllm_algorithm", (None,), "only causal language models are served"),
    Refusal("is_embedding", (False,), "only causal language models are served"),
    Refusal("enable_lora", (None, False), "adapters per request come later; merge the adapter into the checkpoint"),
    Refusal("lora_paths", (None, [], {}), "adapters per request come later; merge the adapter into the checkpoint"),
    Refusal("disaggregation_mode", ("null",), "history sent between servers is untested", inexact=True),
    Refusal("enable_mixed_chunk", (False,), "prefill and decode rows in one batch are untested", inexact=True),
    Refusal("enable_two_batch_overlap", (False,), "two half batches need two backends"),
    Refusal("enable_single_batch_overlap", (False,), "the plugin's layers have nothing to overlap"),
    Refusal("enable_pdmux", (False,), "prefill and decode on shared multiprocessors are untested"),
    Refusal("enable_torch_compile", (False,), "a compiler may fuse and reorder the plugin's arithmetic"),
    Refusal("enable_tf32_matmul", (False, None), "it changes arithmetic of the whole process"),
    Refusal("enable_deterministic_inference", (False,), "it replaces the sampler and PyTorch's products; the plugin needs neither"),
    Refusal("rl_on_policy_target", (None,), "it replaces the sampler and PyTorch's products; the plugin needs neither"),
    Refusal("cpu_offload_gb", (0,), "weights must stay where CUDA graphs read them"),
    Refusal("offload_group_size", (-1,), "weights must stay where CUDA graphs read them"),
    Refusal("enable_paged_experts", (False,), "weights must stay where CUDA graphs read them"),
    Refusal("startup_weight_load_mode", ("serial",), "weights that come after the graphs are untested"),
    Refusal("enable_nvidia_megakernel", (False,), "the plugin's own model classes run"),
    Refusal("model_impl", ("auto", "sglang"), "the plugin's own model classes run"),
    Refusal("json_model_override_args", ("{}", "", None), "trainer and server read one config.json"),
    Refusal("decrypted_config_file", (None,), "trainer and server read one config.json"),
    Refusal("enable_custom_logit_processor", (False,), "the trainer can't replay it"),
    Refusal("enable_watermark", (False,), "the trainer can't replay it"),
    Refusal("preferred_sampling_params", (None,), "each request must name its own program"),
    Refusal("enable_mis", (False,), "several items in one sequence are untested"),
    Refusal("enable_return_hidden_states", (False, None), "the plugin returns log-probabilities only"),
    Refusal("return_hidden_states_mode", (None, "off", "none"), "the plugin returns log-probabilities only"),
    Refusal("enable_return_aux_hidden_states", (False,), "the plugin returns log-probabilities only"),
    Refusal("enable_return_indexer_topk", (False,), "these models have no indexer"),
    Refusal("prefill_only_disable_kv_cache", (False,), "attention reads the cache"),
    Refusal("elastic_ep_backend", (None,), ONE_DEVICE),
    Refusal("moe_a2a_backend", ("none", None), ONE_DEVICE),
    Refusal("enable_eplb", (False,), ONE_DEVICE),
    Refusal("tokenizer_worker_num", (1,), CHECKED_REQUESTS),
    *(Refusal(name, (False,), CHECKED_REQUESTS) for name in ("grpc_mode", "smg_grpc_mode")),
    Refusal("use_ray", (False,), "its schedulers do not load plugins"),
    Refusal("debug_cuda_graph", (False,), "decode is captured whole"),
    Refusal("load_format", ("auto", "safetensors", DUMMY), LOADED),
    Refusal("weight_cache_mode", ("off",), LOADED),
    Refusal("custom_weight_loader", (None, []), "updates go through the model's checks"),
    Refusal("enable_elastic_expert_backup", (False,), LOADED),
    Refusal("remote_instance_weight_loader_start_seed_via_transfer_engine", (False,), LOADED),
    *(Refusal(name, (None, ""), WEIGHTS) for name in ("modelopt_quant", "rl_quant_profile", "quantization_param_path")),
    Refusal("quantize_and_serve", (False,), WEIGHTS),
    Refusal("enable_fp32_lm_head", (False,), "the program alone names the head's arithmetic"),
    Refusal("kt_weight_path", (None,), "the model runs on the GPU"),
    Refusal("forward_hooks", (None, []), DUMPED),
    *(Refusal(name, (None,), DUMPED) for name in ("debug_tensor_dump_output_folder", "debug_tensor_dump_input_file")),
    Refusal("msprobe_dump_config", (None,), DUMPED),
    Refusal("enable_layerwise_nvtx_marker", (False,), DUMPED),
    Refusal("kv_canary", ("none",), DUMPED),
    Refusal("radix_cache_backend", (None,), ELSEWHERE),
    *(Refusal(name, (False,), "sessions are untested") for name in ("enable_session_radix_cache", "enable_streaming_session")),
    Refusal("hicache_storage_backend", (None,), ELSEWHERE),
    *(Refusal(name, (1,), ONE_DEVICE) for name in ("nnodes", "dwdp_size")),
    *(Refusal(name, (False,), ONE_DEVICE) for name in ("enable_prefill_cp", "enable_prefill_context_parallel", "enable_dp_lm_head")),
    Refusal("ep_num_redundant_experts", (0,), ONE_DEVICE),
    Refusal("init_expert_location", ("trivial", None), ONE_DEVICE),
    Refusal("encoder_only", (False,), "only causal language models are served"),
)


def around_resolution(original: Callable[[Any], None], args: Any) -> None:
    """Hook around the method of ServerArgs that resolves the options: for other backends just the original."""
    if args.attention_backend not in PROGRAMS:
        _refuse_half(args)
        return original(args)
    if getattr(args, CHECKED, False):  # a child process, where resolved options arrive
        return original(args)
    if str(args.model_path).lower() in ("none", "dummy"):
        raise ValueError(f"--attention-backend {args.attention_backend} needs a checkpoint, not --model-path {args.model_path}")
    assert_hooked()  # here for the process that takes requests, the scheduler does it for its own
    imply(args, read_config(args.model_path, args.revision))
    if args.chunked_prefill_size is None and not power_of_two(args.page_size):
        args.chunked_prefill_size = widened(default_chunk(original, args), args.page_size)
    original(args)
    check(resolved(args))
    _warn_unproven()
    setattr(args, CHECKED, True)
    return None


def resolved(args: Any) -> Any:
    """The options as resolution left them: SGLang 0.5.17 writes them back into the fields, 0.5.23 keeps what was given there."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(args)


def _warn_unproven() -> None:
    """No log message: `sglang.Engine` drops warnings of the log by default."""
    import sglang

    if sglang.__version__ not in PROVEN:
        warnings.warn(
            f"the zoo's bytes were compared on a GPU with SGLang {', '.join(PROVEN)}, not with {sglang.__version__}: "
            "prove them with `zoo verify ARCH --checkpoint PATH --engine sglang`",
            stacklevel=2,
        )


def _refuse_half(args: Any) -> None:
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        if getattr(args, name, None) in PROGRAMS:
            raise ValueError(f"prefill and decode share one backend: give --attention-backend {getattr(args, name)}, not --{name}")


def page_size(head_dim: int) -> int:
    """Tokens per page: the key tile of attention at this head width. ValueError for a wider head."""
    for widest, page in PAGES:
        if head_dim <= widest:
            return page
    raise ValueError(f"attention with heads of {head_dim} is not served, at most {PAGES[-1][0]}")


def imply(args: Any, fields: dict[str, Any]) -> None:
    """Fills what the one option implies; a contradicting value is refused. `fields` are config.json's."""
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"--attention-backend {args.attention_backend} serves {', '.join(FAMILIES)}, not model_type {kind!r}")
    serving = model_class(fields, "serving")
    config = serving.family.config.from_hf(fields)
    backend = args.attention_backend
    _imply(args, "sampling_backend", SAMPLER, backend)
    _imply(args, "page_size", page_size(config.head_dim), backend)
    _check_chunks(args)
    if kind in HYBRID:
        _imply_slots(args)
    elif args.model_config_parser not in ("auto", "hf"):
        raise ValueError(f"--model-config-parser {args.model_config_parser} would show SGLang another model than {kind}, it must be auto")
    _imply(args, "grammar_backend", "none", backend)
    if not args.disable_cuda_graph and not args.disable_prefill_cuda_graph:
        _imply(args, "cuda_graph_backend_prefill", "disabled", backend)
    if args.enable_return_routed_experts and not config.experts:
        raise ValueError(f"--enable-return-routed-experts needs a mixture of experts, {kind} is dense")
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        if getattr(args, name) not in (None, backend):
            raise ValueError(f"--attention-backend {backend} runs prefill and decode, not --{name} {getattr(args, name)}")
    if args.context_length is not None and args.context_length > config.positions:
        raise ValueError(f"--context-length {args.context_length} is longer than the model's position table of {config.positions}")


def default_chunk(original: Callable[[Any], None], args: Any) -> int:
    """The --chunked-prefill-size that SGLang takes by itself, by the GPU's memory and its version: a copy is resolved without one."""
    probe = copy.deepcopy(args)
    original(probe)
    chunk: int = resolved(probe).chunked_prefill_size
    return chunk


def widened(chunk: int, page: int) -> int:
    """SGLang's default with room for as many prompts in whole pages: 16 in 8192 tokens are 8960 in pages of 80. -1, no chunks, stays."""
    return -(-chunk // CHUNK_PROMPT) * (-(-CHUNK_PROMPT // page) * page) if chunk > 0 else chunk


def _check_chunks(args: Any) -> None:
    """Chunks of prefill are whole pages."""
    given = args.chunked_prefill_size
    page = args.page_size
    if given is not None and given > 0 and given % page:
        raise ValueError(f"--chunked-prefill-size {given} is not a multiple of the model's page of {page} tokens")


def _imply_slots(args: Any) -> None:
    """A state belongs to one running request: no prefix of another one is reused, and their number is known at start."""
    if args.model_config_parser not in ("auto", PARSER):
        raise ValueError(
            f"--attention-backend {args.attention_backend} implies --model-config-parser {PARSER}, not {args.model_config_parser}"
        )
    args.model_config_parser = PARSER
    args.disable_radix_cache = True
    if args.max_running_requests is None:
        args.max_running_requests = REQUESTS


def _imply(args: Any, field: str, value: Any, backend: str) -> None:
    given = getattr(args, field)
    if given is not None and given != value:
        flag = "--" + field.replace("_", "-")
        raise ValueError(f"--attention-backend {backend} implies {flag} {value}, not {given}")
    setattr(args, field, value)


def check(args: Any) -> None:
    """ValueError, one sentence, for a resolved option that isn't served; `zoo_unaligned` only warns where bytes alone suffer."""
    backend = args.attention_backend
    for refusal in REFUSALS:
        if not hasattr(args, refusal.field):
            continue  # an option that this SGLang does not have
        value = getattr(args, refusal.field)
        if any(value == served and type(value) is type(served) for served in refusal.served):
            continue
        sentence = refusal.sentence(value, backend)
        # rows or pages that SGLang moves by other ways would leave a state behind, in any program
        if not refusal.inexact or PROGRAMS[backend] == "aligned" or args.model_config_parser == PARSER:
            raise ValueError(sentence)
        logger.warning("%s", sentence)
    graphs = args.cuda_graph_config
    if graphs is not None:
        if str(graphs.prefill.backend) != "disabled":
            raise ValueError(f"--attention-backend {backend} runs prefill without SGLang's CUDA graphs, not {graphs.prefill.backend!s}")
        if str(graphs.decode.backend) not in ("full", "disabled"):
            raise ValueError(f"--attention-backend {backend} captures decode whole or not at all, not {graphs.decode.backend!s}")
    if args.sampling_backend != SAMPLER:
        raise ValueError(f"another option changed --sampling-backend to {args.sampling_backend}, it must be {SAMPLER}")
