"""FP32 masters on a GPU: a step that a CUDA graph captured, alone or with forward and backward, never leaves a stale rounding."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.common import masters
from zoo.qwen3 import SIZES, Qwen3ForRL
from zoo.testing import LawBroken, assert_same_bytes

pytestmark = pytest.mark.gpu

CONFIG = replace(SIZES["tiny"], layers=2)
IDS = torch.randint(512, (300,), generator=torch.Generator().manual_seed(5))
STARTS = torch.tensor([0, 131, 300], dtype=torch.int32)


def made(master_dtype: Any = torch.float32) -> Any:
    return Qwen3ForRL.from_config(CONFIG, seed=3, device="cuda", master_dtype=master_dtype)


def score(model: Any) -> Tensor:
    scored: Tensor = model.score(IDS.cuda(), STARTS.cuda())
    return scored


def assert_serves(model: Any) -> None:
    plain = made(None)
    plain.load_weights(model.published_tensors())
    with torch.no_grad():
        assert_same_bytes(score(model), score(plain))
    for entry, piece in model.table_of().pieces():
        assert_same_bytes(piece.of(plain.get_parameter(entry.ours).detach()), piece.of(model.get_parameter(entry.ours).detach()).bfloat16())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, capturable=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True, capturable=True),
    "one by one": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False, capturable=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", ["eager", "captured", "captured, unwatched"])
def test_a_step_takes_the_rounding_with_it(kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # averages are made before the capture
        (-score(model).mean()).backward()
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    if how == "eager":
        optimizer.step()
        assert_serves(model)
        return
    if how == "captured, unwatched":
        monkeypatch.setattr(masters.Held, "stepped", lambda self, moved: None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    with torch.no_grad():
        score(model)
    before = model.model.norm.weight.detach().clone()
    for _ in range(3):
        graph.replay()
    assert not torch.equal(model.model.norm.weight, before)
    if how == "captured":
        assert_serves(model)
        return
    with pytest.raises(LawBroken):
        assert_serves(model)


def test_fp32_gradients_and_memory() -> None:
    """Beside BF16 parameters masters take 4 bytes more a parameter, their gradients 2 more."""
    used = {}
    (-score(made()).mean()).backward()  # what libraries keep once they were used
    for dtype in (None, torch.float32):
        gc.collect()
        torch.cuda.synchronize()
        begin = torch.cuda.memory_allocated()
        model = made(dtype)
        (-score(model).mean()).backward()
        assert all(p.grad.dtype == (dtype or torch.bfloat16) for p in model.parameters())
        used[dtype] = torch.cuda.memory_allocated() - begin
        count = sum(p.numel() for p in model.parameters())
        del model
    assert 5.5 < (used[torch.float32] - used[None]) / count < 6.5
