"""Versions of what compiles and runs the kernels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform

import torch

PACKAGES = ("transformers", "flash-attn-4", "sgl-deep-gemm", "sglang-kernel", "tilelang", "sglang")


def toolchain(device: torch.device) -> dict[str, str]:
    """Versions of what compiles and runs the kernels."""
    out = {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.machine()}
    for package in ("triton", *PACKAGES):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out[package] = "not installed"
    if device.type == "cuda":
        out["cuda"] = str(torch.version.cuda)
        out["gpu"] = torch.cuda.get_device_name(device)
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        out["driver"] = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return out
