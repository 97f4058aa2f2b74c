"""The choice of the path between nodes, from rates of links and the rows that a token is expected to cause.

The expected traffic of a token is pure arithmetic. Experts are drawn without replacement, and every expert is equally likely. With groups,
a router first takes the nodes of the token's best experts, and then the best experts of those nodes (DeepSeek-V3 calls this group-limited
routing). Measured rates are kept on disk by topology, next to the compiled kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import _env
from .._documents import has_fields
from ..comm.communicator import Communicator
from ..config import Config
from ..description import BufferDescription, LinkRates
from ..errors import EPConfigError
from ..jit.store import SavedFiles
from ..network import Choice

Measure = Callable[[Communicator, Config], LinkRates]
"""Measures the links of all ranks at the same time, and returns the same rates on all of them. Collective."""

_MARGIN = 0.1  # within it the hierarchical path is taken: it sends fewer messages, and its rates depend less on other jobs

_NEAR_BYTES_PER_S, _NEAR_LATENCY_S = 150e9, 15e-6  # H800 over NVLink
_FAR_BYTES_PER_S = {"nvshmem": 43e9, "nixl": 1.5e9, "mpi": 1.5e9, "wire": 43e9}  # a NIC of 400 Gb/s, and relays over TCP
_FAR_LATENCY_S = {"nvshmem": 25e-6, "nixl": 100e-6, "mpi": 100e-6, "wire": 25e-6}
_RELAY_ON_ONE_HOST = 3.3e9  # bytes a second through shared memory
_LINE_SHARE = 0.86  # of a NIC's line rate, that rows reach


class Traffic(NamedTuple):
    """The places that one token is expected to reach. Places count once, however many of the token's experts they hold."""

    nodes: float  # the token's own node included if it holds an expert of the token
    ranks: float  # the token's own rank included
    num_nodes: int  # of the job

    @property
    def far_nodes(self) -> float:
        """Other nodes than the token's own. By symmetry, each node of the token is its own one with a chance of 1 in `num_nodes`."""
        return self.nodes * (1 - 1 / self.num_nodes)

    @property
    def far_ranks(self) -> float:
        """Ranks on other nodes than the token's own."""
        return self.ranks * (1 - 1 / self.num_nodes)

    @property
    def near_ranks(self) -> float:
        """Ranks on the token's own node."""
        return self.ranks / self.num_nodes


@functools.lru_cache(maxsize=256)
def expected_traffic(num_nodes: int, node_size: int, num_topk: int, num_experts: int, num_groups: int | None = None) -> Traffic:
    """Compute the expected numbers of nodes and ranks that a token goes to. `num_groups` limits the nodes of a token.

    Raise EPConfigError if the experts cannot be divided by the ranks, or if there are too few of them for a token.

    Example:
        >>> traffic = expected_traffic(2, 8, num_topk=8, num_experts=256)
        >>> round(traffic.far_nodes, 3), round(traffic.far_ranks, 3)
        (0.997, 3.262)
    """
    num_ranks = num_nodes * node_size
    if num_experts % num_ranks:
        raise EPConfigError(
            f"num_experts={num_experts}; expected a multiple of the {num_ranks} ranks. Choose another number of experts or nodes."
        )
    node_experts, rank_experts = num_experts // num_nodes, num_experts // num_ranks
    groups = min(num_groups or num_nodes, num_nodes)
    if groups * node_experts < num_topk:
        raise EPConfigError(
            f"num_topk={num_topk}; expected at most the {groups * node_experts} experts of {groups} nodes. Choose more groups or experts."
        )
    nodes = ranks = 0.0
    for counts, chance in _choices_by_node(num_nodes, node_experts, num_topk, groups).items():
        nodes += chance * len(counts)
        ranks += chance * sum(_distinct(node_size, rank_experts, count) for count in counts)
    return Traffic(nodes, ranks, num_nodes)


def _choices_by_node(num_nodes: int, node_experts: int, num_topk: int, groups: int) -> dict[tuple[int, ...], float]:
    """Compute the chance of each split of a token's choices over nodes. A split lists the choices of each chosen node, in falling order.

    The best expert comes first, then the next one. Until `groups` nodes hold a choice, the next expert is any other one. From then
    on, it is one of those nodes. The nodes of the best experts are thereby the first `groups` nodes that appear.
    """
    splits: dict[tuple[int, ...], float] = {(): 1.0}
    for drawn in range(num_topk):
        later: dict[tuple[int, ...], float] = {}
        for split, chance in splits.items():
            is_open = len(split) < groups
            left = (num_nodes if is_open else groups) * node_experts - drawn
            for i, count in enumerate(split):
                _add(later, (*split[:i], count + 1, *split[i + 1 :]), chance * (node_experts - count) / left)
            if is_open:
                _add(later, (*split, 1), chance * (num_nodes - len(split)) * node_experts / left)
        splits = later
    return splits


def _add(chances: dict[tuple[int, ...], float], split: tuple[int, ...], chance: float) -> None:
    if chance > 0:  # a node whose experts are all taken
        key = tuple(sorted(split, reverse=True))
        chances[key] = chances.get(key, 0.0) + chance


def _distinct(num_ranks: int, rank_experts: int, drawn: int) -> float:
    """Return the expected number of ranks that hold at least one of `drawn` experts of a node."""
    total = num_ranks * rank_experts
    return num_ranks * (1 - math.comb(total - rank_experts, drawn) / math.comb(total, drawn))


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 1e-12 < value < 1e18  # of seconds and of bytes a second


_RATES = has_fields(dict.fromkeys((field.name for field in dataclasses.fields(LinkRates)), _is_rate))
_FILES = SavedFiles("links", "measured rates", "topology", {"topology": lambda value: True, "rates": _RATES})


def load_rates(topology: Mapping[str, Any]) -> LinkRates | None:
    """Return the saved rates of a topology, or None. A file that another user may have written is ignored, with a message in the log."""
    return _FILES.load(topology, _parse_rates)


def save_rates(topology: Mapping[str, Any], rates: LinkRates) -> None:
    """Write the rates of a topology. If that fails, the next Buffer measures again."""
    _FILES.save(topology, {"rates": dataclasses.asdict(rates)})


def _parse_rates(document: dict[str, Any]) -> LinkRates:
    return LinkRates(**{name: float(value) for name, value in document["rates"].items()})


def usual_rates(transport: str, num_hosts: int, line_rate: float = 0.0) -> LinkRates:
    """Return the rates to expect of links that nothing was measured on. `line_rate` is that of a NIC's port, or 0 if it is not known.

    With one host, nodes are declared, and no NIC is between them.
    """
    far = _FAR_BYTES_PER_S[transport]
    if num_hosts == 1:
        far = {"nvshmem": _NEAR_BYTES_PER_S, "wire": far}.get(transport, _RELAY_ON_ONE_HOST)
    elif transport == "nvshmem" and line_rate:
        far = _LINE_SHARE * line_rate
    return LinkRates(_NEAR_BYTES_PER_S, _NEAR_LATENCY_S, far, _FAR_LATENCY_S[transport])


def config_of_measurement(config: Config) -> Config:
    """Return sizes for a measurement of links: the nodes and rows of a Buffer, with little memory."""
    tokens = min(config.num_max_tokens_per_rank, 512)
    return dataclasses.replace(
        config, num_max_tokens_per_rank=tokens, num_slots=1, low_latency=False, path="hierarchical", recv_limit=None, num_topk=1
    )


def call_times(config: Config, rates: LinkRates) -> dict[str, float]:
    """Return the expected seconds of a dispatch by path, with all tokens and the widest rows.

    A token crosses the network once for each far node, or once for each far rank. The hierarchical path passes all rows on in the node.
    """
    traffic = expected_traffic(config.num_nodes, config.node_size, config.num_topk, config.num_experts)
    num_bytes = config.num_max_tokens_per_rank * config.row_bytes
    return {
        "hierarchical": rates.far_latency_s
        + rates.near_latency_s
        + max(
            num_bytes * traffic.far_nodes / rates.far_bytes_per_s,
            num_bytes * (traffic.far_ranks + traffic.near_ranks) / rates.near_bytes_per_s,
        ),
        "direct": rates.far_latency_s
        + max(num_bytes * traffic.far_ranks / rates.far_bytes_per_s, num_bytes * traffic.near_ranks / rates.near_bytes_per_s),
    }


def choose_path(config: Config, rates: LinkRates, origin: str) -> Choice:
    """Choose the path of a Buffer with several nodes. The reason names `origin`, the origin of the rates in words."""
    if config.path != "auto":
        return Choice(config.path, f"path={config.path!r} was passed")
    if config.node_size == 1:
        return Choice("hierarchical", "both paths are the same with nodes of one rank")
    times = call_times(config, rates)
    name = "direct" if times["direct"] < (1 - _MARGIN) * times["hierarchical"] else "hierarchical"
    figures = ", ".join(f"{time * 1e6:.0f} us {path}" for path, time in times.items())
    margin = "" if name == min(times, key=lambda path: times[path]) else f", which is less than {_MARGIN:.0%} faster"
    return Choice(name, f"expected for a dispatch: {figures}{margin} ({origin})")


@dataclass(frozen=True)
class AgreedPath:
    """The path that all ranks agreed on. `measured` are the rates for the choice, or None if nothing was measured."""

    choice: Choice
    measured: LinkRates | None = None


def agree_on_path(
    comm: Communicator, config: Config, topology: Mapping[str, Any], usual: LinkRates, measure: Measure | None
) -> AgreedPath:
    """Let rank 0 choose the path of a Buffer with several nodes. Collective.

    Rates are measured once for a topology and kept on disk. `DEEPEP_RT_REMEASURE=1` on rank 0 measures them again. If the variable is wrong
    there, every rank raises EPConfigError.

    Args:
        comm: The ranks.
        config: The sizes that they agreed on.
        topology: Everything that the rates depend on, as values that JSON can hold.
        usual: The rates to assume without a measurement.
        measure: Measures the rates. None: the ranks cannot measure now, but may have saved rates.
    """
    rates, origin, is_first = None, "nothing was measured; these are usual rates", comm.Get_rank() == 0
    if config.path == "auto" and config.node_size > 1:
        rates = _saved(comm, topology)
        if rates is not None:
            origin = "measured earlier"
        elif measure is not None:
            rates, origin = measure(comm, config), "measured now"
            if is_first:
                save_rates(topology, rates)
    choice = tuple(choose_path(config, rates or usual, origin)) if is_first else None
    return AgreedPath(Choice(*comm.bcast(choice)), rates)


def _saved(comm: Communicator, topology: Mapping[str, Any]) -> LinkRates | None:
    """Return the rates that rank 0 finds on disk, or None on all ranks."""
    values, problem = None, ""
    if comm.Get_rank() == 0:
        try:
            values = None if _env.remeasure() else load_rates(topology)
        except EPConfigError as error:
            problem = str(error)
    values, problem = comm.bcast((values and dataclasses.astuple(values), problem))
    if problem:
        raise EPConfigError(f"rank 0 cannot make this Buffer: {problem}")
    return None if values is None else LinkRates(*values)


def describe(
    backend: str,
    config: Config,
    hosts: tuple[str, ...],
    gpus: tuple[str, ...],
    transport: Choice,
    path: AgreedPath | None,
    memory: Mapping[str, int] | None = None,
) -> BufferDescription:
    """Describe a Buffer from what its ranks found and agreed on. `path` is None with one node."""
    chosen = AgreedPath(Choice("", "")) if path is None else path
    return BufferDescription(
        backend,
        config.num_ranks,
        config.node_size,
        hosts,
        gpus,
        *transport,
        *chosen.choice,
        measured=chosen.measured,
        memory=dict(memory or {}),
    )
