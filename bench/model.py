"""Predict times of calls over several nodes from figures of the links, like LogGP (latency, gap of a message, time of a byte).

With T tokens a rank, rows of b bytes, and the expected places of a token from `backends.path_choice`, a call takes

    one node                       L_near + T * ranks * b / B_near
    several nodes, hierarchical    L_far + L_near + max(T * far_nodes * b / B_far, T * ranks * b / B_near, messages * g)
    several nodes, direct          L_far + max(T * far_ranks * b / B_far, T * near_ranks * b / B_near, messages * g)

L is the time of a call with hardly any rows: launch, protocol and the way of one message. B is the bandwidth that rows reach. g is the
time that a rank's NIC or proxy needs for a message, whatever its size. Low-latency calls take the direct path, and their message is a row.
Messages of throughput calls are chunks of as many tokens as the kernels put at once (`usual_chunk_tokens`).

Assumptions:

- All ranks have as many tokens, and all experts are equally likely. No rank waits for a slower one.
- Every rank has a NIC, or a fixed share of one, for itself. It sends and receives at full rate at once. The network between the NICs is
  never the bottleneck, however many nodes there are.
- Near copies, the network and kernels overlap completely. A call takes the time of the slowest part, plus the latencies.
- A row to the own rank costs as much as one to another rank of the node.
- Routing is known. The exchange of counts and the host's wait for them are not in the times.
- Rings of slots never run empty. Chunks are small compared with what a rank sends.
- Ranks do nothing else: kernels of experts and other traffic take neither memory bandwidth nor links.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepep_rt.backends.path_choice import Traffic, expected_traffic
from deepep_rt.bench.results import Sizes, low_latency_rows, row_bytes, throughput_rows
from deepep_rt.errors import EPConfigError
from deepep_rt.kernels.nodes_layout import usual_chunk_tokens

CALLS = {"dispatch": "fp8", "combine": "bf16"}
"""The calls of the model, and the type of their rows."""


@dataclass(frozen=True)
class Link:
    """A connection of a rank to others.

    Attributes:
        gb_s: Bandwidth that rows reach, in GB/s (1e9 bytes).
        us: Time of a call with hardly any rows, in microseconds.
        line_gb_s: Bandwidth that counts as 100 %. Default: `gb_s`.
        message_us: Time of the NIC or proxy for each message, in microseconds.
    """

    gb_s: float
    us: float
    line_gb_s: float | None = None
    message_us: float = 0.0

    @property
    def ideal_gb_s(self) -> float:
        """The bandwidth that counts as 100 %."""
        return self.gb_s if self.line_gb_s is None else self.line_gb_s


@dataclass(frozen=True)
class Machine:
    """The links of a rank.

    Attributes:
        near: To ranks of its node, in throughput calls.
        near_low_latency: The same in low-latency calls.
        far: To ranks of other nodes.
        node_size: Ranks of a node.
        where: The origin of the figures, in words.
    """

    near: Link
    near_low_latency: Link
    far: Link
    node_size: int = 8
    where: str = ""


@dataclass(frozen=True)
class Work:
    """The problem.

    Attributes:
        tokens: Tokens of a rank in a throughput call.
        low_latency_tokens: The same in a low-latency call.
        hidden: Elements of a row.
        topk: Experts of a token.
        experts: Experts over all ranks. If there are more ranks than experts, the model takes one expert for each rank.
        groups: Most nodes of a token in throughput calls. None: no limit.
        row_for_each_expert: Low-latency calls send a row for each expert of a token (DeepEP V1), instead of one for each rank.
    """

    tokens: int = 4096
    low_latency_tokens: int = 128
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    groups: int | None = 4
    row_for_each_expert: bool = False

    def traffic(self, num_nodes: int, node_size: int, groups: int | None) -> Traffic:
        """Compute the expected places of a token."""
        num_ranks = num_nodes * node_size
        experts = -(-max(self.experts, num_ranks) // num_ranks) * num_ranks
        return expected_traffic(num_nodes, node_size, self.topk, experts, groups)


@dataclass(frozen=True)
class Estimate:
    """The expected time of a call, and the reason for it.

    Attributes:
        us: Microseconds of the call.
        gb_s: Bandwidth as DeepEP counts it (`counted_bytes` over the time), in GB/s.
        efficiency: Time that the slower link needs at 100 % of its bandwidth, as a part of `us`.
        bottleneck: "near", "far", "messages", or "latency" if the latencies take longer than anything else.
        near_bytes: Bytes that a rank sends over near links, those to itself included.
        far_bytes: Bytes that a rank sends over the network.
    """

    us: float
    gb_s: float
    efficiency: float
    bottleneck: str
    near_bytes: float
    far_bytes: float


def throughput(work: Work, machine: Machine, num_nodes: int, call: str, path: str = "hierarchical") -> Estimate:
    """Predict a throughput call.

    DeepEP counts bytes by the slower link: a row for each node of a token, its own one included, or for each rank if there is one node.

    Args:
        work: The problem.
        machine: The links.
        num_nodes: Nodes of the job.
        call: One of `CALLS`.
        path: "hierarchical" or "direct". Without meaning for one node.

    Raises:
        EPConfigError: if the experts do not fit the ranks.
    """
    traffic, row = work.traffic(num_nodes, machine.node_size, work.groups), row_bytes(CALLS[call], work.hidden)
    tokens = work.tokens
    counted = tokens * row * (traffic.nodes if num_nodes > 1 else traffic.ranks)
    if num_nodes == 1:
        return _estimate(machine.near, machine.far, machine.near.us, tokens * traffic.ranks * row, 0.0, 0.0, counted)
    if path == "hierarchical":
        far, near, latency = traffic.far_nodes, traffic.ranks, machine.far.us + machine.near.us
    else:
        far, near, latency = traffic.far_ranks, traffic.near_ranks, machine.far.us
    flows = (num_nodes - 1) * (1 if path == "hierarchical" else machine.node_size)
    messages = max(tokens * far / usual_chunk_tokens(row, "nvshmem"), min(flows, tokens * far))
    return _estimate(machine.near, machine.far, latency, tokens * near * row, tokens * far * row, messages, counted)


def low_latency(work: Work, machine: Machine, num_nodes: int, call: str) -> Estimate:
    """Predict a low-latency call. Its bytes count a row for each expert of a token, wherever that expert is. Else as `throughput`."""
    traffic, row = work.traffic(num_nodes, machine.node_size, None), row_bytes(CALLS[call], work.hidden)
    copies = work.topk if work.row_for_each_expert else traffic.ranks
    tokens, counted = work.low_latency_tokens, work.low_latency_tokens * work.topk * row
    far, near = tokens * copies * (1 - 1 / num_nodes), tokens * copies / num_nodes
    latency = machine.far.us if num_nodes > 1 else machine.near_low_latency.us
    return _estimate(machine.near_low_latency, machine.far, latency, near * row, far * row, far, counted)


def _estimate(
    near: Link, far: Link, latency_us: float, near_bytes: float, far_bytes: float, messages: float, counted_bytes: float
) -> Estimate:
    parts = {
        "far": far_bytes / far.gb_s / 1e3,
        "near": near_bytes / near.gb_s / 1e3,
        "messages": messages * far.message_us,
    }
    us = latency_us + max(parts.values())
    ideal_us = max(far_bytes / far.ideal_gb_s, near_bytes / near.ideal_gb_s) / 1e3
    bottleneck = max(parts, key=lambda part: parts[part]) if max(parts.values()) >= latency_us else "latency"
    return Estimate(us, counted_bytes / us / 1e3, ideal_us / us, bottleneck, near_bytes, far_bytes)


def better_path(hierarchical: Estimate, direct: Estimate) -> str:
    """Choose as `path="auto"` does: the direct path only if it is more than 10 % faster."""
    return "direct" if direct.us < 0.9 * hierarchical.us else "hierarchical"


# --- near figures of results -------------------------------------------------------------------------------------------------------


def near_of_results(results: Iterable[Mapping[str, Any]]) -> dict[str, Link]:
    """Find the near links that results of these benchmarks show.

    The time of a call is a latency plus its bytes over a bandwidth. A line through the measured calls gives both: throughput calls with
    known routing at their best number of SMs, low-latency calls in a graph. Large and small calls count the same (relative errors).

    Args:
        results: Results of `results.read`, measured on GPUs of one host.

    Returns:
        Links by "near" and "near_low_latency", as far as there are results for them.

    Raises:
        EPConfigError: if a result is not of such a measurement.

    Example:
        >>> sizes = {"num_ranks": 8, "settings": {"hidden": 7168, "topk": 8, "experts": 256, "backend": "cuda"}}
        >>> rows = [dict(work="combine_bf16", tokens=t, sms=24, us=u, gb_s=0.0, remote_gb_s=0.0) for t, u in ((1024, 260), (4096, 860))]
        >>> round(near_of_results([{**sizes, "rows": rows}])["near"].us)
        60
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        sizes = Sizes.of(result)
        if result["settings"].get("backend") != "cuda" or sizes.num_ranks < 2 or result["settings"].get("ranks_per_node"):
            raise EPConfigError(
                f"a result of {sizes.num_ranks} ranks on backend {result['settings'].get('backend')}; expected one of several GPUs of one "
                "host. Pass another result, or --near-gb-s and --near-us."
            )
        places = expected_traffic(1, sizes.num_ranks, sizes.topk, sizes.experts).ranks
        best = {("near", *call): us for call, us in _best_us(result).items()}
        for few in low_latency_rows(result):
            kind = "bf16" if result["settings"].get("bf16") else "fp8"
            for work, us in ((f"dispatch_{kind}", few.graph_dispatch_us), ("combine_bf16", few.graph_combine_us)):
                if us is not None:
                    best["near_low_latency", work, few.tokens] = us
        for (link, work, tokens), us in best.items():
            points.setdefault(link, []).append((tokens * places * row_bytes(work, sizes.hidden), us))
    return {link: fit_line(each) for link, each in points.items()}


def _best_us(result: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """Find the microseconds of throughput calls with known routing, by work and tokens, at their best number of SMs."""
    best: dict[tuple[str, int], float] = {}
    for row in throughput_rows(result):
        if row.work == "combine_bf16" or row.work.endswith("_known"):
            best[row.work, row.tokens] = min(row.us, best.get((row.work, row.tokens), math.inf))
    return best


def far_of_result(result: Mapping[str, Any], near: Link) -> Link:
    """Find the far link that a result of `NetworkOptions(transport="wire")` shows: a wire of a known rate between nodes of one rank.

    Args:
        result: A throughput result of `results.read`, with at least two numbers of tokens.
        near: The near link. A call's latency has a near part and a far part.

    Returns:
        The bandwidth that rows reach, the far part of the latency of an empty call, and the wire's rate.

    Raises:
        EPConfigError: if the result is not of such a measurement.

    Example:
        >>> settings = {"hidden": 7168, "topk": 8, "experts": 256, "transport": "wire", "ranks_per_node": 1, "wire_bandwidth": 50}
        >>> rows = [dict(work="combine_bf16", tokens=t, sms=24, us=u, gb_s=0.0, remote_gb_s=0.0) for t, u in ((512, 206), (4096, 1246))]
        >>> round(far_of_result({"num_ranks": 2, "settings": settings, "rows": rows}, Link(386.0, 13.0)).us)
        44
    """
    settings, sizes, best = result["settings"], Sizes.of(result), _best_us(result)
    is_wire = settings.get("transport") == "wire" and settings.get("ranks_per_node") == 1
    if not is_wire or len({tokens for _, tokens in best}) < 2:
        raise EPConfigError(
            "a result without two numbers of tokens over a wire between nodes of one rank; expected a result of `bench/throughput.py "
            "--transport wire --ranks-per-node 1 --tokens 512,4096`. Pass such a file, or --nic-share and --nic-us."
        )
    places = expected_traffic(sizes.num_ranks, 1, sizes.topk, sizes.experts).far_ranks
    line = fit_line((tokens * places * row_bytes(work, sizes.hidden), us) for (work, tokens), us in best.items())
    return Link(line.gb_s, max(line.us - near.us, 0.0), float(settings["wire_bandwidth"]))


def fit_line(points: Iterable[tuple[float, float]]) -> Link:
    """Fit latency and bandwidth to times of calls.

    Args:
        points: Bytes and microseconds of each call.

    Returns:
        The link with the least sum of squared relative errors. Its latency is at least 0.

    Raises:
        EPConfigError: if the times do not grow with the bytes.
    """
    # With x = bytes / us and y = 1 / us, us = L + c * bytes becomes 1 = L * y + c * x: two normal equations.
    pairs = [(1 / us, size / us) for size, us in points]
    yy, xy, xx = sum(y * y for y, _ in pairs), sum(y * x for y, x in pairs), sum(x * x for _, x in pairs)
    y, x = sum(y for y, _ in pairs), sum(x for _, x in pairs)
    scale = yy * xx - xy * xy
    latency = (y * xx - x * xy) / scale if scale > 1e-9 * yy * xx else 0.0
    latency = max(latency, 0.0)
    cost = (x - latency * xy) / xx if xx else 0.0
    if cost <= 0:
        raise EPConfigError(
            "the times of these results do not grow with their bytes; expected slower large calls. Measure again."
        )
    return Link(1 / cost / 1e3, latency)


def with_figures(link: Link, **figures: float | None) -> Link:
    """Replace the figures that are not None."""
    return dataclasses.replace(link, **{name: value for name, value in figures.items() if value is not None})
