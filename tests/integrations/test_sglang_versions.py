"""The plugin against whatever SGLang is installed: names, signatures, registries and options, without a GPU and without a model's weights.

This file is also the program that the tests start, in a process of its own: what `register` changes in SGLang stays there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import pkgutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from plugin_harness import judged_options

from zoo.sglang_plugin import names
from zoo.sglang_plugin.hooked import is_hooked

ROOT = Path(__file__).resolve().parents[2]
# refused options that came with a later SGLang than 0.5.17, or are gone by 0.5.23: a version may lack these and no others
NOT_IN_ALL = {
    "attn_dp_size",
    "enable_nvidia_megakernel",
    "enable_paged_experts",
    "enable_prefill_context_parallel",
    "enable_return_aux_hidden_states",
    "enable_unified_cache_external_linker",
    "enable_watermark",
    "startup_weight_load_mode",
    "torchao_config",
}
# our class, SGLang's that it stands for, and the methods by which SGLang calls it
CONTRACTS = (
    (
        "backend.PagedBackend",
        "layers.attention.base_attn_backend.AttentionBackend",
        ("init_forward_metadata", "init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "init_forward_metadata_out_graph"),
    ),
    ("sampler.RowSampler", "layers.sampler.Sampler", ("forward", "compute_logprobs_only")),
    ("sampler.RowsBatchInfo", "sampling.sampling_batch_info.SamplingBatchInfo", ("adjusted_filter_batch", "adjusted_merge_batch")),
    (
        "graphs.BoundedGraphRunner",
        "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner",
        ("capture_one_shape", "_capture_one_stream", "load_batch", "_resolve_lora_variant", "_make_graph_key"),
    ),
    ("capturer.RoutingCapturer", "state_capturer.routed_experts.RoutedExpertsCapturer", ("on_forward_end", "get_topk")),
)
# SGLang's class, and fields that hooks read of its instances: constructors show them, the class does not
INSTANCES = (
    (
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
        ("tp_worker", "is_fully_idle", "scheduler", "offload_tags"),
    ),
    *(
        (f"managers.io_struct.{kind}ReqInput", ("flush_cache",))
        for kind in ("UpdateWeightFromDisk", "UpdateWeightsFromDistributed", "UpdateWeightsFromTensor", "UpdateWeightsFromIPC")
    ),
)
Hook = tuple[str, Callable[..., Any], str]


def name_of(target: str) -> Any:
    return pkgutil.resolve_name(f"sglang.srt.{target}")


def unwrapped(hooks: Sequence[Hook]) -> list[str]:
    """Targets that SGLang lacks, or that no hook is around."""
    absent = []
    for target, _, _ in hooks:
        try:
            found = name_of(target)
        except (ImportError, AttributeError):
            absent.append(target)
        else:
            if not is_hooked(found):
                absent.append(target)
    return absent


def accepts(call: Callable[..., Any], original: Callable[..., Any], *first: Any) -> bool:
    """Whether `call(*first, ...)` takes what callers of `original` give it: all of it, and the least of it."""
    parameters = [p for p in inspect.signature(original).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for given in (parameters, [p for p in parameters if p.default is p.empty]):
        by_name = {p.name: None for p in given if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(call).bind(*first, *(None for p in given if p.kind is not p.KEYWORD_ONLY), **by_name)
        except TypeError:
            return False
    return True


def original_of(target: str) -> Callable[..., Any]:
    """What a hook gets to call, `self` or the class among its parameters."""
    owner, _, name = target.rpartition(".")
    found = inspect.getattr_static(name_of(owner), name)
    return inspect.unwrap(getattr(found, "__func__", found))


def mismatched(hooks: Sequence[Hook]) -> list[str]:
    """Hooks that SGLang would call with other arguments than they take, of those that it has a target for."""
    first = {"AROUND": (None,), "AFTER": (None,), "BEFORE": ()}
    absent = unwrapped(hooks)
    return [t for t, hook, kind in hooks if t not in absent and not accepts(hook, original_of(t), *first[kind])]


def broken(contracts: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
    """Methods that SGLang's class has no longer, or calls with arguments that ours does not take."""
    found = []
    for ours, theirs, methods in contracts:
        mine = pkgutil.resolve_name(f"zoo.sglang_plugin.{ours}")
        base = name_of(theirs)
        for name in methods:
            if not hasattr(base, name) or not accepts(getattr(mine, name), getattr(base, name)):
                found.append(f"{ours}.{name}")
    return found


def fieldless(instances: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Fields that SGLang's class has no longer."""
    return [f"{path}.{name}" for path, wanted in instances for name in wanted if name not in inspect.signature(name_of(path)).parameters]


def checkpoints(folder: Path) -> dict[str, Path]:
    """A folder with a config.json for each family that the plugin serves."""
    from zoo.verify.subject import SIZES, config_of

    made = {}
    for arch in SIZES:
        published = config_of(arch, "tiny", None).to_hf()
        if published["model_type"] in names.FAMILIES:
            made[arch] = folder / arch
            made[arch].mkdir()
            (made[arch] / "config.json").write_text(json.dumps(published))
    return made


def wide_heads(folder: Path) -> Path:
    """As `checkpoints` of a family with state, whose heads want pages that are no power of two."""
    from zoo.verify.subject import config_of

    (folder / "wide").mkdir()
    (folder / "wide" / "config.json").write_text(json.dumps(config_of("qwen3_5", "4b", None).to_hf()))
    return folder / "wide"


def model_classes(folders: dict[str, Path]) -> dict[str, str]:
    """Which class each checkpoint gets: by its own configuration, or by the one that the plugin's parser shows SGLang."""
    from sglang.srt.configs import model_config_parser_registry as parsers
    from sglang.srt.models.registry import ModelRegistry

    found = {}
    for arch, folder in folders.items():
        published = json.loads((folder / "config.json").read_text())
        architectures = published["architectures"]
        if published["model_type"] in names.HYBRID:
            parser = parsers.get_model_config_parser(names.PARSER)
            architectures = parser.parse(folder, trust_remote_code=False).architectures
        found[arch] = ModelRegistry.resolve_model_cls(architectures)[0].__module__
    return found


def started(**given: Any) -> Any:
    """ServerArgs as a launcher leaves them."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(**given)
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    return args


def sentence(**given: Any) -> str | None:
    try:
        started(**given)
    except ValueError as error:
        return str(error)
    return None


def unjudged(judged: Sequence[str]) -> list[str]:
    """Fields of SGLang's ServerArgs that the plugin does not refuse, and that stand nowhere among those that somebody judged."""
    from sglang.srt.server_args import ServerArgs

    from zoo.sglang_plugin.options import REFUSALS

    # a dataclass in 0.5.17, a struct of msgspec's in 0.5.23
    every = getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in fields(ServerArgs)]
    return sorted(set(every) - set(judged) - {refusal.field for refusal in REFUSALS} - {"device"})


def options_of(folders: dict[str, Path], wide: Path) -> dict[str, Any]:
    """What one option implies, and what is refused, in SGLang's own ServerArgs."""
    import torch

    from zoo.sglang_plugin import options

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"model_path": str(folders["qwen3"]), "attention_backend": "zoo", "device": device}
    refused = {"device": sentence(**given | {"device": "cpu"})}
    # on a CPU SGLang picks its own sampler, and the device is refused first of all: both are left out from here on
    kept = options.REFUSALS
    options.REFUSALS = tuple(r for r in kept if r.field != "device")  # type: ignore[misc]
    refused |= {
        "tp_size": sentence(**given, tp_size=2),
        "enable_mixed_chunk": sentence(**given, enable_mixed_chunk=True),
        "page_size": sentence(**given, page_size=16),
        "half": sentence(**given | {"attention_backend": "torch_native", "decode_attention_backend": "zoo"}),
    }
    seen: list[Any] = []
    options.check = seen.append  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = {arch: started(**given | {"model_path": str(folder)}) for arch, folder in folders.items()}
        other = started(**given | {"attention_backend": "torch_native"})
    assert len(seen) == len(made), f"{len(made)} ServerArgs were resolved, the plugin's hook checked {len(seen)}"
    implied = ("attention_backend", "page_size", "grammar_backend", "chunked_prefill_size", "model_config_parser", "max_running_requests")
    views = dict(zip(made, seen, strict=True))
    fresh = seen[0]
    by_default = [r.field for r in kept if hasattr(fresh, r.field) and getattr(fresh, r.field) not in r.served and r.field != "device"]
    sent = pickle.loads(pickle.dumps(made["qwen3"]))
    before = options.resolved(sent).page_size
    if hasattr(sent, "resolve_once"):
        sent.resolve_once()  # as SGLang does in every child process
    for chunk in (None, 240, -1):
        started(**given | {"model_path": str(wide), "chunked_prefill_size": chunk})
    return {
        "refused": refused,
        "implied": {arch: {name: getattr(view, name) for name in implied} for arch, view in views.items()},
        "prefill_graphs": str(fresh.cuda_graph_config.prefill.backend),
        "marked": [bool(getattr(args, options.CHECKED, False)) for args in (*made.values(), sent, other)],
        "wide_chunks": [(view.page_size, view.chunked_prefill_size) for view in seen[-3:]],
        "kept_by_a_child": (before, options.resolved(sent).page_size),
        "warned": sum("the zoo's bytes were compared on a GPU with" in str(w.message) for w in said),
        "refused_by_default": by_default,
        "absent": [r.field for r in kept if not hasattr(fresh, r.field)],
        "unjudged": unjudged(judged_options()),
        "unjudged_without_one": unjudged(judged_options()[1:])[:1] == judged_options()[:1],
    }


def report() -> dict[str, Any]:
    """Everything that the tests look at."""
    import sglang
    from sglang.srt import server_args
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from zoo.sglang_plugin.scores import PromptScores

    page = importlib.import_module("zoo.sglang_plugin.register")
    hooks = page.hooks()
    before = unwrapped(hooks)
    page.register()
    HookRegistry.apply_hooks()
    page.register_classes()
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path", "m", "--attention-backend", "zoo", "--sampling-backend", "zoo"])
    outputs = {f.name for f in fields(LogitsProcessorOutput)}
    wanted = {"next_token_logits", "next_token_logprobs", "customized_info", *(f.name for f in fields(PromptScores))}
    # the controls: a name that is not there, a hook of another shape, a method that SGLang does not have
    absent = ("managers.scheduler.Scheduler.no_such_method", lambda result, scheduler: result, "AFTER")
    HookRegistry.register(f"sglang.srt.{absent[0]}", absent[1], HookType[absent[2]])
    HookRegistry.apply_hooks()
    narrow = (hooks[-1][0], lambda: None, "AFTER")
    nowhere = (CONTRACTS[0][0], CONTRACTS[0][1], ("step",))
    with tempfile.TemporaryDirectory() as folder:
        folders = checkpoints(Path(folder))
        classes = model_classes(folders)
        options = options_of(folders, wide_heads(Path(folder)))
    return {
        "version": sglang.__version__,
        "hooks": len(hooks),
        "without_register": before,
        "unwrapped": unwrapped(hooks),
        "mismatched": mismatched(hooks),
        "broken": [*broken(CONTRACTS), *fieldless(INSTANCES)],
        "parsed": [parsed.attention_backend, parsed.sampling_backend],
        "backend": ATTENTION_BACKENDS["zoo"].__module__,
        "sampler": sampler._CUSTOM_SAMPLER_FACTORIES["zoo"].__module__,
        "lacking_outputs": sorted(wanted - outputs),
        "classes": classes,
        "options": options,
        "controls": [unwrapped([*hooks, absent]), mismatched([narrow]), [*broken([nowhere]), *fieldless([(INSTANCES[0][0], ["step"])])]],
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang, which is not installed")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run([sys.executable, __file__], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    said: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    if "skip" in said:
        pytest.skip(said["skip"])
    return said


pytestmark = pytest.mark.slow


def test_every_hook_is_active_and_takes_what_it_is_given(found: dict[str, Any]) -> None:
    assert (found["unwrapped"], found["mismatched"], found["broken"], found["lacking_outputs"]) == ([], [], [], [])
    # controls: nothing was wrapped before, and what is not there is named
    assert len(found["without_register"]) == found["hooks"] > 0
    absent, narrow, nowhere = found["controls"]
    assert absent == ["managers.scheduler.Scheduler.no_such_method"] and nowhere == ["backend.PagedBackend.step", f"{INSTANCES[0][0]}.step"]
    assert narrow == ["managers.scheduler.Scheduler.flush_cache"]


def test_registries_have_backend_sampler_and_models(found: dict[str, Any]) -> None:
    assert found["parsed"] == ["zoo", "zoo"]
    assert (found["backend"], found["sampler"]) == ("zoo.sglang_plugin.backend", "zoo.sglang_plugin.sampler")
    served = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5"}
    assert found["classes"] == {arch: f"zoo.sglang_plugin.models.{module}" for arch, module in served.items()}


def test_one_option_implies_the_rest_and_refuses_in_one_sentence(found: dict[str, Any]) -> None:
    options = found["options"]
    for arch, implied in options["implied"].items():
        assert (implied["attention_backend"], implied["grammar_backend"]) == ("zoo", "none"), arch
        assert implied["chunked_prefill_size"] % implied["page_size"] == 0, arch
        assert (implied["model_config_parser"], implied["max_running_requests"]) == (("zoo", 64) if "3_5" in arch else ("auto", None)), arch
    # pages of 80 widen what SGLang takes on this machine by itself; what is given stays
    default = options["implied"]["qwen3_5"]["chunked_prefill_size"]
    assert default % 512 == 0 and options["wide_chunks"] == [[80, default // 512 * 560], [80, 240], [80, -1]]
    assert options["prefill_graphs"] == "disabled"
    # the last: another backend, which is left alone
    assert options["marked"] == [True] * len(options["implied"]) + [True, False]
    assert len(set(options["kept_by_a_child"])) == 1
    assert options["warned"] == (0 if found["version"] in names.PROVEN else len(options["implied"]))
    assert options["refused_by_default"] == [] and set(options["absent"]) <= NOT_IN_ALL
    # an option that nobody has judged may move bytes: refuse it, or name it in sglang_options.txt; the control lacks one there
    assert options["unjudged"] == [] and options["unjudged_without_one"]
    sentences = {
        "device": "serves --device 'cuda', not 'cpu'",
        "tp_size": "serves --tp-size 1, not 2",
        "enable_mixed_chunk": "serves --enable-mixed-chunk False, not True",
        "page_size": "implies --page-size 128, not 16",
        "half": "prefill and decode share one backend",
    }
    for name, words in sentences.items():
        said = options["refused"][name]
        assert said is not None and words in said and "\n" not in said, name


if __name__ == "__main__":
    try:
        import sglang.srt.managers.scheduler  # noqa: F401
    except Exception as error:  # installed, but not all that it needs
        print(json.dumps({"skip": f"SGLang can't be imported here: {type(error).__name__}: {error}"}))
    else:
        print(json.dumps(report()))
