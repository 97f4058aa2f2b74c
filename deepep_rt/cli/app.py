"""The commands of `python -m deepep_rt`. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import _shim as compat_shim
from .._version import __version__
from ..errors import EPError
from . import cache as cli_cache
from .bench import bench
from .compile import compile_
from .doctor import doctor
from .soak import soak
from .statistics import statistics
from .store import store

app = typer.Typer(
    help="Expert-parallel dispatch and combine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},  # columns of --help; 80 if the terminal has no more
)
app.add_typer(cli_cache.app, name="cache")
app.command()(bench)
app.command()(doctor)
app.command()(soak)
app.command()(statistics)
app.command()(store)
app.command("compile")(compile_)


@app.command("shim-path")
def shim_path() -> None:
    """Print the folder that holds `deep_ep`. Put it in front of PYTHONPATH for programs that import `deep_ep` by themselves."""
    print(compat_shim.shim_path())


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version of deepep_rt.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def run(args: Sequence[str] | None = None) -> None:
    """Run a command. After an EPError, print its message and exit with status 1."""
    try:
        app(args=args, prog_name="python -m deepep_rt")
    except EPError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
