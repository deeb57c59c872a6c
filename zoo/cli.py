"""`zoo verify | map | qualify | lint | generate | bench`. Bad input gets one sentence and exit status 2, differing bytes 1."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import zoo
from zoo.common.reading import printable
from zoo.common.terminal import Command, Terminal, run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
command = functools.partial(app.command, cls=Command)

ARCH = "an architecture, such as qwen3_moe; an unknown one is answered with all that there are"
Arch = Annotated[str, typer.Argument(help=ARCH, show_default=False)]
Checkpoint = Annotated[str | None, typer.Option(help="folder or hub id; without one, random weights", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="hub revision of the checkpoint", show_default=False)]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU", show_default=False)]
Size = Annotated[
    str | None,
    typer.Option(help="geometry of random weights: tiny (by default), or a published size in lower case (8b, 30b-a3b)", show_default=False),
]
Layers = Annotated[int | None, typer.Option(help="fewer layers, for random weights", show_default=False)]
Json = Annotated[Path | None, typer.Option("--json", help="write a JSON file", show_default=False)]
Store = Annotated[Path | None, typer.Option(help="file of qualifications instead of the one in ~/.cache", show_default=False)]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"zoo {zoo.__version__}")
        raise typer.Exit


@app.callback()
def zoo_command(
    version: Annotated[bool, typer.Option("--version", help="print the version and end", callback=_version, is_eager=True)] = False,
) -> None:
    """Language models whose log-probabilities have the same bytes in training, prefill and decode."""


@command()
def verify(
    arch: Arch,
    checkpoint: Checkpoint = None,
    revision: Revision = None,
    device: Device = None,
    size: Size = None,
    layers: Layers = None,
    rungs: Annotated[str, typer.Option(help="3, 1,3 or 1-5")] = "1-5",
    lengths: Annotated[str | None, typer.Option(help="tokens of each sequence, 1,63,300", show_default=False)] = None,
    layout: Annotated[str | None, typer.Option(help="parallel layout (not built yet)", show_default=False)] = None,
    engine: Annotated[str, typer.Option(help="embedded or sglang: who samples in rungs 4 and 5")] = "embedded",
    seed: Annotated[int, typer.Option(help="seed of random weights")] = 0,
    masters: Annotated[bool, typer.Option(help="with rung 5 the trainer's parameters are FP32 masters; without, BF16 ones")] = True,
    program: Annotated[
        str | None, typer.Option(help="fp8, mxfp4: random weights in codes; a checkpoint's own weights say what it is", show_default=False)
    ] = None,
    shared_weights: Annotated[
        bool, typer.Option(help="the server reads the trainer's own weights: for a model that fits once, rungs 1 to 4")
    ] = False,
    json_file: Json = None,
    report: Annotated[Path | None, typer.Option(help="write a self-contained HTML page", show_default=False)] = None,
    reproduction: Annotated[
        Path | None, typer.Option(help="folder for a reproduction of the first divergence, if there is one", show_default=False)
    ] = None,
    store: Store = None,
) -> None:
    """Climb the ladder: prove on this machine that trainer and sampler give the same bytes. Exit status 1 if a byte differs."""
    from zoo.verify.asked import Asked, lengths_of, rungs_of

    chosen = rungs_of(rungs)
    asked = Asked(
        arch,
        checkpoint,
        revision,
        device,
        size,
        layers,
        chosen,
        lengths_of(lengths),
        layout,
        engine,
        seed,
        store,
        masters,
        program,
        shared_weights,
    )
    from zoo.verify.run import verify as climb  # torch, which takes seconds

    result = climb(asked, Terminal(), json_file, report, reproduction)
    raise typer.Exit(0 if result.ok else 1)


@command("map")
def operation_map(
    arch: Arch, checkpoint: Checkpoint = None, revision: Revision = None, device: Device = None, json_file: Json = None
) -> None:
    """Print every op call of a tiny model in order: dtypes, rounding, order of additions, byte class, provider, launches."""
    from zoo.common.files import check_file
    from zoo.verify import map as maps
    from zoo.verify.asked import check_random
    from zoo.verify.run import device_of
    from zoo.verify.subject import build

    check_file("--json", json_file)
    check_random(checkpoint, None, None, revision)
    subject = build(arch, checkpoint=checkpoint, revision=revision, device=device_of(device))
    places = maps.operation_map(subject)
    maps.show(subject, places, Terminal())
    _write_json(json_file, maps.to_dict(subject, places))


@command()
def qualify(
    op: Annotated[str | None, typer.Option(help="this op only", show_default=False)] = None,
    kernel: Annotated[str | None, typer.Option(help="module:function to put through an op's laws", show_default=False)] = None,
    device: Device = None,
    arch: Annotated[str | None, typer.Option(help=f"the shapes of one architecture: {ARCH}", show_default=False)] = None,
    size: Annotated[str | None, typer.Option(help="the shapes of one size of it", show_default=False)] = None,
    again: Annotated[bool, typer.Option("--again", help="also what already has a verdict")] = False,
    store: Store = None,
) -> None:
    """Admit providers on this GPU and toolchain, or put an outside kernel through laws, numbers, gradient and benchmark."""
    from zoo.verify.run import qualify as admit

    if not admit(Terminal(), op, kernel, device, arch, size, again, store):
        raise typer.Exit(1)


@command()
def lint(json_file: Json = None) -> None:
    """Read a checkout's source: numbers made outside the ops, imports upwards, files out of place. Exit status 1 if there are any."""
    from zoo.common.files import check_file
    from zoo.lint.check import lint as check

    check_file("--json", json_file)
    report = check(Path(__file__).parents[1])
    for finding in report.findings:
        typer.echo(str(finding))
    typer.echo(f"{report.files} files read, {len(report.findings) or 'no'} finding{'s'[: len(report.findings) != 1]}")
    _write_json(json_file, {"files": report.files, "findings": [vars(finding) for finding in report.findings]})
    if report.findings:
        raise typer.Exit(1)


@command()
def generate(
    prompt: Annotated[list[str], typer.Option(help="text to continue; give it several times for several prompts")],
    checkpoint: Annotated[str, typer.Option(help="folder or hub id")],
    revision: Revision = None,
    max_new_tokens: Annotated[int, typer.Option(help="tokens drawn at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: all")] = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: Annotated[int | None, typer.Option(help="of the draws, which it repeats; fresh ones by default, named in the records")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after an end-of-sequence token")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="text that ends a continuation; may be given several times")] = None,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Continue prompts with the embedded engine; --json records tokens, log-probabilities and the fingerprint."""
    from zoo.common.files import check_file
    from zoo.common.generate import generate_command

    check_file("--json", json_file)
    made = generate_command(
        checkpoint,
        prompt,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        ignore_eos=ignore_eos,
        stop=stop or (),
        device=device,
        revision=revision,
        json=json_file,
        progress=sys.stderr.isatty(),
    )
    for generation in made:
        typer.echo(printable(f"{generation.prompt}{generation.text}", keep="\n\t"))


@command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context, what: Annotated[str, typer.Argument(help="ops, models or serve", show_default=False)] = "") -> None:
    """Run benchmarks.ops, .models or .serve of a source checkout; everything after the name goes to it."""
    import runpy

    if what in ("--help", "-h"):
        typer.echo(context.get_help())
        raise typer.Exit
    if what not in ("ops", "models", "serve"):
        raise ValueError(f"{f'there is no benchmark {what!r}' if what else 'no benchmark is named'}; there are ops, models and serve")
    root = Path(__file__).parents[1]
    if not (root / "benchmarks" / f"{what}.py").exists():
        raise ValueError(f"benchmarks/{what}.py is not beside the package in {root}: benchmarks run from a source checkout")
    sys.path.insert(0, str(root))
    sys.argv = [f"python -m benchmarks.{what}", *context.args]
    runpy.run_module(f"benchmarks.{what}", run_name="__main__")


def _write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        from zoo.common.files import write_file

        write_file(path, json.dumps(content, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """The console script; `arguments` instead of those of the process."""
    run(app, "zoo", arguments)
