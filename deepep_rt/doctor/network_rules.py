"""Define the rules about the network between hosts: functions of the job's reports and of what was measured between ranks."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from itertools import combinations

from ..cuda.nics import nvshmem_objection
from ..network import Choice
from .facts import Finding, JobReport, fact, first_few
from .network_facts import has_several_nodes, link_summaries, transport_of

SLOW = 0.5
"""A link is slow below this part of what to expect of it."""


def _transport(job: JobReport) -> Iterator[Finding]:
    """Find a requested transport that cannot work, and jobs that have only the slower one."""
    if not job.uses_gpus or not has_several_nodes(job):
        return
    found = transport_of(job)
    if isinstance(found, str):
        yield Finding.of("no-transport", "error", found)
    if job.transport in ("nixl", "mpi") or len(job.hosts) < 2:
        return
    without = {
        host: objection
        for host, reports in job.hosts.items()
        if (nics := fact(reports[0], "network", "nics")) is not None and (objection := nvshmem_objection(nics))
    }
    wants = any((fact(report, "settings", "variables") or {}).get("NVSHMEM_REMOTE_TRANSPORT") for report in job.reports)
    if without and not wants:
        level = "warning" if isinstance(found, Choice) else "error"
        takes = f". The relay over {found.name.upper()} carries the rows" if isinstance(found, Choice) else ""
        yield Finding.of("no-nic", level, first_few([f"{host} has {objection}" for host, objection in without.items()]) + takes)


def _threads(job: JobReport) -> Iterator[Finding]:
    """Find an MPI that a relay cannot use, where NVSHMEM carries the rows. Else `no-transport` says it."""
    levels = {report.get("mpi_threads", "multiple") for report in job.reports} - {"multiple", "unknown"}
    if levels and job.uses_gpus and has_several_nodes(job) and isinstance(transport_of(job), Choice):
        yield Finding.of("no-mpi-threads", "note", f"MPI grants the level {', '.join(sorted(levels))}")


def _own_names(job: JobReport) -> Iterator[Finding]:
    """Find hosts whose own name resolves to an address of the host alone, which launchers then tell the other hosts."""
    if len(job.hosts) < 2:
        return
    local = []
    for host, reports in job.hosts.items():
        names = fact(reports[0], "network", "own_addresses") or []
        if names and all(ipaddress.ip_address(name.partition("%")[0]).is_loopback for name in names):
            local.append(f"{host} ({', '.join(names)})")
    if local:
        yield Finding.of("own-name-is-local", "warning", first_few(local))


def _subnets(job: JobReport) -> Iterator[Finding]:
    """Find two hosts that have no subnet in common."""
    networks = {}
    for host, reports in job.hosts.items():
        addresses = fact(reports[0], "network", "interfaces")
        if addresses:
            networks[host] = {ipaddress.ip_interface(each["address"]).network for each in addresses}
    apart = [(a, b) for a, b in combinations(networks, 2) if not networks[a] & networks[b]]
    if apart:
        a, b = apart[0]
        theirs = (f"{host} has {', '.join(sorted(map(str, networks[host])))}" for host in (a, b))
        more = f", and {len(apart) - 1} more pairs of hosts" if len(apart) > 1 else ""
        yield Finding.of("different-subnets", "note", "; ".join(theirs) + more)


def _measurement(job: JobReport) -> Iterator[Finding]:
    measured = job.network or {}
    if failure := measured.get("failure"):
        yield Finding.of("network-stuck", "error", failure)
    if reason := (measured.get("gpus") or {}).get("reason"):
        yield Finding.of("gpus-not-measured", "warning", reason)
    if reason := (measured.get("relay") or {}).get("reason"):
        yield Finding.of("relay-not-measured", "warning", reason)


def _slow_network(job: JobReport) -> Iterator[Finding]:
    for found in link_summaries(job):
        if found.kind is not None and found.gb_s < SLOW * found.kind.expected_gb_s:
            what = f"{found.where}, {found.medium}: {found.gb_s:.3g} GB/s; expected {found.expectation()}"
            yield Finding.of("slow-network", "warning", what)


def _slow_pair(job: JobReport) -> Iterator[Finding]:
    """Find a pair or node far below the others of its kind."""
    for found in link_summaries(job):
        which, gb_s = found.slowest
        if found.num_pairs > 1 and gb_s < SLOW * found.gb_s:
            names = f"node {which[0]} reaches" if len(which) == 1 else f"ranks {which[0]} and {which[1]} reach"
            where = f"{found.where}, {found.medium}"
            yield Finding.of("slow-pair", "warning", f"{where}: {names} {gb_s:.3g} GB/s, the median is {found.gb_s:.3g}")


NETWORK_RULES: tuple[Callable[[JobReport], Iterator[Finding]], ...] = (
    _transport,
    _threads,
    _own_names,
    _subnets,
    _measurement,
    _slow_network,
    _slow_pair,
)
