"""FP32 masters: the program computes with their rounding, made once per optimizer step, and no byte knows that they are there."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common import masters
from zoo.common.checkpoint import Checkpoint
from zoo.common.codecs import BlockScaled, Rounded
from zoo.common.masters import computed, hold
from zoo.common.registry import architectures, find
from zoo.qwen3 import Qwen3ForServing
from zoo.testing import LawBroken, assert_same_bytes

IDS = torch.randint(300, (24,), generator=torch.Generator().manual_seed(5))
STARTS = torch.tensor([0, 9, 24])
ARCHS = sorted(architectures())
FIRST = {"qwen3_5": 4, "qwen3_5_moe": 4, "glm5": 3}  # layers that have every kind; else 1


def config_of(arch: str) -> Any:
    return find(arch)[1].sizes["tiny"].first_layers(FIRST.get(arch, 1))


def made(arch: str = "qwen3", *, master_dtype: Any = torch.float32, config: Any = None) -> Any:
    family, _ = find(arch)
    return family.rl.from_config(config or config_of(arch), seed=3, device="cpu", master_dtype=master_dtype)


def backward(model: Any) -> Tensor:
    loss: Tensor = -model.score(IDS, STARTS).mean()
    loss.backward()
    return loss.detach()


def assert_serves(model: Any, plain: Any) -> None:
    """A BF16 model with the weights that are published has the same hash, and scores the same bytes."""
    plain.load_weights(model.published_tensors())
    assert plain.weights_version == model.weights_version
    with torch.no_grad():
        assert_same_bytes(model.score(IDS, STARTS), plain.score(IDS, STARTS))
    for entry, piece in model.table_of().pieces():
        master = piece.of(model.get_parameter(entry.ours).detach())
        assert_same_bytes(piece.of(plain.get_parameter(entry.ours).detach()), master if entry.fixed else master.bfloat16())


# --- the bytes


@pytest.mark.parametrize("arch", ARCHS)
def test_every_step_scores_the_bytes_of_the_rounded_weights(arch: str) -> None:
    model = made(arch)
    plain = made(arch, master_dtype=None)
    assert_serves(model, plain)
    entries = model.table_of().parameters
    own = {name for name, entry in plain.table_of().parameters.items() if entry.dtype is not None}
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())  # a table of ids is none
    assert {name for name, entry in entries.items() if entry.codec is None} == own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = {model.weights_version}
    for _ in range(2):
        backward(model)
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        assert all((p.grad is not None) == entries[name].trainable for name, p in model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert_serves(model, plain)
        seen.add(model.weights_version)
    assert len(seen) == 3
    with torch.no_grad():
        next(plain.parameters())[int(IDS[0])] += 0.25
    with pytest.raises(LawBroken):
        assert_same_bytes(model.score(IDS, STARTS), plain.score(IDS, STARTS))


def test_gradients_are_those_of_the_rounded_weights_widened() -> None:
    model = made()
    plain = made(master_dtype=None)
    backward(model)
    backward(plain)
    assert_same_bytes({n: p.grad for n, p in model.named_parameters()}, {n: p.grad.float() for n, p in plain.named_parameters()})


@pytest.mark.parametrize("arch", ["qwen3", "glm5"])
def test_checkpointing_changes_no_gradient(arch: str) -> None:
    model = made(arch)
    backward(model)
    first = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    backward(model)
    assert_same_bytes({name: p.grad for name, p in model.named_parameters()}, first)


def test_tied_embeddings_add_their_gradients_in_fp32() -> None:
    config = replace(config_of("qwen3"), tied=True)
    model = made(config=config)
    plain = made(config=config, master_dtype=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    backward(plain)
    weight = model.model.embed.weight
    assert model.model.head_weight_VD.shape == weight.shape
    narrow = plain.model.embed.weight.grad
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float()) and torch.allclose(
        weight.grad, narrow.float(), rtol=2**-7, atol=1e-6
    )
    optimizer.step()
    assert_serves(model, plain)


def test_a_small_rate_trains_masters_where_bf16_stands_still() -> None:
    moved = {}
    for dtype in (torch.float32, None):
        model = made(master_dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
        losses = []
        for _ in range(12):
            losses.append(float(backward(model)))
            optimizer.step()
            optimizer.zero_grad()
        moved[dtype] = losses[0] - losses[-1]
    assert moved[torch.float32] > 1.5 * moved[None]


# --- when it is made


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    calls: list[int] = []

    def compute(self: Rounded, values: Tensor, out: Tensor) -> None:
        calls.append(values.numel())
        out.copy_(values)

    with monkeypatch.context() as patch:
        patch.setattr(Rounded, "compute", compute)
        yield calls


def test_it_is_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    everything = len(list(model.parameters()))
    with counted(monkeypatch) as calls:
        model.gradient_checkpointing_enable()
        for step in range(1, 3):
            for _ in range(2):  # two micro-batches, each layer twice
                backward(model)
            assert len(calls) == step * everything
            optimizer.step()
            assert len(calls) == (step + 1) * everything
            assert dict(model.published_tensors()) and model.weights_version
            assert len(calls) == (step + 1) * everything


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "one by one": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_leaves_a_stale_one(name: str) -> None:
    model = made()
    plain = made(master_dtype=None)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for _ in range(2):
        before = model.weights_version
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        assert model.weights_version != before
        assert_serves(model, plain)


def test_without_the_hook_a_fused_step_would_be_the_only_one_to_go_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the hook: what is held is looked at while nobody has asked for it."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    backward(model)
    held = model._held["model.norm.weight"]
    for watched in (False, True):
        with monkeypatch.context() as patch:
            if not watched:
                patch.setattr(masters.Held, "stepped", lambda self, moved: None)
            optimizer.step()
        assert torch.equal(held._tensor, model.model.norm.weight.bfloat16()) is watched


def in_the_same_memory(model: Any) -> None:
    """As an allocator may place a new parameter: at the address of one that is gone, and no write counted."""
    memory = model.model.norm.weight.detach().clone()
    model.model.norm.weight = nn.Parameter(memory)
    model.score(IDS, STARTS)
    memory.numpy()[:] *= 1.5
    model.model.norm.weight = nn.Parameter(memory)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda m: m.model.norm.weight.mul_(1.5),
    "a view": lambda m: m.model.embed.weight[3:5].add_(1.0),
    "load_state_dict": lambda m: m.load_state_dict({n: p * 1.5 for n, p in m.named_parameters()}),
    "load_state_dict, assigned": lambda m: m.load_state_dict({n: p * 1.5 for n, p in m.state_dict().items()}, assign=True),
    "another parameter": lambda m: setattr(m.model.norm, "weight", nn.Parameter(m.model.norm.weight * 1.5)),
    "another parameter in the same memory": in_the_same_memory,
    "other data": lambda m: setattr(m.model.norm.weight, "data", m.model.norm.weight * 1.5),
    "load_weights": lambda m: m.load_weights([(n, t * 1.5) for n, t in m.published_tensors()]),
    "uncounted, told": lambda m: (m.model.norm.weight.data.mul_(1.5), m.weights_changed()),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_counted_write_is_seen(name: str) -> None:
    model = made()
    plain = made(master_dtype=None)
    with torch.no_grad():
        before = model.score(IDS, STARTS)
        WRITES[name](model)
        assert not torch.equal(model.score(IDS, STARTS), before)
    assert_serves(model, plain)


def test_a_write_into_what_is_published_is_undone_before_the_next_use() -> None:
    model = made()
    with torch.no_grad():
        before = model.score(IDS, STARTS)
        for _, tensor in model.published_tensors():
            tensor.mul_(2)
        assert_same_bytes(model.score(IDS, STARTS), before)


def test_a_write_that_nobody_counts_is_not_seen_until_it_is_told() -> None:
    model = made()
    with torch.no_grad():
        before = model.score(IDS, STARTS)
        model.model.norm.weight.data.mul_(1.5)
        assert_same_bytes(model.score(IDS, STARTS), before)
        model.weights_changed()
        assert not torch.equal(model.score(IDS, STARTS), before)


class Captured(TorchDispatchMode):
    """A CUDA graph's equivalent on a CPU: the kernels that ran, which `replay` runs again on the same memory, with no Python between
    and no version counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        written = {
            id(t): t for _, args, kwargs, _ in self.calls for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        with torch.autograd._unsafe_preserve_version_counter(tuple(written.values())):
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(torch.utils._pytree.tree_leaves(out), torch.utils._pytree.tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.mark.parametrize("kind", ["fused", "foreach", "one by one"])
@pytest.mark.parametrize("watched", [True, False])
def test_a_captured_step_takes_the_rounding_with_it(kind: str, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs no hook and moves no counter, so what was captured must make what is computed with too."""
    model = made()
    plain = made(master_dtype=None)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    backward(model)
    optimizer.step()  # makes the averages
    if not watched:
        monkeypatch.setattr(masters.Held, "stepped", lambda self, moved: None)
    captured = Captured()
    with captured:
        optimizer.step()
    model.score(IDS, STARTS)
    before = [p.detach().clone() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    captured.replay()
    assert [p._version for p in model.parameters()] == versions
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    if watched:
        assert_serves(model, plain)
    else:
        with pytest.raises(LawBroken):
            assert_serves(model, plain)


def test_a_compiled_step_is_seen() -> None:
    model = made()
    plain = made(master_dtype=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        before = model.weights_version
        backward(model)
        step()
        assert model.weights_version != before
        assert_serves(model, plain)


def test_a_step_between_forward_and_backward_is_refused_as_torch_does() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    late = model.score(IDS, STARTS).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_has_masters_of_its_own(kind: str) -> None:
    model = made()
    model.score(IDS, STARTS)
    if kind == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert_same_bytes(other.score(IDS, STARTS), model.score(IDS, STARTS))
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True)
    backward(other)
    optimizer.step()
    assert_serves(other, made(master_dtype=None))
    assert_serves(model, made(master_dtype=None))
    assert other.weights_version != model.weights_version


def test_inference_mode_may_come_first() -> None:
    model = made()
    with torch.inference_mode():
        first = model.score(IDS, STARTS).clone()
    assert_same_bytes(first, model.score(IDS, STARTS))
    backward(model)


# --- checkpoints


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in Checkpoint.open(folder).tensors.items()}


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5", "glm5"])
def test_both_kinds_of_checkpoint_save_and_load(arch: str, tmp_path: Path) -> None:
    folder = make_tiny(arch, tmp_path / "tiny", layers=FIRST.get(arch, 1))
    model = zoo.load(folder, device="cpu", master_dtype="float32")
    model.save_pretrained(tmp_path / "same")
    assert_same_bytes(stored(tmp_path / "same"), stored(folder))
    assert (tmp_path / "same" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    backward(model)
    optimizer.step()
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "masters", masters=True)
    # what is published: a server and a plain trainer load it
    for role in ("rl", "serving"):
        assert zoo.load(tmp_path / "published", role=role, device="cpu").weights_version == model.weights_version
    # masters: taken up again bit by bit, or rounded once at load
    again = zoo.load(tmp_path / "masters", device="cpu", master_dtype=torch.float32)
    assert_same_bytes(dict(again.named_parameters()), dict(model.named_parameters()))
    assert again.program == model.program and again.weights_version == model.weights_version
    assert zoo.load(tmp_path / "masters", role="serving", device="cpu", dtype="bfloat16").weights_version == model.weights_version
    kept = {n for n, t in stored(tmp_path / "masters").items() if n in again.table_of().known and t.dtype != torch.float32}
    assert not kept
    with pytest.raises(ValueError, match="program 'aligned' is bfloat16"):
        zoo.load(tmp_path / "masters", device="cpu")
    # of a checkpoint of masters both kinds again
    again.save_pretrained(tmp_path / "published again")
    again.save_pretrained(tmp_path / "masters again", masters=True)
    assert_same_bytes(stored(tmp_path / "published again"), stored(tmp_path / "published"))
    assert_same_bytes(stored(tmp_path / "masters again"), stored(tmp_path / "masters"))


def test_frozen_codes_stay_codes_beside_masters(tmp_path: Path) -> None:
    """A checkpoint in FP8: what is not codes trains as masters, and a checkpoint of masters keeps the codes and their scales."""
    folder = make_tiny("qwen3", tmp_path / "tiny", layers=1, form="fp8")
    model = zoo.load(folder, device="cpu", program="fp8", master_dtype=torch.float32)
    plain = zoo.load(folder, device="cpu", program="fp8")
    codes = [name for name, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn]
    assert codes and {p.dtype for name, p in model.named_parameters() if name not in codes} == {torch.float32}
    backward(model)
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3).step()
    plain.load_weights(model.published_tensors())
    assert plain.weights_version == model.weights_version
    assert_same_bytes(model.score(IDS, STARTS), plain.score(IDS, STARTS))
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "masters", masters=True)
    assert zoo.load(tmp_path / "published", device="cpu", program="fp8").weights_version == model.weights_version
    again = zoo.load(tmp_path / "masters", device="cpu", program="fp8", master_dtype=torch.float32)
    assert_same_bytes(dict(again.named_parameters()), dict(model.named_parameters()))


def test_in_files_of_its_own(tmp_path: Path) -> None:
    """Where no checkpoint says how they are cut."""
    model = made()
    model.save_pretrained(tmp_path / "published", shard_bytes=10**5)
    model.save_pretrained(tmp_path / "masters", shard_bytes=10**5, masters=True)
    assert {t.dtype for t in stored(tmp_path / "published").values()} == {torch.bfloat16}
    assert {t.dtype for t in stored(tmp_path / "masters").values()} == {torch.float32}
    assert zoo.load(tmp_path / "published", device="cpu").weights_version == model.weights_version
    again = zoo.load(tmp_path / "masters", device="cpu", master_dtype=torch.float32)
    assert_same_bytes(dict(again.named_parameters()), dict(model.named_parameters()))


def test_state_dicts_of_both_dtypes_load() -> None:
    model = made()
    other = made(config=config_of("qwen3"))
    backward(model)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    other.load_state_dict(model.state_dict())
    assert_same_bytes(other.state_dict(), model.state_dict())
    narrow = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    other.load_state_dict(narrow)
    assert other.weights_version == model.weights_version
    assert_same_bytes(other.score(IDS, STARTS), model.score(IDS, STARTS))
    assert all(p.dtype == torch.float32 for p in other.parameters())


# --- what is refused


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_no_master_is_converted(convert: Callable[[Any], Any]) -> None:
    model = convert(made())
    with pytest.raises(ValueError, match="program 'aligned' needs torch.float32 masters: no model is converted after loading"):
        model.score(IDS, STARTS)


def test_a_lent_dtype_is_no_conversion() -> None:
    model = made().to(torch.float32).float()
    assert_serves(model, made(master_dtype=None))


def test_what_has_no_masters_is_refused(tmp_path: Path) -> None:
    config = config_of("qwen3")
    with pytest.raises(ValueError, match="master_dtype=torch.bfloat16 is not supported, only torch.float32"):
        made(master_dtype="bfloat16")
    with pytest.raises(ValueError, match="Qwen3ForServing trains nothing: master_dtype is a trainer's"):
        Qwen3ForServing.from_config(config, device="cpu", master_dtype=torch.float32)
    family, _ = find("qwen3")
    with pytest.raises(ValueError, match=r"program 'transformers' computes in torch.float32: .* leave master_dtype out"):
        family.rl.from_config(config, device="cpu", program="transformers", master_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"masters=True, but this Qwen3ForRL was loaded without master_dtype"):
        made(master_dtype=None).save_pretrained(tmp_path / "out", masters=True)
    assert not (tmp_path / "out").exists()


# --- other codecs


class Scaled(nn.Module):
    def __init__(self, codec: BlockScaled) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20, generator=torch.Generator().manual_seed(1)))
        hold(self, "weight", codec, torch.bfloat16)


def test_block_scaled_masters_compute_with_what_their_codes_decode_to() -> None:
    """FP8 weights under training: codes and scales are made again after each step, and the gradient goes straight through."""
    codec = replace(BlockScaled(4, 8), held=torch.float32)
    module = Scaled(codec)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        expected = codec.decode(*codec.encode(module.weight.detach())).bfloat16()
        found = computed(module)
        assert_same_bytes(found.detach(), expected)
        assert not torch.equal(found.detach(), module.weight.detach().bfloat16())
        (found * torch.linspace(-1, 1, 20)).sum().backward()
        assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32
        assert_same_bytes(module.weight.grad, torch.linspace(-1, 1, 20).bfloat16().float().expand(6, 20).contiguous())
        optimizer.step()
        optimizer.zero_grad()
