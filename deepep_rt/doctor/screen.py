"""Print the screen of `python -m deepep_rt doctor`: the facts, and the findings with meaning and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .facts import Finding, JobReport, access_between, differences, fact, format_ranges, gpu_of, gpus, is_broken, path_between
from .memory_facts import provider_of, setting_of, unshared
from .network_facts import has_several_nodes, link_summaries, transport_of
from .slot_rules import launcher_of, obstacles

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_MAX_HOSTS = 4  # hosts with a table of GPUs
_MORE = "docs/when-it-does-not-work.md, in the repository and the source distribution, has more on each."


def show(job: JobReport, found: Sequence[Finding], console: Console) -> None:
    """Print everything on one screen."""
    parts: list[Any] = [_title(job), _facts(job)]
    for host, reports in list(job.hosts.items())[:_MAX_HOSTS]:
        parts += _gpu_tables(host, reports, console)
    if len(job.hosts) > _MAX_HOSTS:
        parts.append(Text(f"... and {len(job.hosts) - _MAX_HOSTS} more hosts"))
    if job.network is not None:
        parts.append(_rates_table(job))
    if different := differences(job.reports):
        parts.append(_difference_table(different))
    groups = (list(group) for _, group in groupby(found, key=lambda finding: (finding.type, finding.level)))
    for part in (*parts, *map(_finding_table, groups), _summary(found)):
        console.print(part)
        console.print()


def _title(job: JobReport) -> Text:
    report = job.reports[0]
    launch = report.get("launch")
    hosts = list(job.hosts)
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = f"{len(job.reports)} rank{'s' if len(job.reports) > 1 else ''}"
    launcher = launch["launcher"] if launch else "torchrun" if len(job.reports) > 1 else None
    processes = f"{ranks}, started by {launcher}" if launcher else "1 process"
    return Text.assemble((f"deepep_rt {fact(report, 'python', 'deepep_rt')}", "bold"), f" on {where}, {processes}")


def _facts(job: JobReport) -> Table:
    """Show the facts of rank 0. Another table shows the differences of other ranks."""
    report = job.reports[0]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _fact_rows(job, report):
        table.add_row(name, Text(value))
    return table


def _fact_rows(job: JobReport, report: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
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
    yield "Transport", _transport(job)
    yield "NICs", _nics(report)
    yield "IBGDA", _ibgda(report)
    yield "Addresses", _addresses(report)
    yield "Kernel cache", _cache(report)
    yield "Memory", _memory(job)
    if job.max_ranks is not None:
        yield "Slots", _slots(job)
    variables = fact(report, "settings", "variables") or {}
    yield "Variables", ", ".join(f"{name}={value}" for name, value in variables.items()) or "none that matter"


def _mpi(report: Mapping[str, Any]) -> str:
    library, mpirun = fact(report, "mpi", "library"), fact(report, "mpi", "mpirun")
    ours = f"{library}  {fact(report, 'mpi', 'path')}, mpi4py {fact(report, 'mpi', 'mpi4py')}" if library else "not found"
    launcher = f"{fact(report, 'mpi', 'mpirun_family') or 'unknown'} {fact(report, 'mpi', 'mpirun_version') or ''}".strip()
    lines = [ours, f"mpirun of {launcher}  {mpirun}" if mpirun else "mpirun not found"]
    if threads := report.get("mpi_threads"):
        knows = {True: "yes", False: "no", None: "unknown"}[report.get("mpi_cuda")]
        lines.append(f"threads: {threads} (the relay needs multiple); sends from GPU memory: {knows} (nothing needs it)")
    return "\n".join(lines)


def _transport(job: JobReport) -> str:
    """Say which transport a Buffer would use between nodes, and why."""
    if not has_several_nodes(job):
        return "none needed: all ranks are one node"
    if not job.uses_gpus:
        return "none needed: the host backend sends its messages itself"
    found = transport_of(job)
    return f"none can work: {found}" if isinstance(found, str) else f"{found.name}: {found.reason}"


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


def _addresses(report: Mapping[str, Any]) -> str:
    def one(each: Mapping[str, Any]) -> str:
        speed = f", {each['speed_mbit'] / 1e3:g} Gb/s" if each["speed_mbit"] else ""
        return f"{each['name']} {each['address']}{speed}"

    own = fact(report, "network", "own_addresses") or []
    shown = "; ".join(map(one, fact(report, "network", "interfaces") or [])) or "none that leads to other hosts"
    return f"{shown}\nresolves itself to {', '.join(own) or 'nothing'}"


def _cache(report: Mapping[str, Any]) -> str:
    folder = fact(report, "cache", "folder")
    if folder is None:
        return "unknown"
    error, corrupt = fact(report, "cache", "error"), len(fact(report, "cache", "corrupt"))
    state = "not writable" if error else "writable" if fact(report, "cache", "exists") else "not there yet, can be made"
    size = f"{fact(report, 'cache', 'entries')} kernels, {fact(report, 'cache', 'bytes') / 1e6:.1f} MB"
    return f"{folder}: {state}, {size}" + (f", {corrupt} corrupt" if corrupt else "")


def _memory(job: JobReport) -> str:
    if (hint := job.size_hint()) is None:
        return "unknown: the sizes are wrong"
    c = job.config()
    modes = "throughput and low-latency" if c.low_latency else "throughput"
    sizes = f"{c.num_max_tokens_per_rank} tokens, hidden {c.hidden}, top-{c.num_topk} of {c.num_experts} experts"
    buffer = f"a {modes} Buffer of {c.num_ranks} ranks, {sizes}, {c.dtype}, {c.num_slots} slots"
    return f"{hint['total'] / 1e9:.2f} GB a rank for {buffer}" + (f"\n{_provider(job)}" if job.uses_gpus else "")


def _slots(job: JobReport) -> str:
    """Say whether ranks can come and go, where they meet, and which launcher decides what becomes of survivors."""
    state = f"{job.max_ranks} slots " + ("cannot work here" if obstacles(job) else "can work here")
    store = job.reports[0].get("store")
    meets = f"store {store['place']}: {'does not answer' if store['error'] else 'answers'}" if store else "store: not looked for"
    return f"{state}; {meets}; launcher: {launcher_of(job) or 'none'}"


def _provider(job: JobReport) -> str:
    """Say which memory GPUs of a host would share, and what was tried."""
    if failed := unshared(job):
        rank, why = next(iter(failed.items()))
        tried = f"failed{f' on rank {rank}' if len(job.reports) > 1 else ''}: {why}"
    else:
        tried = "works" if fact(job.reports[0], "driver", "not_shared") == "" else "was not tried"
    return f"provider: {provider_of(job)} (DEEPEP_RT_SYMMETRIC_MEMORY={setting_of(job)}); sharing virtual memory {tried}"


def _gpu_tables(host: str, reports: Sequence[Mapping[str, Any]], console: Console) -> list[Table]:
    """Show the GPUs of a host and the paths between them.

    This is one table, or two tables with short UUIDs if one is too wide for the console.
    """
    known = {gpu["uuid"]: gpu for report in reports for gpu in gpus(report)}  # including GPUs that only other ranks see
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
    users = format_ranges(report["rank"] for report in reports if (gpu_of(report) or {}).get("uuid") == uuid)
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


def _rates_table(job: JobReport) -> Any:
    """Show what was measured between ranks, and what to expect."""
    rows = []
    for found in link_summaries(job):
        which, gb_s = found.slowest
        name = f"node {which[0]}" if len(which) == 1 else " and ".join(map(str, which)) or "of all ranks"
        us, together = ("-" if value is None else f"{value:.3g}" for value in (found.us, found.together_gb_s))
        cells = [
            f"{found.where}, {found.medium}",
            str(found.num_pairs),
            us,
            f"{found.gb_s:.3g}",
            together,
            f"{gb_s:.3g} ({name})",
        ]
        rows.append([*cells, found.expectation()])
    if not rows:
        is_alone, has_failed = len(job.reports) == 1, "failure" in (job.network or {})
        none = "there is one rank." if is_alone else "without MPI, doctor measures between nodes and between GPUs."
        return Text("No rates between ranks: " + ("the measurement failed." if has_failed else none))
    columns = ("link", "pairs", "us", "GB/s", "all at once", "slowest", "expected")
    return _table("Rates between ranks (MPI: from host memory, one pair of a node at a time)", columns, rows, no_wrap=False)


def _difference_table(different: Mapping[str, Mapping[str, list[int]]]) -> Table:
    rows = [
        (Text("" if number else item), Text(value), format_ranges(at))
        for item, values in different.items()
        for number, (value, at) in enumerate(values.items())
    ]
    return _table("Different between ranks", ("", "value", "ranks"), rows, no_wrap=False)


def _finding_table(group: Sequence[Finding]) -> Table:
    """Show findings of one type and level, and their common meaning and remedy once."""
    finding_type, level = group[0].type, group[0].level
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, width=len("warning"))
    table.add_column(overflow="fold")
    for finding in group:
        where = f" on rank{'s' if len(finding.ranks) > 1 else ''} {format_ranges(finding.ranks)}" if finding.ranks else ""
        table.add_row(Text(level, _STYLES[level]), Text.assemble((finding_type.name, _STYLES[level]), f"{where}: {finding.what}"))
    table.add_row("", Text(finding_type.meaning))
    table.add_row("", Text.assemble(("What to do: ", "bold"), finding_type.remedy))
    return table


def _summary(found: Sequence[Finding]) -> Text:
    number = {level: sum(finding.level == level for finding in found) for level in _STYLES}
    counts = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in number.items() if count)
    if is_broken(found):
        return Text(f"Broken: {counts}. {_MORE}", _STYLES["error"])
    return Text(f"Usable{': ' + counts if counts else ', nothing to remark'}.", "bold green")
