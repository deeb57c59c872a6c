"""FP32 masters under FSDP2 and accelerate: mixed precision rounds them as the program does; what is FP32 in every program stays so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from zoo.common.registry import architectures, find
from zoo.testing import LawBroken, assert_same_bytes

accelerate = pytest.importorskip("accelerate")
IDS = torch.randint(300, (24,), generator=torch.Generator().manual_seed(5))
STARTS = torch.tensor([0, 9, 24])
ARCHS = sorted(architectures())
FIRST = {"qwen3_5": 4, "qwen3_5_moe": 4, "glm5": 3}  # layers that have every kind; else 1
ROUNDS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def made(arch: str, master_dtype: Any = torch.float32) -> Any:
    family, named = find(arch)
    return family.rl.from_config(named.sizes["tiny"].first_layers(FIRST.get(arch, 1)), seed=3, device="cpu", master_dtype=master_dtype)


def wide(model: Any) -> list[Any]:
    """The units whose parameters are FP32 in every program."""
    return model.sharding_units()[: -1 - model.config.layers]


def sharded(model: Any, mesh: Any, policy: MixedPrecisionPolicy) -> Any:
    without = wide(model)
    for unit in model.sharding_units():
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy() if unit in without else policy)
    register_fsdp_forward_method(model, "score")
    return model


def trained(model: Any, call: Callable[[Any], Tensor], steps: int = 2) -> tuple[list[Tensor], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = call(model)
        losses.append(loss.detach())
        loss.backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return losses, {name.removeprefix("module."): p.detach() for name, p in whole.items()}


def score(model: Any) -> Tensor:
    return -model.score(IDS, STARTS).mean()


def loss(model: Any) -> Tensor:
    return model(IDS, cu_seqlens=STARTS, labels=IDS).loss


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("policy", [ROUNDS, MixedPrecisionPolicy()], ids=["rounds", "no policy"])
def test_sharded_masters_train_as_whole_ones(arch: str, policy: MixedPrecisionPolicy, one_rank: Any) -> None:
    model = sharded(made(arch), one_rank, policy)
    if arch == "qwen3":
        model.gradient_checkpointing_enable()
    expected = trained(made(arch), score)
    assert_same_bytes(trained(model, score), expected)
    assert not any(held.kept or held._tensor is not None for held in model._held.values())
    with pytest.raises(LawBroken):
        assert_same_bytes(trained(made(arch), score, 3)[1], expected[1])


@pytest.mark.parametrize("policy", [ROUNDS, MixedPrecisionPolicy()], ids=["rounds", "no policy"])
def test_a_tied_head_shards_with_its_embedding(policy: MixedPrecisionPolicy, one_rank: Any) -> None:
    family, named = find("qwen3")
    config = replace(named.sizes["tiny"].first_layers(1), tied=True)
    model, whole = (family.rl.from_config(config, seed=3, device="cpu", master_dtype=torch.float32) for _ in range(2))
    sharded(model, one_rank, policy)
    if policy is ROUNDS:  # FSDP2 adds the two gradients as it gathered the weight, in BF16; whole masters add them in FP32
        score(model).backward()
        score(whole).backward()
        found, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (model, whole))
        tied = [grads.pop("model.embed.weight") for grads in (found, expected)]
        assert_same_bytes({name: gradient.full_tensor() for name, gradient in found.items()}, expected)
        summed = tied[0].full_tensor()
        assert torch.equal(summed, summed.bfloat16().float()) and not torch.equal(summed, tied[1])
        assert torch.allclose(summed, tied[1], rtol=2**-7, atol=1e-6)
    else:
        assert_same_bytes(trained(model, score), trained(whole, score))


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if wide(made(arch))])
def test_a_policy_on_what_is_fp32_in_every_program_is_refused(arch: str, one_rank: Any) -> None:
    model = made(arch)
    for unit in model.sharding_units():
        fully_shard(unit, mesh=one_rank, mp_policy=ROUNDS)
    with pytest.raises(ValueError, match=r"^\w+: \w+ is torch.bfloat16, program 'aligned' reads torch.float32"):
        loss(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_another_rounding_is_refused(dtype: torch.dtype, one_rank: Any) -> None:
    model = sharded(made("qwen3"), one_rank, MixedPrecisionPolicy(param_dtype=dtype))
    with pytest.raises(ValueError, match=f"embed.weight is {dtype}, program 'aligned' needs torch.float32 masters"):
        loss(model)


def test_converted_shards_are_refused(one_rank: Any) -> None:
    model = sharded(made("qwen3"), one_rank, ROUNDS).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"is torch.bfloat16, program 'aligned' needs torch.float32 masters"):
        model.score(IDS, STARTS)


def test_a_method_that_fsdp2_does_not_know_is_refused_in_one_sentence(one_rank: Any) -> None:
    model = made("qwen3")
    fully_shard(model, mesh=one_rank)
    with pytest.raises(ValueError, match=r"not gathered: register_fsdp_forward_method\(model, name of the method\)"):
        model.score(IDS, STARTS)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate.state.AcceleratorState._reset_state(True)  # another test's, if a trainer made one: a process has one state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5"])
def test_accelerate_s_mixed_precision_moves_no_byte(arch: str, accelerator: Any) -> None:
    model = accelerator.prepare(made(arch))
    assert_same_bytes(trained(model, loss), trained(made(arch), loss))


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5", "glm5"])
def test_accelerate_s_fsdp2(arch: str, one_rank: Any) -> None:
    """Its own wrapping, which on a CPU nothing else reaches: every layer and the rest under one policy, after what is FP32 in every
    program was sharded without one."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        mixed_precision_policy=ROUNDS,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["DecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    stands_in = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="bf16", is_main_process=True, device="cpu")
    model = made(arch)
    for unit in wide(model):
        fully_shard(unit, mesh=one_rank)
    prepared = fsdp2_prepare_model(stands_in, model)
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in prepared.parameters())
    assert_same_bytes(trained(prepared, loss), trained(made(arch), loss))
