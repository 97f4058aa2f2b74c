"""The command `compile`: build the kernels of a Buffer ahead of time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .. import _env
from .._checks import choice, whole_number
from .._console import console
from ..backends.path_choice import config_of_measurement
from ..config import COMBINE_DTYPES, MAX_NODES, MAX_RANKS_PER_NODE, Config, declared_ranks_per_node
from ..errors import EPCacheError, EPCompileError, EPConfigError, EPUnavailableError
from ..jit import build, compiler
from ..jit.build import most_threads
from ..jit.store import KernelCache
from ..kernels.layout import Layout
from ..kernels.source import kernel_constants
from ..kernels.table import KERNELS, Kernel
from ..kernels.tuning import has_fp8
from ..network import TRANSPORTS
from . import tables
from .options import Dtype, Experts, Hidden, Json, RanksPerNode, Slots, Tokens, TopK

ALL_ARCHS = ("sm_80", "sm_90", "sm_100")
"""The targets of `--arch all`. Targets that the installed NVRTC does not know are left out."""


def compile_(
    arch: Annotated[
        list[str] | None,
        typer.Option(help=f"Target, such as sm_90; may be repeated. 'all': those of {', '.join(ALL_ARCHS)} that NVRTC knows."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.")] = 8,
    max_ranks: Annotated[int | None, typer.Option(help="For Buffers with max_ranks. --ranks has no effect then.")] = None,
    tokens: Tokens = 4096,
    hidden: Hidden = 7168,
    topk: TopK = 8,
    experts: Experts = 256,
    dtype: Dtype = "bfloat16",
    slots: Slots = 2,
    ranks_per_node: RanksPerNode = None,
    path: Annotated[str, typer.Option(help="Way of rows between nodes: hierarchical, direct, or auto for both.")] = "auto",
    transport: Annotated[str, typer.Option(help="Transport between nodes: nvshmem, mpi, or auto for both.")] = "auto",
    low_latency: Annotated[
        bool,
        typer.Option("--low-latency", help="For Buffers with low_latency=True. Only with several nodes this makes a difference."),
    ] = False,
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
    """Compile kernels ahead of time. These are all that a Buffer of these sizes needs. With --arch, no GPU is needed."""
    num_ranks, node_size = _placed(ranks, max_ranks, ranks_per_node)
    config = Config(
        num_ranks=num_ranks,
        num_max_tokens_per_rank=tokens,
        hidden=hidden,
        num_topk=topk,
        num_experts=experts,
        dtype=dtype,
        num_slots=slots,
        ranks_per_node=node_size,
        path=path,
        low_latency=low_latency,
        on_timeout=on_timeout,
        statistics=with_statistics or _env.statistics(),
        has_slots=max_ranks is not None,
    )
    needed = kernels_of(config, transport, combine_dtype)
    jobs = [(*job, target) for target in targets_of(arch) for job in needed if has_fp8(target) or not job[1].needs_fp8]
    rows = _build_all(jobs)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_compiled(rows)
    failed = [row["error"] for row in rows if row["status"] == "failed"] + (list(_excesses(rows)) if strict else [])
    for message in failed:
        typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1 if failed else 0)


def _placed(ranks: int, max_ranks: int | None, ranks_per_node: int | None) -> tuple[int, int | None]:
    """Return the number of ranks or slots, and the ranks of a node, as a Buffer chooses them."""
    if max_ranks is None:
        return ranks, declared_ranks_per_node(ranks) if ranks_per_node is None else ranks_per_node
    max_ranks = whole_number(max_ranks, "--max-ranks", 1, MAX_RANKS_PER_NODE, error=EPConfigError)
    if ranks_per_node not in (None, max_ranks):
        raise EPConfigError(
            f"--ranks-per-node={ranks_per_node} with --max-ranks={max_ranks}; expected one node, because slots are on one host. "
            f"Leave --ranks-per-node out."
        )
    return max_ranks, max_ranks


def targets_of(archs: list[str] | None) -> list[str]:
    """List the targets of `--arch`. Default: the architecture of this machine's GPU."""
    if not archs:
        try:
            return [compiler.target_arch()]
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


def kernels_of(config: Config, transport: str, combine_dtypes: list[str] | None) -> list[tuple[Config, Kernel, str | None]]:
    """List the kernels that a Buffer can need, with its sizes: for each transport and path that "auto" may choose.

    Raise EPConfigError if `transport` or an element type of combine is not one of those that exist.
    """
    choice(transport, "--transport", TRANSPORTS, error=EPConfigError)
    if not config.has_network:
        return [(config, *variant) for variant in variants(config, combine_dtypes)]
    found: list[tuple[Config, Kernel, str | None]] = []
    chooses = config.path == "auto" and config.node_size > 1
    paths = ("hierarchical", "direct") if chooses else ("hierarchical",) if config.path == "auto" else (config.path,)
    for name in ("nvshmem", "mpi") if transport == "auto" else (transport,):
        over = dataclasses.replace(config, transport=name)
        if chooses and config.num_nodes <= MAX_NODES:  # a Buffer measures the links first
            found.append((config_of_measurement(over), KERNELS["link_rates"], None))
        for path in paths:
            one = dataclasses.replace(over, path=path)
            found += [(one, *variant) for variant in variants(one, combine_dtypes)]
    return found


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


def _build_all(jobs: list[tuple[Config, Kernel, str | None, str]]) -> list[dict[str, Any]]:
    """Build the kernels, as many at a time as this process has cores, and describe each kernel once, in the order of the jobs."""
    by_key: dict[object, dict[str, Any]] = {}  # kernels that are the same for all transports and paths appear once
    pool = ThreadPoolExecutor(most_threads())
    try:
        with _progress() as progress, _ended_by_sigint(progress.console):
            task = progress.add_task("", total=len(jobs))
            # PTX that is linked needs the CUDA context of this thread.
            futures = [None if _links_ptx(*job) else pool.submit(_build, *job) for job in jobs]
            for job, future in zip(jobs, futures, strict=True):
                _, kernel, element, target = job
                progress.update(task, description=f"{tables.title(kernel.name, element)} for {target}")
                row = _build(*job) if future is None else future.result()
                first = by_key.setdefault(row.get("key", len(by_key)), row)
                if row["status"] == "compiled":
                    first["status"] = "compiled"  # the thread of an equal job may have compiled it first
                progress.advance(task)
    finally:
        pool.shutdown(cancel_futures=True)
    return list(by_key.values())


@contextlib.contextmanager
def _ended_by_sigint(terminal: Console) -> Iterator[None]:
    """Let SIGINT end this process at once while the block runs. A program's own handler stays.

    Python would wait for the threads that compile, and nothing stops NVRTC. The handler raises no exception: Python ignores one that comes
    while it frees an object.
    """

    def end(number: int, frame: object) -> None:
        terminal.show_cursor()
        typer.echo(f"interrupted; the cache keeps the kernels that were complete ({KernelCache().folder})", err=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _links_ptx(config: Config, kernel: Kernel, element: str | None, arch: str) -> bool:
    return not arch.startswith("sm_") and kernel.links_nvshmem(kernel_constants(Layout(config), arch, kernel, element))


def _build(config: Config, kernel: Kernel, element: str | None, arch: str) -> dict[str, Any]:
    """Build one kernel and describe the outcome."""
    row: dict[str, Any] = {"kernel": kernel.name, "dtype": element, "arch": arch}
    if config.has_network and not kernel.is_local:
        row |= {"transport": config.transport, "path": config.path}
    constants = kernel_constants(Layout(config), arch, kernel, element)
    if _links_ptx(config, kernel, element, arch) and not _has_gpu():
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
        return bool(compiler.gpu_arch())
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
        name = tables.title(row["kernel"], row["dtype"], row.get("transport"), row.get("path"))
        table.add_row(
            name, row["arch"], *tables.usage(row), tables.number(row.get("bytes")), seconds, row.get("reason") or row["status"]
        )
    console(tables.WIDTH_OF_LOGS).print(table)


# --- progress ---------------------------------------------------------------------------------------------------------------------


def _progress() -> Progress:
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=Console(stderr=True), transient=True)
