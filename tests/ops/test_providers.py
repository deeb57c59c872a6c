"""Every provider brings what its op asks for, and the type checker sees one that doesn't."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from zoo.common.ops import CONTRACTS
from zoo.common.ops.contract import Provider

PROVIDERS = [
    pytest.param(name, provider, id=f"{name}-{provider.name}") for name, contract in CONTRACTS.items() for provider in contract.providers
]

WRONG = """
from torch import Tensor

from zoo.common.ops.contract import Provider
from zoo.common.ops.swiglu import Functions


def forward(gate_up: str) -> Tensor:
    raise AssertionError(gate_up)


def backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    return grad


def load() -> Functions:
    return Functions(forward, backward)


def lacks() -> Functions:
    return Functions(backward=backward)


def call(provider: Provider[Functions], x: Tensor) -> Tensor:
    return provider.functions.forward(x, None, None, None)
"""


@pytest.mark.parametrize("name,provider", PROVIDERS)
def test_a_provider_brings_its_ops_functions(name: str, provider: Provider) -> None:
    if provider.device == "cuda" and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    if not provider.installed():
        pytest.skip(f"needs {', '.join(provider.lacks())}")
    usual = CONTRACTS[name].providers[0].functions
    assert type(provider.functions) is type(usual)
    assert all(callable(function) for function in provider.functions)
    assert provider.functions is provider.functions  # imported once


def test_the_type_checker_sees_a_wrong_function(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    snippet = tmp_path / "wrong.py"
    snippet.write_text(WRONG)
    said, _, _ = api.run(["--follow-imports=silent", "--ignore-missing-imports", str(snippet)])
    for expected in ('Argument 1 to "Functions" has incompatible type', 'Missing positional argument "forward"', "Too many arguments"):
        assert expected in said, said
