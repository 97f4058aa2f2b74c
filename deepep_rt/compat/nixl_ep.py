"""The Python interface of nixl_ep, NIXL's expert-parallel library, on Buffers with slots: `import deepep_rt.compat.nixl_ep as nixl_ep`.

Its low-latency mode is DeepEP's, and its ranks come and go. Names, arguments, defaults and results are those of nixl_ep 1.4.
docs/coming-from-deepep.md lists the differences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .. import _env
from .._checks import argument_error, flag, whole_number
from ..comm.failure_notice import FailureNotice
from ..comm.store import StoreCommunicator
from ..config import MAX_RANKS_PER_NODE
from ..errors import EPConfigError, EPInputError, EPUnavailableError
from . import buffer as deep_ep
from .base import BufferState, NoAttributeError
from .checks import Tensors, check_handle, check_tensor
from .config import MOST_BYTES, Config, low_latency_bytes
from .events import EventHandle, EventOverlap
from .handles import ExpertHandle, _Fields
from .low_latency import LowLatencyCalls
from .runtime import Runtime
from .slot_buffers import SlotBuffers

__all__ = ["DEFAULT_TIMEOUT_MS", "Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]

DEFAULT_TIMEOUT_MS = 30_000
_MOST_TIMEOUT_MS = 10**9
topk_idx_t = torch.int64
"""The dtype of expert numbers in nixl_ep. This library accepts int32 too."""


class Handle(_Fields):
    """The handle of `Buffer.low_latency_dispatch`: the four entries of nixl_ep's."""

    _fields = ("src_info", "layout_range", "num_max_dispatch_tokens_per_rank", "hidden")

    def __init__(self, whole: ExpertHandle, rank_bound: int) -> None:
        self.whole, self.rank_bound = whole, rank_bound
        self.num_max_dispatch_tokens_per_rank, self.hidden = whole.num_max_dispatch_tokens_per_rank, whole.hidden

    @property
    def num_rows(self) -> int:
        """Rows of an expert for which the results have room."""
        return self.rank_bound * self.num_max_dispatch_tokens_per_rank

    @property
    def src_info(self) -> torch.Tensor:
        """`[num_local_experts, num_rows]` int32: the token of each row at its source, or -1."""
        return self.whole.src_info[:, : self.num_rows].contiguous()

    @property
    def layout_range(self) -> torch.Tensor:
        """`[num_local_experts, rank_bound]` int64: the first row from each rank (upper 32 bits), and their number (lower ones)."""
        return self.whole.layout_range[:, : self.rank_bound].contiguous()


class Buffer:
    """nixl_ep's `Buffer`: low-latency calls between ranks that come and go. Its memory has slots, and a rank is a slot.

    `connect_ranks` and `disconnect_ranks` note which ranks the program wants. The next `dispatch` or `barrier` changes the members, with
    all of them together. So all ranks connect and disconnect the same ranks between the same calls.

    Args:
        disable_ll_nvlink: Must be False. All ranks are on one host, and reach each other over NVLink.
        explicitly_destroy: False: the destructor calls `destroy` too.
        rank: The slot of this process.
        low_latency_mode: Must be True. `deepep_rt.compat.Buffer` has the other mode, for ranks that stay.
        group: Kept, not used.
        comm: Kept, not used.
        tcp_store_group: A store of `torch.distributed`, over which the ranks find each other. Each Buffer has one of its own: another
            prefix, for example.
        timeout_ms: Milliseconds after which a call masks a silent rank. `DEEPEP_RT_TIMEOUT_S` overrides it.

    Raises:
        EPConfigError: If an argument is out of range.
        EPUnavailableError: With `disable_ll_nvlink`, or without `low_latency_mode`.

    Example:
        >>> buffer = nixl_ep.Buffer(rank=rank, tcp_store_group=store)
        >>> num_bytes = nixl_ep.Buffer.get_rdma_size_hint(128, 7168, 8, 8 * 32)
        >>> buffer.update_memory_buffers(num_ranks=8, num_experts_per_rank=32, num_rdma_bytes=num_bytes)
        >>> buffer.connect_ranks([0, 1, 2, 3])
        >>> recv_x, recv_count, handle, event, hook = buffer.dispatch(x, topk_idx, 128, 8 * 32)
    """

    num_sms: int = 20

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: Any = None,
        comm: Any = None,
        tcp_store_group: Any = None,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> None:
        self._state: BufferState | None = None
        self.rank = whole_number(rank, "rank", 0, MOST_BYTES, error=EPConfigError)
        self.explicitly_destroy = flag(explicitly_destroy, "explicitly_destroy", error=EPConfigError)
        self.low_latency_mode = flag(low_latency_mode, "low_latency_mode", error=EPConfigError)
        self.timeout_ms = whole_number(timeout_ms, "timeout_ms", 1, _MOST_TIMEOUT_MS, error=EPConfigError)
        self.group, self.comm, self.tcp_store_group, self.group_size = group, comm, tcp_store_group, 0
        if not self.low_latency_mode:
            raise EPUnavailableError(
                "low_latency_mode=False; expected True, because only low-latency calls have slots here. deepep_rt.compat.Buffer has "
                "dispatch and combine for ranks that stay."
            )
        if flag(disable_ll_nvlink, "disable_ll_nvlink", error=EPConfigError):
            raise EPUnavailableError(
                "disable_ll_nvlink=True; expected False, because slots are on one host, where all rows take NVLink. Leave it out."
            )

    # --- memory and ranks --------------------------------------------------------------------------------------------------------

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int, num_nvl_bytes: int = 0
    ) -> None:
        """Set the sizes. The first call of each hidden size and top-k takes its memory.

        Args:
            num_ranks: The slots: the most ranks at a time, up to 8.
            num_experts_per_rank: The experts of a rank.
            num_rdma_bytes: The result of `get_rdma_size_hint`. It decides how many tokens a call may have.
            num_nvl_bytes: Must be 0, because it is for the other mode.

        Raises:
            EPConfigError: If a number is out of range, or this is a second call.
        """
        if self._state is not None:
            raise EPConfigError(
                "update_memory_buffers was called before; expected one call. Make another Buffer for other sizes."
            )
        num_ranks = whole_number(num_ranks, "num_ranks", 1, MOST_BYTES, error=EPConfigError)
        if not self.rank < num_ranks <= MAX_RANKS_PER_NODE:
            raise EPConfigError(
                f"num_ranks={num_ranks}; expected {self.rank + 1} to {MAX_RANKS_PER_NODE} slots, which are on one host. Pass the most "
                f"ranks at a time (VLLM_NIXL_EP_MAX_NUM_RANKS of vLLM, --max-ep-size of SGLang)."
            )
        num_local = whole_number(num_experts_per_rank, "num_experts_per_rank", 1, MOST_BYTES, error=EPConfigError)
        num_bytes = whole_number(num_rdma_bytes, "num_rdma_bytes", 0, MOST_BYTES, error=EPConfigError)
        if num_nvl_bytes:
            raise argument_error(
                num_nvl_bytes, "num_nvl_bytes", "0, because low-latency calls do not use it", "Leave it out.", EPConfigError
            )
        self.group_size, self.num_rdma_bytes, self.num_nvl_bytes = num_ranks, num_bytes, 0
        self._num_local_experts = num_local
        self._slots = SlotBuffers(self.rank, num_ranks, num_local, num_bytes, _env.timeout_s(self.timeout_ms / 1000))
        notice = FailureNotice(StoreCommunicator(None, "", 0, 1))  # the Buffers have notices of their own
        self._state = BufferState(self.rank, num_ranks, num_ranks, None, self._slots, True, notice)
        self._calls = _Calls(self._state)

    def set_tcp_store_group(self, tcp_store_group: Any) -> None:
        """Set the store over which other ranks find this one from now on. None: none, until the next one."""
        self.tcp_store_group = tcp_store_group
        if self._state is not None and not self._state.is_destroyed:
            self._slots.tell_place(tcp_store_group)

    def connect_ranks(self, remote_ranks: Sequence[int], activate: bool = True) -> None:
        """Let ranks take part from the next call on. That call waits for them. This one does not.

        Args:
            remote_ranks: Their numbers. This rank, and those that are connected, may be among them.
            activate: False: they take part after `update_mask_buffer(rank, mask=False)`.

        Raises:
            EPInputError: If a number is out of range, or before `update_memory_buffers`.
        """
        slots, ranks = self._live(), self._ranks(remote_ranks)
        slots.connect(ranks, flag(activate, "activate"), self.tcp_store_group)

    def disconnect_ranks(self, remote_ranks: Sequence[int]) -> None:
        """Go on without ranks, from the next call on. The other ranks that stay disconnect them too, at the same place.

        A rank that is connected again is another process, or has made its Buffer again.

        Raises:
            EPInputError: If one of them is not connected, or is this one.
        """
        slots, ranks = self._live(), self._ranks(remote_ranks)
        if bad := [rank for rank in ranks if rank == self.rank or not slots.is_connected(rank)]:
            raise EPInputError(f"remote_ranks={ranks}; expected connected ranks other than this one. Leave out {bad}.")
        slots.disconnect(ranks)

    def barrier(self) -> None:
        """Wait for all active ranks on the current stream, and change the members before, as a dispatch does. It masks silent ranks."""
        self._live().barrier()

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Exclude a rank from the calls of this one (`mask=True`), or include it.

        A rank that is included for the first time since it was connected joins in the next call. Otherwise no hook may be open, and all
        ranks must have made the same number of calls before a rank is included again.

        Raises:
            EPInputError: If the rank is this one, or is not connected and shall be included.
        """
        slots, mask = self._live(), flag(mask, "mask")
        rank = whole_number(rank_to_mask, "rank_to_mask", 0, self.group_size - 1)
        if rank == self.rank and mask:
            raise argument_error(rank, "rank_to_mask", "a rank other than this one", "Pass another rank.")
        if not mask and not slots.is_connected(rank):
            raise argument_error(rank, "rank_to_mask", "a rank that is connected", "Call connect_ranks before.")
        slots.set_mask(rank, mask)

    def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that takes no part in calls of this one, and 0 for the others. The host waits for the current stream.

        Args:
            mask_status: `[num_ranks]` int32, for all slots.
        """
        self._live()
        self._calls.low_latency_query_mask_buffer(mask_status)

    def clean_mask_buffer(self) -> None:
        """Include all connected ranks."""
        slots = self._live()
        for rank in range(self.group_size):
            if slots.is_connected(rank):
                slots.set_mask(rank, False)

    def _live(self) -> SlotBuffers:
        if self._state is None:
            raise EPInputError("this Buffer has no sizes; expected update_memory_buffers before. Call it once.")
        self._state.check_live()
        return self._slots

    def _ranks(self, given: Sequence[int]) -> list[int]:
        ranks = [whole_number(rank, "remote_ranks", 0, self.group_size - 1) for rank in given]
        if not ranks:
            raise argument_error(given, "remote_ranks", "at least one rank", "Leave out the call.")
        return ranks

    # --- calls -------------------------------------------------------------------------------------------------------------------

    def low_latency_dispatch(
        self,
        x: Tensors,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensors, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """Send tokens to their experts: `low_latency_dispatch` of `deepep_rt.compat.Buffer`. Choices of absent ranks are skipped.

        Args:
            x: As there, and so are those that are not named here.
            topk_idx: See there. Expert e belongs to rank `e // num_experts_per_rank`.
            num_max_dispatch_tokens_per_rank: See there. At most the number of `get_rdma_size_hint`.
            num_experts: The experts of the ranks from 0 on for which the results have room. From the active ones to those of all slots. All
                slots are the fastest: otherwise the results are copied. Default: up to the last active rank.
            cumulative_local_expert_recv_stats: See there.
            dispatch_wait_recv_cost_stats: `[num_experts // num_experts_per_rank]` int64, see there.
            use_fp8: See there.
            round_scale: See there.
            use_ue8m0: See there.
            async_finish: See there.
            return_recv_hook: See there.

        Returns:
            As there. The handle has four entries.

        Raises:
            EPInputError: If an argument is wrong.
            EPTimeoutError: If a rank that was connected does not come.
            EPEvictedError: If the others have disconnected this process.
        """
        slots, num_local = self._live(), self._num_local_experts
        bound = self._rank_bound(slots, num_experts)
        stats = dispatch_wait_recv_cost_stats
        if stats is not None and bound < self.group_size:
            check_tensor(stats, "dispatch_wait_recv_cost_stats")
            if stats.shape != (bound,):
                raise EPInputError(
                    f"dispatch_wait_recv_cost_stats.shape={list(stats.shape)}; expected [{bound}], a number for each rank of num_experts. "
                    f"Make one of that shape."
                )
            stats = torch.zeros(self.group_size, dtype=torch.int64, device=stats.device)
        recv_x, recv_count, whole, event, hook = self._calls.low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            self.group_size * num_local,
            cumulative_local_expert_recv_stats,
            stats,
            use_fp8,
            round_scale,
            use_ue8m0,
            async_finish,
            return_recv_hook,
        )
        handle = Handle(whole, bound)
        if bound == self.group_size:
            return recv_x, recv_count, handle, event, hook
        copies = []
        if stats is not None and dispatch_wait_recv_cost_stats is not None:
            copies.append((dispatch_wait_recv_cost_stats, stats[:bound], True))
        parts = recv_x if isinstance(recv_x, tuple) else (recv_x,)
        with torch.cuda.stream(self.get_comm_stream()) if async_finish and parts[0].is_cuda else contextlib.nullcontext():
            narrow = []
            for part in parts:
                shape = part.shape[0], handle.num_rows, part.shape[2]
                by_column = part.stride(1) == 1 and part.shape[2] > 1
                made = part.new_empty((shape[0], shape[2], shape[1])).mT if by_column else part.new_empty(shape)
                copies.append((made, part[:, : handle.num_rows], False))
                narrow.append(made)
            results: Tensors = (narrow[0], narrow[1]) if len(narrow) == 2 else narrow[0]
            if hook is None:
                _copy(copies)
                if async_finish:
                    event = EventOverlap(EventHandle(), (*(event.extra_tensors or ()), *narrow))
                return results, recv_count, handle, event, None
        receive = hook

        def receive_and_copy() -> None:
            receive()
            _copy(copies)

        return results, recv_count, handle, event, receive_and_copy

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Call `low_latency_dispatch`."""
        return self.low_latency_dispatch(*args, **kwargs)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Send the experts' outputs back: `low_latency_combine` of `deepep_rt.compat.Buffer`. Absent ranks add nothing.

        Args:
            x: `[num_local_experts, rows, hidden]` bfloat16, as many rows as the dispatch returned. The others as there.
            topk_idx: See there.
            topk_weights: See there.
            handle: See there.
            use_logfmt: See there.
            zero_copy: Read the rows from the tensor of `get_next_combine_buffer`.
            async_finish: See there.
            return_recv_hook: See there.
            out: See there.
            combine_wait_recv_cost_stats: Not supported.

        Returns:
            As there.
        """
        self._live()
        check_handle(handle, Handle, "low_latency_dispatch")
        if not flag(zero_copy, "zero_copy") and handle.rank_bound < self.group_size:
            check_tensor(x, "x")
            expected = self._num_local_experts, handle.num_rows, handle.hidden
            if tuple(x.shape) != expected:
                raise EPInputError(
                    f"x.shape={list(x.shape)}; expected {list(expected)}, the rows of the dispatch. Pass them all."
                )
            whole = x.new_empty((expected[0], self.group_size * handle.num_max_dispatch_tokens_per_rank, expected[2]))
            whole[:, : handle.num_rows].copy_(x.detach())
            x = whole
        return self._calls.low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle.whole,
            use_logfmt,
            zero_copy,
            async_finish,
            return_recv_hook,
            out,
            combine_wait_recv_cost_stats,
        )

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """Call `low_latency_combine`."""
        return self.low_latency_combine(*args, **kwargs)

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Return memory for the experts' outputs, for `combine(zero_copy=True)`. Its rows may have gaps between experts."""
        self._live()
        check_handle(handle, Handle, "low_latency_dispatch")
        return self._calls.get_next_low_latency_combine_buffer(handle.whole)[:, : handle.num_rows]

    def _rank_bound(self, slots: SlotBuffers, num_experts: int | None) -> int:
        """Return the ranks for which the results of a dispatch have room."""
        if num_experts is None:
            return slots.rank_bound
        num_local = self._num_local_experts
        num_experts = whole_number(num_experts, "num_experts", 1, MOST_BYTES)
        least, most = slots.rank_bound * num_local, self.group_size * num_local
        if num_experts % num_local or not least <= num_experts <= most:
            raise EPInputError(
                f"num_experts={num_experts}; expected a multiple of num_experts_per_rank={num_local} from {least} (the active ranks) to "
                f"{most} (all slots). Pass {most}."
            )
        return num_experts // num_local

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> NoReturn:
        """Raise EPUnavailableError: only the other mode has layouts."""
        raise _only_low_latency("get_dispatch_layout")

    def ht_dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> NoReturn:
        """Raise EPUnavailableError: it is a call of the other mode."""
        raise _only_low_latency("ht_dispatch")

    def ht_combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> NoReturn:
        """Raise EPUnavailableError: it is a call of the other mode."""
        raise _only_low_latency("ht_combine")

    # --- settings and sizes ------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether FP8 conversion works. Kernels are compiled for the current GPU."""
        return deep_ep.Buffer.is_sm90_compiled()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set a number that only the other mode uses."""
        Buffer.num_sms = whole_number(new_num_sms, "new_num_sms", 2, MOST_BYTES, multiple_of=2)

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event after the work that the current stream holds now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a configuration, which only the other mode uses."""
        whole_number(num_ranks, "num_ranks", 1, MOST_BYTES)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return `num_rdma_bytes` for calls of so many tokens, and for `num_ranks` slots with `num_experts` experts together."""
        given = {"num_max_dispatch_tokens_per_rank": num_max_dispatch_tokens_per_rank, "hidden": hidden}
        given |= {"num_ranks": num_ranks, "num_experts": num_experts}
        return low_latency_bytes(
            *(whole_number(value, name, 1, MOST_BYTES, error=EPConfigError) for name, value in given.items())
        )

    @staticmethod
    def get_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Call `get_low_latency_buffer_size_hint`, of which this is the older name."""
        return Buffer.get_low_latency_buffer_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_comm_stream(self) -> Any:
        """Return the stream of calls with `async_finish`.

        Raises:
            EPUnavailableError: Without a GPU.
        """
        self._live()
        return self._calls.get_comm_stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return a tensor without elements, as that method of `deepep_rt.compat.Buffer`. Programs set it to zero."""
        self._live()
        return self._calls.get_local_buffer_tensor(dtype, size, offset, use_rdma_buffer)

    @property
    def runtime(self) -> Runtime | None:
        """The methods of nixl_ep's C++ object. None before `update_memory_buffers`, and after `destroy`."""
        return None if self._state is None or self._state.is_destroyed else Runtime(self._state)

    def check(self) -> None:
        """Raise the error that the next call would raise, for loops that only replay CUDA graphs. nixl_ep has no such call."""
        self._live().check()

    def destroy(self) -> None:
        """Free the memory. The other ranks lose this one, and need not take part. Results must not be used afterwards."""
        if self._state is None or self._state.is_destroyed:
            return
        self._state.is_destroyed = True
        self._state.notice.close()
        self._slots.destroy()

    def __del__(self) -> None:
        if getattr(self, "_state", None) is not None and not self.explicitly_destroy:
            with contextlib.suppress(Exception):  # other objects may be gone
                self.destroy()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise NoAttributeError for any other name."""
            raise NoAttributeError(
                f"Buffer.{name} is not a part of this library. See docs/coming-from-deepep.md for the names of nixl_ep that are."
            )


class _Calls(LowLatencyCalls):
    """The low-latency calls over the slots."""

    def __init__(self, state: BufferState) -> None:
        self._state = state


def _copy(copies: list[tuple[torch.Tensor, torch.Tensor, bool]]) -> None:
    """Copy, or add, each second tensor to the first one. The list is empty afterwards."""
    while copies:
        target, source, adds = copies.pop()
        if adds:
            target.add_(source)
        else:
            target.copy_(source)


def _only_low_latency(call: str) -> EPUnavailableError:
    return EPUnavailableError(
        f"{call}: expected a low-latency call, because only these have slots here. deepep_rt.compat.Buffer has dispatch and "
        f"combine for ranks that stay."
    )


def __getattr__(name: str) -> NoReturn:
    """Raise NoAttributeError for any other name."""
    raise NoAttributeError(
        f"{name} is not a part of this library. See docs/coming-from-deepep.md for the names of nixl_ep that are."
    )
