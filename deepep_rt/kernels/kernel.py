"""What the library knows of a kernel: its file, its parameters, and the Buffers that can launch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..arrays.compressed_rows import LOW_LATENCY_CHANNELS
from ..arrays.dtypes import FP8_GROUP
from ..config import MAX_NODES, MAX_RANKS_PER_NODE, Config
from ..statistics import CALL_KINDS
from .structs import CStruct

_CALL_KINDS = {
    "route": CALL_KINDS.index("dispatch"),
    "dispatch": CALL_KINDS.index("dispatch"),
    "combine": CALL_KINDS.index("combine"),
    "combine_choices": CALL_KINDS.index("combine"),
    "ll_dispatch": CALL_KINDS.index("low_latency_dispatch"),
    "ll_combine": CALL_KINDS.index("low_latency_combine"),
    "ll_combine_large": CALL_KINDS.index("low_latency_combine"),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel.

    Attributes:
        name: Name of its file and of its entry point.
        params: Members of its Params.
        threads: Constant with the threads of a block.
        folder: Folder of its file in cuda_src.
        shared: Constant with the bytes of dynamic shared memory.
        per_dtype: Whether it is compiled once for each element type of combine.
        is_local: Whether it works on arrays of one rank without a Buffer (jit/local_kernels.py).
        compression: The form of a combine's rows on the way, one of `COMPRESSIONS`. None: they travel as they are.
        needs_fp8: Whether it needs a GPU that converts to FP8.
        low_latency: Whether it needs a Buffer with room for low-latency calls. With a scale-out domain it links NVSHMEM.
        over_nodes: Whether it serves throughput calls of Buffers with several nodes. Other throughput kernels serve one node.
        scale_up_only: Whether all ranks must reach each other directly.
        overlaps: Whether it may start while its predecessor ends. Its source waits for it before it uses
            what it writes (common/memory.cuh).
        max_stack_bytes: Its declared stack frame. CI fails if the frame is larger or registers spill.
    """

    name: str
    params: str
    threads: str
    folder: str = ""
    shared: str | None = None
    per_dtype: bool = False
    compression: str | None = None
    is_local: bool = False
    needs_fp8: bool = False
    low_latency: bool = False
    over_nodes: bool = False
    scale_up_only: bool = False
    overlaps: bool = False
    max_stack_bytes: int = 0

    def fits(self, config: Config) -> bool:
        """Return whether a Buffer of these sizes can launch the kernel."""
        if self.compression and config.hidden % (LOW_LATENCY_CHANNELS if self.low_latency else FP8_GROUP):
            return False
        if self.over_nodes:
            return config.has_network and config.num_nodes <= MAX_NODES and config.node_size <= MAX_RANKS_PER_NODE
        if not self.low_latency:
            return not config.has_network and config.num_ranks <= MAX_RANKS_PER_NODE
        return config.fits_low_latency and not (self.scale_up_only and config.has_network)

    def links_nvshmem(self, constants: Mapping[str, int]) -> bool:
        """Return whether the kernel, compiled with these constants, contains NVSHMEM's device library."""
        if not (self.low_latency or self.over_nodes):
            return False
        return constants["kRanksPerNode"] < constants["kNumRanks"] and not constants["kHasRelay"]

    @property
    def call_kind(self) -> int:
        """The number in `CALL_KINDS` of the calls that the kernel is a part of; -1: of none."""
        return _CALL_KINDS.get(self.name.removesuffix(f"_{self.compression}").removesuffix("_nodes"), -1)

    @property
    def source(self) -> str:
        """The file with the kernel's entry point, relative to the folder of the CUDA sources."""
        return f"{self.folder}/{self.name}.cu" if self.folder else f"{self.name}.cu"

    @property
    def struct(self) -> CStruct:
        return CStruct("Params", self.params)
