"""The SGLang plugin: weight updates that are faulty or come in parts, what must be on, and what must not be. Without a GPU.

The model, its hooks and checks are the plugin's; SGLang's updater, scheduler and modules are stand-ins (such tests have it in their names).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_harness import arguments, judged_options, served
from torch import Tensor, nn

from zoo.qwen3 import SIZES, Qwen3ForServing
from zoo.sglang_plugin import check, hooked, loading, options, register, waiting

Named = list[tuple[str, Tensor]]


@pytest.fixture
def hooks() -> dict[str, Any]:
    return register.__globals__


@pytest.fixture(scope="module")
def old() -> Qwen3ForServing:
    return Qwen3ForServing.from_config(SIZES["tiny"], seed=1, device="cpu")


@pytest.fixture(scope="module")
def fresh() -> Qwen3ForServing:
    return Qwen3ForServing.from_config(SIZES["tiny"], seed=2, device="cpu")


def published(model: Qwen3ForServing) -> Named:
    return [(name, tensor.clone()) for name, tensor in model.published_tensors(aliases=False)]


class Updater:
    """SGLang's WeightUpdater: tensors go to load_weights unguarded; a disk update that raises rolls back by reading the same path again."""

    def __init__(self, args: Any, model: Any, files: dict[str, Callable[[], Iterable[tuple[str, Tensor]]]]) -> None:
        self.model = model
        self.files = files
        self.model_config = types.SimpleNamespace(model_path="old")
        self.get_model = lambda: model
        self.get_model_runner = lambda: types.SimpleNamespace(server_args=args)

    def from_tensor(self, named_tensors: Named, load_format: str | None = None) -> tuple[bool, str]:
        self.model.load_weights(named_tensors)
        return True, "Success"

    def from_disk(self, path: str, load_format: str, names: Any = None, recapture: bool = False) -> tuple[bool, str]:
        self.model_config.model_path = path
        try:
            self.model.load_weights(self.files[path]())
        except Exception:
            self.model.load_weights(self.files[self.model_config.model_path]())
        return True, "Success"


def faults(good: Named) -> dict[str, tuple[Named, str]]:
    """Updates of which most tensors are good and one is not, and words of the answer."""
    nan = [(name, tensor.clone()) for name, tensor in good]
    nan[-1][1].view(-1)[0] = float("nan")
    return {
        "unknown": ([*good[:3], ("no.such", torch.zeros(2))], "no.such is no tensor of this qwen3 geometry"),
        "nan": (nan, f"{good[-1][0]} has 1 NaN or infinite values"),
        "shape": ([*good[:3], (good[3][0], good[3][1][:1])], f"{good[3][0]} is torch.bfloat16 [1"),
        "dtype": ([*good[:3], (good[3][0], good[3][1].double())], f"{good[3][0]} is torch.float64"),
        "twice": ([*good, good[0]], f"{good[0][0]} is given twice"),
    }


@pytest.mark.parametrize("source", ["tensors", "small pieces", "disk"])
@pytest.mark.parametrize("fault", ["unknown", "nan", "shape", "dtype", "twice"])
def test_stand_in_a_faulty_update_is_answered_and_changes_nothing(
    fault: str, source: str, old: Qwen3ForServing, fresh: Qwen3ForServing, hooks: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    args, model = served(monkeypatch, old, tmp_path / "weights")
    model.load_weights(published(old))
    model.start(dummy=False)
    if source != "tensors":
        monkeypatch.setattr(loading, "LOAD_BYTES", 1)  # so that the good tensors come in pieces of their own
    bad, words = faults(published(fresh))[fault]
    updater = Updater(args, model, {"bad": lambda: iter(bad), "good": lambda: iter(published(fresh))})
    before = model.fingerprint().weights
    writes = model.weights.writes
    assert before == old.fingerprint().weights
    if source == "disk":
        success, message = hooks["around_update_from_disk"](Updater.from_disk, updater, "bad", "auto")
    else:
        success, message = hooks["around_update_from_tensor"](Updater.from_tensor, updater, bad)
    assert success is False and words in message and "\n" not in message
    # byte for byte, hashed anew; and what was cached is still of these weights
    model.zoo.weights_changed()
    assert model.fingerprint().weights == before and model.weights.writes == writes and model.weights.flushed and model.complete
    assert updater.model_config.model_path == "old" and not model.checking
    # control: a good update in the same way is one
    if source == "disk":
        answer = hooks["around_update_from_disk"](Updater.from_disk, updater, "good", "auto")
    else:
        answer = hooks["around_update_from_tensor"](Updater.from_tensor, updater, published(fresh))
    assert answer[0] and model.fingerprint().weights == fresh.fingerprint().weights
    assert model.weights.writes > writes and not model.weights.flushed


class Loop:
    """SGLang's scheduler and its manager of updates: a finished request counts as running for `tail` more passes of a loop that runs."""

    def __init__(self, args: Any, model: Any, hooks: dict[str, Any] | None, later: bool) -> None:
        self.server_args = args
        self.model = model
        self.hooks = hooks
        self.tail = 0
        self.retracted = False
        self._engine_paused = False
        self.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(server_args=args, model=model))
        self.scheduler = self
        self.offload_tags = set[str]()
        self.answers: list[Any] = []
        self.is_fully_idle: Callable[..., bool] = self.idle if later else lambda: self.idle()

    def idle(self, ignore_waiting: bool = False) -> bool:
        return self.tail == 0 and (ignore_waiting or not self.retracted)

    def one_pass(self, *requests: Any) -> None:
        if self.hooks is None:
            self.process(list(requests))
        else:
            self.hooks["around_input"](Loop.process, self, list(requests))
        if not self._engine_paused:
            self.tail = max(self.tail - 1, 0)
            self.retracted = False

    def process(self, requests: list[Any]) -> None:
        for request in requests:
            original = Loop.release if request.kind == "release" else Loop.update
            hook = {Loop.release: "around_release", Loop.update: "around_update"}[original]
            answer = original(self, request) if self.hooks is None else self.hooks[hook](original, self, request)
            if answer is not None:
                self.answers.append(answer)

    def flush(self) -> bool:
        idle = self.is_fully_idle
        return idle(ignore_waiting=self._engine_paused) if idle == self.idle else idle()

    def update(self, request: Any) -> tuple[bool, str]:
        try:
            self.model.load_weights(request.tensors)
        except ValueError as error:
            return False, str(error)
        if request.flush_cache:
            assert self.flush(), "Cache flush failed after updating weights"
        return True, "Success"

    def release(self, request: Any) -> tuple[bool, str]:
        assert self.flush(), "release_memory_occupation should be called only when server is idle."
        self.offload_tags |= {"weights"}
        return True, "released"


def request(kind: str, tensors: Named, flush: bool = True) -> Any:
    return types.SimpleNamespace(kind=kind, tensors=tensors, flush_cache=flush)


@pytest.mark.parametrize("later", [False, True])
def test_stand_in_right_behind_an_answer_an_update_waits(
    later: bool, old: Qwen3ForServing, fresh: Qwen3ForServing, hooks: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    args, model = served(monkeypatch, old, tmp_path / "weights")

    def loop(hooked: bool = True, backend: str = "zoo") -> Loop:
        args.attention_backend = backend
        model.load_weights(published(old))
        model.start(dummy=False)
        made = Loop(args, model, hooks if hooked else None, later)
        made.tail = 2
        return made

    update = request("update", published(fresh))
    first = old.fingerprint().weights
    running = loop()
    running.one_pass(update, request("update", published(old)[:1]))
    running.one_pass()
    assert running.answers == [] and model.fingerprint().weights == first and len(model.waiting) == 2
    running.one_pass()
    # in their order: the second one's tensor is the last written
    assert running.answers == [(True, "Success")] * 2 and model.waiting == []
    expected = dict(published(fresh)) | dict(published(old)[:1])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.zoo.published_tensors(aliases=False))
    running.one_pass()
    assert len(running.answers) == 2
    # nothing to wait for: an idle scheduler, and an update that does not flush
    idle = loop()
    idle.tail = 0
    idle.one_pass(update)
    assert idle.answers == [(True, "Success")]
    unflushed = loop()
    unflushed.one_pass(request("update", published(fresh), flush=False))
    assert unflushed.answers == [(True, "Success")]
    # memory is handed back in the same way, and that is a write only then
    releasing = loop()
    writes = model.weights.writes
    releasing.one_pass(request("release", []))
    releasing.one_pass()
    assert releasing.answers == [] and model.weights.writes == writes
    releasing.one_pass()
    assert releasing.answers == [(True, "released")] and model.weights.writes == writes + 1
    # controls: without the hooks, and in another server, SGLang writes and then ends
    for control in (loop(hooked=False), loop(backend="fa3")):
        with pytest.raises(AssertionError, match="Cache flush failed"):
            control.one_pass(update)
        assert model.fingerprint().weights == fresh.fingerprint().weights
        with pytest.raises(AssertionError, match="only when server is idle"):
            control.one_pass(request("release", []))


@pytest.mark.parametrize("later", [False, True])
def test_stand_in_while_requests_are_paused_an_update_that_flushes_is_refused(
    later: bool, old: Qwen3ForServing, fresh: Qwen3ForServing, hooks: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    args, model = served(monkeypatch, old, tmp_path / "weights")
    model.load_weights(published(old))
    model.start(dummy=False)
    update = request("update", published(fresh))
    paused = Loop(args, model, hooks, later)
    paused.tail = 2
    paused._engine_paused = True
    paused.one_pass(update)
    assert paused.answers == [(False, waiting.PAUSED)] and "\n" not in waiting.PAUSED
    assert model.fingerprint().weights == old.fingerprint().weights and model.weights.flushed and model.waiting == []
    # as when they are paused while it waits
    paused._engine_paused = False
    paused.one_pass(update)
    paused._engine_paused = True
    paused.one_pass()
    assert paused.answers == [(False, waiting.PAUSED)] * 2 and model.fingerprint().weights == old.fingerprint().weights
    # SGLang 0.5.23 flushes behind requests that were retracted, 0.5.17 does not
    paused.tail = 0
    paused.retracted = True
    paused.one_pass(update)
    assert paused.answers[2:] == [(True, "Success") if later else (False, waiting.PAUSED)]
    # sent again, once they go on
    paused._engine_paused = False
    paused.one_pass(update)
    paused.one_pass()
    assert paused.answers[-1] == (True, "Success") and model.fingerprint().weights == fresh.fingerprint().weights
    # control: without the hook
    bare = Loop(args, model, None, later)
    bare.tail = 2
    bare._engine_paused = True
    with pytest.raises(AssertionError, match="Cache flush failed"):
        bare.one_pass(update)


def test_stand_in_updates_past_the_checks_are_refused(
    old: Qwen3ForServing, hooks: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    args, model = served(monkeypatch, old, tmp_path / "weights")
    for load_format in ("direct", "my.loader"):
        success, message = hooks["around_update_from_tensor"](None, Updater(args, model, {}), [], load_format)
        assert success is False and f"load_format {load_format!r} writes past the checks" in message
    answer = hooks["around_update_from_tensor"](lambda *given: (True, given[2]), Updater(args, model, {}), {}, "flattened_bucket")
    assert answer == (True, "flattened_bucket")


def test_stand_in_a_torn_update_claims_nothing(
    old: Qwen3ForServing, fresh: Qwen3ForServing, hooks: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    """Files that change between the check and the write."""
    args, model = served(monkeypatch, old, tmp_path / "weights")
    model.load_weights(published(old))
    model.start(dummy=False)
    monkeypatch.setattr(loading, "LOAD_BYTES", 1)
    reads = iter([published(fresh), *[faults(published(fresh))["nan"][0]] * 2])
    updater = Updater(args, model, {"torn": lambda: iter(next(reads))})
    success, message = hooks["around_update_from_disk"](Updater.from_disk, updater, "torn", "auto")
    assert success is False and "a part of the weights was written, push all of them again" in message
    assert model.fingerprint() is None
    model.load_weights(published(fresh))
    assert model.fingerprint().weights == fresh.fingerprint().weights


def test_stand_in_a_dummy_start_claims_nothing_before_all_tensors_came(
    old: Qwen3ForServing, hooks: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    args, model = served(monkeypatch, old, tmp_path / "weights")
    scheduler = types.SimpleNamespace(
        server_args=args, tp_worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model, server_args=args))
    )
    for parameter in model.parameters():
        parameter.data.uniform_(-1e-3, 1e-3)  # what SGLang's dummy loader does
    with pytest.raises(ValueError, match=r"the checkpoint lacks \d+ tensors of this geometry: "):
        model.start(dummy=False)
    model.start(dummy=True)
    tensors = published(old)
    for name in range(0, len(tensors), 3):
        # a flush after every bucket, SGLang's default
        assert model.fingerprint() is None and not model.weights.flushed
        answer = hooks["around_update_from_tensor"](Updater.from_tensor, Updater(args, model, {}), tensors[name : name + 3])
        assert answer == (True, "Success")
        assert not model.weights.flushed
        hooks["after_flush"](True, scheduler)
    assert model.weights.flushed and model.fingerprint().weights == old.fingerprint().weights
    # from then on any part is an update
    model.load_weights(tensors[:1])
    assert model.fingerprint() is not None and not model.weights.flushed


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_stand_in_the_scheduler_knows_a_dummy_start(
    load_format: str, old: Qwen3ForServing, hooks: dict[str, Any], tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    args, model = served(monkeypatch, old, tmp_path / "weights")
    args.load_format = load_format
    args.max_running_requests = 1
    args.skip_server_warmup = False
    args.chunked_prefill_size = -1
    args.max_prefill_tokens = 64
    args.page_size = 16
    runner = types.SimpleNamespace(server_args=args, model=model, sampler=types.SimpleNamespace())
    runner.memory_saver_adapter = types.SimpleNamespace(region=lambda tag: contextlib.nullcontext())
    monkeypatch.setitem(hooks, "register_classes", lambda: None)
    asserted: list[Any] = []
    monkeypatch.setattr(check, "assert_active", asserted.append)
    caplog.set_level("INFO")
    for parameter in model.parameters():
        parameter.data.zero_()
    if load_format == "auto":
        with pytest.raises(ValueError, match="the checkpoint lacks"):
            hooks["around_initialize"](lambda runner: "loaded", runner)
        model.load_weights(iter(published(old)))
    assert hooks["around_initialize"](lambda runner: "loaded", runner) == "loaded" and asserted == [runner]
    assert "kernel variants were compiled or found on disk" in caplog.text
    printed = old.fingerprint().weights
    assert ("weights are not there yet" in caplog.text) == (load_format == "dummy") != (printed in caplog.text)
    assert model.weights.flushed == (load_format == "auto")
    # and so does the fingerprint's route, which nobody's forward hook passes
    runner.attn_backend = types.SimpleNamespace(draws=None, prefills=None)
    scheduler = types.SimpleNamespace(
        server_args=args,
        tp_worker=types.SimpleNamespace(model_runner=runner),
        weight_updater=types.SimpleNamespace(offload_tags=set()),
    )

    def state() -> Any:
        result = types.SimpleNamespace(internal_state={})
        return hooks["after_internal_state"](result, scheduler, None).internal_state["zoo"]["fingerprint"]

    said = state()
    assert said is None if load_format == "dummy" else said["weights"] == printed
    model.zoo.register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="a forward hook is on the model's zoo"):
        state()


def test_a_tied_alias_may_come_far_from_its_parameter(monkeypatch: Any) -> None:
    tiny = dataclasses.replace(SIZES["tiny"], tied=True)
    zoo, other = (Qwen3ForServing.from_config(tiny, seed=seed, device="cpu") for seed in (1, 2))
    tensors = published(other)
    tensors.append(("lm_head.weight", dict(tensors)["model.embed_tokens.weight"]))
    tensors.sort(key=lambda pair: pair[0] != "lm_head.weight")  # first of all, as sorted files have it
    monkeypatch.setattr(loading, "LOAD_BYTES", 1)
    loading.load(zoo, iter(tensors), lambda names: None)
    assert zoo.weights_version == other.weights_version
    # control: another alias is refused
    tensors[0] = (tensors[0][0], tensors[0][1] * 2)
    with pytest.raises(ValueError, match="lm_head.weight must equal the tied"):
        loading.check(zoo, iter(tensors))


def wrapped() -> None: ...


def stand_in_hooks(monkeypatch: pytest.MonkeyPatch, lacking: str | None) -> None:
    """SGLang's methods below a made-up root, wrapped as its registry wraps them, but for one."""
    root = types.ModuleType("zoo_stand_in")
    monkeypatch.setitem(sys.modules, "zoo_stand_in", root)
    page = register.__globals__
    monkeypatch.setitem(page, "resolver", lambda: "resolve_once")
    monkeypatch.setattr(hooked, "SRT", "zoo_stand_in")
    monkeypatch.setattr(hooked, "REGISTERED", [target for target, _, _ in page["hooks"]()])
    for target, _, _ in page["hooks"]():
        owner: Any = root
        *path, name = target.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, types.SimpleNamespace())
            owner = getattr(owner, part)
        module = "sglang.srt.utils.nvtx_utils" if target == lacking else hooked.REGISTRY  # a decorator is no hook
        setattr(owner, name, types.SimpleNamespace(__wrapped__=wrapped, __globals__={"__name__": module}))


def test_stand_in_every_hook_is_asserted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(register.__globals__, "resolver", lambda: "resolve_once")
    targets = [target for target, _, _ in register.__globals__["hooks"]()]
    assert len(targets) == len(set(targets)) > 10
    stand_in_hooks(monkeypatch, None)
    hooked.assert_hooked()
    for target in targets:
        stand_in_hooks(monkeypatch, target)
        with pytest.raises(RuntimeError, match=f"the hook on {target} is not active"):
            hooked.assert_hooked()


def test_stand_in_a_failed_hook_ends_the_start_of_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "read_config", lambda path, revision: SIZES["8b"].to_hf())
    stand_in_hooks(monkeypatch, "managers.tokenizer_manager.TokenizerManager._validate_one_request")
    with pytest.raises(RuntimeError, match="_validate_one_request is not active"):
        options.around_resolution(lambda args: None, arguments())
    # another backend asks for nothing
    options.around_resolution(lambda args: None, arguments(attention_backend="fa3"))


def test_foreign_forward_hooks_are_found(old: Qwen3ForServing) -> None:
    check.assert_unhooked(old)
    layer = old.model.layers[1].mlp  # type: ignore[union-attr, index]
    for add in (layer.register_forward_hook, layer.register_forward_pre_hook):
        handle = add(lambda *given: None)
        with pytest.raises(RuntimeError, match="a forward hook is on the model's model.layers.1.mlp"):
            check.assert_unhooked(old)
        handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="on every module of this process"):
        check.assert_unhooked(old)
    everywhere.remove()
    layer.forward = layer.forward
    with pytest.raises(RuntimeError, match="model.layers.1.mlp"):
        check.assert_unhooked(old)
    del layer.forward
    check.assert_unhooked(old)


def test_stand_in_the_scheduler_asserts_hooks_and_modules(old: Qwen3ForServing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, model = served(monkeypatch, old, tmp_path / "weights")
    page = types.ModuleType("zoo.sglang_plugin.sampler")
    page.RowSampler = type("RowSampler", (), {"program": model.zoo.program})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, page.__name__, page)
    setattr(args, options.CHECKED, True)
    runner = types.SimpleNamespace(server_args=args, model=model, sampler=page.RowSampler())
    stand_in_hooks(monkeypatch, None)
    check.assert_active(runner)
    handle = model.register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="a forward hook is on the model's root"):
        check.assert_active(runner)
    handle.remove()
    stand_in_hooks(monkeypatch, "managers.scheduler.Scheduler.flush_cache")
    with pytest.raises(RuntimeError, match="the hook on managers.scheduler.Scheduler.flush_cache is not active"):
        check.assert_active(runner)


def test_each_option_is_judged_once() -> None:
    found = judged_options()
    assert len(found) > 400 and not set(found) & {refusal.field for refusal in options.REFUSALS}
