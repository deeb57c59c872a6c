"""`python -m zoo.verify ARCH`: the same as `zoo verify ARCH`."""

import typer

from zoo.cli import run, verify

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(verify)
    run(app, "python -m zoo.verify")
