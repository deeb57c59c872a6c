"""What a caller does around a model and must move no byte, or be refused: compilers, converters, defaults, autocast, configs."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors

from zoo.common import ops
from zoo.common.engine import Engine
from zoo.common.layers import RotaryTable
from zoo.common.memory import PackedKeyValues
from zoo.common.ops.attention.reference import KEY_TILE
from zoo.common.program import resolve, split_k
from zoo.common.rollouts import SamplingParams
from zoo.common.rows import Rows
from zoo.common.training import ForRL
from zoo.glm5.config import SIZES as GLM_SIZES
from zoo.glm5.config import GLMConfig
from zoo.qwen3 import MOE_SIZES, SIZES, Qwen3Config, Qwen3ForRL, Qwen3ForServing
from zoo.qwen3_5 import Qwen35Config, Qwen35ForRL, Qwen35ForServing
from zoo.qwen3_5.config import MOE_SIZES as MOE_35
from zoo.qwen3_5.config import SIZES as SIZES_35
from zoo.testing import LawBroken, assert_same_bytes

CONFIGS = {"qwen3": SIZES["tiny"], "qwen3_moe": MOE_SIZES["tiny"], "qwen3_5": SIZES_35["tiny"], "qwen3_5_moe": MOE_35["tiny"]}
IDS = torch.randint(512, (90,), generator=torch.Generator().manual_seed(3))
STARTS = torch.tensor([0, 19, 90])


def trainer(config: Any, **settings: Any) -> ForRL:
    return (Qwen3ForRL if isinstance(config, Qwen3Config) else Qwen35ForRL).from_config(config, seed=4, device="cpu", **settings)


def server(config: Any) -> Any:
    return (Qwen3ForServing if isinstance(config, Qwen3Config) else Qwen35ForServing).from_config(config, seed=4, device="cpu")


def small(arch: str) -> Any:
    config = CONFIGS[arch]
    return replace(config, layers=1) if isinstance(config, Qwen3Config) else replace(config, layers=2, full=(False, True))


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> ForRL:
    return trainer(small(request.param))


def listed_ops(model: Any) -> set[str]:
    return {name.removeprefix("op.") for name in model.fingerprint().program if name.startswith("op.")}


def ops_run(trained: ForRL, served: Any) -> set[str]:
    """Names of the ops that training, scoring under filters and the engine call."""
    run: set[str] = set()
    with ops.watch(lambda contract, arguments, result: run.add(contract.name)):
        trained(IDS, cu_seqlens=STARTS, labels=IDS).loss.backward()
        _ = trained(IDS, cu_seqlens=STARTS).logits
        trained.score(IDS, STARTS, sampling=SamplingParams(top_p=0.8), top_k=2)
        Engine(served, pages=8, page_size=16).generate([IDS[:9].tolist()], [SamplingParams(top_k=9, max_new_tokens=2)])
    return run


def raise_version(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = ops.CONTRACTS[op]
    monkeypatch.setitem(ops.CONTRACTS, op, contract)  # a contract registers itself: this is undone with it
    replace(contract, version=contract.version + 1)


def gradients(model: ForRL, inside: Any = None) -> list[Tensor]:
    model.zero_grad()
    loss = (
        model(IDS, cu_seqlens=STARTS, labels=IDS).loss
        + model.score(IDS, STARTS, sampling=SamplingParams(top_p=0.8), entropy=True).entropy_R.sum()
    )
    if inside is None:
        loss.backward()
    else:
        with inside:
            loss.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


class TestFingerprint:
    @pytest.mark.parametrize("arch", CONFIGS)
    def test_every_number_of_the_config_is_a_line(self, arch: str) -> None:
        config = small(arch)
        lines = trainer(config).fingerprint().program
        fields = {f.name for f in dataclasses.fields(config)} - {"eos", "published", "wrapped"}
        assert {name.removeprefix("config.") for name in lines if name.startswith("config.")} == fields
        assert lines["config.eps"] == "1e-06"

    @pytest.mark.parametrize(
        ("arch", "change"),
        [
            ("qwen3", {"eps": 1e-3}),
            ("qwen3_moe", {"experts_per_token": 4}),
            ("qwen3_moe", {"renormalise": False}),
            ("qwen3_5", {"rope_dim": 16}),
        ],
    )
    def test_another_config_is_refused(self, arch: str, change: dict[str, Any]) -> None:
        config = small(arch)
        mine = server(config)
        theirs = trainer(replace(config, **change))
        [name] = change
        assert mine.weights_version == theirs.weights_version  # the weights can't tell them apart
        with pytest.raises(ValueError, match=f"config.{name}: {getattr(config, name)} against {change[name]}"):
            mine.fingerprint().check(theirs.fingerprint())
        trainer(replace(config, eos=(1, 2, 3))).fingerprint().check(mine.fingerprint())

    @pytest.mark.parametrize("arch", CONFIGS)
    def test_ends_make_no_other_geometry(self, arch: str, tmp_path: Path) -> None:
        """A server takes the folder of equal numbers and other end tokens, and no other."""
        config = small(arch)
        engine = Engine(server(config), pages=4, max_batch=1)
        folders = {}
        for name, value in {"eos": (1, 2, 3), "eps": 1e-3}.items():
            folders[name] = trainer(replace(config, **{name: value}))
            folders[name].save_pretrained(tmp_path / name)
        assert engine.update_weights(tmp_path / "eos") == folders["eos"].weights_version
        assert engine.model.config.eos == config.eos  # the server's own stay
        with pytest.raises(ValueError, match=r"is of another geometry: eps 0\.001 against 1e-06$"):
            engine.update_weights(tmp_path / "eps")

    @pytest.mark.parametrize("arch", CONFIGS)
    def test_it_lists_the_ops_that_run(self, arch: str) -> None:
        trained = trainer(small(arch))
        served = server(small(arch))
        listed = listed_ops(trained)
        run = ops_run(trained, served)
        assert listed == listed_ops(served) == run
        assert listed == {name for name in trained.fingerprint().realisation if name in ops.CONTRACTS}

    @pytest.mark.parametrize("wrong", [("embed", "rms_norm", "linear", "norm_rope", "attention"), (*ops.CONTRACTS,)])
    def test_a_wrong_list_is_seen(self, wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        trained = trainer(small("qwen3"))
        served = server(small("qwen3"))
        record = SimpleNamespace(**{**vars(trained.family), "used_ops": lambda config: wrong})
        monkeypatch.setattr(type(trained), "family", record)
        assert listed_ops(trained) != ops_run(trained, served)

    def test_an_op_of_another_family_is_no_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mine = server(small("qwen3"))
        theirs = trainer(small("qwen3"))
        before = mine.fingerprint()
        monkeypatch.setitem(ops.CONTRACTS, "sparse_attention", ops.CONTRACTS["attention"])  # registering below is undone with it
        replace(ops.CONTRACTS["attention"], name="sparse_attention")
        raise_version("gated_delta", monkeypatch)
        assert "sparse_attention" in ops.CONTRACTS and mine.fingerprint() == before
        raise_version("swiglu", monkeypatch)
        with pytest.raises(ValueError, match=r"1 line\(s\): op.swiglu: swiglu/1 reference against swiglu/2 reference"):
            before.check(theirs.fingerprint())


class TestCompilers:
    def test_the_bytes_are_the_eager_ones(self) -> None:
        model = trainer(small("qwen3"))
        score = model.score(IDS, STARTS)
        loss = model(IDS, cu_seqlens=STARTS, labels=IDS).loss
        expected = gradients(model)
        assert_same_bytes(torch.compile(model.score)(IDS, STARTS), score)
        compiled = torch.compile(model)
        assert_same_bytes(compiled(IDS, cu_seqlens=STARTS, labels=IDS).loss, loss)
        assert_same_bytes(compiled.score(IDS, STARTS), score)
        inside = copy.deepcopy(model)
        inside.compile()
        assert_same_bytes(inside(IDS, cu_seqlens=STARTS, labels=IDS).loss, loss)
        assert_same_bytes(gradients(inside), expected)

    # the control compiles on purpose what looks its provider up
    @pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning:torch._dynamo")
    def test_nothing_behind_a_door_is_captured(self, model: ForRL) -> None:
        captured: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            captured.append(graph)
            return graph.forward

        served = server(model.config)
        rows = Rows.pushed([20], None, "cpu")
        memory = served.make_memory(4, 16, 2)
        table = memory.table([[1, 2]], [1], 2)
        hidden = model(IDS, cu_seqlens=STARTS).hidden_states.detach()
        calls: dict[Any, tuple[Any, ...]] = {
            model.score: (IDS, STARTS),
            model.forward: (IDS, STARTS),
            model.logits: (hidden,),
            served.logits: (hidden,),
            served.log_prob: (hidden, IDS),
            served.prefill: (IDS[:20], rows, memory, table),
            served.decode: (IDS[:20], rows, memory, table),
        }
        for call, inputs in calls.items():
            torch.compile(call, backend=backend)(*inputs)
            assert not captured, call.__name__
        for call in (model.logits, served.logits):  # the control: what stands behind a call would be captured
            torch.compile(call.__wrapped__, backend=backend)(call.__self__, hidden)
        assert len(captured) >= 2


CONVERSIONS: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "float": (lambda m: m.float(), torch.float32),
    "double": (lambda m: m.double(), torch.float64),
    "to": (lambda m: m.to(torch.float16), torch.float16),
    "one layer": (lambda m: m.model.layers[-1].float(), torch.float32),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_model_is_refused(model: ForRL, name: str) -> None:
    convert, dtype = CONVERSIONS[name]
    for ready in (False, True):  # before the first call, and after one
        converted = copy.deepcopy(model)
        if ready:
            converted.score(IDS, STARTS)
        convert(converted)
        for call, inputs in ((converted.score, (IDS, STARTS)), (converted, (IDS, STARTS)), (converted.logits, (IDS,))):
            with pytest.raises(ValueError, match=rf"is {dtype}, program 'aligned' needs torch.(bfloat16|float32)"):
                call(*inputs)


def test_what_moves_no_dtype_is_taken(model: ForRL) -> None:
    expected = model.score(IDS, STARTS)
    assert_same_bytes(copy.deepcopy(model).to("cpu").cpu().requires_grad_(False).score(IDS, STARTS), expected)
    wide = trainer(model.config, program="transformers")
    assert_same_bytes(copy.deepcopy(wide).float().score(IDS, STARTS), wide.score(IDS, STARTS))
    with pytest.raises(ValueError, match=r"torch.bfloat16, program 'transformers' needs torch.float32"):
        wide.bfloat16().score(IDS, STARTS)


TARGETS: dict[str, tuple[Callable[[], Any], str]] = {
    "beyond the vocabulary": (lambda: IDS.clone().index_fill_(0, torch.tensor([7]), 512), "token id 512 is outside the vocabulary of 512"),
    "negative": (lambda: IDS.clone().index_fill_(0, torch.tensor([7]), -100), "token id -100 is outside the vocabulary of 512"),
    "too few": (lambda: IDS[:89], r"targets_R has shape \(89,\), hidden_RD \(90, \d+\): one target per row"),
    "too many": (lambda: torch.cat([IDS, IDS[:1]]), r"targets_R has shape \(91,\), hidden_RD \(90, \d+\): one target per row"),
    "two dims": (lambda: IDS[:, None], r"targets_R has shape \(90, 1\), hidden_RD \(90, \d+\)"),
    "float": (lambda: IDS.float(), "targets_R must be an int32 or int64 tensor, not torch.float32"),
    "a list": (lambda: IDS.tolist(), "targets_R must be an int32 or int64 tensor, not list"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_the_serving_door_are_checked(name: str) -> None:
    config = small("qwen3")
    hidden = trainer(config)(IDS, cu_seqlens=STARTS).hidden_states.detach()
    made, sentence = TARGETS[name]
    with pytest.raises(ValueError, match=sentence) as caught:
        server(config).log_prob(hidden, made())
    assert "\n" not in str(caught.value)


def test_targets_at_the_limit_are_taken() -> None:
    served = server(small("qwen3"))
    hidden = trainer(small("qwen3"))(IDS, cu_seqlens=STARTS).hidden_states.detach()
    ends = IDS.clone()
    ends[:2] = torch.tensor([0, 511])
    wanted = served.log_prob(hidden, ends)
    assert_same_bytes(served.log_prob(hidden, ends.int()), wanted)
    with pytest.raises(LawBroken):  # the control: the targets before
        assert_same_bytes(served.log_prob(hidden, IDS.roll(1)), wanted)
    assert served.log_prob(hidden[:0], IDS[:0]).shape == (0,)


def test_fp32_weights_of_qwen3_5_may_not_be_narrowed() -> None:
    with pytest.raises(ValueError, match=r"model.layers.0.mixer.gate.a_log is torch.bfloat16, program 'aligned' needs torch.float32"):
        trainer(small("qwen3_5")).to(torch.bfloat16).score(IDS, STARTS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_moves_nothing(model: ForRL, dtype: torch.dtype) -> None:
    def numbers() -> Any:
        made = trainer(model.config)
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_new_tokens=3, ignore_eos=True)
        [done] = Engine(server(model.config), pages=20, page_size=16).generate([IDS[:40].tolist()], params)
        return (
            made.score(IDS, STARTS, sampling=params, entropy=True, top_k=2),
            gradients(made),
            torch.tensor(done.log_probs, dtype=torch.float64),
        )

    expected = numbers()
    torch.set_default_dtype(dtype)
    try:
        found = numbers()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bytes(found, expected)


def test_a_model_built_directly_has_its_rope_table(model: ForRL) -> None:
    made = type(model)(model.config, model.program)
    made.load_state_dict(model.state_dict())
    assert_same_bytes(made.score(IDS, STARTS), model.score(IDS, STARTS))
    fresh = type(model)(model.config, model.program)
    fresh.load_state_dict(model.state_dict())
    fresh.fingerprint().check(model.fingerprint())
    [table] = [m for m in made.modules() if isinstance(m, RotaryTable)]
    table.table_PC2 = table.table_PC2.roll(1, 0)
    with pytest.raises(LawBroken):  # the control
        assert_same_bytes(made.score(IDS, STARTS), model.score(IDS, STARTS))


class TestBackward:
    def test_inside_autocast(self, model: ForRL) -> None:
        expected = gradients(model)
        assert_same_bytes(gradients(model, torch.autocast("cpu", torch.bfloat16)), expected)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            assert_same_bytes(gradients(model, torch.autocast("cpu", torch.bfloat16)), expected)
        finally:
            model.gradient_checkpointing_disable()

    def test_a_gradient_of_the_gradient_is_refused(self, model: ForRL) -> None:
        weight = next(model.parameters())
        loss = model.score(IDS, STARTS).sum()
        with pytest.raises(ValueError, match="create_graph=True is not supported"):
            torch.autograd.grad(loss, weight, create_graph=True)
        torch.autograd.grad(model.score(IDS, STARTS).sum(), weight)

    def test_every_function_has_the_decorator(self) -> None:
        seen = []
        for path in sorted(Path(ops.__file__).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
                assert "torch.autograd.Function" not in bases or node.name == "OpFunction"
                if "OpFunction" in bases:
                    [backward] = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "backward"]
                    assert [ast.unparse(d) for d in backward.decorator_list] == ["staticmethod", "closed_form"], node.name
                    seen.append(node.name)
        assert len(seen) >= 24


def test_weights_may_be_swapped_by_views_of_themselves(model: ForRL) -> None:
    swapped = copy.deepcopy(model)
    layer = max(i for i, full in enumerate(getattr(model.config, "full", [True])) if full)
    places = [f"{'model.layers'}.{layer}.self_attn.{n}_norm.weight" for n in "qk"]
    views = dict(swapped.published_tensors())
    before = {name: views[name].clone() for name in places}
    assert not torch.equal(before[places[0]], before[places[1]])
    swapped.load_weights([(places[0], views[places[1]]), (places[1], views[places[0]])])
    assert_same_bytes([views[places[0]], views[places[1]]], [before[places[1]], before[places[0]]])
    swapped.load_weights(list(swapped.published_tensors()))
    assert_same_bytes([views[places[0]], views[places[1]]], [before[places[1]], before[places[0]]])


HUGE = 10**12
LAYERS = 10**7
BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "list": ({"rope_parameters": [1]}, r"rope_parameters must be an object, it is \[1\]"),
    "empty list": ({"rope_parameters": []}, r"rope_parameters must be an object, it is \[\]"),
    "unknown": ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "rope_parameters has unknown fields factor"),
    "other theta": ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 10.0}}, "rope_theta is 5.0, and 10.0 in rope_parameters"),
    "scaled": ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' is not supported in rope_scaling, only 'default'"),
    "scaling of no object": ({"rope_scaling": [4.0]}, r"rope_scaling must be an object, it is \[4\.0\]"),
    "scaled by a factor": ({"rope_scaling": {"type": "default", "factor": 2}}, "rope_scaling has unknown fields factor"),
    "scaling of another theta": (
        {"rope_theta": 5.0, "rope_parameters": None, "rope_scaling": {"rope_theta": 10.0}},
        "rope_theta is 5.0, and 10.0 in rope_scaling",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8"}},
        # of a family that reads codes and of one that does not
        r"weight_block_size None in quantization_config is not supported, only \[128, 128\]"
        "|quantization_config .* is not supported, only null: load the .* BF16",
    ),
    "type": ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
    "theta inf": ({"rope_parameters": None, "rope_theta": math.inf}, "rope_theta must be a number that FP32 holds, it is inf"),
    "theta nan": ({"rope_parameters": {"rope_theta": math.nan}, "rope_theta": None}, "rope_theta must be a number .* it is nan"),
    "theta huge": ({"rope_parameters": None, "rope_theta": 10**400}, "rope_theta must be a number .* it is 1000"),
    "eps inf": ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a number that FP32 holds, it is inf"),
    "layers": ({"num_hidden_layers": LAYERS, "layer_types": None}, r"num_hidden_layers must be at most 1024, it is 10000000|1e\+07"),
    "positions": ({"max_position_embeddings": HUGE}, r"max_position_embeddings must be at most 4194304, it is 1e\+12"),
    "hidden": ({"hidden_size": 10**400}, "hidden_size must be at most 4194304, it is 1000"),
    "eos text": ({"eos_token_id": "2"}, "eos_token_id must be token ids of at least 0, it is '2'"),
    "eos fraction": ({"eos_token_id": [2.5]}, "eos_token_id must be token ids"),
    "eos bool": ({"eos_token_id": True}, "eos_token_id must be token ids"),
    "dropout": ({"attention_dropout": 0.1}, r"attention_dropout 0\.1 is not supported, only 0\.0"),
    "no dropout": ({"attention_dropout": None}, r"attention_dropout None is not supported, only 0\.0"),
    "routers' loss": ({"output_router_logits": True}, "output_router_logits True is not supported, only False"),
    "eos outside": ({"eos_token_id": [2, 512]}, "eos_token_id 512 is outside the vocabulary of 512"),
}


@pytest.mark.parametrize("made", [Qwen3Config, Qwen35Config])
@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_contradictory_or_absurd_config_is_refused(made: Any, name: str) -> None:
    fields = (SIZES if made is Qwen3Config else SIZES_35)["tiny"].to_hf()
    made.from_hf(json.loads(json.dumps(fields)))
    change, sentence = BAD_FIELDS[name]
    with pytest.raises(ValueError, match=sentence):
        made.from_hf({**fields, **change})


@pytest.mark.parametrize("size", [SIZES["tiny"], MOE_SIZES["tiny"], SIZES_35["tiny"], MOE_35["tiny"]], ids=lambda c: c.model_type)
def test_what_training_would_change_is_refused_and_loads_as_published(size: Any) -> None:
    fields = size.to_hf()
    made = type(size)
    published = {"attention_dropout": 0.0, "output_router_logits": False, "router_aux_loss_coef": 0.001, "use_cache": True}
    assert made.from_hf({**fields, **published}) == made.from_hf({**fields, "attention_dropout": 0}) == size
    for name, value in {"attention_dropout": 0.1, "output_router_logits": True}.items():
        with pytest.raises(ValueError, match=f"{name} {value} is not supported, only"):
            made.from_hf({**fields, **published, name: value})
    for name in ("hidden_dropout", "layerdrop", "pretraining_tp"):
        with pytest.raises(ValueError, match=f"unknown fields {name}=2"):
            made.from_hf({**fields, name: 2})


@pytest.mark.parametrize("size", [SIZES["0.6b"], SIZES_35["tiny"]], ids=lambda c: c.model_type)
def test_no_config_has_an_end_outside_its_vocabulary(size: Any) -> None:
    last = max(size.eos)
    assert replace(size, vocabulary=last + 1).eos == size.eos
    with pytest.raises(ValueError, match=f"eos_token_id {last} is outside the vocabulary of {last}$"):
        replace(size, vocabulary=last)
    with pytest.raises(ValueError, match=r"eos_token_id must be token ids of at least 0, it is \(-1,\)"):
        replace(size, eos=(-1,))


UPLOADED = {
    "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "tokenizer_class": "Qwen2Tokenizer",
    "quantization_config": None,
    "unsloth_fixed": True,
    "unsloth_version": "2026.1",
}


@pytest.mark.parametrize("size", [SIZES["tiny"], SIZES_35["tiny"], GLM_SIZES["tiny"]], ids=lambda c: c.model_type)
def test_what_trainers_add_to_a_config_is_no_geometry(size: Any) -> None:
    made = type(size)
    assert made.from_hf({**size.to_hf(), **UPLOADED}) == size


def test_what_trainers_add_around_text_config() -> None:
    size = SIZES_35["tiny"]
    outside = {"model_type": "qwen3_5", "text_config": size.to_hf() | UPLOADED}
    plain = Qwen35Config.from_hf(outside)
    assert replace(plain, wrapped=False) == size
    assert Qwen35Config.from_hf({**outside, **UPLOADED}) == plain
    ends = Qwen35Config.from_hf({**outside, "eos_token_id": [5, 2, 7]})
    assert ends == replace(plain, eos=(2, 5, 7)) and ends.to_hf() == {**outside, "eos_token_id": [5, 2, 7]}
    with pytest.raises(ValueError, match="eos_token_id 512 is outside the vocabulary of 512"):
        Qwen35Config.from_hf({**outside, "eos_token_id": 512})
    with pytest.raises(ValueError, match="weight_block_size None in quantization_config is not supported"):
        Qwen35Config.from_hf({**outside, "quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize("scaling", [{}, None, {"rope_type": "default"}, {"type": "default"}, {"rope_theta": 1e6, "rope_type": "default"}])
def test_rope_that_is_not_scaled_may_say_so(scaling: Any) -> None:
    """Beside a theta of its own; beside rope_parameters transformers would read rope_scaling alone, and another theta."""
    fields = SIZES["tiny"].to_hf()
    assert Qwen3Config.from_hf({**fields, "rope_scaling": scaling}) == SIZES["tiny"]
    other = GLM_SIZES["tiny"]
    fields = other.to_hf() | {"rope_scaling": scaling}
    theirs = transformers.GlmMoeDsaConfig(**copy.deepcopy(fields)).rope_parameters["rope_theta"]
    if theirs == other.theta:
        assert GLMConfig.from_hf(fields) == other
    else:
        with pytest.raises(ValueError, match="rope_theta is 8000000.0 in rope_parameters, and .* in rope_scaling, which alone counts"):
            GLMConfig.from_hf(fields)


def test_rope_theta_may_stand_in_either_place_or_both() -> None:
    fields = SIZES["tiny"].to_hf()
    theta = fields.pop("rope_theta")
    for way in ({"rope_theta": theta}, {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}):
        assert Qwen3Config.from_hf({**fields, **way}).theta == theta
    both = {"rope_theta": 1000000, "rope_parameters": {"rope_theta": theta}}
    assert Qwen3Config.from_hf({**fields, **both}).theta == theta


@pytest.mark.parametrize("outputs", [1, 8, 16, 128, 256, 300])
def test_parts_of_a_narrow_linear_divide_it(outputs: int) -> None:
    for inputs in (96, 1024, 1028, 2048, 4100, 5121, 6144, 8200, 10002, 16384):
        parts = split_k(outputs, inputs)
        assert inputs % parts == 0 and parts in (1, 2, 4, 8, 16)
    assert split_k(1, 2048) == 8 and split_k(256, 6144) == 8 and split_k(24, 16384) == 16
    assert split_k(24, 8200) == 8 and split_k(24, 10002) == 2 and split_k(1, 1028) == 4


def test_a_later_value_that_is_not_finite_reaches_its_own_tile_only() -> None:
    """What README's limits say, to the row: the earlier rows of the same key tile, no other tile, no other document."""
    program = resolve("aligned", "cpu", torch.bfloat16)
    starts = torch.tensor([0, 150, 200])
    q, k, v = (torch.randn(200, 2, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))

    def out(values: Tensor) -> Tensor:
        rows = Rows.packed(starts)
        return ops.attention(q, PackedKeyValues().append(k, values, rows), rows, 0.25, program=program)

    spoiled = v.clone()
    spoiled[100] = torch.nan
    clean = out(v)
    dirty = out(spoiled)
    tile = 100 // KEY_TILE * KEY_TILE
    assert_same_bytes([dirty[:tile], dirty[150:]], [clean[:tile], clean[150:]])
    assert dirty[tile:150].isnan().all()


class TestPrecision:
    """PyTorch's switch that lets a CPU round FP32 products to BF16; a small model's products don't show it."""

    @pytest.mark.parametrize("precision", ["bf16", "tf32"])
    @pytest.mark.parametrize("switch", [torch.backends, torch.backends.mkldnn, torch.backends.mkldnn.matmul])
    def test_rounded_products_are_refused(self, model: ForRL, switch: Any, precision: str) -> None:
        before = switch.fp32_precision
        ids = torch.arange(4)
        starts = torch.tensor([0, 4])
        switch.fp32_precision = precision
        try:
            with pytest.raises(ValueError, match=f"to {precision} .* moves bytes on a CPU"):
                model.score(ids, starts)
        finally:
            switch.fp32_precision = before
        model.score(ids, starts)


def test_a_replaced_parameter_is_hashed_again(model: ForRL) -> None:
    frozen = copy.deepcopy(model).requires_grad_(False)
    name = "model.norm.weight"
    owner = frozen.get_submodule("model.norm")
    seen = set()
    for value in range(8):  # a freed parameter's address is often used again at once
        shape = owner.weight.shape
        del owner.weight
        owner.weight = torch.nn.Parameter(torch.full(shape, 1.0 + value / 16, dtype=frozen.program.torch_dtype), requires_grad=False)
        assert dict(frozen.named_parameters())[name] is owner.weight
        seen.add(frozen.weights_version)
    assert len(seen) == 8
    assert pickle.loads(pickle.dumps(frozen)).weights_version == frozen.weights_version == copy.deepcopy(frozen).weights_version


def test_rows_pass_through_a_wrapper_that_casts_arguments() -> None:
    """What FSDP2's mixed precision does with a dataclass argument; what a launch derived stays with the rows it came from."""
    rows = Rows.pushed([3, 2], [0, 5], "cpu")
    rows.launch["derived"] = 1
    cast = _apply_to_tensors(lambda t: t.bfloat16() if t.is_floating_point() else t, rows)
    assert cast == replace(rows) and cast.launch == {} and rows.launch == {"derived": 1}


def test_an_update_from_a_transposed_parameter_of_its_own(model: ForRL) -> None:
    own = copy.deepcopy(model)
    square = next(n for n, t in own.published_tensors() if t.dim() == 2 and t.shape[0] == t.shape[1])
    given = dict(own.published_tensors())[square].T
    wanted = given.clone()
    own.load_weights([(square, given)])
    assert_same_bytes(dict(own.published_tensors())[square], wanted)


@pytest.mark.parametrize(("counts", "contexts"), [([], None), ([2, 0], None), ([2], [-1]), ([2, 1], [0])])
def test_rows_of_nothing_are_refused(counts: list[int], contexts: list[int] | None) -> None:
    assert Rows.pushed([2, 1], [0, 3], "cpu").positions_R.tolist() == [0, 1, 3]
    with pytest.raises(ValueError, match=r"a push has sequences of at least one row .*: counts \["):
        Rows.pushed(counts, contexts, "cpu")


def test_final_rows_of_another_model_are_refused() -> None:
    server = Qwen3ForServing.from_config(SIZES["tiny"], seed=1, device="cpu")
    width = server.config.hidden
    good = torch.randn(3, width).bfloat16()
    ids = torch.tensor([1, 2, 3])
    assert server.log_prob(good, ids).shape == (3,) and server.logits(good).dtype == torch.float32
    for bad in (good[:, : width // 2], good.float(), good[0], good[None]):
        for call, more in ((server.logits, ()), (server.log_prob, (ids,))):
            with pytest.raises(ValueError, match=rf"final rows are \[R, {width}\] of torch.bfloat16, not "):
                call(bad, *more)


def test_a_prefill_s_shapes_are_checked_before_it_writes() -> None:
    server = Qwen3ForServing.from_config(SIZES["tiny"], seed=1, device="cpu")
    recurrent = Qwen35ForServing.from_config(SIZES_35["tiny"], seed=1, device="cpu")
    memory = server.make_memory(4, 16)
    hybrid = recurrent.make_memory(4, 16, 2)
    rows = Rows.pushed([3], None, "cpu")
    table = torch.tensor([[1]], dtype=torch.int32)
    ids = torch.tensor([1, 2, 3])
    for change, message in (
        ({"ids": ids[:2]}, r"ids_R has shape \[2\] for 3 rows"),
        ({"ids": ids.float()}, "ids_R must be an int32 or int64 tensor"),
        ({"table": table[0]}, r"the page table has shape \[1\] for 1 sequences"),
        ({"table": table.expand(2, 1)}, r"the page table has shape \[2, 1\] for 1 sequences"),
        ({"table": table.long()}, "the page table must be int32, not torch.int64"),
        ({"table": table.float()}, "the page table must be int32, not torch.float32"),
        ({"memory": [table]}, "Qwen3ForServing takes a Memory, not a list"),
        ({"memory": hybrid}, "Qwen3ForServing takes a memory of keys, not of keys, delta, carry"),
    ):
        given = {"ids": ids, "memory": memory, "table": table} | change
        with pytest.raises(ValueError, match=message):
            server.prefill(given["ids"], rows, given["memory"], given["table"])
    with pytest.raises(ValueError, match="Qwen35ForServing takes a memory of keys, delta, carry, not of keys"):
        recurrent.prefill(ids, rows, memory, table)
    assert all(not pool.any() for pool in memory.tensors().values()), "nothing was written"
    assert server.prefill(ids, rows, memory, table).shape == (3, server.config.hidden) and memory.tensors()["k"][:, 1].any()


@pytest.mark.parametrize("model", [Qwen3ForServing, Qwen35ForServing])
def test_no_memory_of_nothing(model: Any) -> None:
    """A page of 0 tokens once meant the default."""
    served = model.from_config((SIZES if model is Qwen3ForServing else SIZES_35)["tiny"], seed=1, device="cpu")
    for sizes, message in (((4, 0), "at least 1 token, not 0"), ((4, -1), "at least 1 token, not -1"), ((1, 16), "at least 2 pages")):
        with pytest.raises(ValueError, match=message):
            served.make_memory(*sizes, 2)
