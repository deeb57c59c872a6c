"""What the commands do: build, qualify, climb, print, write."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

import zoo
from zoo.common import verdicts
from zoo.common.files import check_file, check_fresh, write_file, written_in_place
from zoo.common.ops import CONTRACTS
from zoo.common.program import Program, resolve
from zoo.common.terminal import Terminal
from zoo.common.threads import suited
from zoo.verify import map as maps
from zoo.verify import qualify as admission
from zoo.verify import report as pages
from zoo.verify.asked import Asked, check_lengths
from zoo.verify.ladder import Ladder, Result
from zoo.verify.outside import KernelReport, put_through_apart
from zoo.verify.products import Held, all_products, hold
from zoo.verify.room import check_room
from zoo.verify.samplers import check_engine
from zoo.verify.shrink import reproduction as write_reproduction
from zoo.verify.stages import Stages
from zoo.verify.subject import Settings, Subject, build, config_of, geometry, settings_for, sizes
from zoo.verify.tally import Row


def device_of(name: str | None) -> str:
    """cpu, cuda or cuda:N. ValueError for another, or for cuda where there is none."""
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device {chosen!r} must be cpu or cuda")
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {chosen}: torch {torch.__version__} sees no GPU here")
    return chosen


def verify(asked: Asked, console: Terminal, json_file: Path | None, report: Path | None, reproduction: Path | None) -> Result:
    """Climbs, prints the table, writes the files. ValueError for whatever the user got wrong."""
    device = device_of(asked.device)
    check_engine(asked.engine, device)
    if reproduction is not None:
        check_fresh(reproduction)
    check_file("--json", json_file)
    check_file("--report", report)
    config, fields = geometry(asked.arch, asked.checkpoint, asked.size, asked.layers, asked.revision, asked.program)
    if asked.lengths is not None:
        check_lengths(asked.lengths, config.positions)
    check_room(fields, config, device, asked.rungs, asked.engine, masters=asked.trains_masters, shared=asked.shared_weights)
    if asked.store is not None:
        verdicts.use(asked.store)
    stages = Stages()
    with console.status("building") as status:

        def say(text: str) -> None:
            status.update(text)

        with stages.stage("building"):
            subject = build(
                asked.arch,
                checkpoint=asked.checkpoint,
                revision=asked.revision,
                device=device,
                size=asked.size,
                layers=asked.layers,
                seed=asked.seed,
                masters=asked.trains_masters,
                program=asked.program,
                shared=asked.shared_weights,
                say=say,
            )
        settings = settings_for(subject, asked.lengths)
        if device.startswith("cuda"):
            status.update("qualifying")  # just the shapes that this model uses
            with stages.stage("qualifying"):
                targets = admission.targets_of(subject.server)
                admission.qualify(targets, lambda text: line(console, text), program=subject.server.program)

        def wrote(row: Row, seconds: float) -> None:
            line(console, f"{'equal ' if row.ok else 'FAILED'} {row.rung} {row.what} ({seconds:.1f} s)")
            stages.add(f"rung {row.rung}", seconds)
            save(json_file, ladder.result)

        ladder = Ladder(subject, settings, say, wrote, asked.engine)
        ladder.result.about = about(asked, settings)
        with suited(subject.trainer):
            result = ladder.climb(asked.rungs)
        with stages.stage("map of operations") if report is not None else nullcontext():
            places = maps.operation_map(subject) if report is not None else []
    console.print(table_of(result))
    show_end(result, console)
    line(console, str(stages))
    save(json_file, result)
    if report is not None:
        write_file(report, pages.page(result, places, layers_of(subject), max(settings.lengths)))
        line(console, f"wrote {report}")
    if reproduction is not None and result.divergence is not None:
        try:
            script = write_reproduction(result.divergence, reproduction, result.names)
            line(console, f"wrote {script}: run it to see the one row and the one op again")
        except ValueError as error:  # the climb's verdict stands
            line(console, f"no reproduction: {error}")
    return result


def about(asked: Asked, settings: Settings) -> dict[str, str]:
    """What a report says of its run beside the fingerprint."""
    random = f"random weights of size {asked.size or 'tiny'}" + (f", {asked.layers} layers" if asked.layers is not None else "")
    revision = f", revision {asked.revision}" if asked.revision is not None else ""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "version": zoo.__version__,
        "command": asked.command(),
        "checkpoint": random if asked.checkpoint is None else f"{asked.checkpoint}{revision}",
        "seed": str(asked.seed),
        "lengths": ", ".join(map(str, settings.lengths)),
        "engine": asked.engine,
    }


def line(console: Terminal, text: str) -> None:
    """One line at once, also where stdout is a file or a pipe: a run that is killed leaves what it proved."""
    console.print(text, soft_wrap=True)


def save(path: Path | None, result: Result) -> None:
    """Replaces the JSON file as a whole. What is written in place, a pipe or a device, gets only the result of a whole climb."""
    if path is None:
        return
    text = json.dumps(result.to_dict(), indent=2) + "\n"
    if not (written_in_place(path) and result.unfinished):
        write_file(path, text)


def layers_of(subject: Subject) -> int:
    return int(subject.trainer.config.layers)


def table_of(result: Result) -> Table:
    """The ladder as people read it."""
    table = Table(title=f"zoo verify {result.arch} on {result.device}", box=SIMPLE)
    table.add_column("rung", justify="right")
    table.add_column("what was compared", overflow="fold")
    for name in ("values", "bytes", "differing bytes", "K3"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in result.rows:
        k3 = "" if row.k3 is None else f"{row.k3:.3g}"
        verdict = Text("equal", "green") if row.ok else Text("FAILED", "red")
        table.add_row(str(row.rung), row.what, f"{row.compared:,}", f"{row.compared_bytes:,}", f"{row.differing:,}", k3, verdict)
    for idle in result.not_run:
        table.add_row(str(idle["rung"]), f"{idle['what']}: {idle['reason']}", "", "", "", "", Text("not run", "dim"))
    return table


def show_end(result: Result, console: Terminal) -> None:
    """One sentence of verdict, and where the first byte differs."""
    if result.ok:
        console.print(f"{result.totals['bytes_compared']:,} bytes compared, none differs.")
    else:
        failed = sum(not row.ok for row in result.rows)
        console.print(f"{failed} of {len(result.rows)} comparisons failed, {result.totals['bytes_differing']:,} bytes differ.")
    first = result.first_divergence
    if first is not None:
        place = f"layer {first['layer']}, op {first['op']}, sequence {first['sequence']}, position {first['position']}"
        console.print(f"first divergence: {place}, {first['elements']} values, {first['ulp']} ulp")
    parts = result.fingerprint
    program = parts["program"]["program"]
    state = parts["realisation"]["qualification"]
    kernels = f"{state}: the defining kernels ran" if state == "unqualified" else state
    console.print(f"program {program}, weights {parts['weights']}, {kernels}")


def qualify(
    console: Terminal,
    op: str | None,
    kernel: str | None,
    device: str | None,
    arch: str | None,
    size: str | None,
    again: bool,
    store: Path | None,
) -> bool:
    """`zoo qualify`; False if an outside kernel fails, breaks a law or computes other numbers or gradients, or a product is wrong."""
    if op is not None and op not in CONTRACTS:
        raise ValueError(f"there is no op {op!r}; there are {', '.join(sorted(CONTRACTS))}")
    if kernel is not None and op is None:
        raise ValueError("--kernel needs --op, the op that the kernel stands in for")
    if size is not None and arch is None:
        raise ValueError("--size needs --arch")
    where = device_of(device)
    if store is not None:
        verdicts.use(store)
    program = resolve("aligned", where, torch.bfloat16)
    if kernel is not None:
        assert op is not None
        with console.status("laws") as status:
            found = put_through_apart(op, kernel, program, status.update)
        show_kernel(found, console)
        return found.ok
    if where == "cpu":
        console.print("On a CPU there is only the reference of each op: nothing to admit.")
        return True
    targets = admission.default_targets()
    if arch is not None:
        if size is not None:
            config_of(arch, size, None)
        targets = admission.targets_of_sizes(arch, [size] if size is not None else list(sizes(arch)))
    targets = [t for t in targets if op is None or t.op == op]
    stages = Stages()
    with stages.stage("products against float64"):
        wrong = hold_products(console, program, op)
    with console.status("qualifying"), stages.stage("qualifying"):
        admission.qualify(targets, lambda text: line(console, text), program=program, again=again)
    table = Table(title=f"providers on {torch.cuda.get_device_name()}")
    for name in ("op and shape", "runs", "fallback because"):
        table.add_column(name, overflow="fold")
    for target, provider, why in admission.running(targets, program):
        table.add_row(str(target), provider, why)
    console.print(table)
    console.print(f"stored in {verdicts.path_for_this_machine()}", soft_wrap=True)
    line(console, str(stages))
    return not wrong


def hold_products(console: Terminal, program: Program, op: str | None) -> list[Held]:
    """Prints what became of our own kernels' products against float64, of one op or of all; the ones that are wrong."""
    with console.status("products against float64") as status:
        found = hold(all_products(op), program, status.update)
    wrong = [held for held in found if not held.right]
    for held in wrong:
        line(console, f"wrong product: {held}")
    line(console, f"{len(found)} products of our kernels against float64, {len(wrong) or 'none'} wrong")
    return wrong


def show_kernel(found: KernelReport, console: Terminal) -> None:
    for line in found.broken:
        console.print(f"broken: {line}", soft_wrap=True)
    for line in found.missed:
        console.print(f"wrong numbers: {line}", soft_wrap=True)
    counts = f"{found.kept} laws kept, {len(found.broken)} broken"
    console.print(f"{found.op} by {found.kernel}: {counts}")
    console.print(found.numbers, soft_wrap=True)
    console.print(f"gradient {found.gradient}", soft_wrap=True)
    console.print(found.equal)
    for line in found.benchmark:
        console.print(line, soft_wrap=True)
