"""`python -m benchmarks ops|models|sglang|sglang_proof ...`: the same as `python -m benchmarks.<name>`."""

from __future__ import annotations

import importlib
import sys

NAMES = ("ops", "models", "sglang", "sglang_proof")


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"usage: python -m benchmarks {'|'.join(NAMES)} ...")
        return 2
    return int(importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
