"""One of the processes of test_processes.py: `python sharded_worker.py RANK WORLD FOLDER`. FOLDER has a tiny checkpoint per family.

A model that FSDP2 shards over gloo is held against the whole one that each process has beside it; what differs is an exception.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import zoo
from zoo.common.checkpoint import Checkpoint
from zoo.common.engine import Engine
from zoo.common.registry import architectures
from zoo.common.rollouts import Completion, SamplingParams, check_draws
from zoo.testing import LawBroken, assert_same_bytes

IDS = torch.randint(300, (24,), generator=torch.Generator().manual_seed(5))
STARTS = torch.tensor([0, 9, 24])
LATE = timedelta(seconds=100)  # a process whose partner has failed ends too
ROUNDS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def refused(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except ValueError as error:
        assert words in str(error), f"{words!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"not refused: {words}")


class Process:
    def __init__(self, rank: int, folder: Path, mesh: DeviceMesh) -> None:
        self.rank = rank
        self.folder = folder
        self.mesh = mesh

    def sharded(self, model: Any) -> Any:
        wide = model.sharding_units()[: -1 - model.config.layers]
        for unit in model.sharding_units():
            fully_shard(unit, mesh=self.mesh, mp_policy=MixedPrecisionPolicy() if unit in wide or model._masters is None else ROUNDS)
        register_fsdp_forward_method(model, "score")
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return model

    def family(self, arch: str, master_dtype: torch.dtype | None) -> None:
        path = self.folder / arch
        whole: Any = zoo.load(path, device="cpu", master_dtype=master_dtype)
        model: Any = self.sharded(zoo.load(path, device="cpu", master_dtype=master_dtype))
        self.same(model, whole)
        for each in (model, whole):  # the same documents in every process, so that the mean of their gradients is each one
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
            (-each.score(IDS, STARTS).mean()).backward()
            with torch.no_grad():
                each.score(IDS, STARTS)  # leaves the root gathered
            optimizer.step()
        with torch.no_grad():
            assert_same_bytes(model.score(IDS, STARTS), whole.score(IDS, STARTS))
        self.same(model, whole)
        self.saved(arch, model, whole)
        if self.rank == 0:
            with torch.no_grad():
                whole.model.norm.weight[3] += 0.25
            try:  # the control
                assert_same_bytes(dict(self.published), dict(whole.published_tensors()))
            except LawBroken:
                return
            raise AssertionError("another weight was not seen")

    def same(self, model: Any, whole: Any) -> None:
        self.published = [(name, tensor.clone()) for name, tensor in model.published_tensors()]
        assert [name for name, _ in self.published] == [name for name, _ in whole.published_tensors()]
        assert_same_bytes(dict(self.published), dict(whole.published_tensors()))
        model.fingerprint().check(whole.fingerprint())

    def saved(self, arch: str, model: Any, whole: Any) -> None:
        out = self.folder / f"{arch}-{model._masters}"
        kinds = [{}, {"masters": True}] if model._masters else [{}]
        for number, kind in enumerate(kinds):
            model.save_pretrained(out / f"sharded{number}", **kind)
            dist.barrier()
            if self.rank == 0:
                whole.save_pretrained(out / f"whole{number}", **kind)
                found, expected = (
                    {path.name: path.read_bytes() for path in sorted((out / f"{name}{number}").iterdir())} for name in ("sharded", "whole")
                )
                assert found == expected
            dist.barrier()
        refused(lambda: model.save_pretrained(out / "sharded0"), "exists and is not an empty folder")

    def broadcast(self, arch: str) -> None:
        """A state dict of rank 0 alone, and what was loaded of it saved by a process that has no checkpoint of its own."""
        path = self.folder / arch
        source: Any = zoo.load(path, device="cpu", master_dtype=torch.float32)
        whole = source.state_dict() if self.rank == 0 else {}
        other = source if self.rank == 0 else type(source).from_config(source.config, seed=9, device="cpu", master_dtype=torch.float32)
        version = source.weights_version
        if self.rank == 0:
            whole = {name: tensor.clone() for name, tensor in whole.items()}
            for parameter in other.parameters():
                parameter.data.mul_(0.5)
        model = self.sharded(other)
        assert model.weights_version != version
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        assert model.weights_version == version
        with torch.no_grad():
            assert_same_bytes(
                model.score(IDS, STARTS), source.score(IDS, STARTS) if self.rank else zoo.load(path, device="cpu").score(IDS, STARTS)
            )
        kept: dict[str, Tensor] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert set(kept) == set(whole)  # of the first process alone
        model.save_pretrained(self.folder / f"{arch}-broadcast")
        refused(lambda: model.load_weights([]), "is sharded over processes: load a state dict")
        dist.barrier()
        stored, written = (Checkpoint.open(folder) for folder in (path, self.folder / f"{arch}-broadcast"))
        assert_same_bytes({n: t.read() for n, t in written.tensors.items()}, {n: t.read() for n, t in stored.tensors.items()})

    def draws(self, arch: str) -> None:
        """Each process has records of its own, or none; where one of them is refused, all processes say so."""
        path = self.folder / arch
        engine = Engine(zoo.load(path, role="serving", device="cpu"), pages=8, max_batch=2)
        params = SamplingParams(seed=7, top_p=0.9, max_new_tokens=5, ignore_eos=True)
        records = engine.generate([[1, 40, 50 + self.rank], [1, 7]], params)
        model = self.sharded(zoo.load(path, device="cpu", master_dtype=torch.float32))
        check_draws(model, *records)
        check_draws(model, *records[self.rank :])
        check_draws(model, *(records if self.rank else []))

        def changed(record: Completion) -> Completion:
            scores = list(record.log_probs)
            scores[2] = float(torch.nextafter(torch.tensor(scores[2]), torch.tensor(-torch.inf)))
            return replace(record, log_probs=tuple(scores))

        def other(record: Completion) -> Completion:
            return replace(record, sampling=replace(record.sampling, seed=None))

        for spoil, words in ((changed, "output token 2"), (other, "names no seed")):
            said = words if self.rank else f"process 1: {words}" if spoil is changed else "process 1: request"
            refused(lambda spoil=spoil: check_draws(model, *(map(spoil, records) if self.rank else records)), said)
        check_draws(model, *records)


def main() -> None:
    rank, world = map(int, sys.argv[1:3])
    folder = Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world, timeout=LATE)
    process = Process(rank, folder, init_device_mesh("cpu", (world,)))
    for arch in sorted(architectures()):
        process.family(arch, torch.float32)
    process.family("qwen3", None)
    process.broadcast("qwen3_5")
    for arch in ("qwen3", "glm5"):
        process.draws(arch)
    dist.destroy_process_group()
    print("all equal")


if __name__ == "__main__":
    main()
