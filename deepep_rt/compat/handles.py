"""The handles of DeepEP V1: sequences that compute an entry when a program reads it.

PyTorch computes their tables from ours on the current stream, and the host does not wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..arrays.frameworks import framework_of
from ..arrays.view import Framework
from ..buffer import Buffer, backend_of
from ..errors import EPInputError, EPUnavailableError
from ..results import DispatchHandle, LowLatencyHandle


def _pytorch() -> Framework:
    return framework_of(torch.empty(0, device="cpu"), "handle")


def expert_tables(buffer: Buffer, handle: LowLatencyHandle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sources of the rows of a low-latency dispatch.

    Returns:
        `[num_local_experts, rows]` int32: the token, at its source, of each row (-1 for places without a row); and
        `[num_local_experts, num_ranks]` int64: the first row of each source in the upper 32 bits, the number of rows in the lower ones.
    """
    config, entries = buffer.config, backend_of(buffer).tables.entries(handle, _pytorch())
    words, num_entries = entries.words.to_framework(), entries.num_entries.to_framework()
    is_filled = torch.arange(len(words), device=words.device) < num_entries
    rows = torch.where(is_filled[:, None], words[:, entries.rows], -1)
    source, token = (words[:, column].repeat_interleave(rows.shape[1]) for column in (entries.source, entries.token))
    sizes = config.num_local_experts, handle.capacity, config.num_ranks
    return _tables(rows.flatten().long(), source.long(), token, *sizes)


def _tables(
    row: torch.Tensor, source: torch.Tensor, token: torch.Tensor, num_experts: int, num_rows: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make both tables of `[n]` entries. Entries with a negative row count for nothing: they go to a cell past the end."""
    device, end = row.device, num_experts * num_rows
    is_row = row >= 0
    row = torch.where(is_row, row, end)
    tokens = torch.full((end + 1,), -1, dtype=torch.int32, device=device).scatter_(0, row, token.int())
    pair = torch.where(is_row, torch.div(row, num_rows, rounding_mode="floor") * num_ranks + source, num_experts * num_ranks)
    counts = torch.zeros(num_experts * num_ranks + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, pair, torch.ones_like(pair))
    first = torch.full_like(counts, num_rows).scatter_reduce_(0, pair, row % num_rows, "amin")
    ranges = torch.where(counts > 0, first << 32 | counts, 0)
    return tokens[:-1].view(num_experts, num_rows), ranges[:-1].view(num_experts, num_ranks)


class _Fields(Sequence[Any]):
    """A sequence of attributes, which programs index, slice and unpack."""

    _fields: ClassVar[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._fields[index]
        return tuple(getattr(self, name) for name in chosen) if isinstance(index, slice) else getattr(self, chosen)


_T = torch.Tensor
_NEEDS_ELEMENTS = ("T", "H", "mT", "mH", "real", "imag", "data")
_METHODS = (
    "size dim numel nelement stride storage_offset element_size get_device data_ptr untyped_storage is_contiguous is_pinned "
    "is_floating_point is_complex is_inference is_shared new_empty"
)
_READS = frozenset(
    (
        *(
            value.__get__
            for name, value in vars(_T.__base__).items()
            if inspect.isgetsetdescriptor(value) and name not in _NEEDS_ELEMENTS
        ),
        *(getattr(_T, name) for name in _METHODS.split()),
        *(_T.requires_grad.__set__, torch.numel, torch.is_floating_point, torch.is_complex, torch.empty_like),
    )
)
"""Functions of an unsupported entry that need no elements."""
_COPIES = frozenset(
    (
        *(_T.detach, _T.detach_, _T.clone, _T.contiguous, _T.to, _T.cpu, _T.cuda, _T.pin_memory, _T.requires_grad_, _T.view_as),
        *(_T.data.__get__, torch.clone, torch.detach),
    )
)
"""Functions that return a copy of an unsupported entry."""


class UnsupportedEntry(torch.Tensor):  # type: ignore[misc]  # torch is Any to mypy
    """An entry of a handle whose table this library lacks. A read of its elements raises EPUnavailableError.

    It is a tensor because callers keep the entries of a handle for a backward pass (`ctx.save_for_backward(*handle)`). They return the
    entries as a tuple. Each entry knows its handle. So does each copy, because checkpointing and hooks of saved tensors copy entries.
    """

    handle: DispatchedHandle
    entry: str

    @staticmethod
    def of(handle: DispatchedHandle, name: str) -> UnsupportedEntry:
        return _T._make_subclass(UnsupportedEntry, torch.empty(0, dtype=torch.int32, device="cpu"))._bind(handle, name)

    def _bind(self, handle: DispatchedHandle, entry: str) -> UnsupportedEntry:
        self.handle, self.entry = handle, entry
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = [*args, *kwargs.values()]
        given = [entry for value in values for entry in (value if isinstance(value, (list, tuple)) else (value,))]
        entries = [entry for entry in given if isinstance(entry, UnsupportedEntry)]
        source = entries[-1 if function is _T.copy_ else 0]
        if function not in _READS and function not in _COPIES and function is not _T.copy_:
            raise EPUnavailableError(
                f"{source.entry} of a dispatch handle is not in this library, which sends without channels. "
                f"Read {source.handle.readable}."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            if function in _READS:
                return result
            if function is _T.copy_:
                result.__class__ = UnsupportedEntry  # the caller's tensor for the copy has no elements either
            return (result if isinstance(result, UnsupportedEntry) else _T._make_subclass(UnsupportedEntry, result))._bind(
                source.handle, source.entry
            )

    def record_stream(self, stream: Any) -> None:
        """Do nothing: an entry has no memory."""

    def __copy__(self) -> UnsupportedEntry:
        return self

    def __deepcopy__(self, memo: Any) -> UnsupportedEntry:
        return self

    def __repr__(self) -> str:
        return f"<{self.entry}: not in this library>"


def handle_of(handle: Any) -> Any:
    """Return the handle to which a sequence of entries belongs. Return anything else as it is."""
    entries = handle if isinstance(handle, (tuple, list)) else ()
    return next((entry.handle for entry in entries if isinstance(entry, UnsupportedEntry)), handle)


class DispatchedHandle(_Fields):
    """What the handles of `Buffer.dispatch` on one node and on several nodes share."""

    readable: ClassVar[str]
    """The entries that a program may read, for messages."""

    def __init__(self, buffer: Buffer, routing: DispatchHandle, is_token_in_rank: torch.Tensor) -> None:
        self.buffer, self.routing, self.is_token_in_rank = buffer, routing, is_token_in_rank


def _unsupported(name: str) -> Any:
    """Make a property for an entry whose table this library lacks."""
    return property(lambda handle: UnsupportedEntry.of(handle, name), doc="This library has no such table.")


class NormalHandle(DispatchedHandle):
    """The handle of `Buffer.dispatch` on one node: the six entries of DeepEP's intranode handle, without the tables of channels.

    Attributes:
        recv_src_idx: `[rows of recv_x]` int32, the token of each row at its source rank.
    """

    _fields = (
        "rank_prefix_matrix",
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "recv_src_idx",
        "is_token_in_rank",
        "send_head",
    )
    readable = "rank_prefix_matrix [0], recv_src_idx [3] or is_token_in_rank [4]"

    channel_prefix_matrix = _unsupported("channel_prefix_matrix")
    recv_channel_prefix_matrix = _unsupported("recv_channel_prefix_matrix")
    send_head = _unsupported("send_head")

    def __init__(
        self, buffer: Buffer, routing: DispatchHandle, is_token_in_rank: torch.Tensor, recv_src_idx: torch.Tensor
    ) -> None:
        super().__init__(buffer, routing, is_token_in_rank)
        self.recv_src_idx = recv_src_idx

    @cached_property
    def rank_prefix_matrix(self) -> torch.Tensor:
        """Entry (i, j) of `[num_ranks, num_ranks]` int32 counts the rows that rank j receives from the ranks 0 to i."""
        rows = backend_of(self.buffer).tables.rows_between_ranks(self.routing, _pytorch()).to_framework()
        return rows.cumsum(0, dtype=torch.int32)


class InternodeHandle(DispatchedHandle):
    """The handle of `Buffer.dispatch` on several nodes: the ten entries of DeepEP's internode handle, without the tables of channels.

    Rows come in the order of source ranks and tokens, as in DeepEP.
    """

    _fields = (
        "is_token_in_rank",
        "rdma_channel_prefix_matrix",
        "gbl_channel_prefix_matrix",
        "recv_rdma_channel_prefix_matrix",
        "recv_rdma_rank_prefix_sum",
        "recv_gbl_channel_prefix_matrix",
        "recv_gbl_rank_prefix_sum",
        "recv_src_meta",
        "send_rdma_head",
        "send_nvl_head",
    )
    readable = "is_token_in_rank [0], recv_gbl_rank_prefix_sum [6] or recv_src_meta [7]"

    rdma_channel_prefix_matrix = _unsupported("rdma_channel_prefix_matrix")
    gbl_channel_prefix_matrix = _unsupported("gbl_channel_prefix_matrix")
    recv_rdma_channel_prefix_matrix = _unsupported("recv_rdma_channel_prefix_matrix")
    recv_rdma_rank_prefix_sum = _unsupported("recv_rdma_rank_prefix_sum")
    recv_gbl_channel_prefix_matrix = _unsupported("recv_gbl_channel_prefix_matrix")
    send_rdma_head = _unsupported("send_rdma_head")
    send_nvl_head = _unsupported("send_nvl_head")

    def __init__(
        self, buffer: Buffer, routing: DispatchHandle, is_token_in_rank: torch.Tensor, num_recv_tokens: torch.Tensor, rank: int
    ) -> None:
        super().__init__(buffer, routing, is_token_in_rank)
        self._num_recv_tokens, self._rank = num_recv_tokens, rank

    @cached_property
    def recv_gbl_rank_prefix_sum(self) -> torch.Tensor:
        """Entry i of `[num_ranks]` int32 counts the rows that this rank receives from the ranks 0 to i."""
        first = backend_of(self.buffer).tables.first_rows(self.routing, _pytorch()).to_framework()
        return torch.cat([first[1:].int(), self._num_recv_tokens.clamp(max=self.routing.num_recv_rows).int()])

    @cached_property
    def recv_src_meta(self) -> torch.Tensor:
        """`[rows of recv_x, 8]` uint8: two int32 for each row, the node of its source, and the bit of this rank in its node.

        Rows that did not arrive have -1 and no bit. DeepEP also sets the bits of the other ranks of the node that receive the token, which
        this rank does not know here.
        """
        ends, ranks_per_node = self.recv_gbl_rank_prefix_sum, self.buffer.config.node_size
        rows = torch.arange(self.routing.num_recv_rows, dtype=ends.dtype, device=ends.device)
        source = torch.searchsorted(ends, rows, right=True)
        has_arrived = source < len(ends)
        node = torch.where(has_arrived, torch.div(source, ranks_per_node, rounding_mode="floor"), -1)
        bit = torch.where(has_arrived, 1 << self._rank % ranks_per_node, 0)
        return torch.stack([node, bit], dim=1).int().view(torch.uint8)


class ExpertHandle(_Fields):
    """The handle of `Buffer.low_latency_dispatch`: the five entries of DeepEP's."""

    _fields = ("src_info", "layout_range", "num_max_dispatch_tokens_per_rank", "hidden", "num_experts")

    def __init__(self, buffer: Buffer, routing: LowLatencyHandle, num_topk: int) -> None:
        config = buffer.config
        self.buffer, self.routing = buffer, routing
        self.num_topk = num_topk  # the caller's; that of the Buffer may be larger
        self.num_max_dispatch_tokens_per_rank = routing.capacity // config.num_ranks
        self.hidden, self.num_experts = config.hidden, config.num_experts
        self.is_received = True  # a call with a hook sets it to False until the hook has run

    @property
    def src_info(self) -> torch.Tensor:
        """`[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank]` int32: the token of each row at its source, or -1."""
        return self._tables[0]

    @property
    def layout_range(self) -> torch.Tensor:
        """`[num_local_experts, num_ranks]` int64: the first row from each rank (upper 32 bits), and their number (lower ones)."""
        return self._tables[1]

    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_received:
            raise EPInputError(
                "the hook of this handle's low_latency_dispatch was not called; expected one call. Call it before you read the handle."
            )
        return expert_tables(self.buffer, self.routing)
