"""The memory of throughput calls over several nodes: control, handle and network regions, and the chunks that cross the network.

A flow leads from a source rank to a gateway on another node. The gateway passes rows on to its fan. On the hierarchical path a rank has a
flow to each other node, and the fan is that node. On the direct path it has a flow to each rank of other nodes, whose fan is itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import MAX_ROUTE_BLOCKS, Config
from . import structs
from .regions import Map, align_up, arrange

MAX_CHUNK_TOKENS = 32
"""Tokens of a chunk: one for each lane of a warp."""

EXPOSED_ROWS = 32
"""Rows of combine that one flag exposes to the other ranks of a node."""

# A put over a NIC is one request, and occupies no warp. A put of a relay takes its thread some microseconds, whatever its size.
_CHUNK_BYTES = {"nvshmem": 64 * 1024, "nixl": 256 * 1024, "mpi": 256 * 1024, "wire": 64 * 1024}

# Of all slots of a rank at one end. With few nodes each chunk of a call has a slot of its own, and none waits for a credit. Memory of GPUs
# has room for that: the sums of combine arrive in the same place. A relay's memory is pinned memory of the host.
_SLOT_BYTES = {"nvshmem": 192 << 20, "nixl": 32 << 20, "mpi": 32 << 20, "wire": 192 << 20}
_MOST_SLOTS = {"nvshmem": 4096, "nixl": 64, "mpi": 64, "wire": 4096}


def usual_chunk_tokens(row_bytes: int, transport: str) -> int:
    """Return the most tokens of a chunk whose rows have `row_bytes` bytes. With very many flows, chunks are smaller."""
    num_tokens = MAX_CHUNK_TOKENS
    while num_tokens > 1 and num_tokens * row_bytes > _CHUNK_BYTES[transport]:
        num_tokens //= 2
    return num_tokens


@dataclass(frozen=True)
class Chunk:
    """The form of a chunk in one call: its most tokens, and the offsets of its parts in a slot. The rows come last."""

    num_tokens: int
    offsets: dict[str, int]
    num_bytes: int


@functools.lru_cache
def _exposed(num_rows: int, num_topk: int, row_bytes: int) -> Map:
    return arrange([("exposed_weights", num_rows * num_topk * 4), ("exposed", num_rows * row_bytes)])


class NodesLayout:
    """Sizes and maps of the throughput calls of a Buffer with several nodes. `sizes` has the constants of its structures so far."""

    def __init__(self, config: Config, sizes: dict[str, int]) -> None:
        self.config = config
        ranks, node = config.num_ranks, config.node_size
        self.is_direct = config.path == "direct"
        self.num_flows = ranks - node if self.is_direct else config.num_nodes - 1
        self.fan = 1 if self.is_direct else node
        self.constants = {
            "kNumNodes": config.num_nodes,
            "kDirect": int(self.is_direct),
            "kNumFlows": self.num_flows,
            "kFan": self.fan,
            "kFanExperts": self.fan * config.num_local_experts,
            "kNumBuckets": ranks + (0 if self.is_direct else self.num_flows),
            "kChunkPositions": MAX_CHUNK_TOKENS * self.fan,
            "kExposedRows": EXPOSED_ROWS,
        }
        self._sizes = {**sizes, **self.constants}
        self._chunks: dict[tuple[int, int, int, bool], Chunk] = {}

    # --- chunks and slots --------------------------------------------------------------------------------------------------------

    def chunk(self, row_bytes: int, scale_bytes: int, idx_bytes: int, with_weights: bool) -> Chunk:
        """Return the form of the chunks of a call: as many tokens as fit a slot, a power of two up to 32."""
        sizes = row_bytes, scale_bytes, idx_bytes, with_weights
        if (known := self._chunks.get(sizes)) is None:  # it takes as long as half a call
            known = self._chunks[sizes] = self._form(*sizes)
        return known

    def _form(self, row_bytes: int, scale_bytes: int, idx_bytes: int, with_weights: bool) -> Chunk:
        num_tokens = MAX_CHUNK_TOKENS
        while (
            num_tokens > 1
            and self._chunk(num_tokens, row_bytes, scale_bytes, idx_bytes, with_weights).num_bytes > self.slot_bytes
        ):
            num_tokens //= 2
        parts = self._chunk(num_tokens, row_bytes, scale_bytes, idx_bytes, with_weights)
        return Chunk(num_tokens, parts.offsets, parts.num_bytes)

    def _chunk(self, num_tokens: int, row_bytes: int, scale_bytes: int, idx_bytes: int, with_weights: bool) -> Map:
        topk = self.config.num_topk
        return arrange(
            [
                ("head", structs.ChunkHead.size(self._sizes)),
                ("topk_idx", num_tokens * topk * idx_bytes),
                ("weights", num_tokens * topk * 4 * with_weights),
                ("scales", num_tokens * scale_bytes),
                ("rows", num_tokens * row_bytes),
            ]
        )

    def _widest_chunk(self, num_tokens: int) -> int:
        """Return the bytes of a slot with room for `num_tokens` rows of the widest type, or for the FP8 rows that take their place."""
        config = self.config
        most_fp8 = min(num_tokens * config.row_bytes // config.hidden, MAX_CHUNK_TOKENS)
        widest = self._chunk(num_tokens, config.row_bytes, config.scale_bytes, 8, with_weights=True)
        fp8 = self._chunk(most_fp8, config.hidden, config.scale_bytes, 8, with_weights=True)
        return max(widest.num_bytes, fp8.num_bytes)

    @functools.cached_property
    def _slots(self) -> tuple[int, int]:
        """Slots of a flow at each end, and bytes of a slot."""
        num_tokens = usual_chunk_tokens(self.config.row_bytes, self.config.transport)

        def slots() -> int:
            return _SLOT_BYTES[self.config.transport] // (self.num_flows * self._widest_chunk(num_tokens))

        while num_tokens > 1 and slots() < 4:
            num_tokens //= 2
        most = max(2, -(-self.config.num_max_tokens_per_rank // num_tokens))
        return max(2, min(slots(), _MOST_SLOTS[self.config.transport], most)), self._widest_chunk(num_tokens)

    @property
    def slot_bytes(self) -> int:
        return self._slots[1]

    @property
    def num_slots(self) -> int:
        return self._slots[0]

    # --- maps --------------------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def network(self) -> Map:
        """Network memory: what crosses the network at its two ends. The parity of the epoch selects one of two counts and hellos.

        Chunks of dispatch and sums of combine arrive in the same place: before a rank sends, all have ended the call before.
        """
        flows, nodes, slots = self.num_flows, self.config.num_nodes, self.num_flows * self.num_slots
        counts, hello = self.flow_counts_stride, structs.Hello.size(self._sizes)
        sums = self.num_max_node_sums * self.sum_stride(self.config.row_bytes, with_weights=True)
        return arrange(
            [
                ("count_words", 2 * flows * 8),
                ("hello_words", 2 * nodes * 8),
                ("arrived", slots * 8),  # the chunk in each slot
                ("credits", slots * 8),  # the chunk that the receiver has taken out of each slot
                ("choice_counts", 2 * flows * 8),  # rows of choices that come through each flow
                ("send_counts", 2 * flows * counts),
                ("recv_counts", 2 * flows * counts),
                ("send_hellos", 2 * hello),
                ("recv_hellos", 2 * nodes * hello),
                ("sum_words", flows * self.config.num_max_tokens_per_rank * 8),  # [flow][chunk]: of the sums that have arrived
                ("sent", slots * self.slot_bytes),
                ("arrivals", max(slots * self.slot_bytes, sums)),
            ]
        )

    @functools.cached_property
    def num_ring_entries(self) -> int:
        """Descriptors of a relay's ring: one for each put that may be without an answer.

        A flow has a put for each slot, and a credit for each slot. Counts and hellos of two calls may be on the way.
        """
        most = self.num_flows * (2 * self.num_slots + 4) + 4 * self.config.num_nodes
        return 1 << (most - 1).bit_length()

    @functools.cached_property
    def flow_counts_stride(self) -> int:
        return align_up(structs.FlowCounts.size(self._sizes), 128)

    @functools.cached_property
    def source_counts_stride(self) -> int:
        return align_up(structs.SourceCounts.size(self._sizes), 128)

    @functools.cached_property
    def control(self) -> Map:
        """Flags and inboxes that the ranks of this node write. The parity of the epoch selects one of two ring slots."""
        node = self.config.node_size
        return arrange(
            [
                ("count_inbox", 2 * self.config.num_ranks * self.source_counts_stride),
                ("node_windows", 2 * node * structs.NodeWindow.size(self._sizes)),
                ("node_flags", node * 4),
                ("exposed_flags", node * self.num_exposed_chunks * 4),
                ("choice_marks", self.config.num_max_tokens_per_rank * self.config.num_topk * 8),  # of staged rows of choices
            ]
        )

    @property
    def num_exposed_chunks(self) -> int:
        return -(-self.config.worst_recv_tokens // EXPOSED_ROWS)  # memory may grow for all rows

    @property
    def local(self) -> Iterable[tuple[str, int]]:
        """Local memory: counts of the blocks of a routing, the verdict on a call, and addresses of other nodes' memory."""
        return [
            ("route_nodes_blocks", MAX_ROUTE_BLOCKS * structs.RouteNodesBlock.size(self._sizes)),
            (
                "nodes_verdict",
                8,
            ),  # lower half: epoch of a call; upper half: whether its ranks agree; block 0 writes it for the others
            ("wire", structs.WireState.size({}) * self.config.has_wire),
            (
                "network_peers",
                self.config.num_ranks * 8,
            ),  # address of offset 0 of each rank's network memory, if this GPU reaches it
        ]

    @functools.cached_property
    def handle(self) -> Map:
        """The tables that a dispatch leaves for combine, and for later calls with the same routing. All grow with the ranks, not faster."""
        config = self.config
        ranks, tokens, entries = (
            config.num_ranks,
            config.num_max_tokens_per_rank,
            config.num_max_tokens_per_rank * config.num_topk,
        )
        return arrange(
            [
                ("num_recv", 4),
                ("serial", 4),  # of the routing: the same on all ranks
                ("num_recv_per_expert", config.num_local_experts * 4),
                ("first_row", ranks * 4),  # [source]: its first row here
                ("num_sent", ranks * 4),  # [rank]: rows for it
                ("flow_tokens", self.num_flows * 4),  # tokens sent through each flow
                ("flow_recv", self.num_flows * 4),  # tokens that arrive through the flow from each gateway
                ("flow_first_sum", self.num_flows * 4),  # the tokens of its source in the flows before that one
                ("entry_rank", entries * 4),  # [token][choice]: the rank, or -1 if an earlier choice has the same rank
                ("entry_pos", entries * 4),  # the index of the token among the rows for that rank
                (
                    "entry_flow_pos",
                    entries * 4,
                ),  # the index of the token in the flow, or -1 if an earlier choice has the same flow
                ("near_list", config.node_size * tokens * 4),  # [rank of the node][position]: the token
                ("flow_list", self.num_flows * tokens * 4),  # [flow][position]: the token
                ("sent_pos", self.num_flows * tokens * self.fan * 4),  # [flow][position][rank of the fan], as ChunkHead::pos
                ("recv_pos", self.num_flows * tokens * self.fan * 4),  # the same of the flows that end here
                ("dispatched", 4),  # the serial, once a dispatch has written recv_pos
            ]
        )

    # --- results -----------------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def num_max_node_sums(self) -> int:
        """The most rows that a rank receives from other nodes in combine."""
        return self.config.num_max_tokens_per_rank * min(self.num_flows, self.config.num_topk)

    def sum_stride(self, sent_bytes: int, *, with_weights: bool) -> int:
        """Return the bytes that a sum takes at the rank of its token, in a combine whose sums have `sent_bytes` on the way.

        The sums of a chunk follow each other there, and then their weights. Each chunk begins on a line of 128 bytes.
        """
        return align_up(sent_bytes + 4 * self.config.num_topk * with_weights, 128)

    def staging(self, row_bytes: int) -> Map:
        """Memory of combine: the rows that this rank exposes to its node."""
        return self.exposed(self.config.num_max_recv_tokens, row_bytes)

    def exposed(self, num_rows: int, row_bytes: int) -> Map:
        """Memory for rows that this rank exposes to its node."""
        return _exposed(num_rows, self.config.num_topk, row_bytes)

    @property
    def region_constants(self) -> dict[str, int]:
        """Every number of this class that the kernels use."""
        return {
            **self.constants,
            "kNumSlots": self.num_slots,
            "kSlotBytes": self.slot_bytes,
            "kFlowCountsStride": self.flow_counts_stride,
            "kSourceCountsStride": self.source_counts_stride,
            "kMaxExposedChunks": self.num_exposed_chunks,
        }
