"""`python -m benchmarks.masters ARCH`: a whole train step (score, backward, fused AdamW) with FP32 masters beside BF16 parameters.

Three contenders one after another, since each holds the whole model: BF16 parameters, `master_dtype=torch.float32`, and masters that a
loop copies into BF16 parameters itself. Before a time counts, the model with masters scores the bytes of a BF16 model that loaded what
it publishes. Times are wall-clock medians of whole steps, the device waited for.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import USUAL_HELP, USUAL_SIZES, Recorder, about, geometry, table

RATE = 1e-5
GIB = 2**30


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.masters", description=__doc__)
    made.add_argument("arch", choices=tuple(USUAL_SIZES))
    made.add_argument("--size", help=USUAL_HELP)
    made.add_argument("--layers", type=int)
    made.add_argument("--documents", type=int, default=4)
    made.add_argument("--length", type=int, default=4096, help="tokens of each document")
    made.add_argument("--steps", type=int, default=5, help="timed, after two that are not")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--out", type=Path, help="append a JSON row to this file")
    return made


class Bench:
    """One geometry and one batch of documents."""

    def __init__(self, config: Any, trainer: type[Any], device: torch.device, documents: int, length: int, steps: int) -> None:
        self.config = config
        self.trainer = trainer
        self.device = device
        self.steps = steps
        ids = torch.randint(config.vocabulary, (documents * length,), generator=torch.Generator().manual_seed(0))
        self.ids = ids.to(device)
        self.starts = torch.arange(0, documents * length + 1, length, device=device)

    def model(self, master_dtype: torch.dtype | None = None) -> Any:
        return self.trainer.from_config(self.config, device=self.device, master_dtype=master_dtype)

    def backward(self, model: Any) -> None:
        scored: Tensor = model.score(self.ids, self.starts)
        (-scored.sum() / len(self.ids)).backward()

    def plain(self) -> Callable[[], None]:
        return self._own(self.model())

    def masters(self) -> Callable[[], None]:
        return self._own(self.model(torch.float32))

    def _own(self, model: Any) -> Callable[[], None]:
        """The optimizer moves the model's own parameters."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

        def step() -> None:
            self.backward(model)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def by_hand(self) -> Callable[[], None]:
        """FP32 copies of BF16 parameters, which are written after every step."""
        model = self.model()
        pairs = [(p, p.detach().float().requires_grad_()) for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW([master for _, master in pairs], lr=RATE, fused=True)

        def step() -> None:
            self.backward(model)
            with torch.no_grad():
                for parameter, master in pairs:
                    master.grad = None if parameter.grad is None else parameter.grad.float()
                    parameter.grad = None
                optimizer.step()
                for parameter, master in pairs:
                    parameter.copy_(master)
            optimizer.zero_grad()

        return step

    def measure(self, make: Callable[[], Callable[[], None]]) -> tuple[float, float]:
        """Milliseconds of a step, and GiB at its peak, of the whole process on a CPU."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        step = make()
        times = []
        for turn in range(self.steps + 2):
            begin = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            if turn >= 2:  # the first compiles, the second has the averages for the first time
                times.append((time.perf_counter() - begin) * 1e3)
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        del step
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        return statistics.median(times), peak / GIB

    @torch.no_grad()
    def differing(self) -> int:
        """Bytes of log-probabilities in which masters after a step differ from a BF16 model with what they publish."""
        model = self.model(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with torch.enable_grad():
            self.backward(model)
        optimizer.step()
        optimizer.zero_grad()
        plain = self.model()
        plain.load_weights(model.published_tensors())
        found, expected = (m.score(self.ids, self.starts).view(torch.uint8) for m in (model, plain))
        return int((found != expected).sum())


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        device = torch.device(given.device)
        size = given.size or USUAL_SIZES[given.arch]
        config, trainer, _ = geometry(given.arch, size, given.layers)
        record = Recorder(given.out, about(device, False))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bench = Bench(config, trainer, device, given.documents, given.length, given.steps)
    differing = bench.differing()
    gc.collect()
    contenders = {"BF16 parameters": bench.plain, "FP32 masters": bench.masters, "masters by hand": bench.by_hand}
    found = {name: bench.measure(make) for name, make in contenders.items()}
    plain = found["BF16 parameters"]
    ours = found["FP32 masters"]
    record.add(
        {
            "kind": "masters",
            "arch": given.arch,
            "size": size,
            "layers": config.layers,
            "documents": given.documents,
            "length": given.length,
            "ms": {name: ms for name, (ms, _) in found.items()},
            # a CPU tells the highest of the whole process so far, which is no contender's own
            "peak_gib": {name: gib for name, (_, gib) in found.items()} if device.type == "cuda" else None,
            "ratio": None if differing else ours[0] / plain[0],
            "differing": differing,
        }
    )
    print(table([(name, ms, gib if device.type == "cuda" else None) for name, (ms, gib) in found.items()], ("step", "ms", "peak GiB")))
    print(f"{differing} bytes of log-probabilities differ from a BF16 model with the published weights")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
