"""The handles of DeepEP V1: sequences whose entries are worked out when somebody reads them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..buffer import Buffer
from ..errors import EPInputError, EPUnavailableError
from ..results import DispatchHandle, LowLatencyHandle
from . import handle_tables as compat_routing


class _Fields(Sequence[Any]):
    """Attributes as a sequence: it can be indexed, sliced and unpacked."""

    _fields: ClassVar[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._fields[index]
        return tuple(getattr(self, name) for name in chosen) if isinstance(index, slice) else getattr(self, chosen)


_T = torch.Tensor
_OF_ELEMENTS = ("T", "H", "mT", "mH", "real", "imag", "data")
_METHODS = (
    "size dim numel nelement stride storage_offset element_size get_device data_ptr untyped_storage is_contiguous is_pinned "
    "is_floating_point is_complex is_inference is_shared new_empty"
)
_READS = frozenset(
    (
        *(
            value.__get__
            for name, value in vars(_T.__base__).items()
            if inspect.isgetsetdescriptor(value) and name not in _OF_ELEMENTS
        ),
        *(getattr(_T, name) for name in _METHODS.split()),
        *(_T.requires_grad.__set__, torch.numel, torch.is_floating_point, torch.is_complex, torch.empty_like),
    )
)
"""What may be asked of an entry that is not here: all that needs no elements."""
_COPIES = frozenset(
    (
        *(_T.detach, _T.detach_, _T.clone, _T.contiguous, _T.to, _T.cpu, _T.cuda, _T.pin_memory, _T.requires_grad_, _T.view_as),
        *(_T.data.__get__, torch.clone, torch.detach),
    )
)
"""What gives another entry of the same handle."""


class Absent(torch.Tensor):  # type: ignore[misc]  # torch is Any to mypy
    """Stands in a handle for a table that this library does not have; reading its elements raises EPUnavailableError.

    It is a tensor because callers keep the entries of a handle for a backward pass (`ctx.save_for_backward(*handle)`), and give them back
    as a tuple. Each entry knows its handle, and so does each copy: checkpointing and hooks that save tensors elsewhere detach and copy.
    """

    handle: NormalHandle
    entry: str

    @staticmethod
    def of(handle: NormalHandle, name: str) -> Absent:
        return _T._make_subclass(Absent, torch.empty(0, dtype=torch.int32, device="cpu"))._belong(handle, name)

    def _belong(self, handle: NormalHandle, entry: str) -> Absent:
        self.handle, self.entry = handle, entry
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = [*args, *kwargs.values()]
        given = [entry for value in values for entry in (value if isinstance(value, (list, tuple)) else (value,))]
        entries = [entry for entry in given if isinstance(entry, Absent)]
        one = entries[-1 if function is _T.copy_ else 0]
        if function not in _READS and function not in _COPIES and function is not _T.copy_:
            raise EPUnavailableError(
                f"{one.entry} of a dispatch handle: this library sends without channels, and has no such table. Of a handle there are "
                f"rank_prefix_matrix [0], recv_src_idx [3] and is_token_in_rank [4]"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            if function in _READS:
                return result
            if function is _T.copy_:
                result.__class__ = Absent  # the caller's memory for the copy, which has no elements either
            return (result if isinstance(result, Absent) else _T._make_subclass(Absent, result))._belong(one.handle, one.entry)

    def record_stream(self, stream: Any) -> None:
        """Nothing to do: an entry has no memory."""

    def __copy__(self) -> Absent:
        return self

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def __repr__(self) -> str:
        return f"<{self.entry}: not in this library>"


def whole(handle: Any) -> Any:
    """The handle that a sequence holds the entries of; anything else as it is."""
    entries = handle if isinstance(handle, (tuple, list)) else ()
    return next((entry.handle for entry in entries if isinstance(entry, Absent)), handle)


class NormalHandle(_Fields):
    """What `Buffer.dispatch` returns as its handle: the six entries of DeepEP's intranode handle, without the tables of its channels.

    Attributes:
        recv_src_idx: `[rows of recv_x]` int32, the token at its source.
        is_token_in_rank: As it was given to dispatch.
    """

    _fields = (
        "rank_prefix_matrix",
        "channel_prefix_matrix",
        "recv_channel_prefix_matrix",
        "recv_src_idx",
        "is_token_in_rank",
        "send_head",
    )

    def __init__(
        self, buffer: Buffer, own: DispatchHandle, recv_src_idx: torch.Tensor, is_token_in_rank: torch.Tensor | None
    ) -> None:
        self.buffer, self.own = buffer, own
        self.recv_src_idx, self.is_token_in_rank = recv_src_idx, is_token_in_rank

    @cached_property
    def rank_prefix_matrix(self) -> torch.Tensor:
        """`[num_ranks, num_ranks]` int32: entry (i, j) counts the rows that rank j receives from the ranks 0 to i."""
        return compat_routing.rank_prefix_matrix(self.buffer, self.own)

    @property
    def channel_prefix_matrix(self) -> Absent:
        """Not in this library."""
        return Absent.of(self, "channel_prefix_matrix")

    @property
    def recv_channel_prefix_matrix(self) -> Absent:
        """Not in this library."""
        return Absent.of(self, "recv_channel_prefix_matrix")

    @property
    def send_head(self) -> Absent:
        """Not in this library."""
        return Absent.of(self, "send_head")


class ExpertHandle(_Fields):
    """What `Buffer.low_latency_dispatch` returns as its handle: the five entries of DeepEP's.

    Attributes:
        num_max_dispatch_tokens_per_rank: As given to the dispatch.
        hidden: Elements of a row.
        num_experts: Experts over all ranks.
    """

    _fields = ("src_info", "layout_range", "num_max_dispatch_tokens_per_rank", "hidden", "num_experts")

    def __init__(self, buffer: Buffer, own: LowLatencyHandle, num_topk: int) -> None:
        config = buffer.config
        self.buffer, self.own, self.num_topk = buffer, own, num_topk  # the caller's top-k; the Buffer may take more
        self.num_max_dispatch_tokens_per_rank, self.hidden = config.num_max_tokens_per_rank, config.hidden
        self.num_experts = config.num_experts
        self.is_received = True  # not before the hook, if there is one

    @property
    def src_info(self) -> torch.Tensor:
        """`[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank]` int32: the token, at its source, of each row; else -1."""
        return self._tables[0]

    @property
    def layout_range(self) -> torch.Tensor:
        """`[num_local_experts, num_ranks]` int64: first row from each rank in the upper 32 bits, number of rows in the lower ones."""
        return self._tables[1]

    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_received:
            raise EPInputError(
                "handle: the hook of its low_latency_dispatch was not called yet; call it before reading the handle"
            )
        return compat_routing.expert_tables(self.buffer, self.own)
