"""The description of a Buffer: where its ranks are, and how their rows travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LinkRates:
    """Rates of the links between ranks: the worst of any rank.

    Args:
        near_bytes_per_s: Bandwidth to ranks of its node.
        near_latency_s: Seconds of a small message to them.
        far_bytes_per_s: Bandwidth to ranks of other nodes.
        far_latency_s: Seconds of a small message to them.

    Example:
        >>> print(LinkRates(150e9, 15e-6, 43e9, 25e-6))
        near 150 GB/s and 15 us, far 43 GB/s and 25 us
    """

    near_bytes_per_s: float
    near_latency_s: float
    far_bytes_per_s: float
    far_latency_s: float

    def __str__(self) -> str:
        near = f"near {_figure(self.near_bytes_per_s / 1e9)} GB/s and {_figure(self.near_latency_s * 1e6)} us"
        return f"{near}, far {_figure(self.far_bytes_per_s / 1e9)} GB/s and {_figure(self.far_latency_s * 1e6)} us"


def _figure(value: float) -> str:
    """Format with three digits, and without an exponent for large values."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class BufferDescription:
    """What `Buffer.describe` returns. It prints as a table, and is the same on all ranks.

    Args:
        backend: "cuda" or "host".
        num_ranks: Ranks of the Buffer.
        ranks_per_node: Consecutive ranks of a node.
        hosts: Name of each rank's host.
        gpus: Name and architecture of each rank's GPU. Empty texts on the host backend.
        transport: What carries rows to other nodes: "nvshmem" or "mpi", on the host backend "MPI" or "a store". With one node on GPUs: "".
        transport_reason: Why.
        path: "hierarchical" or "direct" with several nodes, otherwise "".
        path_reason: Why.
        measured: The rates that were measured for the choice of the path, or None.
        memory: Bytes of GPU memory of a rank by region, and their sum as "total". With a relay also "pinned on the host", which is no GPU
            memory. If NVSHMEM is only the network, also "low_latency of the network". Empty on the host backend.
        provider: What provides the memory that the GPUs of a host share, and how. Empty on the host backend.
        grows: Whether the memory of each rank grows when results fill it.
        tuning: The choice of `Buffer.autotune` in use. Its number of SMs does not count if the program has set another. Empty without one.

    Example:
        >>> print(BufferDescription("host", 2, 2, ("a", "a"), ("", ""), transport="MPI"))
        backend    host
        ranks      2, on 1 node
        hosts      a (ranks 0 to 1)
        transport  MPI
    """

    backend: str
    num_ranks: int
    ranks_per_node: int
    hosts: tuple[str, ...]
    gpus: tuple[str, ...]
    transport: str = ""
    transport_reason: str = ""
    path: str = ""
    path_reason: str = ""
    measured: LinkRates | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    tuning: str = ""
    provider: str = ""
    grows: bool = False

    @property
    def num_nodes(self) -> int:
        """Groups of ranks that reach each other directly."""
        return self.num_ranks // self.ranks_per_node

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} nodes of {self.ranks_per_node}" if self.num_nodes > 1 else "1 node"
        regions = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in self.memory.items() if size and name != "total")
        lines = {
            "backend": self.backend,
            "ranks": f"{self.num_ranks}, on {nodes}",
            "hosts": _by_rank(self.hosts),
            "GPUs": _by_rank(self.gpus),
            "transport": _because(self.transport, self.transport_reason),
            "path": _because(self.path, self.path_reason),
            "measured": str(self.measured or ("nothing" if self.path else "")),
            "memory": f"{self.memory['total'] / 1e9:.2f} GB a rank ({regions}){', and more if results fill it' * self.grows}"
            if self.memory
            else "",
            "provider": self.provider,
            "tuning": self.tuning,
        }
        return "\n".join(f"{name:<9}  {text}" for name, text in lines.items() if text)


def _because(name: str, reason: str) -> str:
    return f"{name}: {reason}" if name and reason else name


def _by_rank(names: Sequence[str]) -> str:
    """Return each name once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return "; ".join(f"{name} ({_format(having)})" for name, having in ranks.items() if name)


def _format(ranks: Iterable[int]) -> str:
    """Format ascending ranks as "ranks 0 to 3, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"rank{'' if texts == [str(runs[0][0])] else 's'} {', '.join(texts)}"
