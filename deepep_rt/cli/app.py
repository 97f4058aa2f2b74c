"""The commands of `python -m deepep_rt`. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .. import _env
from .. import _shim as compat_shim
from .._console import console
from .._version import __version__
from ..config import COMBINE_DTYPES, Config, declared_ranks_per_node
from ..errors import EPCacheError, EPCompileError, EPConfigError, EPError, EPUnavailableError
from ..jit import build, compiler, current_gpu
from ..kernels.kernel import Kernel
from ..kernels.layout import Layout
from ..kernels.source import kernel_constants
from ..kernels.table import KERNELS
from ..kernels.tuning import has_fp8
from . import cache as cli_cache
from . import tables
from .bench import bench
from .doctor import doctor
from .options import Dtype, Experts, Hidden, Json, RanksPerNode, Slots, Tokens, TopK
from .soak import soak
from .statistics import statistics

app = typer.Typer(help="Expert-parallel dispatch and combine.", no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.add_typer(cli_cache.app, name="cache")
app.command()(bench)
app.command()(doctor)
app.command()(soak)
app.command()(statistics)

ALL_ARCHS = ("sm_80", "sm_90", "sm_100")
"""The targets of `--arch all`. Targets that the installed NVRTC does not know are left out."""


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


@app.command("shim-path")
def shim_path() -> None:
    """Print the folder to put in front of PYTHONPATH for programs that import `deep_ep` by themselves."""
    print(compat_shim.shim_path())


# --- compile -----------------------------------------------------------------------------------------------------------------------


@app.command("compile")
def compile_(
    arch: Annotated[
        list[str] | None,
        typer.Option(help=f"Target, such as sm_90; may be repeated. 'all': those of {', '.join(ALL_ARCHS)} that NVRTC knows."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.")] = 8,
    tokens: Tokens = 4096,
    hidden: Hidden = 7168,
    topk: TopK = 8,
    experts: Experts = 256,
    dtype: Dtype = "bfloat16",
    slots: Slots = 2,
    ranks_per_node: RanksPerNode = None,
    on_timeout: Annotated[str, typer.Option(help="Reaction of low-latency calls to a silent peer: raise or mask.")] = "raise",
    with_statistics: Annotated[
        bool, typer.Option("--statistics", help="For Buffers with statistics=True. Default: DEEPEP_RT_STATISTICS.")
    ] = False,
    combine_dtype: Annotated[
        list[str] | None,
        typer.Option(help="Element type of combine and of fp8=True; may be repeated. Default: --dtype."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a kernel spills or has an undeclared stack frame.")] = False,
    as_json: Json = False,
) -> None:
    """Compile every kernel of a configuration ahead of time; no GPU is needed. Without --arch: for the GPU of this machine."""
    config = Config(
        num_ranks=ranks,
        num_max_tokens_per_rank=tokens,
        hidden=hidden,
        num_topk=topk,
        num_experts=experts,
        dtype=dtype,
        num_slots=slots,
        ranks_per_node=declared_ranks_per_node(ranks) if ranks_per_node is None else ranks_per_node,
        on_timeout=on_timeout,
        statistics=with_statistics or _env.statistics(),
    )
    jobs = [
        (kernel, element, target)
        for target in targets_of(arch)
        for kernel, element in variants(config, combine_dtype)
        if has_fp8(target) or not kernel.needs_fp8
    ]
    rows = []
    with _progress() as progress:
        task = progress.add_task("", total=len(jobs))
        for kernel, element, target in jobs:
            progress.update(task, description=f"{tables.title(kernel.name, element)} for {target}")
            rows.append(_build(config, kernel, element, target))
            progress.advance(task)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_compiled(rows)
    failed = [row["error"] for row in rows if row["status"] == "failed"] + (list(_excesses(rows)) if strict else [])
    for message in failed:
        typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1 if failed else 0)


def targets_of(archs: list[str] | None) -> list[str]:
    """List the targets of `--arch`. Default: the architecture of this machine's GPU."""
    if not archs:
        try:
            return [current_gpu.target_arch()]
        except EPUnavailableError as error:
            raise EPConfigError(
                f"--arch is missing, and there is no GPU to compile for. Pass --arch sm_90 (may be repeated) or --arch all. {error}"
            ) from error
    targets: list[str] = []
    for arch in archs:
        targets += [known for known in ALL_ARCHS if known in compiler.known_archs()] if arch == "all" else [arch]
    for target in targets:
        compiler.check_arch(target)
    return list(dict.fromkeys(targets))


def variants(config: Config, combine_dtypes: list[str] | None) -> list[tuple[Kernel, str | None]]:
    """List the kernels that a Buffer of these sizes and its callers can need, some once for each element type."""
    # combine adds no FP8 rows, so `elements` may be empty
    elements = combine_dtypes or [element for element in COMBINE_DTYPES if element == config.dtype]
    if wrong := set(elements) - set(COMBINE_DTYPES):
        raise EPConfigError(
            f"--combine-dtype={', '.join(sorted(wrong))}; expected one of {', '.join(COMBINE_DTYPES)}. Choose one of them."
        )
    kernels = [k for k in KERNELS.values() if k.fits(config) or k.is_local]
    return [(kernel, element) for kernel in kernels for element in (elements if kernel.per_dtype else [None])]


def _build(config: Config, kernel: Kernel, element: str | None, arch: str) -> dict[str, Any]:
    """Build one kernel and describe the outcome."""
    row: dict[str, Any] = {"kernel": kernel.name, "dtype": element, "arch": arch}
    constants = kernel_constants(Layout(config), arch, kernel, element)
    if kernel.links_nvshmem(constants) and not arch.startswith("sm_") and not _has_gpu():
        return {**row, "status": "skipped", "reason": "PTX is linked with NVSHMEM for one GPU, and there is none here"}
    try:
        built = build.build(kernel, constants, arch)
    except EPCompileError as error:
        if isinstance(error, EPCacheError) and not _env.assert_cached():
            raise  # the cache folder is unusable, for the other kernels too
        return {**row, "status": "failed", "error": str(error)}
    return {**row, **built.info, "key": built.key, "status": "compiled" if built.compiled else "cached"}


def _has_gpu() -> bool:
    try:
        return bool(current_gpu.arch())
    except EPUnavailableError:
        return False


def _excesses(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    """List the errors of --strict. PTX has no figures."""
    for row in rows:
        title, most = f"{tables.title(row['kernel'], row['dtype'])} for {row['arch']}", KERNELS[row["kernel"]].max_stack_bytes
        if row.get("spill_stores") or row.get("spill_loads"):
            yield f"{title} spills registers: {row['spill_stores']} bytes of stores, {row['spill_loads']} of loads"
        if (row.get("stack_bytes") or 0) > most:
            yield f"{title} has a stack frame of {row['stack_bytes']} bytes; {most} are declared (max_stack_bytes in kernels/table.py)"


def _print_compiled(rows: list[dict[str, Any]]) -> None:
    table = tables.new_table("kernel", "arch", "registers", "shared", "stack", "spills", "bytes", "seconds", "")
    for row in rows:
        seconds = f"{row['compile_seconds']:.2f}" if row["status"] == "compiled" else "-"
        name = tables.title(row["kernel"], row["dtype"])
        table.add_row(
            name, row["arch"], *tables.usage(row), tables.number(row.get("bytes")), seconds, row.get("reason") or row["status"]
        )
    console(tables.WIDTH_OF_LOGS).print(table)


# --- progress ---------------------------------------------------------------------------------------------------------------------


def _progress() -> Progress:
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=Console(stderr=True), transient=True)
