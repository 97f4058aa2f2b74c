"""The commands of `python -m deepep_rt`. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from . import __version__, _env, bench, compat_shim, jit, toolchain
from .cache import CorruptEntry, Entry, Store
from .cli_doctor import doctor
from .cli_options import Dtype, Experts, Hidden, Json, RanksPerNode, Slots, Tokens, TopK
from .cli_soak import soak
from .config import COMBINE_DTYPES, Config
from .errors import EPCacheError, EPCompileError, EPConfigError, EPError, EPUnavailableError
from .kernels import TABLE, Kernel
from .screen import console
from .sources import kernel_constants
from .tuning import has_fp8

app = typer.Typer(help="Expert-parallel dispatch and combine.", no_args_is_help=True, add_completion=False, rich_markup_mode=None)
cache_app = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache_app, name="cache")
app.command()(doctor)
app.command()(soak)

ALL_ARCHS = ("sm_80", "sm_90", "sm_100")
"""What `--arch all` means, as far as the installed NVRTC knows them."""

_WIDTH_OF_LOGS = 220  # holds the table of the cache
_MOST_CHOICES = 10  # keys that an ambiguous one is answered with


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
    """Run a command; an EPError becomes its message and exit status 1."""
    try:
        app(args=args, prog_name="python -m deepep_rt")
    except EPError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
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
    on_timeout: Annotated[str, typer.Option(help="What low-latency calls do about a silent peer: raise or mask.")] = "raise",
    combine_dtype: Annotated[
        list[str] | None,
        typer.Option(help="Element type that combine adds up, and fp8=True converts; may be repeated. Default: --dtype."),
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
        ranks_per_node=ranks_per_node,
        on_timeout=on_timeout,
    )
    jobs = [
        (kernel, element, target)
        for target in _targets(arch)
        for kernel, element in _variants(config, combine_dtype)
        if has_fp8(target) or not kernel.needs_fp8
    ]
    rows = []
    with _progress() as progress:
        task = progress.add_task("", total=len(jobs))
        for kernel, element, target in jobs:
            progress.update(task, description=f"{_title(kernel.name, element)} for {target}")
            rows.append(_build(config, kernel, element, target))
            progress.advance(task)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_compiled(rows)
    failed = [row["error"] for row in rows if row["status"] == "failed"] + (list(_excesses(rows)) if strict else [])
    for message in failed:
        Console(stderr=True).print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


def _targets(archs: list[str] | None) -> list[str]:
    if not archs:
        try:
            return [jit.current_arch()]
        except EPUnavailableError as error:
            raise EPConfigError(
                f"there is no GPU to compile for; say --arch sm_90 (may be repeated), or --arch all. {error}"
            ) from error
    targets: list[str] = []
    for arch in archs:
        targets += [known for known in ALL_ARCHS if known in toolchain.known_archs()] if arch == "all" else [arch]
    for target in targets:
        toolchain.check_arch(target)
    return list(dict.fromkeys(targets))


def _variants(config: Config, combine_dtypes: list[str] | None) -> list[tuple[Kernel, str | None]]:
    """Every kernel that a Buffer of these sizes, and those who call it, can need; some of them once for each element type."""
    # FP8 rows are only dispatched: combine_dtypes stays empty for them
    elements = combine_dtypes or [element for element in COMBINE_DTYPES if element == config.dtype]
    if wrong := set(elements) - set(COMBINE_DTYPES):
        raise EPConfigError(f"--combine-dtype is {', '.join(sorted(wrong))}; expected one of {', '.join(COMBINE_DTYPES)}")
    kernels = [k for k in TABLE.values() if k.fits(config) or k.is_local]
    return [(kernel, element) for kernel in kernels for element in (elements if kernel.per_dtype else [None])]


def _build(config: Config, kernel: Kernel, element: str | None, arch: str) -> dict[str, Any]:
    """Build one kernel, and describe what became of it."""
    row: dict[str, Any] = {"kernel": kernel.name, "dtype": element, "arch": arch}
    constants = kernel_constants(config, arch, kernel, element)
    if kernel.links_nvshmem(constants) and not arch.startswith("sm_") and not _has_gpu():
        return {**row, "status": "skipped", "reason": "PTX is linked with NVSHMEM for one GPU, and there is none here"}
    try:
        built = jit.build(kernel, constants, arch)
    except EPCompileError as error:
        if isinstance(error, EPCacheError) and not _env.assert_cached():
            raise  # the folder: no other kernel would fare better
        return {**row, "status": "failed", "error": str(error)}
    return {**row, **built.info, "key": built.key, "status": "compiled" if built.compiled else "cached"}


def _has_gpu() -> bool:
    try:
        return bool(jit.device_arch())
    except EPUnavailableError:
        return False


def _excesses(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    """What --strict objects to; PTX has no figures yet."""
    for row in rows:
        title, most = f"{_title(row['kernel'], row['dtype'])} for {row['arch']}", TABLE[row["kernel"]].max_stack_bytes
        if row.get("spill_stores") or row.get("spill_loads"):
            yield f"{title} spills registers: {row['spill_stores']} bytes of stores, {row['spill_loads']} of loads"
        if (row.get("stack_bytes") or 0) > most:
            yield f"{title} has a stack frame of {row['stack_bytes']} bytes; {most} are declared (max_stack_bytes in kernels.py)"


def _print_compiled(rows: list[dict[str, Any]]) -> None:
    table = _table("kernel", "arch", "registers", "shared", "stack", "spills", "bytes", "seconds", "")
    for row in rows:
        seconds = f"{row['compile_seconds']:.2f}" if row["status"] == "compiled" else "-"
        name = _title(row["kernel"], row["dtype"])
        table.add_row(name, row["arch"], *_usage(row), _number(row.get("bytes")), seconds, row.get("reason") or row["status"])
    console(_WIDTH_OF_LOGS).print(table)


# --- cache -------------------------------------------------------------------------------------------------------------------------


@cache_app.command("list")
def list_(as_json: Json = False) -> None:
    """List the compiled kernels."""
    store = Store()
    entries = store.entries()
    if as_json:
        print(json.dumps([_described(entry) for entry in entries], indent=2))
        return
    if not entries:
        print(f"The cache {store.folder} is empty; it fills when kernels are first used, or with: python -m deepep_rt compile")
        return
    columns = ("kernel", "arch", "key", "bytes", "registers", "shared", "stack", "spills", "NVSHMEM", "built with", "created")
    table = _table(*columns)
    for entry in entries:
        if isinstance(entry, CorruptEntry):
            table.add_row("CORRUPT", entry.arch, entry.key[:12], *["-"] * 6, entry.reason, "rebuilt when it is needed")
            continue
        info = entry.info
        nvshmem = "linked" if info["nvshmem"] else "no"
        tools = [name for name in ("deepep_rt", "nvrtc", "nvjitlink", "nvshmem") if name in info["versions"]]
        built_with = ", ".join(f"{name} {info['versions'][name]}" for name in tools)
        numbers = (_number(info["bytes"]), *_usage(info))
        table.add_row(info["kernel"], entry.arch, entry.key[:12], *numbers, nvshmem, built_with, info["created"])
    console(_WIDTH_OF_LOGS).print(table)
    total = sum(len(entry.code) for entry in entries if isinstance(entry, Entry))
    print(f"{len(entries)} {_plural(len(entries))}, {total:,} bytes, in {store.folder}")


@cache_app.command()
def show(key: Annotated[str, typer.Argument(help="A key, or enough of its beginning.")], as_json: Json = False) -> None:
    """Print everything that is known about one compiled kernel."""
    if not key:
        raise EPConfigError("the key is empty; give one, or enough of its beginning: python -m deepep_rt cache list shows them")
    store = Store()
    found = [entry for entry in store.entries() if entry.key.startswith(key)]
    if len(found) != 1:
        what = f"{len(found)} kernels have keys that begin with" if found else "no kernel has a key that begins with"
        choices = "".join(f"\n  {entry.key} {_described(entry)['kernel']} {entry.arch}" for entry in found[:_MOST_CHOICES])
        if len(found) > _MOST_CHOICES:
            choices += f"\n  ... and {len(found) - _MOST_CHOICES} more"
        raise EPConfigError(f"{what} {key!r} in the cache {store.folder}; see: python -m deepep_rt cache list{choices}")
    described = _described(found[0])
    if as_json:
        print(json.dumps(described, indent=2))
        return
    for name, value in described.items():
        if not isinstance(value, dict):
            print(f"{name:22}{value}")
            continue
        print(name)
        for inner, number in value.items():
            print(f"  {inner:30}{number}")


@cache_app.command()
def clear() -> None:
    """Delete every compiled kernel."""
    store = Store()
    number = store.clear()
    print(f"removed {number} {_plural(number)} from {store.folder}")


def _described(entry: Entry | CorruptEntry) -> dict[str, Any]:
    if isinstance(entry, CorruptEntry):
        return {"kernel": None, "arch": entry.arch, "key": entry.key, "corrupt": entry.reason}
    return {"kernel": entry.info["kernel"], "arch": entry.arch, "key": entry.key, **entry.info}


# --- bench -------------------------------------------------------------------------------------------------------------------------


@app.command("bench")
def bench_(
    what: Annotated[str, typer.Argument(help="throughput, low-latency, all, or jitter.")] = "all",
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write. Default: bench-DATE-TIME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few calls of each kind: does it run at all?")] = False,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Draw these results, or references, beside; may be repeated.")
    ] = None,
    from_: Annotated[
        list[Path] | None, typer.Option("--from", metavar="FILE", help="Draw this result, and measure nothing; may be repeated.")
    ] = None,
    backend: Annotated[str, typer.Option(help="cuda, host (NumPy and MPI, at small sizes), or auto.")] = "auto",
    hidden: Annotated[int | None, typer.Option(help="Elements of a row. Default: 7168; 512 without a GPU.")] = None,
    topk: Annotated[int | None, typer.Option(help="Experts of a token. Default: 8.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts over all ranks. Default: 256.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record, where this is no git checkout.")] = None,
) -> None:
    """Measure on the ranks of the current mpirun, and make pictures and a page: mpirun -n 8 python -m deepep_rt bench."""
    if from_:
        bench.draw(from_, out, compare or [])
    else:
        sizes = bench.AskedSizes(hidden, topk, experts)
        bench.measure(what, out, compare or [], quick=quick, backend=backend, sizes=sizes, commit=commit)


# --- text --------------------------------------------------------------------------------------------------------------------------


def _usage(info: dict[str, Any]) -> tuple[str, str, str, str]:
    """Registers, shared memory (static + dynamic), stack and spills."""
    static, dynamic = info.get("static_shared_bytes"), info.get("dynamic_shared_bytes")
    shared = "-" if dynamic is None else f"{_number(static)} + {dynamic:,}"
    stores, loads = info.get("spill_stores"), info.get("spill_loads")
    return (
        _number(info.get("registers")),
        shared,
        _number(info.get("stack_bytes")),
        "-" if stores is None else f"{stores + loads:,}",
    )


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _title(kernel: str, dtype: str | None) -> str:
    return f"{kernel} ({dtype})" if dtype else kernel


def _plural(number: int) -> str:
    return "kernel" if number == 1 else "kernels"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column in ("registers", "shared", "stack", "spills", "bytes", "seconds")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "built with")
    return table


def _progress() -> Progress:
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=Console(stderr=True), transient=True)
