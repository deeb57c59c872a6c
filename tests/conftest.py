"""Seeds, markers and fixtures that every test shares."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import hypothesis
import numpy
import pytest
import torch

HAS_TRITON = find_spec("triton") is not None

# Triton reads it when it is imported, so it must be set before any test module is; where there is a GPU kernels run there.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("zoo", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("zoo")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of pytest-xdist's workers: they share the cores
        torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    present = torch.cuda.device_count()
    if item.get_closest_marker("gpu") and not present:
        pytest.skip("needs a CUDA device; there is none")
    several = item.get_closest_marker("gpus")
    if several and present < several.args[0]:
        pytest.skip(f"needs {several.args[0]} CUDA devices; there are {present}")
    if item.get_closest_marker("interpreted"):
        if not HAS_TRITON:
            pytest.skip("needs triton, which is not installed")
        if present:
            pytest.skip("runs in Triton's interpreter on machines without a GPU; the gpu tests cover the kernels here")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> int:
    """Seeds every generator from the test's own name, so that order, selection and worker change nothing."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def _poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = function(*args, **kwargs)
        if made.is_floating_point() or made.is_complex():
            with torch.no_grad():
                made.fill_(torch.nan)
        return made

    return empty


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats from torch.empty and its kin start as NaN, so that a byte nobody wrote shows in the result."""
    for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty", "new_empty_strided"))):
        for name in names:
            monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
