"""`Buffer` of DeepEP V1."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from .. import buffer as _core
from .._checks import flag, whole_number
from ..comm.communicator import communicator_of
from ..config import MAX_RANKS_PER_NODE, MAX_SMS
from ..cuda.topology import ranks_per_host
from ..errors import EPConfigError, EPInputError, EPUnavailableError
from ..network import NetworkOptions
from ..torch.process_group import communicator
from .buffer_cache import LowLatencyBuffers, NormalBuffers
from .config import MOST_BYTES, Config
from .events import EventHandle, EventOverlap
from .low_latency import LowLatencyCalls
from .normal import NormalCalls
from .runtime import Runtime

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class Buffer(NormalCalls, LowLatencyCalls):
    """DeepEP V1's `Buffer`. Making it, and every call, is collective: all ranks do it in the same order.

    Args:
        group: A `torch.distributed` group, an mpi4py communicator, or None.
        num_nvl_bytes: Memory for the normal mode (`dispatch`, `combine`) on each rank. Tells how many tokens room is made for at first;
            where calls have more, more is taken. 0: no normal mode.
        num_rdma_bytes: Accepted; the low-latency mode takes what its calls need.
        low_latency_mode: Whether the low-latency calls may be made.
        num_qps_per_rank: Connections to each peer on another host (NVSHMEM's IBGDA).
        allow_nvlink_for_low_latency_mode: False: low-latency calls go through NVSHMEM also between the ranks of a host.
        allow_mnnvl: Accepted; without effect.
        use_fabric: Accepted; without effect.
        explicitly_destroy: Accepted; `destroy` may be called in any case, and nothing is given back without it.
        enable_shrink: Low-latency calls leave silent ranks out, and the mask calls work. Memory is then taken here, for the sizes that
            `get_low_latency_rdma_size_hint` was asked about last (up to 8 experts a token; on the GPU, if there is one): at the first call,
            a rank may be lost already. A first call of other sizes makes memory of its own, and all ranks have to be there.
        comm: An mpi4py communicator, where `group` is None.

    Raises:
        EPConfigError: if there is neither a group nor a communicator, or `group` is something else.
        EPUnavailableError: if `num_nvl_bytes` asks for the normal mode with ranks on several hosts, and `low_latency_mode` is off. With
            it, `dispatch` and `combine` raise there.

    Example:
        >>> import deepep_rt.compat as deep_ep
        >>> buffer = deep_ep.Buffer(group, num_nvl_bytes=int(1e9))
    """

    num_sms: int = 20
    copies_results: bool = False
    """True: `dispatch` and `combine` copy their results to PyTorch's own memory, which may be resized, and heeds `record_stream`."""
    num_slots: int = 2
    """Largest results of `dispatch` that a Buffer made from now on has room for at once; further ones that a program holds are copied."""
    _hinted: tuple[int, tuple[int, int, int, int]] = 0, (0, 0, 0, 0)  # ranks; tokens, hidden, top-k and experts

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Intracomm | None = None,
    ) -> None:
        if group is None and comm is None:
            raise EPConfigError(
                "neither group nor comm was given; pass a torch.distributed group, or an mpi4py communicator as comm="
            )
        num_nvl_bytes = whole_number(num_nvl_bytes, "num_nvl_bytes", 0, MOST_BYTES, error=EPConfigError)
        num_rdma_bytes = whole_number(num_rdma_bytes, "num_rdma_bytes", 0, MOST_BYTES, error=EPConfigError)
        num_qps_per_rank = whole_number(num_qps_per_rank, "num_qps_per_rank", 0, MOST_BYTES, error=EPConfigError)
        low_latency_mode = flag(low_latency_mode, "low_latency_mode", error=EPConfigError)
        enable_shrink = flag(enable_shrink, "enable_shrink", error=EPConfigError)
        ranks = communicator_of(comm if group is None else communicator(group))
        self.rank, self.group_size = ranks.Get_rank(), ranks.Get_size()
        self.group = comm if group is None else group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = flag(explicitly_destroy, "explicitly_destroy", error=EPConfigError)
        self._ranks_per_host = ranks_per_host(ranks)
        is_one_host = self._ranks_per_host == self.group_size
        if num_nvl_bytes and not is_one_host and not low_latency_mode:
            raise EPUnavailableError(
                f"num_nvl_bytes={num_nvl_bytes} asks for the normal mode with ranks on several hosts; expected 0. Make the Buffer with "
                f"low_latency_mode=True, and call low_latency_dispatch"
            )
        self._normal = NormalBuffers(ranks, num_nvl_bytes, self.num_slots) if num_nvl_bytes and is_one_host else None
        settings: dict[str, Any] = {"on_timeout": "mask" if enable_shrink else "raise"}
        if not flag(allow_nvlink_for_low_latency_mode, "allow_nvlink_for_low_latency_mode", error=EPConfigError):
            settings["ranks_per_node"] = 1
        if not is_one_host:
            settings["network"] = NetworkOptions(ibgda=True, connections_per_peer=num_qps_per_rank)
        self._low_latency = LowLatencyBuffers(ranks, **settings) if low_latency_mode else None
        ranks_hinted, sizes = Buffer._hinted
        if self._low_latency is not None and enable_shrink and ranks_hinted == self.group_size:
            self._low_latency.take(*sizes, "cuda" if torch.cuda.is_available() else "host")

    def check(self) -> None:
        """Raise what the next call would raise: for loops that only replay CUDA graphs. DeepEP has no such call.

        Raises:
            EPTimeoutError: if a peer did not answer.
            EPInputError: if ranks gave different arguments, or an argument was wrong.

        Example:
            >>> graph.replay()
            >>> buffer.check()
        """
        for buffers in (self._low_latency, self._normal):
            if buffers is not None:
                buffers.check()

    def destroy(self) -> None:
        """Give the memory back. Collective; results that are still held must not be used afterwards."""
        if self._destroyed:
            return
        self._destroyed = True
        with ExitStack() as rest:  # all are destroyed, whatever comes to light
            if self._low_latency is not None:
                rest.callback(self._low_latency.destroy)
            if self._normal is not None:
                # Ranks that low-latency calls have lost are not waited for here either.
                rest.callback(self._normal.destroy, in_touch=self._low_latency is None or not self._low_latency.masked_ranks())

    # --- settings and sizes ------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 conversion works: kernels are compiled for the GPU at hand."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of the normal mode, for calls without a `config`.

        Raises:
            EPInputError: unless it is an even number from 2 to 1024.
        """
        Buffer.num_sms = whole_number(new_num_sms, "new_num_sms", 2, MAX_SMS, multiple_of=2)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The configuration that `dispatch` takes without one: `num_sms`, whatever the number of ranks."""
        whole_number(num_ranks, "num_ranks", 1, MOST_BYTES)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The configuration that `combine` takes without one: `num_sms`, whatever the number of ranks."""
        whole_number(num_ranks, "num_ranks", 1, MOST_BYTES)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that the low-latency mode takes on each rank with such calls (of up to 8 experts a token).

        More than 8 ranks count as ranks of several hosts.
        """
        given = {"hidden": hidden, "num_ranks": num_ranks, "num_experts": num_experts}
        given["num_max_dispatch_tokens_per_rank"] = num_max_dispatch_tokens_per_rank
        sizes = {name: whole_number(value, name, 1, MOST_BYTES, error=EPConfigError) for name, value in given.items()}
        num_ranks, tokens = sizes.pop("num_ranks"), sizes.pop("num_max_dispatch_tokens_per_rank")
        sizes["num_topk"] = min(8, sizes["num_experts"])
        node = None if num_ranks <= MAX_RANKS_PER_NODE else _most_on_a_host(num_ranks)
        settings: dict[str, Any] = {**sizes, "num_max_tokens_per_rank": tokens, "low_latency": True, "ranks_per_node": node}
        num_bytes = _core.Buffer.size_hint(num_ranks, **settings)["total"]
        Buffer._hinted = num_ranks, (tokens, sizes["hidden"], sizes["num_topk"], sizes["num_experts"])
        return num_bytes

    @staticmethod
    def capture() -> EventOverlap:
        """An event after the work that the current stream holds now."""
        return EventOverlap(EventHandle())

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """A tensor without elements in place of DeepEP's memory, for programs that set that memory to zero before ranks come back.

        This library needs no such cleaning: `low_latency_clean_mask_buffer` does all of it.

        Args:
            dtype: Of the tensor.
            size: Its shape; without elements.
            offset: Accepted; without effect.
            use_rdma_buffer: True: the memory of the low-latency mode. That of the normal mode is not to be had.

        Returns:
            A tensor of `size`, or `[0]`, on the GPU if there is one.

        Raises:
            EPInputError: if `dtype` is none of PyTorch's, or `low_latency_mode` is off.
            EPUnavailableError: without `use_rdma_buffer`, or if `size` has elements.

        Example:
            >>> buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
        """
        self._check_live()
        if not isinstance(dtype, torch.dtype):
            raise EPInputError(f"dtype={dtype!r}; expected a torch.dtype")
        if not use_rdma_buffer or (size is not None and torch.Size(size).numel()):
            raise EPUnavailableError(
                f"get_local_buffer_tensor: use_rdma_buffer={use_rdma_buffer!r} and size={size}; expected True and no elements: the memory "
                f"of this library is not open to callers. For rows that combine reads without a copy, call "
                f"get_next_low_latency_combine_buffer"
            )
        self._need_low_latency()
        return torch.empty(size or 0, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")

    @property
    def runtime(self) -> Runtime | None:
        """What DeepEP's C++ object says of a Buffer; None after `destroy`."""
        return None if self._destroyed else Runtime(self)


def _most_on_a_host(num_ranks: int) -> int:
    """The most ranks of a host, where all hosts hold equally many."""
    return max(size for size in range(1, MAX_RANKS_PER_NODE + 1) if num_ranks % size == 0)
