"""Stock SGLang as it comes, with deterministic inference, and with the zoo's backend: tokens/s on one machine, in turns.

    python -m benchmarks.sglang qwen3 --size 8b [--layers N] [--backends fa3,triton] [--out rows.jsonl] [--profile]

Weights are random ones of realistic scale, written once; DeepGEMM is qualified for this GPU first, so that no fallback is measured.
Each contender is an `sglang.Engine` in a process of its own (benchmarks/engines.py). All start together and one measures at a time,
while the others, ready or late, stand still; beside one that comes late all others are measured again. `--sequential` runs one after
another, where not all fit the GPU. The prefix cache is flushed between calls and log-probabilities are returned. `stock` is as it
comes, its prefill graphs included; `eager-prefill` (if asked for by --contenders) is stock without them.
A row is written the moment it is measured; a rival's row carries the zoo's speed over it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.admit import admit
from benchmarks.common import USUAL_HELP, USUAL_SIZES, Budget, Recorder, about, check_served, check_server, geometry, has_slots, table
from benchmarks.engines import PROMPT, Contender, Measure
from zoo.common.registry import architectures

LOADS = "64x128,1x128,64x1024,32x128,32x1024,1x1024"  # in the order measured: the first rows come early
CONTEXT = 2048  # one key segment of heads of 128: the plugin captures one bound
MARGIN = 16384  # slots beyond what the largest load holds: whole pages, and the page more that SGLang reserves for each request
SLOTS = 640  # whole pages of 80 and of 128 tokens
AIM = 0.97
START_SHARE = 0.6  # of the budget that may pass before what is ready is measured without the rest
ZOO = "zoo"


class Entrant(Protocol):
    """What a race needs of a contender."""

    name: str
    why: str
    ready: dict[str, Any] | None

    @property
    def state(self) -> str: ...
    def start(self) -> None: ...
    def ask(self, measure: Measure, seconds: float) -> dict[str, Any]: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...
    def tail(self) -> str: ...


def contenders(backends: Sequence[str], wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> engine arguments, in the order of their first turn. ValueError for one of `wanted` that there is not."""
    stock = {f"stock {b}": {"attention_backend": b} for b in backends}
    eager = {f"eager-prefill {b}": {"attention_backend": b, "cuda_graph_backend_prefill": "disabled"} for b in backends}
    fixed = {f"deterministic {b}": {"attention_backend": b, "enable_deterministic_inference": True} for b in backends}
    made = {ZOO: {"attention_backend": "zoo"}, **stock, **eager, **fixed}
    kinds = list(dict.fromkeys(name.split()[0] for name in made))
    for name in wanted:
        if name not in kinds:
            raise ValueError(f"--contenders {name!r}: there are {', '.join(kinds)}")
    return {name: arguments for name, arguments in made.items() if name.split()[0] in wanted}


def engine_arguments(path: str, loads: Sequence[Measure], context: int | None, hybrid: bool) -> dict[str, Any]:
    """What all contenders share. `hybrid`: stock SGLang would give its own pool of states most of the GPU."""
    most = max(load.batch for load in loads)
    slots = max(load.batch * (PROMPT + load.new) for load in loads) + MARGIN
    longest = max(PROMPT + load.new for load in loads)
    return {
        "model_path": path,
        "skip_tokenizer_init": True,
        "max_total_tokens": -(-slots // SLOTS) * SLOTS,
        "max_running_requests": most + 1,  # SGLang's admission counts a request whose prompt is cut twice
        "cuda_graph_bs_decode": sorted({load.batch for load in loads}),
        "mem_fraction_static": 0.9,
        "context_length": context or max(CONTEXT, -(-(longest + 8) // CONTEXT) * CONTEXT),
        "log_level": "info",
        **({"max_mamba_cache_size": 3 * most} if hybrid else {}),
    }


def plan(loads: Sequence[Measure]) -> list[Measure]:
    """The first load, the two short measurements, the other loads."""
    most = max(load.batch for load in loads)
    return [loads[0], Measure("prefill", most), Measure("first", 1), *loads[1:]]


def parse_loads(text: str) -> list[Measure]:
    """ "64x128,64x128@0.95", with top-p behind the @; ValueError naming what is not batch x new."""
    out = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:@(0?\.\d*[1-9]\d*))?", part)
        if not found:
            raise ValueError(f"--loads {part!r} is not batch x new tokens, like 64x128, or with top-p behind it, like 64x128@0.95")
        out.append(Measure("load", int(found[1]), int(found[2]), float(found[3] or 1)))
    return out


class Race:
    """Contenders measured in turns, best of `turns`, rows as they come."""

    def __init__(
        self,
        record: Recorder,
        budget: Budget,
        shared: dict[str, Any],
        say: Callable[[str], None],
        turns: int = 2,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.record = record
        self.budget = budget
        self.shared = shared
        self.say = say
        self.turns = turns
        self.wait = pause
        self.best: dict[str, dict[str, float]] = {}  # contender -> measure -> tokens/s, or ms
        self.took: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.entrants: list[Entrant] = []  # that run side by side

    def together(self, entrants: Sequence[Entrant], measures: Sequence[Measure]) -> None:
        """All start; who is ready is measured while the others stand still, deterministic ones last to be waited for.

        Who comes late is measured beside all that were before: a host that still compiles slows the first window.
        """
        self.entrants = list(entrants)
        for entrant in entrants:
            entrant.start()
        early = [e for e in entrants if not e.name.startswith("deterministic")]
        self.settle(early, self.budget.left * START_SHARE)
        if not self._comparable(early):  # one number of whoever comes first; then the others have the time that a comparison leaves
            for entrant in self.arrivals(entrants, [])[:1]:
                self._measure(entrant, measures[0], 0)
            reserve = 2 * self.turns * self.took.get(measures[0].label, measures[0].seconds)
            self.until(lambda: self._comparable(early), self.budget.left - reserve)
        measured: list[Entrant] = []
        while fresh := self.arrivals(entrants, measured):
            if self.best and not any(e in early for e in fresh):
                self.settle(early, self.budget.left / 2)
                fresh = self.arrivals(entrants, measured)
            for entrant in self._those(entrants, "starting"):
                self.say(f"{entrant.name} is not ready yet: it stands still while the others are measured")
            self.turn([*fresh, *measured], measures)
            measured += fresh
        for entrant in self._those(entrants, "failed") + self._those(entrants, "starting"):
            self.give_up(entrant, entrant.why or "it was not ready when the budget was spent")

    def arrivals(self, entrants: Sequence[Entrant], measured: Sequence[Entrant]) -> list[Entrant]:
        """Who is ready and not among `measured`, as soon as there is one; none if nobody starts any more or the budget is spent."""

        def found() -> list[Entrant]:
            return [e for e in self._those(entrants, "ready") if e not in measured]

        self.until(lambda: bool(found()) or not self._those(entrants, "starting"), self.budget.left)
        return found()

    def _comparable(self, early: Sequence[Entrant]) -> bool:
        """Whether the zoo and another of `early` are ready, or none of them starts any more."""
        ready = [e.name for e in self._those(early, "ready")]
        return (ZOO in ready and len(ready) > 1) or not self._those(early, "starting")

    def one_by_one(self, entrants: Iterable[Entrant], measures: Sequence[Measure], profile: bool = False) -> None:
        """Each starts when the one before has ended, so its decode step is profiled whether the aim is missed or not."""
        for entrant in entrants:
            entrant.start()
            self.settle([entrant], self.budget.left)
            if entrant.state == "ready":
                self.turn([entrant], measures)
                if profile:
                    self.profile([entrant], measures)
            else:
                self.give_up(entrant, entrant.why or "it was not ready when the budget was spent")
            entrant.close()

    def settle(self, entrants: Sequence[Entrant], seconds: float) -> None:
        """Until each is ready or failed, or the time is over."""
        self.until(lambda: not self._those(entrants, "starting"), seconds)

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        end = self.budget.left - seconds
        while not done() and self.budget.left > max(end, 0):
            self.wait(0.2)

    def turn(self, entrants: Sequence[Entrant], measures: Sequence[Measure]) -> None:
        """All measures `turns` times; every other time the contenders' order is reversed."""
        for number in range(self.turns):
            for measure in measures:
                for entrant in entrants[:: -1 if number % 2 else 1]:
                    if entrant.name not in self.failed:
                        self._measure(entrant, measure, number)

    def _ask(self, entrant: Entrant, measure: Measure) -> dict[str, Any]:
        """The others, ready or late, stand still: an idle scheduler polls, and takes a core from the one that is measured."""
        others = [other for other in self.entrants if other is not entrant]
        for other in others:
            other.pause()
        try:
            return entrant.ask(measure, self.budget.left)
        finally:
            for other in others:
                other.resume()

    def _measure(self, entrant: Entrant, measure: Measure, number: int) -> None:
        guess = self.took.get(measure.label, measure.seconds)
        if not self.budget.allows(f"{entrant.name} {measure.label}", 1.1 * guess):
            return
        try:
            found = self._ask(entrant, measure)
        except ValueError as error:
            if entrant.state == "failed":
                self.give_up(entrant, str(error))
            else:
                self.record.add({**self._row(entrant), "what": measure.label, "failed": str(error)})
                self.say(f"{entrant.name} {measure.label}: {error}")
            return
        self.took[measure.label] = max(found["took_s"] + found["warm_s"], self.took.get(measure.label, 0.0))
        mine = self.best.setdefault(entrant.name, {})
        value = found[measure.unit]
        before = mine.get(measure.label)
        better = min if measure.unit == "ms" else max
        mine[measure.label] = value if before is None else better(value, before)
        ratio = self.zoo_over(entrant.name, measure)
        self.record.add({**self._row(entrant), "what": measure.label, **found, "turn": number, "zoo_over_it": ratio})
        text = f"{value:.1f} {'ms' if measure.unit == 'ms' else 'tokens/s'}"
        self.say(f"{entrant.name} {measure.label}: {text}{'' if ratio is None else f', zoo at {100 * ratio:.1f} % of its speed'}")

    def zoo_over(self, rival: str, measure: Measure) -> float | None:
        """The zoo's speed over a rival's: above 1 where the zoo is faster."""
        ours, theirs = (self.best.get(name, {}).get(measure.label) for name in (ZOO, rival))
        if rival == ZOO or ours is None or theirs is None:
            return None
        return theirs / ours if measure.unit == "ms" else ours / theirs

    def missed(self, measures: Sequence[Measure], aim: float) -> list[Measure]:
        """Loads, and prefill, at which the zoo stays below `aim` of a stock contender's speed."""
        stock = [name for name in self.best if name != ZOO and not name.startswith("deterministic")]
        return [m for m in measures if m.kind in ("load", "prefill") and any((self.zoo_over(s, m) or aim) < aim for s in stock)]

    def profile(self, entrants: Iterable[Entrant], measures: Sequence[Measure]) -> None:
        """The kernels of a decode step, or of a prefill's batches, at each batch size of `measures`, the zoo's and stock's."""
        stages = {"load": "decode profile", "prefill": "prefill profile"}
        for kind, batch in sorted({(stages[m.kind], m.batch) for m in measures if m.kind in stages}):
            for entrant in entrants:
                if entrant.state == "ready" and not entrant.name.startswith("deterministic"):
                    self._profile(entrant, Measure(kind, batch))

    def _profile(self, entrant: Entrant, measure: Measure) -> None:
        what = f"{measure.kind} at {measure.batch}"
        if not self.budget.allows(f"{entrant.name} {what}", measure.seconds):
            return
        try:
            found = self._ask(entrant, measure)
        except ValueError as error:
            self.say(f"{entrant.name} {what}: {error}")
            return
        self.record.add({**self._row(entrant), "what": measure.kind, "batch": measure.batch, **found})
        kernels = [[k["kernel"], k["us"], k["launches"]] for k in found["kernels"]]
        head = f"a step {found['step_us']:.0f} us, GPU busy {100 * found['busy']:.0f} %, {found['launches']:.0f} launches"
        self.say(f"{entrant.name}, {what}: {head}\n{table(kernels, ('kernel', 'us', 'launches'))}")

    def give_up(self, entrant: Entrant, why: str) -> None:
        if entrant.name in self.failed:
            return
        self.failed[entrant.name] = why
        self.record.add({**self._row(entrant), "failed": why[-600:]})
        self.say(f"{entrant.name} did not run: {why}\n{entrant.tail()}")

    def _row(self, entrant: Entrant) -> dict[str, Any]:
        told = {k: v for k, v in (entrant.ready or {}).items() if k != "ready"}
        if "qualification" in told:  # from here on every row says which zoo it was compared with
            self.shared["qualification"] = told["qualification"]
        return {"kind": "sglang", "contender": entrant.name, **self.shared, **told}

    @staticmethod
    def _those(entrants: Sequence[Entrant], state: str) -> list[Entrant]:
        return [e for e in entrants if e.state == state]

    def ratios(self, measures: Sequence[Measure]) -> None:
        """A last row per rival: the zoo's best over its best."""
        for rival in (name for name in self.best if name != ZOO):
            found = {m.label: self.zoo_over(rival, m) for m in measures}
            self.record.add({"kind": "sglang ratio", **self.shared, "rival": rival, "zoo_over_it": found})

    def summary(self, measures: Sequence[Measure]) -> str:
        names = list(dict.fromkeys(m.label for m in measures))
        body = [[name, *(found.get(label) for label in names)] for name, found in self.best.items()]
        for rival in (name for name in self.best if name != ZOO):
            ratios = {m.label: self.zoo_over(rival, m) for m in measures}
            body.append([f"zoo over {rival}", *ratios.values()])
        return table(body, ("tokens/s, first token in ms", *names))


def make_weights(arch: str, size: str, layers: int | None, folder: Path) -> None:
    """Random weights of realistic scale as a published checkpoint."""
    config, _, server = geometry(arch, size, layers)
    server.from_config(config).save_pretrained(folder)


def qualify(arch: str, size: str, layers: int | None, seconds: float) -> list[str]:
    """Verdicts for every shape of the model; one line per shape with the provider that runs it."""
    import torch

    from zoo.common.program import resolve
    from zoo.verify.qualify import targets_of

    config, _, server = geometry(arch, size, layers)
    program = resolve("aligned", "cuda", torch.bfloat16)
    with torch.device("meta"):
        targets = targets_of(server(config, program))
    return admit(targets, program, seconds)


def prepare(given: argparse.Namespace, checkpoint: Path, env: dict[str, str], budget: Budget, say: Callable[[str], None]) -> None:
    """Weights and qualification, side by side in processes of their own. ValueError if the weights can't be made."""
    asked = [given.arch, "--size", given.size, *([] if given.layers is None else ["--layers", str(given.layers)])]
    jobs = {"qualify": ["--job", "qualify", "--budget", str(budget.left / 3)]}
    if not (checkpoint / "config.json").exists():
        jobs["weights"] = ["--job", "weights", "--checkpoint", str(checkpoint)]
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sglang", *asked, *job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        for name, job in jobs.items()
    }
    for name, process in started.items():
        try:
            text, _ = process.communicate(timeout=max(budget.left, 1))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        last = "\n".join(text.strip().splitlines()[-12:])
        say(f"{name} done" + (f":\n{last}" if name == "qualify" or process.returncode else ""))
        if name == "weights" and process.returncode:
            raise ValueError(f"the weights could not be made: {last}")


def environment(folder: Path) -> dict[str, str]:
    """SGLang moves DeepGEMM's cache to a folder of its own: one folder for it and for the qualification saves a compilation each."""
    cache = os.environ.get("SGLANG_DG_CACHE_DIR", str(folder))
    return {**os.environ, "SGLANG_DG_CACHE_DIR": cache, "DG_JIT_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.sglang", description=__doc__)
    made.add_argument("arch", choices=tuple(architectures()))
    made.add_argument("--size", help=USUAL_HELP)
    made.add_argument("--layers", type=int, help="the first layers only")
    made.add_argument("--backends", default="fa3", help="stock attention backends, by commas")
    made.add_argument("--contenders", help="of zoo, stock, eager-prefill, deterministic, by commas; all but eager-prefill by default")
    made.add_argument("--loads", default=LOADS, help="batch x new tokens (@top-p), by commas, in the order measured")
    made.add_argument("--turns", type=int, default=2, help="of every measure; the contenders' order is reversed between them")
    made.add_argument("--context", type=int, help=f"the servers' context length; {CONTEXT} or what the loads need")
    made.add_argument("--sequential", action="store_true", help="one engine at a time")
    made.add_argument("--checkpoint", type=Path, help="weights are read from here, or written if there are none")
    made.add_argument("--logs", type=Path, help="folder of the engines' logs; a temporary one by default")
    made.add_argument("--budget", type=float, default=540, help="seconds in all")
    made.add_argument("--profile", action="store_true", help="the kernels of a decode step, or of prefill, where the aim is missed")
    made.add_argument("--aim", type=float, default=AIM, help="of stock's speed")
    made.add_argument("--out", "--json", type=Path, help="append JSON rows to this file")
    made.add_argument("--job", choices=("weights", "qualify"), help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    given.size = USUAL_SIZES[given.arch] if given.size is None else given.size
    begin = time.monotonic()
    if given.job == "weights":
        make_weights(given.arch, given.size, given.layers, given.checkpoint)
        return 0
    if given.job == "qualify":
        print("\n".join(qualify(given.arch, given.size, given.layers, given.budget)))
        return 0

    def say(text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - begin:4.0f} s] {text}\n")  # one piece: readers of several engines write too
        sys.stdout.flush()

    try:
        check_served(given.arch)
        config, _, _ = geometry(given.arch, given.size, given.layers)
        loads = parse_loads(given.loads)
        chosen = contenders(given.backends.split(","), (given.contenders or "zoo,stock,deterministic").split(","))
        check_server("cuda")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        return _run(given, config, chosen, loads, Path(folder), say)


def _run(
    given: argparse.Namespace,
    config: Any,
    chosen: dict[str, dict[str, Any]],
    loads: list[Measure],
    folder: Path,
    say: Callable[[str], None],
) -> int:
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines end with this process
    budget = Budget(given.budget)
    measures = plan(loads)
    record = Recorder(given.out, about(torch.device("cuda"), smoke=False))
    logs = given.logs or folder / "logs"
    checkpoint = given.checkpoint or folder / "weights"
    logs.mkdir(parents=True, exist_ok=True)
    env = environment(Path.home() / ".cache" / "deep_gemm")
    hybrid = has_slots(config)
    shared = {"arch": given.arch, "size": given.size, "layers": config.layers, "prompt": PROMPT}
    common = engine_arguments(str(checkpoint), loads, given.context, hybrid=False)

    def made(name: str, mine: dict[str, Any]) -> Contender:
        extra = engine_arguments(str(checkpoint), loads, given.context, hybrid and name != ZOO)
        order = list(dict.fromkeys(measure.batch for measure in measures))
        arguments = [json.dumps({**extra, **mine}), str(config.vocabulary), json.dumps(order)]
        command = [sys.executable, "-m", "benchmarks.engines", *arguments]
        return Contender(name, command, logs / f"{name.replace(' ', '_')}.log", say, env)

    say(f"{', '.join(chosen)}; context {common['context_length']}, graphs of {common['cuda_graph_bs_decode']}; logs in {logs}")
    race = Race(record, budget, {**shared, "context": common["context_length"]}, say, given.turns)
    started: list[Contender] = []

    def enter() -> Iterable[Contender]:
        for name, mine in chosen.items():
            started.append(made(name, mine))
            yield started[-1]

    try:
        entrants = enter() if given.sequential else list(enter())  # imports run beside the preparation
        prepare(given, checkpoint, env, budget, say)
        if given.sequential:
            race.one_by_one(entrants, measures, given.profile)
        else:
            assert isinstance(entrants, list)
            race.together(entrants, measures)
            missed = race.missed(measures, given.aim)
            if given.profile and missed:
                race.profile(entrants, missed)
    except ValueError as error:
        say(str(error))
        return 1
    finally:
        race.ratios(measures)
        print(race.summary(measures) if race.best else "nothing was measured", flush=True)
        for contender in started:
            contender.close()
    return 0 if ZOO in race.best else 1


if __name__ == "__main__":
    sys.exit(main())
