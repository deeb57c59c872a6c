"""Providers that register themselves when imported, as an outside package's would: what worker processes of `qualify` run in tests."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import torch
from torch import Tensor

from zoo.common.ops import CONTRACTS
from zoo.common.ops.contract import Provider
from zoo.common.ops.linear.reference import linear as reference_linear


def equal(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """Another way to the same bytes; slow where N is 40, deadly where N is 56."""
    if weight_NK.shape[0] == 40:
        time.sleep(600)
    if weight_NK.shape[0] == 56:
        os.kill(os.getpid(), signal.SIGABRT)
    return torch.cat([reference_linear(row, weight_NK, out_dtype, k_parts) for row in x_RK.split(16)])


def unequal(x_RK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, k_parts: int) -> Tensor:
    """Right in the program's dtype, wrong where FP32 is asked for: each part of a shape must be compared."""
    y = reference_linear(x_RK, weight_NK, out_dtype, k_parts)
    return y + 1 if out_dtype == torch.float32 else y


def register() -> None:
    contract = CONTRACTS["linear"]
    if not any(p.name == "equal" for p in contract.providers):
        usual = next(p for p in contract.providers if p.name == "reference").functions
        planted = [
            Provider("equal", "reference", "cpu", lambda: usual._replace(forward=equal)),
            Provider("unequal", "reference", "cpu", lambda: usual._replace(forward=unequal)),
        ]
        replace(contract, providers=(*planted, *contract.providers))


register()
