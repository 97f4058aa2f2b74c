"""Summarise the measured links between ranks, and say what to expect of each kind of link."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cuda.transport import RankFacts, choose_transport, facts_of
from ..errors import EPUnavailableError
from ..network import Choice
from .facts import JobReport, fact, gpu_of, path_between
from .links import LINK_KINDS, LinkKind, nic_kind, tcp_kind

_ARCH_LINKS = {8: ("nvlink3", "pcie4", 12), 9: ("nvlink4", "pcie5", 18), 10: ("nvlink5", "pcie5", 18)}
"""By major number of the architecture: kinds of NVLink and PCIe, and the links of a GPU with all of them."""


NO_THREADS = "an MPI that allows no calls of a second thread (no MPI_THREAD_MULTIPLE)"


def transport_of(job: JobReport) -> Choice | str:
    """Choose the transport between the nodes of the job as a Buffer does.

    Return the choice with its reason, or the reason why no transport, or not the requested one, can work.
    """
    try:
        return choose_transport(job.transport, [_rank_facts(report) for report in job.reports])
    except EPUnavailableError as error:
        return str(error)


def _rank_facts(report: Mapping[str, Any]) -> RankFacts:
    """Make the facts of a rank for the choice. Unknown facts are no objection."""
    host = f"{fact(report, 'machine', 'host') or 'unknown'} {report['group']}"
    remote = (fact(report, "settings", "variables") or {}).get("NVSHMEM_REMOTE_TRANSPORT", "")
    has_threads = report.get("mpi_threads", "multiple") in ("multiple", "unknown")
    no_mpi = report.get("no_mpi") or ("" if has_threads else NO_THREADS)
    nics, no_nixl = fact(report, "network", "nics"), fact(report, "nixl", "error") or ""
    return facts_of(host, remote, nics, no_mpi, no_nixl) if nics is not None else RankFacts(host, "", no_mpi, no_nixl)


def has_several_nodes(job: JobReport) -> bool:
    """Tell whether a Buffer would have several nodes: several hosts, or nodes that the user declared."""
    declared = job.declared_ranks_per_node
    return len(job.hosts) > 1 or (declared is not None and declared < len(job.reports))


@dataclass(frozen=True)
class LinkSummary:
    """The measured links of one sort. Latencies and bandwidths are medians.

    Where only the rate of the slowest rank is known, `slowest` names no rank and has `gb_s`.
    """

    where: str  # "near" or "far"
    medium: str  # "MPI" or "a relay over NIXL" (from host memory), or "GPU" with the transport between nodes
    num_pairs: int  # measured pairs of ranks. For GPUs: nodes
    us: float | None  # of a small message one way. None: not measured
    gb_s: float  # of large messages, in the slower direction of each pair
    slowest: tuple[tuple[int, ...], float]  # ranks of the slowest pair, or number of a node; GB/s
    together_gb_s: float | None  # of one direction while all pairs send both ways. None: not measured
    kind: LinkKind | None  # for what to expect. None: unknown

    def expectation(self) -> str:
        """Say in words what to expect."""
        if self.kind is None:
            return "unknown kind of link"
        latency = f", below {self.kind.us:g} us" if self.us is not None else ""
        return f"{self.kind.expected_gb_s:.3g} GB/s{latency} ({self.kind.about})"


def link_summaries(job: JobReport) -> list[LinkSummary]:
    """Summarise what `doctor --network` measured."""
    measured: Mapping[str, Any] = job.network or {}
    found = []
    for where in ("near", "far"):
        links = [link for link in measured.get("links", ()) if link["where"] == where]
        groups: dict[bool, list[dict[str, Any]]] = {}
        for link in links:
            groups.setdefault(_on_one_host(job, link["ranks"]), []).append(link)
        for on_one_host, each in groups.items():
            if any("gb_s" in link for link in each):
                found.append(_summary(where, each, LINK_KINDS["host-memory"] if on_one_host else far_kind(job)))
    if relays := (measured.get("relay") or {}).get("links"):
        found.append(_summary("far", relays, None, "a relay over NIXL"))
    gpus = measured.get("gpus") or {}
    rates, far = {int(node): gb_s for node, gb_s in gpus.get("near", {}).items()}, gpus.get("far")
    if rates:
        slowest = min(rates, key=lambda node: rates[node])
        median, us = statistics.median(rates.values()), far and far.get("near_us")
        found.append(LinkSummary("near", "GPU", len(rates), us, median, ((slowest,), rates[slowest]), None, gpu_kind(job)))
    if far:
        kind, num_nodes = _far_gpu_kind(job, far["transport"]), len(measured["nodes"])
        medium = f"GPU over {far['transport']}"
        found.append(LinkSummary("far", medium, num_nodes, far.get("us"), far["gb_s"], ((), far["gb_s"]), None, kind))
    return found


def _far_gpu_kind(job: JobReport, transport: str) -> LinkKind | None:
    if len(job.hosts) > 1:
        return far_kind(job)
    return gpu_kind(job) if transport == "nvshmem" else LINK_KINDS["host-memory"]


def slower_gb_s(link: Mapping[str, Any]) -> float:
    """Return the bandwidth of a pair in its slower direction."""
    return min(link["gb_s"], link["back_gb_s"])


def _summary(where: str, links: Sequence[Mapping[str, Any]], kind: LinkKind | None, medium: str = "MPI") -> LinkSummary:
    alone = [link for link in links if "gb_s" in link]
    together = [link["together_gb_s"] for link in links if "together_gb_s" in link]
    slowest = min(alone, key=slower_gb_s)
    return LinkSummary(
        where,
        medium,
        len(alone),
        statistics.median(link["us"] for link in alone),
        statistics.median(map(slower_gb_s, alone)),
        (tuple(slowest["ranks"]), slower_gb_s(slowest)),
        statistics.median(together) if together else None,
        kind,
    )


def _on_one_host(job: JobReport, ranks: Sequence[int]) -> bool:
    return len({job.reports[rank]["group"] for rank in ranks}) == 1


# --- kinds of links ----------------------------------------------------------------------------------------------------------------


def far_kind(job: JobReport) -> LinkKind | None:
    """Return the kind of link between hosts: the fastest of each host, and of those the slowest. None: unknown."""
    kinds = [host_kind(reports[0]) for reports in job.hosts.values()]
    known = [kind for kind in kinds if kind is not None]
    return min(known, key=lambda kind: kind.expected_gb_s) if len(known) == len(kinds) else None


def host_kind(report: Mapping[str, Any]) -> LinkKind | None:
    """Return the kind of the fastest link that leads from a host: a usable RDMA NIC, or else an Ethernet interface."""
    found = []
    for nic in fact(report, "network", "nics") or []:
        for port in nic["ports"] if nic["usable"] else ():
            rate = re.match(r"[\d.]+", port.get("rate", ""))
            kind = nic_kind(nic["name"], port.get("link", ""), float(rate[0])) if rate and port["state"] == "ACTIVE" else None
            found += [kind] if kind else []
    if not found:
        speeds = [each["speed_mbit"] for each in fact(report, "network", "interfaces") or []]
        found = [kind for speed in speeds if speed and (kind := tcp_kind(speed / 1e3))]
    return max(found, key=lambda kind: kind.expected_gb_s, default=None)


def gpu_kind(job: JobReport) -> LinkKind | None:
    """Return the kind of link between the GPUs of the first host, with the line rate of as many NVLinks as there are. None: unknown."""
    here = next(iter(job.hosts.values()))
    gpus = [gpu for report in here if (gpu := gpu_of(report)) is not None]
    uuids = list(dict.fromkeys(gpu["uuid"] for gpu in gpus))
    if len(uuids) < 2 or not (arch := re.match(r"sm_(\d+)\d", gpus[0]["arch"])):
        return None
    path = path_between(here[0], uuids[0], uuids[1]) or ""
    nvlink, pcie, links = _ARCH_LINKS.get(int(arch[1]), _ARCH_LINKS[max(_ARCH_LINKS)])
    if not path.startswith("NV"):
        return LINK_KINDS[pcie]
    kind, number = LINK_KINDS[nvlink], int(path[2:] or links)
    return dataclasses.replace(kind, gb_s=kind.gb_s * number / links, about=f"{number} NVLinks")
