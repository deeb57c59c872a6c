"""A server on the trainer's own parameters: no second copy, the same bytes, and refusals."""

from __future__ import annotations

import pytest
import torch

from zoo.common.registry import architectures
from zoo.testing import assert_same_bytes
from zoo.verify.asked import Asked
from zoo.verify.subject import build


@pytest.mark.parametrize("arch", sorted(architectures()))
def test_no_byte_is_held_twice(arch: str) -> None:
    shared = build(arch, checkpoint=None, device="cpu", shared=True)
    mine = dict(shared.trainer.named_parameters())
    theirs = dict(shared.server.named_parameters())
    assert list(mine) == list(theirs) and all(mine[name].data_ptr() == theirs[name].data_ptr() for name in mine)
    assert not any(p.requires_grad for p in theirs.values())
    assert shared.server.weights_version == shared.trainer.weights_version
    apart = build(arch, checkpoint=None, device="cpu")
    assert shared.server.weights_version == apart.server.weights_version
    with torch.no_grad():
        name = next(name for name, p in mine.items() if p.requires_grad)
        mine[name].mul_(2)
    assert_same_bytes(theirs[name], mine[name].detach())
    shared.server.weights_changed()
    assert shared.server.weights_version == shared.trainer.weights_version != apart.server.weights_version


def test_what_can_t_share_is_refused() -> None:
    plain = build("qwen3", checkpoint=None, device="cpu")
    masters = build("qwen3", checkpoint=None, device="cpu", masters=True)
    other = build("glm5", checkpoint=None, device="cpu")
    server = type(plain.server)
    for call, sentence in (
        (lambda: server.sharing_weights(masters.trainer), "this Qwen3ForRL has FP32 masters, which serving does not read"),
        (lambda: server.sharing_weights(other.trainer), "Qwen3ForServing has no weights of a GLMForRL, another family's"),
        (lambda: type(plain.trainer).sharing_weights(plain.trainer), "wants gradients of parameters of its own"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    with pytest.raises(ValueError, match="--shared-weights: rung 5 hands weights from the trainer to the server"):
        Asked("qwen3", None, None, "cpu", None, None, (3, 5), None, None, "embedded", 0, None, shared_weights=True)
