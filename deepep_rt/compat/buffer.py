"""`Buffer` of DeepEP V1."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from .. import _env
from .._checks import flag, whole_number
from ..backends.agreement import creation_comm
from ..comm.communicator import Communicator
from ..comm.convert import communicator_of
from ..comm.failure_notice import FailureNotice, making
from ..config import MAX_SMS, declared_ranks_per_node
from ..cuda.topology import ranks_per_host
from ..errors import EPConfigError
from ..network import NetworkOptions
from ..torch.process_group import communicator
from .base import BufferState, knows_other_versions
from .buffer_cache import LowLatencyBuffers, NormalBuffers
from .config import MOST_BYTES, USUAL_TOPK, Config, low_latency_bytes
from .events import EventHandle, EventOverlap
from .low_latency import LowLatencyCalls
from .normal import NormalCalls
from .runtime import Runtime

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class Buffer(NormalCalls, LowLatencyCalls):
    """DeepEP V1's `Buffer`. The constructor and every call are collective: all ranks make them in the same order.

    Args:
        group: A `torch.distributed` group, an mpi4py communicator, or None.
        num_nvl_bytes: Bytes for the normal mode (`dispatch`, `combine`) on each rank. They decide how many tokens fit at first. A call
            with more tokens takes more memory. 0: no normal mode.
        num_rdma_bytes: Between nodes and without `low_latency_mode`, more such bytes. With it, the bytes of that mode: they decide how many
            tokens fit at first, as `get_low_latency_rdma_size_hint` counts. A call with more tokens takes more memory.
        low_latency_mode: Whether the low-latency calls may be made.
        num_qps_per_rank: Connections to each peer on another host (NVSHMEM's IBGDA).
        allow_nvlink_for_low_latency_mode: False: low-latency calls use NVSHMEM also between the ranks of a host.
        allow_mnnvl: Accepted without effect.
        use_fabric: Accepted without effect.
        explicitly_destroy: Accepted without effect. A program may always call `destroy`, and only `destroy` frees memory.
        enable_shrink: Low-latency calls exclude silent ranks, and the mask calls work. The constructor then takes memory for the sizes of
            the last `get_low_latency_rdma_size_hint` (up to 8 experts a token, on the GPU if there is one), because a rank may be lost
            before the first call. A first call of other sizes takes its own memory, and needs all ranks.
        comm: An mpi4py communicator, if `group` is None.

    Raises:
        EPConfigError: If there is neither a group nor a communicator, or `group` is something else. If `DEEPEP_RT_RANKS_PER_NODE` does
            not divide the ranks of a host.

    Example:
        >>> import deepep_rt.compat as deep_ep
        >>> buffer = deep_ep.Buffer(group, num_nvl_bytes=int(1e9))
    """

    num_sms: int = 20
    copies_results: bool = False
    """True: `dispatch` and `combine` copy their results to PyTorch's memory, which programs may resize and `record_stream`."""
    num_slots: int = 2
    """The number of largest dispatch results that fit a new Buffer at once. If a program holds more, the Buffer copies them."""
    network: NetworkOptions | None = None
    """How new Buffers reach ranks of other nodes, such as `NetworkOptions(transport="mpi")`. None: with IBGDA between hosts, if every
    host has a NIC that NVSHMEM can use, and otherwise over MPI or NIXL."""
    _hinted: tuple[int, tuple[int, int, int, int]] = 0, (0, 0, 0, 0)  # ranks; tokens, hidden, top-k and experts

    @knows_other_versions
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
        ranks = ranks_of(group, comm)
        own = creation_comm(ranks, _env.timeout_s())
        with making(ranks, own, "the making of a Buffer") as notices:  # other ranks hear if this one refuses its arguments
            num_nvl_bytes = whole_number(num_nvl_bytes, "num_nvl_bytes", 0, MOST_BYTES, error=EPConfigError)
            num_rdma_bytes = whole_number(num_rdma_bytes, "num_rdma_bytes", 0, MOST_BYTES, error=EPConfigError)
            num_qps_per_rank = whole_number(num_qps_per_rank, "num_qps_per_rank", 0, MOST_BYTES, error=EPConfigError)
            self.rank, self.group_size = ranks.Get_rank(), ranks.Get_size()
            self.group = comm if group is None else group
            self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
            self.low_latency_mode = flag(low_latency_mode, "low_latency_mode", error=EPConfigError)
            self.enable_shrink = flag(enable_shrink, "enable_shrink", error=EPConfigError)
            self.explicitly_destroy = flag(explicitly_destroy, "explicitly_destroy", error=EPConfigError)
            direct = flag(allow_nvlink_for_low_latency_mode, "allow_nvlink_for_low_latency_mode", error=EPConfigError)
            self._state = self._make_state(ranks, own, num_qps_per_rank, direct)
            notices.append(self._state.notice)
        own.release()
        ranks.heard = functools.partial(self._state.notice.heard, "the making of a Buffer")

    def _make_state(self, ranks: Communicator, own: Communicator, num_qps_per_rank: int, allows_nvlink: bool) -> BufferState:
        """Make the Buffers of both modes. Collective."""
        node, is_one_host = placement(own)
        network = self.network
        if network is None and not is_one_host:
            network = NetworkOptions(ibgda=True, connections_per_peer=num_qps_per_rank)
        normal = None
        if self.num_nvl_bytes:
            num_bytes = self.num_nvl_bytes
            num_bytes += self.num_rdma_bytes if node < self.group_size and not self.low_latency_mode else 0
            normal = NormalBuffers(ranks, num_bytes, self.num_slots, node, network)
        settings: dict[str, Any] = {"on_timeout": "mask" if self.enable_shrink else "raise"}
        if not allows_nvlink:
            settings["ranks_per_node"] = 1
        if network is not None:
            settings["network"] = network
        low_latency = None
        if self.low_latency_mode:  # all ranks make Buffers of one size
            low_latency = LowLatencyBuffers(ranks, min(own.allgather(self.num_rdma_bytes)), **settings)
        num_ranks, sizes = Buffer._hinted
        if low_latency is not None and self.enable_shrink and num_ranks == self.group_size:
            low_latency.buffer_for(*sizes, "cuda" if torch.cuda.is_available() else "host")
        notice = FailureNotice(own.Dup())
        return BufferState(self.rank, self.group_size, node, normal, low_latency, self.enable_shrink, notice)

    def check(self) -> None:
        """Raise the error that the next call would raise, for loops that only replay CUDA graphs. DeepEP has no such call.

        Raises:
            EPTimeoutError: If a peer did not answer.
            EPInputError: If ranks gave different arguments, or an argument was wrong.

        Example:
            >>> graph.replay()
            >>> buffer.check()
        """
        for buffers in (self._state.low_latency, self._state.normal):
            if buffers is not None:
                buffers.check()

    def destroy(self) -> None:
        """Free the memory. Collective. Results must not be used afterwards."""
        state = self._state
        if state.is_destroyed:
            return
        state.is_destroyed = True
        state.notice.close()
        with ExitStack() as stack:  # an error of one does not keep the others from being destroyed
            if state.low_latency is not None:
                stack.callback(state.low_latency.destroy)
            if state.normal is not None:
                # The normal mode does not wait for ranks that low-latency calls have lost.
                stack.callback(state.normal.destroy, in_touch=state.low_latency is None or not state.low_latency.masked_ranks())
        state.notice.end()

    # --- settings and sizes ------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether FP8 conversion works. Kernels are compiled for the current GPU."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of the normal mode, for calls without a `config`.

        Raises:
            EPInputError: Unless it is an even number from 2 to 1024.
        """
        Buffer.num_sms = whole_number(new_num_sms, "new_num_sms", 2, MAX_SMS, multiple_of=2)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the configuration of a call without `config`. It does not depend on the number of ranks."""
        whole_number(num_ranks, "num_ranks", 1, MOST_BYTES)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of the low-latency mode on each rank, for such calls of up to 8 experts a token.

        More than 8 ranks count as ranks of several nodes, unless `DEEPEP_RT_RANKS_PER_NODE` declares the nodes.
        """
        given = {"num_max_dispatch_tokens_per_rank": num_max_dispatch_tokens_per_rank, "hidden": hidden}
        given |= {"num_ranks": num_ranks, "num_experts": num_experts}
        sizes = [whole_number(value, name, 1, MOST_BYTES, error=EPConfigError) for name, value in given.items()]
        num_bytes = low_latency_bytes(*sizes)
        tokens, hidden, num_ranks, num_experts = sizes
        Buffer._hinted = num_ranks, (tokens, hidden, min(USUAL_TOPK, num_experts), num_experts)
        return num_bytes

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event after the work that the current stream holds now."""
        return EventOverlap(EventHandle())

    @property
    def runtime(self) -> Runtime | None:
        """The methods of DeepEP's C++ object. None after `destroy`."""
        return None if self._state.is_destroyed else Runtime(self._state)


def ranks_of(group: Any, comm: Any) -> Communicator:
    """Return the ranks of a group of `torch.distributed`, or else of an mpi4py communicator."""
    if group is None and comm is None:
        raise EPConfigError(
            "group=None and comm=None; expected one of them. Pass a torch.distributed group, or an mpi4py communicator as comm=."
        )
    return communicator_of(comm if group is None else communicator(group))


def placement(ranks: Communicator) -> tuple[int, bool]:
    """Return the ranks of a node, and whether all ranks are on one host. Collective; `ranks` is what a meeting has made."""
    on_host, num_ranks = ranks_per_host(ranks), ranks.Get_size()
    node = declared_ranks_per_node(num_ranks) or on_host
    if node != on_host and on_host % node:
        raise EPConfigError(
            f"DEEPEP_RT_RANKS_PER_NODE={node}, but a host holds {on_host} ranks; expected a divisor of {on_host}. Set it to one of them, "
            f"or unset it."
        )
    return node, on_host == num_ranks
