"""Hold DeepEP V1's published figures, and what the model says about them."""

from __future__ import annotations

from typing import NamedTuple

import model


class PublishedRow(NamedTuple):
    """A figure of DeepEP V1's README.

    Attributes:
        mode: "throughput" (GB/s) or "low-latency" (microseconds).
        call: "dispatch" (FP8) or "combine" (BF16).
        num_ranks: Ranks, 8 for each node.
        value: The figure.
    """

    mode: str
    call: str
    num_ranks: int
    value: float


_THROUGHPUT = {16: (43, 43), 32: (58, 57), 64: (51, 50)}  # GB/s of dispatch and combine by ranks
_LOW_LATENCY = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}  # microseconds

ROWS = tuple(
    PublishedRow(mode, call, ranks, value)
    for mode, table in (("throughput", _THROUGHPUT), ("low-latency", _LOW_LATENCY))
    for ranks, values in table.items()
    for call, value in zip(model.CALLS, values, strict=True)
)
"""H800 with 50 GB/s NICs. Throughput: 4096 tokens, top-4 groups (a group is a node). Low latency: 128 tokens. Both: hidden 7168, top-8
of 256 experts, FP8 dispatch, BF16 combine."""

WORK = model.Work(row_for_each_expert=True)
NIC_GB_S = 50.0

FITTED_US, FITTED_FAR_GB_S, FITTED_NEAR_GB_S = 24.3, 43.2, 147.0
"""The three numbers that are fitted to the rows: one latency for near and far, and two bandwidths."""


def machine(us: float = FITTED_US, far_gb_s: float = FITTED_FAR_GB_S, near_gb_s: float = FITTED_NEAR_GB_S) -> model.Machine:
    """Make the machine of the published figures."""
    near, far = model.Link(near_gb_s, us), model.Link(far_gb_s, us, NIC_GB_S)
    return model.Machine(near, near, far, where="fitted to DeepEP V1's figures of H800")


def predict(row: PublishedRow, on: model.Machine) -> float:
    """Compute the model's value for a row, in the unit of the row."""
    nodes = row.num_ranks // on.node_size
    if row.mode == "throughput":
        return model.throughput(WORK, on, nodes, row.call).gb_s
    return model.low_latency(WORK, on, nodes, row.call).us


def relative_errors(on: model.Machine) -> list[float]:
    """Compute the relative error of the model for each row."""
    return [predict(row, on) / row.value - 1 for row in ROWS]
