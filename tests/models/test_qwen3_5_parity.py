"""Qwen3.5 against transformers' own classes, and both against a plain float64 model: values, accuracy, gradients, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity_harness
import pytest
import torch
import transformers
from parity_harness import (
    Checkpoints,
    assert_packed_parity,
    assert_parity,
    by_published_name,
    gradients_of,
    leaves,
    relative,
    theirs,
    whole,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import zoo
from benchmarks.models_float64 import float64_of, next_log_prob
from weights_tools.cli import app as weights_tools_app
from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.shards import read_shard
from zoo.qwen3_5 import MOE_SIZES, SIZES, Qwen35Config, Qwen35ForRL, Qwen35ForServing
from zoo.sglang_plugin import loading
from zoo.sglang_plugin.loading import load as load_stream

TOKENS = 150
GEOMETRY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
MIXTURE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3_5", {"intermediate_size": 128}),
    "dense, tied": ("Qwen3_5", {"intermediate_size": 128, "tie_word_embeddings": True}),
    "dense, three values a key": ("Qwen3_5", {"intermediate_size": 96, "linear_num_value_heads": 6, "linear_value_head_dim": 32}),
    "moe": ("Qwen3_5Moe", MIXTURE),
}
# a large eps keeps norms of nearly empty rows from magnifying their roundings: with 1e-6 BF16 gradients err by 30 %, in ours as in
# transformers', and a comparison of two such errors sees nothing
CONDITIONED = {"dense, large eps": ("Qwen3_5", {"intermediate_size": 128, "rms_norm_eps": 0.3})}
FP32 = {"program": "transformers", "dtype": torch.float32, "device": "cpu"}


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Every parameter at a realistic scale: decays of a row between exp(-16 softplus) and about exp(-softplus)."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=random)
        if name.endswith("A_log"):
            parameter.copy_((1 + 15 * torch.rand(parameter.shape, generator=random)).log())
        elif name.endswith("dt_bias"):
            parameter.copy_(0.4 * drawn - 2.0 * (torch.arange(len(drawn)) % 2))  # every second head remembers longer
        elif parameter.dim() == 1:
            parameter.copy_((1.0 if "linear_attn.norm" in name else 0.0) + 0.1 * drawn)
        else:
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5)


def build(kind: str, seed: int) -> nn.Module:
    family, fields = {**KINDS, **CONDITIONED}[kind]
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}TextConfig")(**{**GEOMETRY, **fields}))
    randomise(model, seed)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("published"), build)


def tokens(seed: int = 0, count: int = TOKENS) -> Tensor:
    return parity_harness.tokens(seed, count)


class TestParity:
    """program="transformers", FP32: 1e-3, as far as transformers' own two rules may lie apart; 1.4e-4 was seen at most."""

    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_logits_and_log_probs(self, checkpoint: Checkpoints, kind: str) -> None:
        model = zoo.load(checkpoint(kind), **FP32)
        assert isinstance(model, Qwen35ForRL)
        assert_parity(model, checkpoint(kind), checkpoint(kind, 1), tokens(), 1e-3)

    @pytest.mark.parametrize("kind", ["dense", "moe"])
    @torch.no_grad()
    def test_padded_and_packed(self, checkpoint: Checkpoints, kind: str) -> None:
        model = zoo.load(checkpoint(kind), **FP32)
        reference = theirs(checkpoint(kind), torch.float32)
        assert_packed_parity(model, reference, [tokens(1, 70), tokens(2, 5), tokens(3, 18)], 1e-3)

    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_the_float64_model_is_the_architecture(self, checkpoint: Checkpoints, kind: str) -> None:
        """So that what follows measures errors and not a misunderstanding.

        Running sums of log-decay reach hundreds, in ours as in theirs: an ulp of 256 is 3e-5, and exponentials err by as much.
        """
        model = zoo.load(checkpoint(kind), **FP32)
        ids = tokens()
        exact = float64_of(model).logits(ids)
        mine, their = (
            float((x.double() - exact).abs().max())
            for x in (model(ids, cu_seqlens=whole(ids)).logits, theirs(checkpoint(kind), torch.float32)(ids[None]).logits[0])
        )
        assert mine <= 5e-4 and their <= 1e-3

    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients(self, checkpoint: Checkpoints, kind: str) -> None:
        """FP32 against float64 autograd, and theirs beside it: a decay's gradient is a sum of terms that nearly cancel."""
        ids = tokens(count=100)
        model = zoo.load(checkpoint(kind), **FP32)
        (-model.score(ids, whole(ids))[:-1].mean()).backward()
        exact = leaves(float64_of(model))
        (-next_log_prob(exact.logits(ids), ids).mean()).backward()
        reference = theirs(checkpoint(kind), torch.float32)
        reference(ids[None], labels=ids[None]).loss.backward()
        found = gradients_of(model)
        wanted = by_published_name(model, lambda name: exact.p[name].grad)
        their = {name: p.grad for name, p in reference.named_parameters()}
        assert set(found) == set(their)
        errors = {name: (relative(found[name], wanted[name]), relative(their[name], wanted[name])) for name in found if wanted[name].any()}
        for name, (mine, theirs_) in errors.items():
            assert mine < 1e-3 and theirs_ < 1e-3, f"{name}: {mine:.1e}, transformers {theirs_:.1e}"
        assert sorted(mine for mine, _ in errors.values())[len(errors) // 2] < 3e-4
        # the control: the gradient of other tokens
        model.zero_grad()
        (-model.score(ids.roll(1), whole(ids))[:-1].mean()).backward()
        moved = gradients_of(model)
        assert min(relative(moved[name], wanted[name]) for name in errors) > 1e-2

    @pytest.mark.parametrize("kind", ["dense", "moe"])
    @pytest.mark.parametrize("tied", [False, True])
    @torch.no_grad()
    def test_a_vision_language_class_that_ties_outside(self, tmp_path: Path, kind: str, tied: bool) -> None:
        """tie_word_embeddings stands beside text_config only, where transformers' class reads it."""
        family, fields = KINDS[kind]
        config = getattr(transformers, f"{family}Config")(
            text_config={**GEOMETRY, **fields}, vision_config=VISION, tie_word_embeddings=tied
        )
        vision_language = getattr(transformers, f"{family}ForConditionalGeneration")
        reference = vision_language(config)
        randomise(reference, 0)
        reference.save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        del stored["text_config"]["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(stored))
        assert stored["tie_word_embeddings"] == tied and ("lm_head.weight" in tensors_of(tmp_path)) != tied
        ids = tokens()
        model = zoo.load(tmp_path, **FP32)
        expected = vision_language.from_pretrained(tmp_path, dtype=torch.float32).eval()(input_ids=ids[None]).logits[0]
        assert model.config.wrapped and model.config.tied == tied
        assert (model(ids, cu_seqlens=whole(ids)).logits - expected).abs().max() <= 1e-3 < 1 < expected.abs().max()
        with pytest.raises(ValueError, match="lm_head.weight"):  # the control: the other tie, outside too
            zoo.load(rewritten(tmp_path, tmp_path / "other", lambda t: t, tie_word_embeddings=not tied), **FP32)


class Run(parity_harness.Run):
    def errors(self, rounded: bool = False) -> Tensor:
        """Squared errors of final rows, ours and theirs, where all three chose the same experts."""
        ours = (self.hidden.view(torch.int16) & ~31).view(torch.bfloat16) if rounded else self.hidden
        return torch.stack([(x.double() - self.exact_hidden)[self.same_experts_T].square().mean() for x in (ours, self.their_hidden)])


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bf16_errs_no_more_than_transformers(checkpoint: Checkpoints, kind: str) -> None:
    """Root mean square over several checkpoints."""
    runs = [Run(checkpoint(kind, seed, torch.bfloat16), tokens(seed)) for seed in range(5)]
    ours, their = torch.stack([run.errors() for run in runs]).mean(0).sqrt().tolist()
    assert 0 < ours <= their
    assert all(int(run.same_experts_T.sum()) > TOKENS // 2 for run in runs)
    coarse = torch.stack([run.errors(rounded=True) for run in runs]).mean(0).sqrt()[0]
    assert coarse > their  # the control: final rows cut to 3 bits


def test_bf16_gradients(checkpoint: Checkpoints) -> None:
    """Relative errors against float64 over all parameters of several checkpoints: ours on average below theirs."""
    mine = []
    their = []
    coarse = []
    for seed in range(4):
        run = Run(checkpoint("dense, large eps", seed, torch.bfloat16), tokens(seed, 100))
        found = run.gradients(run.ours)
        reference = run.their_gradients()
        wanted = run.exact_gradients()
        mine += [relative(found[name], value) for name, value in wanted.items()]
        their += [relative(reference[name], value) for name, value in wanted.items()]
        cut = {name: (g.bfloat16().view(torch.int16) & ~31).view(torch.bfloat16) for name, g in found.items()}
        coarse += [relative(cut[name], value) for name, value in wanted.items()]
    assert 0 < sum(mine) <= sum(their)
    assert max(mine) < 0.06  # some 30 roundings of up to 2^-9 add like noise to about 1 %, a few times that where terms cancel
    assert sum(coarse) > sum(their)  # the control: gradients cut to 3 bits


# files


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def rewritten(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **fields: Any) -> Path:
    """A checkpoint of one file with other tensors and other fields in config.json."""
    out.mkdir()
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in change(tensors_of(folder)).items()}, out / "model.safetensors")
    return out


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as transformers saves them, into the published stacks."""
    out = {name: t for name, t in tensors.items() if ".experts." not in name}
    for i in range(GEOMETRY["num_hidden_layers"]):
        at = f"model.layers.{i}.mlp.experts"
        count = MIXTURE["num_experts"]
        gate, up, down = ([tensors[f"{at}.{e}.{part}_proj.weight"] for e in range(count)] for part in ("gate", "up", "down"))
        out[f"{at}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
        out[f"{at}.down_proj"] = torch.stack(down)
    return out


def test_experts_stacked_and_one_by_one_load_alike(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """And both come back as they were."""
    path = checkpoint("moe")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in tensors_of(path)
    fused = rewritten(path, tmp_path / "fused", stacked)
    one, other = (zoo.load(p, **FP32) for p in (path, fused))
    assert one.weights_version == other.weights_version
    for model, source in ((one, path), (other, fused)):
        model.save_pretrained(tmp_path / "out" / source.name)
        assert contents(tmp_path / "out" / source.name) == contents(source)
    swapped = rewritten(
        fused, tmp_path / "swapped", lambda t: {n: x.flip(0) if n.endswith("experts.down_proj") else x for n, x in t.items()}
    )
    assert zoo.load(swapped, **FP32).weights_version != one.weights_version


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("vision", [False, True])
def test_round_trip(arch: str, vision: bool, tmp_path: Path) -> None:
    """Both roles, byte for byte: FP32 vectors, vision and multi-token-prediction tensors, tokenizer, config."""
    path = make_tiny(arch, tmp_path / "tiny", vision=vision)
    names = {t.name: t.dtype for file in path.glob("*.safetensors") for t in read_shard(file).tensors}
    root = "model.language_model" if vision else "model"
    for vector in ("A_log", "dt_bias", "norm.weight"):
        assert names[f"{root}.layers.0.linear_attn.{vector}"] == "F32"
    assert ("model.visual.patch_embed.proj.weight" in names) == ("mtp.fc.weight" in names) == vision
    trainer = zoo.load(path, device="cpu")
    server = zoo.load(path, role="serving", device="cpu")
    assert isinstance(trainer, Qwen35ForRL) and isinstance(server, Qwen35ForServing)
    mixer = trainer.model.layers[0].mixer
    assert {p.dtype for p in (mixer.gate.a_log, mixer.gate.dt_bias, mixer.norm.weight)} == {torch.float32}
    assert torch.equal(mixer.gate.a_log, tensors_of(path)[f"{root}.layers.0.linear_attn.A_log"])
    trainer.fingerprint().check(server.fingerprint())
    trainer.save_pretrained(tmp_path / "same")
    assert contents(tmp_path / "same") == contents(path)
    with torch.no_grad():
        mixer.gate.a_log.add_(1e-6)
    trainer.save_pretrained(tmp_path / "trained")
    changed = tensors_of(tmp_path / "trained")
    before = tensors_of(path)
    assert [name for name in before if not torch.equal(changed[name], before[name])] == [f"{root}.layers.0.linear_attn.A_log"]


def test_the_wrapped_config_is_the_text_model(tmp_path: Path) -> None:
    plain = make_tiny("qwen3_5", tmp_path / "plain")
    wrapped = make_tiny("qwen3_5", tmp_path / "wrapped", vision=True)
    ids = torch.arange(70)
    models = [zoo.load(p, device="cpu") for p in (plain, wrapped)]
    a, b = (model.config for model in models)
    assert b.wrapped and not a.wrapped and a.hidden == b.hidden and a.full == b.full
    renamed = {n.replace("model.language_model", "model"): t for n, t in tensors_of(wrapped).items()}
    text = rewritten(plain, tmp_path / "text", lambda _: {n: renamed[n] for n in tensors_of(plain)})
    alone = zoo.load(text, device="cpu")
    compared = CliRunner().invoke(weights_tools_app, ["compare", str(wrapped), str(text)])
    assert compared.exit_code == 1 and f"of one content hash: {alone.weights_version} (" in compared.output
    scored = [m.score(ids, whole(ids)) for m in (models[1], alone, models[0])]
    assert torch.equal(scored[0], scored[1]) and not torch.equal(scored[0], scored[2])
    models[1].fingerprint().check(alone.fingerprint())
    with pytest.raises(ValueError, match=r"differ in 1 line\(s\): weights: "):  # the control: other weights
        models[1].fingerprint().check(models[0].fingerprint())
    # a server that holds either form takes the other one's folder and names
    for start, end in ((plain, wrapped), (wrapped, plain), (wrapped, text)):
        engine = Engine(zoo.load(start, role="serving", device="cpu"), pages=4, max_batch=1)
        wanted = zoo.load(end, device="cpu")
        for given in (end, list(wanted.published_tensors())):
            before = engine.update_weights(start)
            assert (before == wanted.weights_version) == (end == text)
            assert engine.update_weights(given) == wanted.weights_version


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_that_transformers_saves(arch: str, tmp_path: Path) -> None:
    """Of a published vision-language checkpoint: the text model's config beside the other's names."""
    path = make_tiny(arch, tmp_path / "published", vision=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "text")
    names = tensors_of(tmp_path / "text")
    assert "text_config" not in json.loads((tmp_path / "text" / "config.json").read_text())
    assert all(name == "lm_head.weight" or name.startswith("model.language_model.") for name in names)
    whole_model, text = (zoo.load(p, **FP32) for p in (path, tmp_path / "text"))
    text.fingerprint().check(whole_model.fingerprint())
    text.save_pretrained(tmp_path / "same")
    assert contents(tmp_path / "same") == contents(tmp_path / "text")
    served = Qwen35ForServing.from_config(text.config, **FP32)
    assert served.weights_version != text.weights_version
    wrote: set[str] = set()
    load_stream(served, names.items(), wrote.update)  # the SGLang plugin's way
    assert not loading.absent(served.table_of(), wrote)
    assert served.weights_version == text.weights_version
    shown = CliRunner().invoke(weights_tools_app, ["inspect", str(tmp_path / "text")]).output
    assert text.weights_version in shown
    with torch.no_grad():
        text.model.norm.weight[0] += 1
    text.save_pretrained(tmp_path / "trained")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    changed = [name for name, old in theirs.state_dict().items() if not torch.equal(again.state_dict()[name], old)]
    assert changed == ["model.norm.weight"]


def test_both_prefixes_at_once_are_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    name = "model.norm.weight"
    other = "model.language_model.norm.weight"
    both = rewritten(checkpoint("dense"), tmp_path / "both", lambda t: {**t, other: t[name].clone()})
    with pytest.raises(ValueError, match=f"1 tensors unknown: {other}$"):
        zoo.load(both, **FP32)


@pytest.mark.parametrize("first", ["experts.gate_up_proj", "experts.0.gate_proj.weight"])
def test_an_update_in_two_layouts_is_refused(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LOAD_BYTES", 1)  # the plugin's stream: one tensor a piece
    model = Qwen35ForServing.from_config(MOE_SIZES["tiny"], seed=1, device="cpu")
    at = "model.layers.0.mlp"
    version = model.weights_version
    stack = dict(model.published_tensors())[f"{at}.experts.gate_up_proj"] * 2
    given = {"experts.gate_up_proj": stack, "experts.0.gate_proj.weight": stack[0, :64].clone()}
    pairs = [(f"{at}.{name}", given[name]) for name in sorted(given, key=lambda name: name != first)]
    message = f"{pairs[0][0]} and {pairs[1][0]} are two layouts of one parameter"
    with pytest.raises(ValueError, match=message):
        model.load_weights(pairs)
    assert model.weights_version == version
    with pytest.raises(ValueError, match=message):
        load_stream(model, pairs, lambda names: None)
    assert model.weights_version == version
    wrapped = (pairs[0][0].replace("model.", "model.language_model."), pairs[0][1])
    with pytest.raises(ValueError, match=f"{pairs[0][0]} and {wrapped[0]} are two layouts of one parameter"):
        model.load_weights([pairs[0], wrapped])
    for pair in (*pairs, wrapped):  # the control: each alone
        model.load_weights([pair])


def test_the_config_follows_converted_weights(tmp_path: Path) -> None:
    """Also inside text_config, which transformers' text class reads its dtype from."""
    path = make_tiny("qwen3_5", tmp_path / "published", vision=True)
    zoo.load(path, **FP32).save_pretrained(tmp_path / "wide")
    fields = [json.loads((p / "config.json").read_text()) for p in (path, tmp_path / "wide")]
    assert [f["text_config"]["dtype"] for f in fields] == ["bfloat16", "float32"]
    fields[1]["text_config"]["dtype"] = "bfloat16"
    assert fields[0] == fields[1]  # and nothing else
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").dtype == torch.float32
    zoo.load(tmp_path / "wide", dtype=torch.bfloat16, device="cpu").save_pretrained(tmp_path / "back")
    assert contents(tmp_path / "back") == contents(path)


def test_vectors_stored_in_bf16_are_widened_and_go_back(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = checkpoint("dense", 0, torch.bfloat16)
    model = zoo.load(path, device="cpu")
    assert model.model.layers[0].mixer.gate.dt_bias.dtype == torch.float32 and model.program.dtype == "bfloat16"
    model.save_pretrained(tmp_path / "same")
    assert contents(tmp_path / "same") == contents(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "model.vision.a": torch.zeros(1)}, "1 tensors unknown: model.vision.a"),
        (lambda t: {**t, "model.layers.0.linear_attn.in_proj_qkvz.weight": torch.zeros(1)}, "unknown: .*in_proj_qkvz"),
        (lambda t: {**t, "xmtp.fc.weight": torch.zeros(1)}, "unknown: xmtp.fc.weight"),
        (
            lambda t: {n: x for n, x in t.items() if n != "model.layers.1.linear_attn.A_log"},
            "missing: model.layers.1.linear_attn.A_log",
        ),
        (
            lambda t: {n: x[:-1] if n == "model.layers.3.self_attn.q_proj.weight" else x for n, x in t.items()},
            r"q_proj.weight \[127, 64\] where the config needs \[128, 64\]",
        ),
        (
            lambda t: {n: x * torch.nan if n == "model.layers.0.linear_attn.dt_bias" else x for n, x in t.items()},
            "dt_bias has 4 NaN",
        ),
    ],
)
def test_other_tensors_are_refused(checkpoint: Checkpoints, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        zoo.load(rewritten(checkpoint("dense"), tmp_path / "spoiled", change), **FP32)
    assert "\n" not in str(caught.value)


ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"sliding_window": 128}, "unknown fields sliding_window=128"),
    "unknown type": ({"model_type": "qwen3_next"}, "model_type 'qwen3_next' is not supported"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size must be an integer of at least 1, it is '64'"),
    "zero heads": ({"linear_num_key_heads": 0}, "linear_num_key_heads must be an integer of at least 1, it is 0"),
    "a number for a flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, it is 1"),
    "eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number above 0"),
    "end of text": ({"eos_token_id": [2, "3"]}, r"eos_token_id must be token ids of at least 0, it is \[2, '3'\]"),
    "yarn": ({"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
    "old scaling": ({"rope_scaling": {"type": "linear"}}, "rope type .*linear.* is not supported"),
    "a factor without a type": ({"rope_parameters": {**ROPE, "factor": 4.0}}, "rope_parameters has unknown fields factor"),
    "rope of no object": ({"rope_parameters": "default"}, "rope_parameters must be an object"),
    "theta": ({"rope_parameters": {**ROPE, "rope_theta": "1e7"}}, "rope_theta must be a number above 0, it is '1e7'"),
    "odd rotation": ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.4}}, "partial_rotary_factor 0.4 of head_dim 64"),
    "unknown layers": (
        {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
        r"unknown ones \['sliding_attention'\]",
    ),
    "too few layers": ({"layer_types": ["linear_attention", "full_attention"]}, "2 entries for 4 layers"),
    "layers of no list": ({"layer_types": 4}, "layer_types must be a list, it is 4"),
    "one kind of layer": ({"layer_types": ["linear_attention"] * 4}, "needs layers of both kinds, all 4 are 'linear_attention'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
    "bias": ({"attention_bias": True}, "attention_bias True is not supported, only False"),
    "no gate": ({"attn_output_gate": False}, "attn_output_gate False is not supported, only True"),
    "wide convolution": ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim 5 is not supported, only 4"),
    "state in bf16": ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16' is not supported, only 'float32'"),
    "key heads": ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "value heads": ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2"),
    "experts": ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of num_experts 8"),
    "plain softmax": ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
    "dense layers": ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\] is not supported"),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_other_configs_are_refused(name: str, wrapped: bool) -> None:
    fields, message = BAD[name]
    good = MOE_SIZES["tiny"].to_hf()
    Qwen35Config.from_hf(good)
    text = {**good, **fields}
    outer = {"model_type": "qwen3_5_moe", "vision_config": {}, "text_config": text}
    with pytest.raises(ValueError, match=message) as caught:
        Qwen35Config.from_hf(outer if wrapped else text)
    assert "\n" not in str(caught.value)


def test_wrapped_configs_are_read_strictly_too() -> None:
    good = {"model_type": "qwen3_5", "vision_config": {}, "text_config": SIZES["tiny"].to_hf()}
    assert Qwen35Config.from_hf(good).wrapped
    for fields, message in (
        ({"audio_config": {}}, "unknown fields audio_config"),
        ({"text_config": 5}, "text_config must be an object"),
        ({"model_type": "qwen3_5_moe"}, "model_type is 'qwen3_5_moe', and 'qwen3_5_text' in text_config"),
        ({"tie_word_embeddings": "junk"}, "tie_word_embeddings must be true or false, it is 'junk'"),
        (
            {"tie_word_embeddings": True, "text_config": {**SIZES["tiny"].to_hf(), "tie_word_embeddings": 1}},
            "tie_word_embeddings must be true or false, it is 1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Qwen35Config.from_hf({**good, **fields})


def test_of_two_ties_the_outer_one_counts(tmp_path: Path) -> None:
    """As in transformers' vision-language class, which leaves the inner one at its default when it saves."""
    text = SIZES["tiny"].to_hf()
    del text["tie_word_embeddings"]
    for outer in ({}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}):
        for inner in ({}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}):
            config = Qwen35Config.from_hf({"model_type": "qwen3_5", "text_config": {**text, **inner}, **outer})
            assert config.tied == {"tie_word_embeddings": False, **inner, **outer}["tie_word_embeddings"]
            assert Qwen35Config.from_hf(config.to_hf()) == config
    path = make_tiny("qwen3_5", tmp_path / "tied", vision=True, tied=True)
    inside = json.loads((path / "config.json").read_text())["text_config"] | {"tie_word_embeddings": False}
    kept = rewritten(path, tmp_path / "kept", lambda t: t, text_config=inside)
    assert zoo.load(kept, device="cpu").weights_version == zoo.load(path, device="cpu").weights_version
    with pytest.raises(ValueError, match="1 tensors missing: lm_head.weight"):
        zoo.load(rewritten(path, tmp_path / "untied", lambda t: t, tie_word_embeddings=False), device="cpu")


def test_a_changed_config_is_written_as_it_is(tmp_path: Path) -> None:
    """Not as the config.json that it once came from, whose names and numbers are others."""
    path = make_tiny("qwen3_5", tmp_path / "published", vision=True)
    read = zoo.load(path, device="cpu").config
    assert read.to_hf() == json.loads((path / "config.json").read_text())
    changes = {
        "fewer": read.first_layers(4),
        "alone": replace(read, wrapped=False),
        "narrow": replace(read, hidden=64),
        "ends": replace(read, eos=(2, 3)),
        "same": replace(read, hidden=read.hidden),
    }
    for name, config in changes.items():
        made = Qwen35ForRL.from_config(config, device="cpu")
        made.save_pretrained(tmp_path / name)
        found = zoo.load(tmp_path / name, device="cpu")
        assert replace(found.config, wrapped=config.wrapped) == config and found.weights_version == made.weights_version
        assert found.config.wrapped == (name == "same")
        assert any("language_model" in n for n in tensors_of(tmp_path / name)) == config.wrapped == (name not in ("fewer", "alone"))


def test_a_config_is_not_changed_through_what_it_wrote() -> None:
    read = Qwen35Config.from_hf({"model_type": "qwen3_5", "vision_config": {"depth": 2}, "text_config": SIZES["tiny"].to_hf()})
    wanted = read.to_hf()
    written = read.to_hf()
    written["text_config"]["hidden_size"] = 64
    written["vision_config"]["depth"] = 3
    assert written != wanted and read.to_hf() == wanted


def test_configs_come_back() -> None:
    for config in (*SIZES.values(), *MOE_SIZES.values()):
        assert Qwen35Config.from_hf(config.to_hf()) == config
        assert Qwen35Config.from_hf(config.first_layers(4).to_hf()).full == (False, False, False, True)
    with pytest.raises(ValueError, match="the first 3 layers have none of full attention, 4 are needed"):
        SIZES["4b"].first_layers(3)
    by_interval = SIZES["4b"].to_hf()
    assert by_interval["full_attention_interval"] == 4  # stock SGLang reads nothing else
    for wrong, message in (
        (3, r"full_attention_interval 3 contradicts layer_types, whose layers of full attention are \[3, 7, 11, "),
        ("4", "full_attention_interval must be an integer of at least 1, it is '4'"),
    ):
        with pytest.raises(ValueError, match=message):
            Qwen35Config.from_hf({**by_interval, "full_attention_interval": wrong})
    del by_interval["layer_types"]
    assert Qwen35Config.from_hf(by_interval) == SIZES["4b"]
    uneven = replace(SIZES["4b"], full=(True, True, *SIZES["4b"].full[2:]))
    assert "full_attention_interval" not in uneven.to_hf() and Qwen35Config.from_hf(uneven.to_hf()) == uneven
