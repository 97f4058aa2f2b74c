"""What the machine code of each kernel must have. `jit.machine_code` compares, and `python -m deepep_rt cache check` reports.

All kernels promise more: no spills, no stack frame above `Kernel.max_stack_bytes`, `__launch_bounds__` as the launch, and few enough
registers for a block. Kernels with `Kernel.overlaps` wait for their predecessor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .tuning import has_tma

WARP_COPY_LOADS = 8
"""16-byte loads that `warp_copy` in common/memory.cuh starts before it stores the first."""

_LEAST_RANKS, _LEAST_CHOICES, _LEAST_ROW_BYTES = 4, 8, 4096


@dataclass(frozen=True)
class Promise:
    """How a kernel moves rows.

    Attributes:
        bulk_copies: Whether the copy engine loads and stores rows, on GPUs that have one. On others `warp_copy` does. No other kernel has
            bulk copies.
        bulk_stores: Whether the copy engine only stores rows, which warps have made, on GPUs that have one.
        bulk_if_no_relay: Whether it does so in Buffers without a relay. With one, all that it moves to other nodes goes through that.
        loads_at_once: The least number of 16-byte loads that a thread starts before it uses one. A thread that waits for each load reads a
            small part of what the memory can deliver. The function `loads_at_once` says for which sizes this holds.
        stores_rows: Whether it stores rows, and therefore has 16-byte stores, though it promises no loads.
        narrow_accesses: Whether it may access global memory by 1 or 2 bytes. It has scales or flags of this size then.
        narrow_if_slots: Whether it may do so in Buffers with slots. The compiler then reads single bytes of the mask of absent slots.
    """

    bulk_copies: bool = False
    bulk_stores: bool = False
    bulk_if_no_relay: bool = False
    loads_at_once: int = 0
    stores_rows: bool = False
    narrow_accesses: bool = False
    narrow_if_slots: bool = False


PROMISES: dict[str, Promise] = {
    "route": Promise(narrow_if_slots=True),
    "dispatch": Promise(bulk_copies=True),
    "combine": Promise(bulk_copies=True, loads_at_once=12),
    "combine_fp8": Promise(bulk_copies=True, loads_at_once=4),
    "combine_log10": Promise(bulk_copies=True, loads_at_once=3),
    "combine_choices": Promise(bulk_copies=True, loads_at_once=8),
    "route_nodes": Promise(),
    "dispatch_nodes": Promise(bulk_copies=True),
    "combine_choices_nodes": Promise(bulk_copies=True, loads_at_once=8),
    "combine_nodes": Promise(bulk_copies=True, loads_at_once=8),
    "combine_nodes_fp8": Promise(loads_at_once=8),
    "combine_nodes_log10": Promise(loads_at_once=4),
    "link_rates": Promise(bulk_if_no_relay=True),
    "wire": Promise(bulk_copies=True),
    "ll_dispatch": Promise(loads_at_once=2, narrow_accesses=True),
    "ll_dispatch_opaque": Promise(loads_at_once=2, narrow_accesses=True),
    "ll_combine": Promise(loads_at_once=4, narrow_accesses=True),
    "ll_combine_fp8": Promise(loads_at_once=4, narrow_accesses=True),
    "ll_combine_log10": Promise(loads_at_once=4, narrow_accesses=True),
    "ll_combine_large": Promise(loads_at_once=4, narrow_accesses=True),
    "ll_combine_large_fp8": Promise(loads_at_once=4, narrow_accesses=True),
    "ll_combine_large_log10": Promise(loads_at_once=4, narrow_accesses=True),
    "copy_bandwidth": Promise(bulk_copies=True),
    "fp8_encode": Promise(loads_at_once=2, narrow_accesses=True),
    "fp8_decode": Promise(stores_rows=True),
    "zero_padding": Promise(loads_at_once=4),
    "expert_positions": Promise(),
    "expand_rows": Promise(loads_at_once=4),
    "prepare_tiles": Promise(),
    "expand_tiles": Promise(bulk_copies=True),
    "sum_expert_rows": Promise(loads_at_once=4),
    "order_chunks": Promise(),
    "await_tiles": Promise(),
    "combine_tiles": Promise(bulk_stores=True, loads_at_once=4),
    "list_choices": Promise(),
    "dispatch_layout": Promise(narrow_accesses=True),
}
"""The promise of each kernel of `kernels.table`."""


def loads_at_once(promise: Promise, arch: str, constants: Mapping[str, int]) -> int:
    """Return the 16-byte loads that a kernel must start at once on an architecture, for the constants that are compiled in.

    Promises hold from 4 ranks, 8 choices and rows of 4 KB on. Kernels of smaller sizes have shorter loops, which the compiler unrolls.
    """
    row_bytes = constants.get("kRowBytes", 2 * constants.get("kHidden", _LEAST_ROW_BYTES))
    ranks, choices = constants.get("kNumRanks", _LEAST_RANKS), constants.get("kNumTopk", _LEAST_CHOICES)
    if ranks < _LEAST_RANKS or choices < _LEAST_CHOICES or row_bytes < _LEAST_ROW_BYTES:
        return 0
    least = promise.loads_at_once
    return max(least, WARP_COPY_LOADS) if promise.bulk_copies and not has_tma(arch) else least
