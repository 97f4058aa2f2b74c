"""`python -m deepep_rt doctor`: what this machine has, what is wrong with it, and what to do about that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .. import _env
from ..errors import EPConfigError
from ..kernels.layout import Layout
from . import runner as doctor_run
from .facts import Finding, Situation, access_between, differences, fact, gpu_of, gpus, path_between, ranges

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_MAX_HOSTS = 4  # that are shown with all their GPUs
_MORE = "docs/when-it-does-not-work.md, in the repository and the source distribution, has more on each."


def examine(sizes: Mapping[str, Any], num_ranks: int | None, backend: str) -> tuple[Situation, bool]:
    """Look at this machine, and ask the other ranks what they see. Collective under a launcher.

    Args:
        sizes: Arguments of `Config` except for `num_ranks`; `num_experts` may be left out.
        num_ranks: Ranks of the Buffer; default: those of the launcher.
        backend: "auto", "cuda" or "host", as for `Buffer`.

    Returns:
        What was found, and whether it is for this rank to tell it.
    """
    launch = doctor_run.launch()
    other_launch: dict[str, Any] = {"size": _env.world_size(), "local_rank": _env.local_rank()}
    report = {**doctor_run.examine(), "launch": launch, "other_launch": other_launch}
    rank, reports, failure = 0, [{**report, **doctor_run.ALONE}], None
    if fact(report, "mpi", "error") is None:
        rank, reports, failure = doctor_run.gather(report)
    if len(reports) == 1:  # MPI did not bring the ranks together, so the launcher's word counts
        rank = launch["rank"] if launch else 0
        if other_launch["size"] > 1:
            rank = rank or other_launch["local_rank"] or 0  # srun may have started torchrun, once on each host
    return Situation(reports, sizes, num_ranks, backend, failure), rank == 0


def as_json(situation: Situation, found: Sequence[Finding]) -> dict[str, Any]:
    """Everything, for programs: `status` ("ok" or "broken"), `findings`, `size_hint`, `differences`, `ranks` (their reports)."""
    return {
        "status": "broken" if is_broken(found) else "ok",
        "findings": [
            {
                "kind": finding.kind.name,
                "level": finding.level,
                "what": finding.what,
                "ranks": list(finding.ranks) or [report["rank"] for report in situation.reports],
                "meaning": finding.kind.meaning,
                "remedy": finding.kind.remedy,
            }
            for finding in found
        ],
        "size_hint": _size_hint(situation),
        "differences": differences(situation.reports),
        "ranks": list(situation.reports),
    }


def is_broken(found: Iterable[Finding]) -> bool:
    """Whether a Buffer cannot be made, or not as asked for."""
    return any(finding.level == "error" for finding in found)


def show(situation: Situation, found: Sequence[Finding], console: Console) -> None:
    """Print one screen."""
    parts: list[Any] = [_title(situation), _facts(situation)]
    for host, reports in list(situation.hosts.items())[:_MAX_HOSTS]:
        parts += _gpu_tables(host, reports, console)
    if len(situation.hosts) > _MAX_HOSTS:
        parts.append(Text(f"... and {len(situation.hosts) - _MAX_HOSTS} more hosts"))
    if different := differences(situation.reports):
        parts.append(_difference_table(different))
    alike = (list(some) for _, some in groupby(found, key=lambda finding: (finding.kind, finding.level)))
    for part in (*parts, *map(_described, alike), _verdict(found)):
        console.print(part)
        console.print()


def _title(s: Situation) -> Text:
    report = s.reports[0]
    launch = report.get("launch")
    hosts = list(s.hosts)
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    who = (
        "1 process"
        if not launch
        else f"{len(s.reports)} rank{'s' if len(s.reports) > 1 else ''}, started by {launch['launcher']}"
    )
    return Text.assemble((f"deepep_rt {fact(report, 'python', 'deepep_rt')}", "bold"), f" on {where}, {who}")


def _facts(s: Situation) -> Table:
    """What rank 0 sees; what is different elsewhere has a table of its own."""
    report = s.reports[0]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _fact_rows(s, report):
        table.add_row(name, Text(value))
    return table


def _fact_rows(s: Situation, report: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    def versioned(probe: str) -> str:
        version, path = fact(report, probe, "version"), fact(report, probe, "path")
        return f"{version}  {path or ''}".strip() if version else "not found"

    packages = fact(report, "python", "packages") or {}
    yield "Python", f"{fact(report, 'python', 'version')}  {fact(report, 'python', 'executable')}"
    yield "Packages", ", ".join(f"{name} {version}" for name, version in packages.items() if not name.startswith("nvidia-"))
    yield "MPI", _mpi(report)
    cuda, driver = fact(report, "driver", "cuda"), fact(report, "nvml", "driver")
    yield "Driver", f"{driver or ''}, CUDA {cuda}  {fact(report, 'driver', 'library')}".strip(", ") if cuda else "not found"
    if cuda and (error := fact(report, "nvml", "error")):
        yield "NVML", error
    yield "NVRTC", versioned("nvrtc")
    yield "nvJitLink", versioned("nvjitlink")
    yield "NVSHMEM", f"host {versioned('nvshmem_host')}\ndevice {versioned('nvshmem_device')}"
    yield "NICs", _nics(report)
    yield "IBGDA", _ibgda(report)
    yield "Kernel cache", _cache(report)
    yield "Memory", _memory(s)
    variables = fact(report, "settings", "variables") or {}
    yield "Variables", ", ".join(f"{name}={value}" for name, value in variables.items()) or "none that matter"


def _mpi(report: Mapping[str, Any]) -> str:
    library, mpirun = fact(report, "mpi", "library"), fact(report, "mpi", "mpirun")
    ours = f"{library}  {fact(report, 'mpi', 'path')}, mpi4py {fact(report, 'mpi', 'mpi4py')}" if library else "not found"
    launcher = f"{fact(report, 'mpi', 'mpirun_family') or 'unknown'} {fact(report, 'mpi', 'mpirun_version') or ''}".strip()
    return f"{ours}\nmpirun of {launcher}  {mpirun}" if mpirun else f"{ours}\nmpirun not found"


def _nics(report: Mapping[str, Any]) -> str:
    def one(nic: Mapping[str, Any]) -> str:
        ports = "; ".join(f"port {port['port']} {port['state']}, {port['rate']}, {port['link']}" for port in nic["ports"])
        return f"{nic['name']} ({nic['type']}): {ports}" + ("" if nic["usable"] else "; may not be opened")

    return "\n".join(map(one, fact(report, "network", "nics") or [])) or "no RDMA NIC"


def _ibgda(report: Mapping[str, Any]) -> str:
    parameters = fact(report, "network", "driver_parameters") or {}
    names = ("EnableStreamMemOPs", "RegistryDwords")
    shown = ", ".join(f'{name}="{parameters[name]}"' for name in names if name in parameters) or "no driver parameters"
    yes = {True: "yes", False: "no"}
    peermem, gdrcopy = fact(report, "network", "peermem"), fact(report, "network", "gdrdrv") and fact(report, "network", "gdrapi")
    dmabuf = fact(report, "network", "open_driver")
    return (
        f"{shown}; nvidia-peermem: {yes[bool(peermem)]}; open kernel modules: {yes[bool(dmabuf)]}; GDRCopy: {yes[bool(gdrcopy)]}"
    )


def _cache(report: Mapping[str, Any]) -> str:
    folder = fact(report, "cache", "folder")
    if folder is None:
        return "unknown"
    error, corrupt = fact(report, "cache", "error"), len(fact(report, "cache", "corrupt"))
    state = "not writable" if error else "writable" if fact(report, "cache", "exists") else "not there yet, can be made"
    size = f"{fact(report, 'cache', 'entries')} kernels, {fact(report, 'cache', 'bytes') / 1e6:.1f} MB"
    return f"{folder}: {state}, {size}" + (f", {corrupt} corrupt" if corrupt else "")


def _memory(s: Situation) -> str:
    if (hint := _size_hint(s)) is None:
        return "unknown: the sizes are wrong"
    c = s.config()
    kinds = " and low-latency" if c.low_latency else ""
    return (
        f"{hint['total'] / 1e9:.2f} GB a rank for a throughput{kinds} Buffer of {c.num_ranks} ranks, {c.num_max_tokens_per_rank} tokens, "
        f"hidden {c.hidden}, top-{c.num_topk} of {c.num_experts} experts, {c.dtype}, {c.num_slots} slots"
    )


def _size_hint(s: Situation) -> dict[str, int] | None:
    try:
        return Layout(s.config()).size_hint
    except EPConfigError:
        return None


def _gpu_tables(host: str, reports: Sequence[Mapping[str, Any]], console: Console) -> list[Table]:
    """The GPUs of a host, and the paths between them: one table, or two and short UUIDs where that is too wide."""
    known = {gpu["uuid"]: gpu for report in reports for gpu in gpus(report)}  # also those that only other ranks see
    nvml = {gpu["uuid"]: gpu for gpu in fact(reports[0], "nvml", "gpus") or []}
    ids = [*nvml, *(uuid for uuid in known if uuid not in nvml)]
    if not ids:
        return []
    rows = [[str(number), *_gpu_row(reports, known, nvml, uuid)] for number, uuid in enumerate(ids)]
    paths = [[_cell(reports, uuid, other) for other in ids] for uuid in ids]
    title, columns, numbers = (
        f"GPUs of {host}",
        ["", "name", "UUID", "arch", "MIG", "free of GB", "ranks"],
        [row[0] for row in rows],
    )
    one = _table(title, [*columns, *numbers], [[*row, *cells] for row, cells in zip(rows, paths, strict=True)])
    if Measurement.get(console, console.options.update(width=1000), one).maximum <= console.width:
        return [one]
    short = [[*row[:2], row[2][:8], *row[3:]] for row in rows]
    between = [[number, *cells] for number, cells in zip(numbers, paths, strict=True)]
    return [_table(title, columns, short), _table("Paths between them", ["", *numbers], between)]


def _gpu_row(
    reports: Sequence[Mapping[str, Any]], known: Mapping[str, Any], nvml: Mapping[str, Any], uuid: str
) -> tuple[str, str, str, str, str, str]:
    gpu, seen = nvml.get(uuid, {}), known.get(uuid)
    mig = {True: "on", False: "off", None: "?"}[gpu.get("mig")]
    free, total = gpu.get("free_bytes"), gpu.get("total_bytes") or (seen or {}).get("total_bytes") or 0
    memory = f"{'?' if free is None else f'{free / 1e9:.1f}'} of {total / 1e9:.1f}"
    users = ranges(report["rank"] for report in reports if (gpu_of(report) or {}).get("uuid") == uuid)
    return (seen or gpu)["name"] or "?", uuid, seen["arch"] if seen else "hidden", mig, memory, users if len(reports) > 1 else "-"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, no_wrap: bool = True) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, min_width=len(title))
    for column in columns:
        table.add_column(column, no_wrap=no_wrap, overflow="ellipsis" if no_wrap else "fold")
    for row in rows:
        table.add_row(*row)
    return table


def _cell(reports: Sequence[Mapping[str, Any]], a: str, b: str) -> Text:
    if a == b:
        return Text("-", style="dim")
    path, access = path_between(reports[0], a, b), access_between(reports, a, b)
    if access is None:
        return Text(path or "?")
    if not access:
        return Text("none", style="bold red")
    return Text(path or "access", style="green" if (path or "").startswith("NV") else "yellow")


def _difference_table(different: Mapping[str, Mapping[str, list[int]]]) -> Table:
    rows = [
        (Text("" if number else item), Text(value), ranges(at))
        for item, values in different.items()
        for number, (value, at) in enumerate(values.items())
    ]
    return _table("Different between ranks", ("", "value", "ranks"), rows, no_wrap=False)


def _described(alike: Sequence[Finding]) -> Table:
    """Findings of one kind and level: what each is, and once what that means."""
    kind, level = alike[0].kind, alike[0].level
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, width=len("warning"))
    table.add_column(overflow="fold")
    for finding in alike:
        where = f" on rank{'s' if len(finding.ranks) > 1 else ''} {ranges(finding.ranks)}" if finding.ranks else ""
        table.add_row(Text(level, _STYLES[level]), Text.assemble((kind.name, _STYLES[level]), f"{where}: {finding.what}"))
    table.add_row("", Text(kind.meaning))
    table.add_row("", Text.assemble(("What to do: ", "bold"), kind.remedy))
    return table


def _verdict(found: Sequence[Finding]) -> Text:
    number = {level: sum(finding.level == level for finding in found) for level in _STYLES}
    counts = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in number.items() if count)
    if is_broken(found):
        return Text(f"Broken: {counts}. {_MORE}", _STYLES["error"])
    return Text(f"Usable{': ' + counts if counts else ', nothing to remark'}.", "bold green")
