"""`weights-tools`: make-tiny, inspect, compare, convert, quantize, dequantize."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from zoo.common.reading import printable
from zoo.common.terminal import Command, run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Tools for checkpoints.",
)
command = functools.partial(app.command, cls=Command)


@command("make-tiny")
def make_tiny(
    arch: Annotated[str, typer.Argument(help="qwen3, qwen3_moe, qwen3_5, qwen3_5_moe, glm5 or deepseek_v4")],
    out: Annotated[Path, typer.Argument(help="folder to write; must be absent or empty")],
    hidden: Annotated[int | None, typer.Option(help="hidden size")] = None,
    layers: Annotated[int | None, typer.Option(help="number of layers")] = None,
    tied: Annotated[bool, typer.Option("--tied", help="tie the head to the embedding")] = False,
    vision: Annotated[bool, typer.Option("--vision", help="as the text part of a vision-language checkpoint")] = False,
    form: Annotated[str, typer.Option(help="bf16, or with codes and scales where the family has them: fp8, mxfp4")] = "bf16",
    seed: Annotated[int, typer.Option(help="seed of the random weights")] = 0,
) -> None:
    """Write a small random checkpoint in published format: config, sharded BF16 safetensors, tokenizer."""
    from weights_tools.make_tiny import make_tiny as make

    make(arch, out, hidden=hidden, layers=layers, tied=tied, vision=vision, form=form, seed=seed)
    typer.echo(printable(f"wrote {out}"))


@command()
def inspect(
    path: Annotated[str, typer.Argument(help="folder or hub id")],
    revision: Annotated[str | None, typer.Option(help="hub revision")] = None,
    content: Annotated[bool, typer.Option("--hash/--no-hash", help="stream the data once for the content hash")] = True,
) -> None:
    """Show architecture, config, tensors, shards and content hash without building the model."""
    from weights_tools.inspect import show

    show(path, revision, content)


@command()
def compare(
    a: Annotated[str, typer.Argument(help="folder or hub id")],
    b: Annotated[str, typer.Argument(help="folder or hub id")],
    revision: Annotated[str | None, typer.Option(help="hub revision of A, and of B if it is a hub id too", show_default=False)] = None,
    revision_b: Annotated[str | None, typer.Option(help="another one for B", show_default=False)] = None,
) -> None:
    """Report every tensor whose bytes differ; of the same weights in two forms one sentence. Exit status 1 unless all bytes are equal."""
    from weights_tools.compare import revisions, show

    if not show(a, b, *revisions(a, b, revision, revision_b)):
        raise typer.Exit(1)


@command()
def convert(
    path: Annotated[str, typer.Argument(help="folder or hub id")],
    out: Annotated[Path, typer.Argument(help="folder to write; must be absent or empty")],
    to: Annotated[str, typer.Option(help="zoo or hf")] = "zoo",
) -> None:
    """Rename and fuse published tensors into the zoo's parameters (--to zoo), or split them back (--to hf)."""
    from weights_tools.convert import convert as convert_to

    convert_to(path, out, to)
    typer.echo(printable(f"wrote {out}"))


@command()
def quantize(
    path: Annotated[str, typer.Argument(help="folder of a BF16 checkpoint")],
    out: Annotated[Path, typer.Argument(help="folder to write; must be absent or empty")],
    form: Annotated[str, typer.Option(help="fp8, or mxfp4 where the family has it")] = "fp8",
) -> None:
    """Write matrices as codes with scales, in the published form of the family: FP8 blocks, or experts in MXFP4."""
    from weights_tools.quantize import quantize as quantize_to

    quantize_to(path, out, form)
    typer.echo(printable(f"wrote {out}"))


@command()
def dequantize(
    path: Annotated[str, typer.Argument(help="folder of a checkpoint with codes and scales")],
    out: Annotated[Path, typer.Argument(help="folder to write; must be absent or empty")],
) -> None:
    """Write codes and scales as the BF16 values that they stand for."""
    from weights_tools.quantize import dequantize as dequantize_to

    dequantize_to(path, out)
    typer.echo(printable(f"wrote {out}"))


def main() -> None:
    """The console script."""
    run(app, "weights-tools")
