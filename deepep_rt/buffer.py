"""`Buffer`: expert-parallel dispatch and combine over the ranks of a communicator. Readers start here.

A call goes one way: the arguments become checked Views (`inputs`), the backend moves the rows (`backends/cuda` or `backends/host`),
and the results are Views that turn into arrays of the caller's framework when they are first looked at (`results`).
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._checks import argument_error, choice, flag, whole_number
from .arrays import stream_handles as handles
from .backends.base import Backend
from .backends.calls import BufferInfo, Call
from .backends.inputs import (
    check_low_latency_handle,
    combine_inputs,
    dispatch_inputs,
    low_latency_combine_inputs,
    low_latency_dispatch_inputs,
)
from .config import MAX_SMS, ROW_ALIGNMENT, Config
from .errors import EPConfigError, EPInputError
from .kernels.layout import Layout
from .network import NetworkOptions
from .results import (
    MAKE_ANOTHER,
    CombineResult,
    DispatchHandle,
    DispatchResult,
    LowLatencyCombineResult,
    LowLatencyDispatchResult,
    LowLatencyHandle,
    SharedByCopies,
)

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from .comm.communicator import Communicator

_MOST_ROWS, _MOST_ITERATIONS = (1 << 31) - 1, 10**6  # of a measurement; kernels count rows in 32 bits
_log = logging.getLogger("deepep_rt")
_serials = itertools.count(1)
_alive: weakref.WeakSet[Buffer] = weakref.WeakSet()
_OF_PARENT = (
    "this Buffer was made by the process that this one was forked from, and speaks for that one; leave calls to it (a DataLoader's workers "
    "prepare batches, and run no model)"
)


def _leave_to_parent() -> None:
    """In a process that was forked off: its messages would be taken for its parent's."""
    for buffer in _alive:
        if buffer._backend is not None:
            buffer._call_lock.refuse(_OF_PARENT)
            buffer._of_parent, buffer._backend = buffer._backend, None


os.register_at_fork(after_in_child=_leave_to_parent)


class Buffer(SharedByCopies):
    """Routes tokens to the ranks of their experts (`dispatch`) and adds the experts' outputs up back home (`combine`).

    Making and destroying a Buffer, and every call, is collective: all ranks of `comm` do it in the same order (and so from one thread at a
    time; a thread that comes in the middle of another's call gets an `EPInputError`). In a call, dtypes and which
    arguments are given must be the same on all ranks, numbers of tokens need not be. Ranks that differ get an `EPInputError`, on GPUs from
    a later call where the host does not wait (which is made all the same); a low-latency call that differs breaks the Buffer there.

    Args:
        comm: An mpi4py communicator, or what `deepep_rt.torch.communicator` makes of a process group; its ranks are the expert-parallel
            group. On GPUs, NVSHMEM starts over the ranks of a process's first Buffer. Later ones may be over groups of these ranks; all
            groups then make theirs at the same time, over as many ranks and of the same sizes.
        num_max_tokens_per_rank: Most tokens that one rank gives to one `dispatch`.
        hidden: Elements of a row; in `dtype`, a row has a multiple of 16 bytes, and at most 96 KiB.
        num_topk: Experts of a token, 1 to 32.
        num_experts: Experts over all ranks, a multiple of the number of ranks; rank r holds the r-th run of them.
        dtype: Widest element type of a row: its name, or an array library's object for it (`torch.bfloat16`). Narrower rows (FP8 in a
            bfloat16 buffer) are welcome in each call.
        num_slots: Worst-case results of dispatch, with one of combine each, that there is memory for at once (the pool); they are trimmed
            to what arrived. Also how many low-latency hooks of a kind may be open.
        backend: "cuda", "host" (NumPy and MPI, no GPU), or "auto": CUDA if there is a GPU, and cuda-python (the extras).
        timeout_s: Seconds after which a silent peer raises EPTimeoutError; default `DEEPEP_RT_TIMEOUT_S`, or 300. A
            GPU counts them from when its kernel begins to wait; work that is queued before does not count.
        num_sms: SMs that a dispatch or combine occupies; the property of this name changes it between calls.
        low_latency: Set memory aside for `low_latency_dispatch` and `low_latency_combine` (which need it). Each of their results has room
            for `num_experts * num_max_tokens_per_rank` rows: see `size_hint`, and make a Buffer of few tokens for decoding.
        low_latency_sms: SMs that a low-latency call occupies, however few tokens it has (fewer only for a small `num_max_tokens_per_rank`).
            Where such calls of several Buffers run beside each other, on streams of their own, they have to fit the GPU together: one
            that waits for its peers keeps its SMs, and ranks on which another one came first would wait for each other.
        ranks_per_node: Consecutive ranks that reach each other over NVLink; low-latency calls go through NVSHMEM between such groups.
            Default: the ranks of a host. 1 sends everything through NVSHMEM.
        network: How NVSHMEM reaches the ranks on other hosts; takes effect when it starts, with the first Buffer of the process.
        on_timeout: What a low-latency call does about a silent peer: "raise", or "mask" it (see `mask_rank`) and go on without it.
        check_inputs: Report expert numbers out of range from the device, in this call or a later one; without it GPUs skip them. (The host
            backend always raises.) Default: `DEEPEP_RT_DEBUG`.
        on_exhausted: What a dispatch does when the caller holds so many results that the pool is full: "copy" the result to
            memory of its own (a quarter slower; the log says so once, at INFO), or raise "error". The host backend has no pool.

    Raises:
        EPConfigError: if a size is wrong, or the ranks disagree on one.
        EPUnavailableError: if `backend="cuda"` and something that it needs is missing; with "auto", if only some ranks have a GPU, or
            there is a CUDA driver that does not start.
        EPOutOfMemoryError: if the GPU has less free memory than `size_hint` says.

    Example:
        >>> from mpi4py import MPI
        >>> from deepep_rt import Buffer
        >>> with Buffer(MPI.COMM_WORLD, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256) as buffer:
        ...     sent = buffer.dispatch(x, topk_idx, topk_weights)
        ...     y = experts(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights)
        ...     out = buffer.combine(y, sent.handle).x
    """

    _instead = MAKE_ANOTHER

    def __init__(
        self,
        comm: Intracomm | Communicator,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: Any = "bfloat16",
        num_slots: int = 2,
        backend: str = "auto",
        timeout_s: float | None = None,
        num_sms: int = 24,
        low_latency: bool = False,
        low_latency_sms: int = 128,
        ranks_per_node: int | None = None,
        network: NetworkOptions | None = None,
        on_timeout: str = "raise",
        check_inputs: bool | None = None,
        on_exhausted: str = "copy",
    ) -> None:
        from .backends.agreement import report_config_error  # agreement and factory load communicators, which import mpi4py
        from .backends.factory import make_backend
        from .comm.communicator import communicator_of

        ranks = communicator_of(comm)
        optional: dict[str, Any] = {"timeout_s": timeout_s, "check_inputs": check_inputs}
        try:
            backend = choice(backend, "backend", ("auto", "cuda", "host"), error=EPConfigError)
            on_exhausted = choice(on_exhausted, "on_exhausted", ("copy", "error"), error=EPConfigError)
            if network is not None and not isinstance(network, NetworkOptions):
                raise argument_error(network, "network", "NetworkOptions, or None", "Pass one of them.", EPConfigError)
            config = Config(
                num_ranks=ranks.Get_size(),
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                hidden=hidden,
                num_topk=num_topk,
                num_experts=num_experts,
                dtype=dtype,
                num_slots=num_slots,
                num_sms=num_sms,
                low_latency=low_latency,
                low_latency_sms=low_latency_sms,
                ranks_per_node=ranks_per_node,
                on_timeout=on_timeout,
                **{name: value for name, value in optional.items() if value is not None},
            )
        except EPConfigError as error:
            report_config_error(ranks, error, timeout_s)
            raise
        self._rank = ranks.Get_rank()
        self._backend: Backend | None = None
        made = make_backend(ranks, config, backend, next(_serials), on_exhausted, network)
        self._backend, self._info, self._call_lock = made, made.info, made.call_lock
        self.config = made.info.config
        self._of_parent: Any = None  # the backend, in a process that was forked off: kept, so that nothing is given back there
        _alive.add(self)

    @staticmethod
    def size_hint(
        num_ranks: int,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: Any = "bfloat16",
        num_slots: int = 2,
        low_latency: bool = False,
        ranks_per_node: int | None = None,
    ) -> dict[str, int]:
        """Bytes of GPU memory that such a Buffer takes on each rank; nothing is allocated.

        Args:
            num_ranks: Ranks of the communicator.
            num_max_tokens_per_rank: This and the others as for `Buffer`.
            hidden: See `Buffer`.
            num_topk: See `Buffer`.
            num_experts: See `Buffer`.
            dtype: See `Buffer`.
            num_slots: See `Buffer`.
            low_latency: See `Buffer`.
            ranks_per_node: See `Buffer`.

        Returns:
            Bytes by region ("control", "landing", "pool", "sums", "low_latency"; "handles"; "low_latency_results", one of them:
            as many are allocated as are held at once) and their sum under "total".

        Example:
            >>> hint = Buffer.size_hint(8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
            >>> print(f"{hint['total'] / 1e9:.2f} GB")
            1.56 GB
        """
        sizes = (num_ranks, num_max_tokens_per_rank, hidden, num_topk, num_experts, dtype, num_slots)
        config = Config(
            *sizes,
            timeout_s=1.0,  # of this and check_inputs, the environment says the defaults
            check_inputs=False,
            low_latency=low_latency,
            ranks_per_node=ranks_per_node,
        )
        return Layout(config).size_hint

    @property
    def backend(self) -> str:
        """The backend in use, "cuda" or "host"."""
        return self._live().name

    @property
    def num_sms(self) -> int:
        """SMs that the next `dispatch` and `combine` occupy (GPUs only); may be set between calls, on all ranks alike.

        Raises:
            EPConfigError: if it is set to something else than a whole number from 1 to 1024.
            EPDestroyedError: if the buffer was destroyed.

        Example:
            >>> buffer.num_sms = 8  # leaves more to a matrix product on another stream
        """
        return self._live().num_sms

    @num_sms.setter
    def num_sms(self, num_sms: int) -> None:
        self._live().num_sms = whole_number(num_sms, "num_sms", 1, MAX_SMS, error=EPConfigError)

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        x_scales: Any = None,
        handle: DispatchHandle | None = None,
        num_worst_tokens: int | None = None,
        expert_alignment: int = 1,
        async_finish: bool = False,
        previous_event: Any = None,
        stream: Any = None,
    ) -> DispatchResult:
        """Send each token to the ranks that hold its experts, once to each rank.

        Args:
            x: `[num_tokens, hidden]`, any dtype up to the buffer's width: bfloat16, float16, float32, float8, int8 or uint8 (FP8 from
                frameworks that cannot export it). A row has a multiple of 16 bytes.
            topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers; -1 skips. With `handle`, the same as then, or None;
                `recv_topk_idx` is None then.
            topk_weights: `[num_tokens, num_topk]` float32, or None. Needs `topk_idx` beside it.
            x_scales: `[num_tokens, n]`, at most one 4-byte word for 128 channels: `hidden // 128` float32, or packed UE8M0.
            handle: Repeat the routing of an earlier dispatch; nothing is counted and the host does not wait.
            num_worst_tokens: Rows of the result whatever arrives, 0 to `num_ranks * num_max_tokens_per_rank`: the host does not wait
                and nothing is allocated, so the call can be captured in a CUDA graph (keep the result as long as the graph). Rows
                past it are dropped and count in `num_recv_tokens`; the log says so once.
            expert_alignment: Counts for each expert are rounded up to a multiple of this. Not with `handle`, which keeps its counts.
            async_finish: Run on the buffer's own stream; `result.event` tells when it is done.
            previous_event: Start after this event instead of after the caller's current stream (an `Event`, or an array library's).
            stream: Run on this stream (an array library's, or an integer handle) instead of the caller's current one. Given or current, a
                stream that nothing but its number holds (as PyTorch's or CuPy's ExternalStream) has to outlive the results and the
                Buffer: the CUDA driver may crash otherwise. The first call on a second stream waits for all that the first one holds.

        Returns:
            What arrived at this rank, ordered by source rank and source token.

        Raises:
            EPInputError: if an argument is wrong; nothing was launched.
            EPOutOfMemoryError: if the caller holds too many results and `on_exhausted="error"`, or the call cannot copy.
            EPTimeoutError: if a peer did not answer; also raised for earlier calls that the host did not wait for.
            EPDestroyedError: after `destroy()`.

        Example:
            >>> sent = buffer.dispatch(x, topk_idx, topk_weights)
            >>> sent.recv_x.shape, sent.num_recv_tokens_per_expert_list
        """
        backend = self._live()
        with self._call_lock:
            call = self._begin(x, async_finish, previous_event, stream)
            inputs = dispatch_inputs(
                self._info, call.stream, x, topk_idx, topk_weights, x_scales, handle, num_worst_tokens, expert_alignment
            )
            return backend.dispatch(inputs, call)

    def combine(
        self,
        x: Any,
        handle: DispatchHandle,
        *,
        topk_weights: Any = None,
        bias: Any = None,
        async_finish: bool = False,
        previous_event: Any = None,
        stream: Any = None,
    ) -> CombineResult:
        """Send rows back to the ranks of their tokens and add up the rows of each token there, in float32 and in rank order.

        The host never waits, so the call can be captured in a CUDA graph (keep the result as long as the graph).

        Args:
            x: `[rows of recv_x, hidden]` bfloat16, float16 or float32, in the order of `recv_x`; in any memory.
            handle: The handle of the dispatch that brought the tokens.
            topk_weights: `[rows of recv_x, num_topk]` float32 to be added up over the ranks too (a backward pass needs it), or None.
            bias: None, one array or two of them, `[num_tokens, hidden]`, dtype of `x`: added to the sum.
            async_finish: As in `dispatch`.
            previous_event: As in `dispatch`.
            stream: As in `dispatch`.

        Returns:
            `x` `[num_tokens, hidden]` (zero, or the bias, for tokens that went nowhere), `topk_weights` and `event`.

        Raises:
            EPInputError: if an argument is wrong; nothing was launched.
            EPTimeoutError: if a peer did not answer; also raised for earlier calls that the host did not wait for.
            EPDestroyedError: after `destroy()`.

        Example:
            >>> out = buffer.combine(y, sent.handle, bias=shared_expert_output).x
        """
        backend = self._live()
        with self._call_lock:
            call = self._begin(x, async_finish, previous_event, stream)
            inputs = combine_inputs(self._info, call.stream, x, handle, topk_weights, bias)
            return backend.combine(inputs, call)

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        *,
        topk_weights: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        cumulative_local_expert_recv_stats: Any = None,
        wait_recv_cost_stats: Any = None,
        stream: Any = None,
    ) -> LowLatencyDispatchResult:
        """Send a few tokens to their experts as fast as possible; what arrives lies expert by expert. For decoding.

        The host never waits, so the call can be captured in a CUDA graph (keep the result as long as the graph).

        Args:
            x: `[num_tokens, hidden]` bfloat16. (NaNs of all ones may arrive as other NaNs.)
            topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers; -1 skips. A token that names an expert more than once gets
                a row for each choice, and `low_latency_combine` adds each. An expert has room for `num_ranks * num_max_tokens_per_rank`
                rows; the last ones past that are dropped, which the log says once.
            topk_weights: `[num_tokens, num_topk]` float32, or None. Given here, `low_latency_combine` is a message round shorter.
            use_fp8: Convert rows to float8_e4m3fn on the way, with a scale for each 128 channels. GPUs that cannot (sm_80) warn once, and
                rows arrive as bfloat16, without scales.
            round_scale: Make the scales powers of two.
            use_ue8m0: Deliver such scales as their 8-bit exponents.
            async_finish: As in `dispatch`.
            return_recv_hook: Only send; calling the result's `hook` receives, on the same stream. No SM is held in between. Hooks are
                called in the order of their calls, and at most `num_slots` may be open. (One that is lost, in an exception, is called by
                the next call.) In a CUDA graph, a call and its hook are in the same capture. A whole call that is replayed between the two
                halves of another one ends the buffer: the next call, or wait, raises EPInputError.
            cumulative_local_expert_recv_stats: `[num_local_experts]` int32; the tokens that arrive are added to it.
            wait_recv_cost_stats: `[num_ranks]` int64; the nanoseconds that each source kept the call waiting are added to it, until its
                last row had come. (On the host backend, which gets all rows at once, each other source counts for all of the wait.)
            stream: As in `dispatch`.

        Returns:
            `recv_x`, `recv_x_scales`, `num_recv_tokens_per_expert`, `handle`, `event`, `hook`.

        Raises:
            EPInputError: if an argument is wrong, or the buffer was made without `low_latency=True`; nothing was launched.
            EPTimeoutError: if a peer did not answer in an earlier call.

        Example:
            >>> sent = buffer.low_latency_dispatch(x, topk_idx, topk_weights=topk_weights)
            >>> y = experts(sent.recv_x, sent.recv_x_scales, sent.num_recv_tokens_per_expert)
            >>> out = buffer.low_latency_combine(y, topk_idx, topk_weights, sent.handle).x
        """
        backend, return_recv_hook = self._low_latency(), flag(return_recv_hook, "return_recv_hook")
        with self._call_lock:
            call = self._begin(x, async_finish, None, stream)
            inputs = low_latency_dispatch_inputs(
                self._info,
                call.stream,
                x,
                topk_idx,
                topk_weights,
                use_fp8,
                round_scale,
                use_ue8m0,
                cumulative_local_expert_recv_stats,
                wait_recv_cost_stats,
            )
            return backend.low_latency_dispatch(inputs, call, return_recv_hook)

    def low_latency_combine(
        self,
        y: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: LowLatencyHandle,
        *,
        allow_multiple_reduction: bool = True,
        zero_copy: bool = False,
        out: Any = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        stream: Any = None,
    ) -> LowLatencyCombineResult:
        """Bring the experts' outputs back: each token gets the sum of its experts' rows, times its weights, added up in float32.

        Like `low_latency_dispatch`, it can be captured in a CUDA graph.

        Args:
            y: `[num_local_experts, num_ranks * num_max_tokens_per_rank, hidden]` bfloat16, in the order of `recv_x`; in any memory.
            topk_idx: As given to `low_latency_dispatch`, or -1 for choices that are not to be added (with `allow_multiple_reduction`, for
                all of a token's experts on one rank). Anything else is an EPInputError; GPUs add what the dispatch was given, and report
                it to a later call or `check`. Like `topk_weights`, not to be written to before the call, or its hook, has run.
            topk_weights: `[num_tokens, num_topk]` float32; the same as in `low_latency_dispatch`, if they were given there.
            handle: The handle of that call.
            allow_multiple_reduction: An expert rank adds up (and rounds to bfloat16) its own experts' rows of a token and sends one.
                False: it sends one row for each expert, and all are added up at the token's rank; not with masked ranks or
                `on_timeout="mask"` on GPUs. The same on all ranks, as the dispatch of `handle`; a difference breaks the buffer.
            zero_copy: `y` is what `get_low_latency_combine_buffer` returned. Rows are read where they lie in any case.
            out: `[num_tokens, hidden]` bfloat16 to write the result to, outside of `y`; default: memory of the buffer.
            async_finish: As in `dispatch`.
            return_recv_hook: As in `low_latency_dispatch`.
            stream: As in `dispatch`.

        Returns:
            `x` `[num_tokens, hidden]` bfloat16 (zero for tokens that went nowhere), `event`, `hook`.

        Raises:
            EPInputError: if an argument is wrong; nothing was launched.
            EPTimeoutError: if a peer did not answer in an earlier call.

        Example:
            >>> out = buffer.low_latency_combine(y, topk_idx, topk_weights, sent.handle).x
        """
        backend, return_recv_hook = self._low_latency(), flag(return_recv_hook, "return_recv_hook")
        with self._call_lock:
            call = self._begin(y, async_finish, None, stream)
            inputs = low_latency_combine_inputs(
                self._info, call.stream, y, topk_idx, topk_weights, handle, allow_multiple_reduction, out
            )
            if flag(zero_copy, "zero_copy") and inputs.y.ptr != backend.low_latency_combine_view(handle.framework).ptr:
                raise EPInputError("zero_copy=True, but y is not what get_low_latency_combine_buffer returned")
            return backend.low_latency_combine(inputs, call, return_recv_hook)

    def get_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Any:
        """Memory for the experts to write their outputs to, for `low_latency_combine(zero_copy=True)`.

        Args:
            handle: The handle of a `low_latency_dispatch`.

        Returns:
            `[num_local_experts, num_ranks * num_max_tokens_per_rank, hidden]` bfloat16, in the framework of that call. There is one
            for each Buffer.

        Raises:
            EPInputError: if the buffer was made without `low_latency=True`, the handle is none of its own, or the call was given JAX
                arrays, which nobody may write to.
            EPOutOfMemoryError: if the first such call finds no GPU memory for it.

        Example:
            >>> y = buffer.get_low_latency_combine_buffer(sent.handle)
        """
        backend = self._low_latency()
        check_low_latency_handle(self._info, handle)
        if handle.framework.name == "jax":
            raise EPInputError(
                "get_low_latency_combine_buffer: JAX arrays cannot be written to; give low_latency_combine an array of yours"
            )
        with self._call_lock:
            return backend.low_latency_combine_view(handle.framework).to_framework()

    def mask_rank(self, rank: int) -> None:
        """Leave a rank out of low-latency calls from now on: nothing is sent to it and nothing waited for from it.

        Its tokens do not arrive here, its experts contribute nothing, and the results of the other ranks stay right. Waits for earlier
        calls of this rank, whose hooks have to have been called. Throughput calls take no notice.

        Args:
            rank: A rank of the buffer's communicator, not this one.

        Raises:
            EPInputError: if there is no such rank, it is this one, or a hook is open.

        Example:
            >>> buffer.mask_rank(7)
        """
        self._set_mask(rank, True)

    def unmask_rank(self, rank: int) -> None:
        """Let a masked rank take part again.

        All ranks have made the same number of low-latency calls by then, none is running or waits for its hook, and all of them call this
        (for `rank`, or on that rank itself for whomever it masked) before the next one: put a barrier of your own before it and one after.
        Handles from before are not used any more: in them, one rank may be left out on one side only.

        Args:
            rank: As in `mask_rank`.

        Raises:
            EPInputError: if there is no such rank, it is this one, or a hook is open.

        Example:
            >>> buffer.unmask_rank(7)
        """
        self._set_mask(rank, False)

    def query_masked_ranks(self) -> list[int]:
        """Ranks that low-latency calls leave out: those that `mask_rank` named, or that timed out (`on_timeout="mask"`). Waits for nothing.

        Returns:
            The ranks, ascending.

        Example:
            >>> buffer.query_masked_ranks()
            [7]
        """
        return self._low_latency().masked_ranks()

    def copy_ceiling(self, *, row_bytes: int | None = None, num_rows: int = 2048, iterations: int = 5) -> float:
        """Measure what the links carry: every rank pushes rows to all others at once, with nothing to look up and nobody to wait for.

        Collective; waits for all earlier work.

        Args:
            row_bytes: Bytes of a row, a multiple of 16; default: the widest row of this buffer.
            num_rows: Rows for each peer (fewer if they do not fit this buffer's memory, or 64 MiB a rank on the host backend).
            iterations: Pushes that one timing covers, up to 1,000,000. All three are the same on all ranks.

        Returns:
            Bytes a second that a rank sends to the others (on one rank: to itself), on the slowest rank.

        Raises:
            EPInputError: if a number is out of range, or on every rank, if the ranks give different ones.
            EPOutOfMemoryError: on every rank, if one has no memory for the rows (host backend).
            EPTimeoutError: if a peer did not answer.

        Example:
            >>> print(f"{buffer.copy_ceiling() / 1e9:.0f} GB/s")
        """
        most = self.config.row_bytes
        row_bytes = most if row_bytes is None else row_bytes
        row_bytes = whole_number(row_bytes, "row_bytes", ROW_ALIGNMENT, most, multiple_of=ROW_ALIGNMENT)
        num_rows = whole_number(num_rows, "num_rows", 1, _MOST_ROWS)
        iterations = whole_number(iterations, "iterations", 1, _MOST_ITERATIONS)
        backend = self._live()
        with self._call_lock:
            return backend.copy_ceiling(row_bytes, num_rows, iterations)

    def check(self) -> None:
        """Raise what the next call would raise: that a peer was silent, that ranks differ, or that an input was wrong.

        Reads pinned memory (under a microsecond), waits for nothing and is not collective. It sees what the GPU has come to. A loop that
        only replays CUDA graphs makes no calls that could raise: check after each replay, or after some. From the replay of a time-out
        on, floating results are NaN.

        Raises:
            EPTimeoutError: if a peer did not answer; the buffer is broken.
            EPInputError: if ranks gave different arguments, or an argument was wrong.
            EPDestroyedError: after `destroy()`.

        Example:
            >>> graph.replay()
            >>> buffer.check()
        """
        self._live().check()

    def synchronize(self) -> None:
        """Wait on the host for the work of all calls so far; where they were all on one stream, for all that it holds.

        Raises:
            EPTimeoutError: if a peer did not answer.
            EPInputError: while that stream is captured in a CUDA graph.

        Example:
            >>> buffer.synchronize()  # before a clock is read, or results are used by what knows no streams
        """
        backend = self._live()
        with backend.context:
            backend.synchronize()

    def destroy(self, in_touch: bool = True) -> None:
        """Give the memory back. Collective; results that are still held must not be used afterwards. Safe to call twice.

        On GPUs, giving it back takes all ranks. A rank whose call timed out, that an error threw out of the `with` block, or that has
        masked others, says so and waits for nobody; the memory of all ranks then stays until the processes end, and a new Buffer may be
        made. A rank that says nothing is waited for, in two rounds of `timeout_s` (or 30 s, where that is more), with a warning every
        30 seconds. Then the memory stays, too, and this raises EPTimeoutError with the names of such ranks. With `on_timeout="mask"` a
        round takes `timeout_s`, and this warns instead.

        In the middle of a call - from a signal handler, or from another thread - the call raises EPDestroyedError, and the other ranks hear
        of it.

        Args:
            in_touch: False: the program knows that a rank is lost; this one waits for nobody.

        Raises:
            EPTimeoutError: if a rank did not come, or a peer did not answer in a call before, and the host has not been told. The Buffer is
                destroyed all the same.
            EPInputError: as `synchronize`. The Buffer is destroyed, but the memory of all ranks stays until the processes end.

        Example:
            >>> buffer.destroy()  # the end of a with block does the same
        """
        self._destroy(flag(in_touch, "in_touch"))

    def _destroy(self, in_touch: bool, error: BaseException | None = None) -> None:
        self._call_lock.refuse("this Buffer was destroyed; make a new one")
        backend, self._backend = self._backend, None
        if backend is None:
            return

        def finish(thrown: BaseException | None) -> None:
            backend.destroy(in_touch and thrown is None, error or thrown)

        self._call_lock.drain(finish)

    def _begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Check how a call is to run, also where a backend has no streams, and begin it."""
        async_finish = flag(async_finish, "async_finish")
        if previous_event is not None:
            handles.of_event(previous_event)
        if stream is not None:
            handles.of_stream(stream)
        return self._live().begin(x, async_finish, previous_event, stream)

    def _live(self) -> Backend:
        self._call_lock.check()
        assert self._backend is not None  # it goes after calls are refused
        return self._backend

    def _low_latency(self) -> Backend:
        if not self.config.low_latency:
            raise EPInputError("this Buffer has no memory for low-latency calls; make it with low_latency=True")
        return self._live()

    def _set_mask(self, rank: int, masked: bool) -> None:
        backend, mine = self._low_latency(), self._rank
        remedy = f"Pass the rank to leave out, other than this one ({mine})."
        rank = whole_number(rank, "rank", 0, self.config.num_ranks - 1, remedy=remedy)
        if rank == mine:
            raise argument_error(
                rank, "rank", f"0 to {self.config.num_ranks - 1}, other than this one ({mine})", "Pass another rank."
            )
        with self._call_lock:
            backend.set_mask(rank, masked)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._destroy(error is None, error)  # with an error, the other ranks may not get here

    def __del__(self) -> None:
        if getattr(self, "_backend", None) is not None:  # freeing is collective, and a destructor runs at no agreed time
            _log.warning("a Buffer was dropped without destroy(): its memory stays taken until the process ends")
            warnings.warn("a Buffer was dropped without destroy(); use `with Buffer(...)`", ResourceWarning, stacklevel=2)


def info_of(buffer: Buffer) -> BufferInfo:
    """Return the number, sizes and device of a Buffer, for the wrappers of frameworks. It outlives the Buffer."""
    return buffer._info


def backend_of(buffer: Buffer, *, low_latency: bool = False) -> Backend:
    """Return the backend of a Buffer, for the wrappers of frameworks.

    Raises:
        EPDestroyedError: After `destroy()`.
        EPInputError: If `low_latency`, and the Buffer was made without it.
    """
    return buffer._low_latency() if low_latency else buffer._live()
