"""Combine with compressed rows in the throughput benchmark: its works, and a check of its sums before they are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..arrays.compressed_rows import COMPRESSIONS, compress, expand
from ..buffer import Buffer
from ..errors import EPError
from ..results import DispatchHandle
from .machine import Machine

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

WORKS = {f"combine_{name}": name for name in COMPRESSIONS}
"""The form of the rows of each work."""

_MOST_CHECKED = 64  # tokens of a rank: the host compresses their rows


def check_sums(
    comm: Intracomm, machine: Machine, buffer: Buffer, work: str, *, x: Any, topk_idx: Any, recv_x: Any, handle: DispatchHandle
) -> None:
    """Compare the sums of some tokens with those of `arrays.compressed_rows` on this host, bit for bit. Collective.

    Each rank returns the rows that it received, so all terms of a sum are the token's own row. `x` is bfloat16, and `handle` is of the
    dispatch of its rows. Raise EPError on all ranks, if a bit of a rank differs.
    """
    compression, num_checked = WORKS[work], min(len(x), _MOST_CHECKED)
    got = machine.download(buffer.combine(recv_x, handle, compress=compression).x.view(np.uint16)[:num_checked])
    rows = machine.download(x.view(np.uint16)[:num_checked]).view(ml_dtypes.bfloat16).astype(np.float32)
    terms = expand(compress(rows, compression), rows.shape[1], compression)
    ranks = machine.download(topk_idx[:num_checked]) // (buffer.config.num_experts // comm.size)
    config, total = buffer.config, np.zeros_like(terms)
    for first in range(0, comm.size, config.node_size):
        is_far, node = not first <= comm.rank < first + config.node_size, np.zeros_like(terms)
        each = terms if not config.has_network or (is_far and config.path == "direct") else rows
        for rank in range(first, first + config.node_size):
            node += np.where((ranks == rank).any(axis=1)[:, None], each, np.float32(0))
        if is_far and each is rows:  # the sum of a node crosses, rounded and compressed
            sums = node.astype(ml_dtypes.bfloat16).astype(np.float32)
            node = expand(compress(sums, compression), rows.shape[1], compression)
        total += node
    wanted = total.astype(ml_dtypes.bfloat16).view(np.uint16)
    wrong = comm.allgather(int((got != wanted).any(axis=1).sum()))
    if any(wrong):
        rank = next(rank for rank, count in enumerate(wrong) if count)
        raise EPError(
            f"{work}: {wrong[rank]} of the {num_checked} checked sums of rank {rank} differ from those of the host; expected the same "
            f"bits. Run python -m deepep_rt soak, and report the output"
        )
