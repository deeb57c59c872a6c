"""A rehearsal goes through every kind of push, and moves nothing that is served."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.common import rehearsal, rehearsing
from zoo.common.compilations import Compilation, watch
from zoo.common.engine import Engine
from zoo.common.pushes import Push, pushes
from zoo.common.registry import architectures
from zoo.common.rehearsal import layers_of_every_kind
from zoo.common.rollouts import Completion, SamplingParams

FEW = [((3,), (0,)), ((1, 1), (4, 4))]
PROMPTS = [[5, 6, 7, 8], list(range(3, 40))]


def test_pushes_cover_counts_batches_and_both_sides_of_a_segment() -> None:
    planned = list(pushes(chunk_rows=256, max_batch=12, segment=512, positions=2048))
    prefills = {push.counts[0] for push in planned if len(push.counts) == 1 and push.contexts == (0,)}
    assert {1, 17, 64, 128, 192, 256} <= prefills
    decodes = {(len(push.counts), push.contexts[0]) for push in planned if set(push.counts) == {1} and push.contexts[0]}
    assert {(1, 16), (12, 16), (1, 512), (12, 512)} <= decodes
    assert any(push.contexts == (512,) and push.counts[0] > 1 for push in planned)
    assert all(sum(push.counts) <= 256 for push in planned)


def test_pushes_stay_inside_the_position_table() -> None:
    for push in pushes(chunk_rows=4096, max_batch=3, segment=None, positions=100):
        assert max(a + b for a, b in zip(push.counts, push.contexts, strict=True)) <= 100


@pytest.mark.parametrize("arch", architectures())
def test_a_rehearsal_moves_nothing(arch: str) -> None:
    family, architecture = architectures()[arch]
    model = family.serving.from_config(architecture.sizes["tiny"], seed=1, device="cpu")
    made = partial(Engine, model, pages=16, max_batch=2, chunk_rows=64, seed=3)
    params = SamplingParams(max_new_tokens=3, top_p=0.9)
    plain = made().generate(PROMPTS, params)
    rehearsed = made()
    before = {name: tensor.clone() for name, tensor in rehearsed.scheduler.memory.tensors().items()}
    assert before
    rehearsed.rehearse()
    assert all(tensor.equal(before[name]) for name, tensor in rehearsed.scheduler.memory.tensors().items())
    assert rehearsed.stats.compilations == 0
    assert plain[0].log_probs
    assert [numbers(record) for record in rehearsed.generate(PROMPTS, params)] == [numbers(record) for record in plain]
    # the control: what is served is written, and other tokens are other numbers
    after = rehearsed.scheduler.memory.tensors()
    assert not all(tensor.equal(before[name]) for name, tensor in after.items())
    assert [numbers(record) for record in made().generate([prompt[::-1] for prompt in PROMPTS], params)] != [numbers(r) for r in plain]


def numbers(record: Completion) -> tuple[object, ...]:
    return tuple(record.output_ids), record.log_probs, record.filtered_log_probs


def tiny(arch: str) -> Any:
    family, architecture = architectures()[arch]
    return family.serving.from_config(architecture.sizes["tiny"], seed=1, device="cpu")


@pytest.mark.parametrize("arch", architectures())
def test_the_first_layers_have_every_kind_and_are_the_models_own(arch: str) -> None:
    model = tiny(arch)
    count = layers_of_every_kind(model)
    short = type(model).first_layers_of(model, count)
    assert short.config.layers == count == len(short.model.layers)
    kinds = [{repr([(name, p.shape) for name, p in layer.named_parameters()]) for layer in one.model.layers} for one in (model, short)]
    assert kinds[0] == kinds[1]
    whole = dict(model.named_parameters())
    assert all(parameter.data_ptr() == whole[name].data_ptr() for name, parameter in short.named_parameters())
    # the control: with a layer fewer, a kind is missing or the one kind has no layer
    if count > 1:
        fewer = {repr([(name, p.shape) for name, p in layer.named_parameters()]) for layer in model.model.layers[: count - 1]}
        assert fewer != kinds[0]


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "deepseek_v4"])
def test_other_processes_push_a_share_each(arch: str) -> None:
    model = tiny(arch)
    assert rehearsing.can_be_made_anew(model)
    assert sum(rehearsing.side_by_side(model, [FEW, FEW[:1]], None)) == 3


def test_a_process_that_fails_is_told_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    beyond = [((5000,), (0,))]  # of a position table of 4096
    assert sum(rehearsing.side_by_side(tiny("qwen3"), [beyond, FEW], None)) == 2
    assert "a process that compiled ended with status 1: ValueError: a sequence of 5000 tokens" in caplog.text


def test_a_program_that_has_no_name_is_compiled_here() -> None:
    model = tiny("qwen3")
    model.program = replace(model.program, version=model.program.version + 1)
    assert not rehearsing.can_be_made_anew(model)
    assert rehearsing.processes_for(tiny("qwen3"), 10) == 0  # on a CPU nothing compiles


def test_others_are_asked_once_and_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come at the first push for which a compiler ran; what a cache gave calls nobody."""
    model = tiny("qwen3")
    planned = list(pushes(64, 2, model.captured_length, model.config.positions))
    ran: list[Push] = []
    asked: list[list[list[Any]]] = []
    given = {2: "flash_attn", 3: "triton", 5: "triton"}

    def look(doing: str) -> list[Compilation]:
        compiler = given.get(len(ran)) if doing.startswith("rehearsing ") and "side" not in doing else None
        return [] if compiler is None else [Compilation(compiler, "kernel", doing)]

    monkeypatch.setattr(rehearsal, "run", lambda model, push, page_size: ran.append(push))
    monkeypatch.setattr(watch(), "look", look)
    monkeypatch.setattr(rehearsal, "processes_for", lambda model, count: 5)
    monkeypatch.setattr(rehearsal, "side_by_side", lambda model, shares, page_size: asked.append(shares) or iter([1]))
    rehearsal.rehearse(model, chunk_rows=64, max_batch=2, progress=True, processes=3)
    assert ran == planned
    [shares] = asked
    assert [counts for share in shares for counts, _ in share] == [push.counts for push in planned[3:]] and len(shares) == 3


def test_what_a_user_said_of_a_cache_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    from zoo.common.compilations import keep

    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    keep()
    found = {name: os.environ[f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}"] for name in ("DIR", "ENABLED")}
    assert found == {"DIR": str(tmp_path), "ENABLED": "1"}


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_nothing_compiles_after_a_rehearsal(arch: str) -> None:
    """Odd lengths and batches, every filter, prompt scores; the control: a width that was not rehearsed compiles and is counted."""
    family, architecture = architectures()[arch]
    config = architecture.sizes[architecture.usual_size].first_layers(2)
    engine = Engine(family.serving.from_config(config, seed=1, device="cuda"), pages=200, max_batch=9, chunk_rows=512, seed=3)
    engine.rehearse()
    draw = torch.Generator().manual_seed(0)
    for length, n, params in [
        (1, 1, {}),
        (5, 7, {"top_p": 0.9}),
        (77, 3, {"top_k": 20}),
        (301, 9, {"min_p": 0.1, "temperature": 0.7}),
        (2100, 1, {"temperature": 0.0}),
    ]:
        prompt = torch.randint(3, config.vocabulary, (length,), generator=draw).tolist()
        engine.generate([prompt], SamplingParams(max_new_tokens=9, **params), n=n, prompt_log_probs=True)
    assert [one for one in watch().found[-engine.stats.compilations :] if engine.stats.compilations] == []
    other = family.serving.from_config(replace(config, hidden=config.hidden + 128, published={}), seed=1, device="cuda")
    Engine(other, pages=20, max_batch=2).generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
    watch().look("the control")
    assert watch().after_ready > 0
