"""`Buffer`: expert-parallel dispatch and combine over the ranks of a communicator. Readers start here.

A call takes three steps. `backends/inputs` turns the arguments into checked Views. `backends/cuda` or `backends/host` moves the rows. The
results hold Views, which become arrays of the caller's framework at first access (`results`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
import warnings
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _env
from ._checks import argument_error, choice, flag, instance, seconds, whole_number
from .arrays.dtypes import DTYPES
from .arrays.frameworks import framework_of, of_event, of_stream
from .arrays.view import Framework, View
from .backends import nvtx_ranges
from .backends.base import Backend, BufferInfo, Call, LowLatencyDispatchInputs, LowLatencyPreparation, ThroughputPreparation
from .backends.call_forms import CallForms
from .backends.inputs import (
    bias_views,
    check_apart,
    check_handle,
    check_low_latency_handle,
    combine_inputs,
    combine_rows,
    compression,
    dispatch_inputs,
    expert_rows,
    form_of_combine,
    low_latency_combine_inputs,
    low_latency_dispatch_inputs,
    sums_view,
    weights_of_rows,
)
from .comm import process_end
from .config import (
    COMBINE_DTYPES,
    MAX_RANKS,
    MAX_SMS,
    MAX_TIMEOUT_S,
    ROW_ALIGNMENT,
    USUAL_SMS,
    Config,
    declared_ranks_per_node,
    dtype_name,
)
from .cuda import start
from .description import BufferDescription
from .errors import EPConfigError, EPDestroyedError, EPInputError
from .kernels.layout import Layout
from .network import NetworkOptions
from .prepared import PreparedLowLatency, PreparedThroughput, check_in_place
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
from .statistics import Statistics
from .tuned import TuningResult

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from .backends.members import Members
    from .comm.communicator import Communicator
    from .comm.failure_notice import FailureNotice
    from .comm.liveness import LivenessWatch

_log = logging.getLogger("deepep_rt")
_serials = itertools.count(1)
_living: weakref.WeakSet[Buffer] = weakref.WeakSet()  # those that the program holds, destroyed ones too
_MOST_ROWS, _MOST_ITERATIONS = (1 << 31) - 1, 10**6  # of a measurement; kernels count rows in 32 bits
_USUAL_ROWS = 16_384  # that a rank sends in one push of a measurement
_AFTER_FORK = (
    "this Buffer belongs to the process that this one was forked from; expected calls in that process only. Keep calls out of forked "
    "processes (a DataLoader's workers prepare batches, and run no model)"
)


def _detach_after_fork() -> None:
    """Refuse calls in a forked process: peers would take its messages for messages of its parent."""
    for buffer in _living:
        if buffer._backend is not None:
            buffer._call_lock.refuse(_AFTER_FORK)
            # Kept, so that this process releases nothing that its parent uses.
            buffer._parents_backend, buffer._backend = buffer._backend, None


os.register_at_fork(after_in_child=_detach_after_fork)


@dataclasses.dataclass(frozen=True)
class _Joining:
    """Stands for the communicator of a process that joins: the slot that it wants, and its limit."""

    slot: int | None
    limit_s: float | None

    def checked(self, num_slots: int) -> _Joining:
        """Check the numbers. Raise EPConfigError if one is out of range."""
        slot, limit_s = self.slot, self.limit_s
        if slot is not None:
            slot = whole_number(slot, "slot", 0, num_slots - 1, error=EPConfigError, remedy="Pass a slot, or None for any.")
        if limit_s is not None:
            limit_s = seconds(limit_s, "limit_s", MAX_TIMEOUT_S, error=EPConfigError)
        return _Joining(slot, limit_s)


def begin_call(backend: Backend, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
    """Check how a call shall run, also on a backend without streams, and begin it. The call holds the lock."""
    if async_finish is not False:
        async_finish = flag(async_finish, "async_finish")
    if previous_event is not None:
        of_event(previous_event)
    if stream is not None:
        of_stream(stream)
    return backend.begin(x, async_finish, previous_event, stream)


class Buffer(SharedByCopies):
    """Sends tokens to the ranks of their experts (`dispatch`), and adds up the experts' outputs at the tokens' rank (`combine`).

    Making a Buffer, destroying it, and every call are collective: all ranks of `comm` make the same calls in the same order. So one thread
    at a time may call it. A second thread gets an `EPInputError` during a call of the first one.

    In a call, all ranks must give rows of the same dtypes and sizes, the same kinds of arrays, and the same options. What only one rank
    uses may differ: its number of tokens, `num_worst_tokens`, `bias`, `y_ready`, arrays for results, hooks, and its streams and events. If
    ranks differ in anything else, all of them get an `EPInputError` that names the argument and its values. On GPUs, if the host does not
    wait, a later call raises it, and that call still runs. A low-latency call that differs breaks the Buffer there.

    Args:
        comm: An mpi4py communicator, or what `deepep_rt.torch.communicator` makes of a process group. Its ranks are the expert-parallel
            group. Inside a host, Buffers may be over any ranks, at any time. If NVSHMEM provides the memory (between hosts; see
            `DEEPEP_RT_SYMMETRIC_MEMORY`), it starts over the ranks of a process's first Buffer. Later Buffers may be over groups of these
            ranks. All groups then make theirs at the same time, over as many ranks and of the same sizes.
        num_max_tokens_per_rank: The most tokens that one rank gives to one `dispatch`.
        hidden: Elements of a row; in `dtype`, a row has a multiple of 16 bytes, and at most 96 KiB.
        num_topk: Experts of a token, 1 to 32.
        num_experts: Experts over all ranks, a multiple of the number of ranks; rank r holds the r-th group of consecutive experts.
        dtype: The widest element type of a row: its name, or an array library's object for it (`torch.bfloat16`). Each call may have
            narrower rows (FP8 in a bfloat16 buffer).
        num_slots: The number of worst-case dispatch results, with one combine result each, that the pool has memory for. Results are
            trimmed to what arrived. Also the most low-latency hooks of a kind that may be open.
        backend: "cuda", "host" (NumPy and MPI, no GPU), or "auto": CUDA if there are a GPU and cuda-python (the extras).
        timeout_s: Seconds after which a silent peer raises EPTimeoutError; default `DEEPEP_RT_TIMEOUT_S`, or 300. A
            GPU counts them from when its kernel begins to wait; work that is queued before does not count.
        num_sms: SMs that a dispatch or combine occupies; the property of this name changes it between calls. Default: what `autotune` has
            stored for such a Buffer on such GPUs, or else 64 for one rank and 24 for several. Combines with `compress` or `reduce="topk"`
            are faster with more. Pass the same on all ranks.
        low_latency: Allocate memory for `low_latency_dispatch` and `low_latency_combine`, which need it. Each of their results has room
            for `num_experts * num_max_tokens_per_rank` rows: see `size_hint`, and make a Buffer of few tokens for decoding.
        low_latency_sms: SMs that a low-latency call occupies, for any number of tokens (fewer only for a small `num_max_tokens_per_rank`).
            If several Buffers make such calls at the same time, on different streams, their SMs must fit on the GPU together. A call that
            waits for its peers keeps its SMs, and ranks that started with different Buffers would wait for each other.
        ranks_per_node: Consecutive ranks that reach each other over NVLink, a divisor of the number of ranks. They are a node; rows
            between nodes take the network. Default: `DEEPEP_RT_RANKS_PER_NODE`, or the ranks of a host. With 1, all rows between
            ranks take the network. (If hosts hold different numbers of ranks, the host backend takes all ranks for one node.)
        network: How NVSHMEM reaches the ranks on other hosts. It takes effect when NVSHMEM starts, with the first Buffer of the process.
        on_timeout: What a low-latency call does with a silent peer: "raise", or "mask" it (see `mask_rank`) and continue without it.
        check_inputs: Report expert numbers out of range from the device, in this call or a later one. Without it GPUs skip them. (The host
            backend always raises.) Default: `DEEPEP_RT_DEBUG`.
        on_exhausted: What a dispatch does when results that the caller holds fill the pool: "copy" its result to separate memory (a quarter
            slower; the log says so once, at INFO), or raise "error". With "copy" and CUDA's virtual memory, the pool grows instead, as
            long as the GPU has memory; see `trim`. The host backend has no pool.
        path: The way of rows between nodes. "hierarchical" sends a token once to each node, and a rank there passes it on over NVLink.
            "direct" sends it to each rank. "auto" chooses by what is measured. All give the same bits.
        num_max_recv_tokens: With several nodes, the rows of one dispatch that a rank has memory for: 1 to `num_ranks *
            num_max_tokens_per_rank`. CUDA's virtual memory grows for more rows, as long as the GPU has memory (not with
            `on_exhausted="error"`). With other memory, more rows are an error on all ranks. Default: `2 * num_max_tokens_per_rank *
            min(num_topk, num_ranks)`, or that largest number if it is smaller. On one node, all rows that can arrive always have room,
            and this only has to be in range. `config.num_max_recv_tokens` is the number in use.
        statistics: Count calls, rows, bytes and waits for `statistics()`. Kernels are compiled for it, and take a little longer. All ranks
            agree on it. Default: `DEEPEP_RT_STATISTICS`.
        max_ranks: Let ranks come and go (`shrink`, `admit`, `join`), up to so many at a time. A rank is then a slot: it keeps its number,
            and its experts, while others leave. `num_experts` counts the experts of all slots. Choices of a slot without a process are
            skipped, as -1 is. The ranks of `comm` have the slots from 0 on. One host, and memory of CUDA's virtual memory. Default: the
            ranks are fixed.
        rendezvous: Where the processes of such a Buffer meet, also after some have died: "host:port" or "host:port/name" of
            `python -m deepep_rt store`, a store of torch.distributed that outlives them, or "auto", such a store that rank 0 starts.
            Default: "auto".

    Raises:
        EPConfigError: If a size is wrong, or the ranks disagree on one.
        EPUnavailableError: If `backend="cuda"` and something that it needs is missing. With "auto", if only some ranks have a GPU, or if
            there is a CUDA driver that does not start.
        EPOutOfMemoryError: If the GPU has less free memory than `size_hint` says.
        EPTimeoutError: If a rank does not make the Buffer.
        EPPeerError: If another rank raises while it makes its part, or leaves.

    Example:
        >>> from mpi4py import MPI
        >>> from deepep_rt import Buffer
        >>> with Buffer(MPI.COMM_WORLD, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256) as buffer:
        ...     sent = buffer.dispatch(x, topk_idx, topk_weights)
        ...     y = experts(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights)
        ...     out = buffer.combine(y, sent.handle).x
    """

    _instead = MAKE_ANOTHER
    _backend: Backend | None = None
    _parents_backend: Backend | None = None
    _members: Members | None = None
    _watch: LivenessWatch | None = None

    def __init__(
        self,
        comm: Intracomm | Communicator | _Joining,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: Any = "bfloat16",
        num_slots: int = 2,
        backend: str = "auto",
        timeout_s: float | None = None,
        num_sms: int | None = None,
        low_latency: bool = False,
        low_latency_sms: int = 128,
        ranks_per_node: int | None = None,
        network: NetworkOptions | None = None,
        on_timeout: str = "raise",
        check_inputs: bool | None = None,
        on_exhausted: str = "copy",
        path: str = "auto",
        num_max_recv_tokens: int | None = None,
        statistics: bool | None = None,
        max_ranks: int | None = None,
        rendezvous: Any = None,
    ) -> None:
        if isinstance(backend, str) and backend != "host":  # it is checked below
            start.begin_driver()  # it takes longer than what follows
        from .backends.agreement import report_wrong_setting  # agreement and factory load communicators, which import mpi4py
        from .backends.factory import make_backend
        from .comm.convert import communicator_of
        from .comm.rendezvous import check_place

        joining = comm if isinstance(comm, _Joining) else None
        ranks = communicator_of(comm) if joining is None else None
        has_slots = max_ranks is not None or rendezvous is not None
        optional: dict[str, Any] = {"timeout_s": timeout_s, "check_inputs": check_inputs, "statistics": statistics}
        try:
            self._annotate = nvtx_ranges.annotator()
            _env.tuning()  # the backend reads it too; all ranks hear of a wrong value only here
            backend = choice(backend, "backend", ("auto", "cuda", "host"), error=EPConfigError)
            on_exhausted = choice(on_exhausted, "on_exhausted", ("copy", "error"), error=EPConfigError)
            if network is not None and not isinstance(network, NetworkOptions):
                raise argument_error(network, "network", "NetworkOptions, or None", "Pass one of them.", EPConfigError)
            num_ranks = ranks.Get_size() if ranks is not None else 1
            if has_slots:
                if max_ranks is not None or joining is not None:
                    num_ranks = whole_number(max_ranks, "max_ranks", 1, MAX_RANKS, error=EPConfigError)
                if joining is not None:
                    joining = joining.checked(num_ranks)
                check_place(rendezvous)
                ranks_per_node = num_ranks if ranks_per_node is None else ranks_per_node
            config = Config(
                num_ranks=num_ranks,
                has_slots=has_slots,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                hidden=hidden,
                num_topk=num_topk,
                num_experts=num_experts,
                dtype=dtype,
                num_slots=num_slots,
                num_sms=USUAL_SMS if num_sms is None else num_sms,
                leaves_sms=num_sms is None,
                low_latency=low_latency,
                low_latency_sms=low_latency_sms,
                ranks_per_node=declared_ranks_per_node(num_ranks) if ranks_per_node is None else ranks_per_node,
                on_timeout=on_timeout,
                path=path,
                recv_limit=num_max_recv_tokens,
                **{name: value for name, value in optional.items() if value is not None},
            )
        except Exception as error:
            if ranks is not None:
                report_wrong_setting(ranks, error, timeout_s)
            raise
        if has_slots:
            from .backends.members import Members

            self._members = Members.begin(ranks, joining, rendezvous, config, {"backend": backend, "on_exhausted": on_exhausted})
            ranks = self._members.communicator()
        assert ranks is not None
        made, self._watch = make_backend(ranks, config, backend, next(_serials), on_exhausted, network)
        self._rank, self._backend, self._info = ranks.numbers[ranks.Get_rank()], made, made.info
        self._call_lock = made.call_lock
        if self._members is not None:
            self._members.start(made, joining)
        self.config = made.info.config
        self._forms = {
            name: CallForms(made, self._annotate, text)
            for name, text in (
                ("dispatch", nvtx_ranges.dispatch_text),
                ("combine", nvtx_ranges.combine_text),
                ("low_latency_dispatch", nvtx_ranges.low_latency_dispatch_text),
                ("low_latency_combine", nvtx_ranges.low_latency_combine_text),
            )
        }
        self._made_at = time.monotonic()
        _living.add(self)
        if self.config.statistics:
            from . import _statistics_files  # modules that it needs take milliseconds to load

            _statistics_files.follow(self, made, self._rank)

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
        num_max_recv_tokens: int | None = None,
    ) -> dict[str, int]:
        """Compute the bytes of GPU memory that such a Buffer takes on each rank. This allocates nothing.

        Args:
            num_ranks: Ranks of the communicator.
            num_max_tokens_per_rank: This and the others as for `Buffer`.
            hidden: See `Buffer`.
            num_topk: See `Buffer`.
            num_experts: See `Buffer`.
            dtype: See `Buffer`.
            num_slots: See `Buffer`.
            low_latency: See `Buffer`.
            ranks_per_node: See `Buffer`. Default: all ranks are one node.
            num_max_recv_tokens: See `Buffer`.

        Returns:
            Bytes by region ("control", "landing", "pool", "sums", "low_latency", "handles", "low_latency_results") and their sum under
            "total". "low_latency_results" counts one result; a Buffer allocates as many as the caller holds at once.

        Example:
            >>> hint = Buffer.size_hint(8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
            >>> print(f"{hint['total'] / 1e9:.2f} GB")
            1.56 GB
        """
        sizes = (num_ranks, num_max_tokens_per_rank, hidden, num_topk, num_experts, dtype, num_slots)
        config = Config(
            *sizes,
            timeout_s=1.0,  # this and the next two do not matter here, and would read the environment
            check_inputs=False,
            statistics=False,
            low_latency=low_latency,
            ranks_per_node=ranks_per_node,
            recv_limit=num_max_recv_tokens,
        )
        return Layout(config).size_hint

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
        layout: str | None = None,
        zero_padding: bool = False,
        scales_layout: str = "row",
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        signals: bool = False,
        async_finish: bool = False,
        previous_event: Any = None,
        stream: Any = None,
    ) -> DispatchResult:
        """Send each token to the ranks that hold its experts, once to each rank.

        Args:
            x: `[num_tokens, hidden]`, any dtype up to the buffer's width: bfloat16, float16, float32, float8, int8 or uint8 (FP8 from
                frameworks that cannot export it). A row has a multiple of 16 bytes. Or `[num_tokens, hidden // 2]` uint8, two numbers of
                4 bits in a byte (NVFP4, MXFP4).
            topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers; -1 skips. With `handle`, the same as then, or None;
                `recv_topk_idx` is None then.
            topk_weights: `[num_tokens, num_topk]` float32, or None. Needs `topk_idx`.
            x_scales: `[num_tokens, n]`, at most one 4-byte word for 128 channels: `hidden // 128` float32, or packed UE8M0. With rows at
                most half as wide as the buffer's, at most one byte for 16 channels (NVFP4). A row of scales has a multiple of 4 bytes.
            handle: Repeat the routing of an earlier dispatch. The call counts nothing, and the host does not wait.
            num_worst_tokens: Fix the rows of the result, 0 to `config.num_max_recv_tokens` (times `num_topk`, and padding, with
                `layout="expert"`). The host does not wait, so a CUDA graph can capture the call. Keep the result as long as
                you read it after replays.
                Rows past it are dropped and count in `num_recv_tokens`. The log says so once (with `layout="expert"`, on the host backend).
            expert_alignment: Round the count of each expert up to a multiple of this. Not with `handle`, which keeps its counts.
            layout: "token": a row for each token, in the order (source rank, source token). "expert": a row for each (token, choice) of
                this rank, expert by expert, as grouped matrix products take them. Each expert's rows begin at a multiple of
                `expert_alignment`. A token crosses a link once in both. Default: that of the handle, or "token".
            zero_padding: With `layout="expert"`, fill padding rows of `recv_x` and `recv_x_scales` with zeros.
            scales_layout: With `layout="expert"`, "row": a row of scales for each row. "column": the transpose, whose columns lie
                contiguously as GEMMs that load them with TMA want. Scales have 4 bytes then.
            use_fp8: Convert rows of bfloat16, float16 or float32 to float8_e4m3fn before sending, with a scale for each 128 channels, which
                arrives as `recv_x_scales`. All GPUs need FP8 (sm_89 or newer).
            round_scale: With `use_fp8`, make the scales powers of two.
            use_ue8m0: With `use_fp8`, deliver such scales as their 8-bit exponents.
            signals: With `layout="expert"`, let a kernel read rows before all of them are here. The call runs as with `async_finish=True`.
                `result.tile_ready` says which tiles of rows are complete, and `result.event` marks the end of the call. No array is
                ready before. The kernel leaves `result.num_sms` SMs free, or the rows never come. `expert_alignment` is a multiple of 64.
            async_finish: Run on the buffer's own stream. `result.event` marks the end of the call.
            previous_event: Start after this event instead of after the caller's current stream (an `Event`, or an array library's).
            stream: Run on this stream (an array library's, or an integer handle) instead of the caller's current one. An external stream
                (as PyTorch's or CuPy's ExternalStream), given or current, has to outlive the results and the Buffer: the CUDA driver may
                crash otherwise. The first call on a second stream waits for all work of the first one.

        Returns:
            What arrived at this rank, ordered by source rank and source token, or expert by expert.

        Raises:
            EPInputError: If an argument is wrong. Nothing was launched.
            EPOutOfMemoryError: If the caller holds too many results and `on_exhausted="error"`, or if the call cannot copy.
                With several nodes, on all ranks, if it brings a rank more rows than `num_max_recv_tokens` and its memory cannot grow; no
                row is sent.
            EPTimeoutError: If a peer did not answer, also in an earlier call that the host did not wait for.
            EPUnavailableError: If `use_fp8`, and the GPU of a rank cannot convert to FP8.
            EPDestroyedError: After `destroy()`.

        Example:
            >>> sent = buffer.dispatch(x, topk_idx, topk_weights)
            >>> sent.recv_x.shape, sent.num_recv_tokens_per_expert_list
            >>> sent = buffer.dispatch(x, topk_idx, topk_weights, layout="expert", expert_alignment=128)
            >>> y = torch.nn.functional.grouped_mm(sent.recv_x, experts, offs=sent.expert_offsets[1:])
            >>> out = buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True).x
        """
        backend = self._live()
        with (lock := self._call_lock):
            lock.progress.name = "dispatch"
            forms = self._forms["dispatch"]
            if handle is not None:
                options: tuple[Any, ...] = (topk_idx, topk_weights, num_worst_tokens, expert_alignment, layout, zero_padding)
                options += scales_layout, use_fp8, round_scale, use_ue8m0, signals, async_finish, previous_event, stream
                if (known := forms.repeat(options, (x, x_scales), handle)) is not None:
                    return known
            call = begin_call(backend, x, flag(signals, "signals") or async_finish, previous_event, stream)
            inputs = dispatch_inputs(
                self._info,
                call.stream,
                x,
                topk_idx,
                topk_weights,
                x_scales,
                handle,
                num_worst_tokens,
                expert_alignment,
                layout,
                zero_padding,
                scales_layout,
                use_fp8,
                round_scale,
                use_ue8m0,
                signals,
            )
            if handle is not None and stream is None:
                forms.note((inputs.x.shape, handle.num_recv_rows), options, (x, x_scales), inputs, call)
            if self._annotate is None:
                return backend.dispatch(inputs, call)
            with self._annotate(nvtx_ranges.dispatch_text(inputs)):
                return backend.dispatch(inputs, call)

    def combine(
        self,
        x: Any,
        handle: DispatchHandle,
        *,
        topk_weights: Any = None,
        weighted: bool = False,
        reduce: str = "rank",
        compress: str | None = None,
        bias: Any = None,
        y_ready: Any = None,
        async_finish: bool = False,
        previous_event: Any = None,
        stream: Any = None,
    ) -> CombineResult:
        """Send rows back to the ranks of their tokens, and add up the rows of each token there, in float32 and in rank order.

        With several nodes, the rows of each node are added up first. The sum of a node other than the token's is rounded to the rows'
        type, because it crosses the network as a row. Then the sums are added up in node order. `topk_weights` are never rounded.

        With a handle of `layout="expert"`, this rank first adds up its rows of each token in the order of the token's choices, in float32,
        and rounds the sum to the rows' type. That sum is the token's row.

        The host never waits, so a CUDA graph can capture the call. Keep the result as long as you read it after replays.

        Args:
            x: `[rows of recv_x, hidden]` bfloat16, float16 or float32, in the order of `recv_x`; in any memory.
            handle: The handle of the dispatch that brought the tokens.
            topk_weights: `[rows of recv_x, num_topk]` float32 to add up over the ranks too (for a backward pass), or None. With a handle of
                `layout="expert"`, `[rows of recv_x]`: they return to their tokens and choices.
            weighted: With a handle of `layout="expert"`, multiply each row by its `topk_weights` in float32 before it is added. The
                weights do not return then.
            reduce: "rank": as above. "topk", with a handle of `layout="expert"`: the row of each choice travels to the token's rank, which
                adds them up in float32 in the order of the choices and rounds once. The bits are the same for any number of ranks and
                any placement of experts and nodes, and more bytes cross the links.
            compress: The form of the rows on the way. None: as they are. "fp8": float8_e4m3fn with a scale for each 128 channels, about
                52 % of the bytes of bfloat16. "log10": 10-bit logarithms, 64 % of the bytes, and an error about ten times smaller. Sums
                stay in float32. A group of 128 channels with an infinity or NaN becomes NaN, also if its other channels are numbers. With
                several nodes, only what crosses between nodes is compressed: the rounded sum of a node, or on the direct path each row.
                `hidden` is a multiple of 128. Not with `reduce="topk"`.
            bias: None, one array or two of them, `[num_tokens, hidden]`, dtype of `x`: added to the sum.
            y_ready: None, or `[tiles]` int32 on the GPU: a product still writes `x`, and sets the word of each tile of `handle.tile_rows`
                rows to `DispatchResult.signal` once its rows are written. Rows then leave tile by tile, with the same bits. The program
                clears the words and records `previous_event` before it queues the product. Queue this call behind the product, with
                `async_finish=True`. It needs the Buffer's `num_sms` SMs in the product's last part. The handle has `layout="expert"` and an
                `expert_alignment` that is a multiple of 64. Each rank chooses for itself. Over several nodes, with `compress` and with
                `reduce="topk"`, rows leave when all words are set. The host backend expects set words.
            async_finish: As in `dispatch`.
            previous_event: As in `dispatch`.
            stream: As in `dispatch`.

        Returns:
            `x` `[num_tokens, hidden]` (zero, or the bias, for tokens that went nowhere), `topk_weights` and `event`.

        Raises:
            EPInputError: If an argument is wrong. Nothing was launched.
            EPUnavailableError: With `compress="fp8"`, if the GPU of a rank cannot convert to FP8.
            EPTimeoutError: If a peer did not answer, also in an earlier call that the host did not wait for.
            EPDestroyedError: After `destroy()`.

        Example:
            >>> out = buffer.combine(y, sent.handle, bias=shared_expert_output).x
        """
        backend = self._live()
        with (lock := self._call_lock):
            lock.progress.name = "combine"
            forms, arrays = self._forms["combine"], (x, topk_weights, bias)
            options = weighted, reduce, compress, async_finish, previous_event, stream
            if y_ready is None and (known := forms.repeat(options, arrays, handle)) is not None:
                return known
            call = begin_call(backend, x, async_finish, previous_event, stream)
            inputs = combine_inputs(self._info, call.stream, x, handle, topk_weights, bias, weighted, reduce, compress, y_ready)
            if stream is None and y_ready is None:
                forms.note((inputs.x.shape, inputs.handle.num_tokens), options, arrays, inputs, call)
            if self._annotate is None:
                return backend.combine(inputs, call)
            with self._annotate(nvtx_ranges.combine_text(inputs)):
                return backend.combine(inputs, call)

    def prepare_throughput(
        self,
        x: Any,
        handle: DispatchHandle,
        *,
        topk_idx: Any = None,
        topk_weights: Any = None,
        x_scales: Any = None,
        y: Any = None,
        y_weights: Any = None,
        bias: Any = None,
        compress: str | None = None,
        async_finish: bool = False,
        stream: Any = None,
    ) -> PreparedThroughput:
        """Prepare dispatches along a known routing and their combines, so that the host takes less time for each of them.

        This checks the arguments, and takes memory for results. It makes no call, and not all ranks need to prepare theirs: prepared and
        ordinary calls match if they have the same dtypes and options. `PreparedThroughput` says which arrays have to stay as they are, and
        how long results are valid.

        Args:
            x: `[num_tokens, hidden]`, as in `dispatch`. The program updates it in place. Not of JAX.
            handle: The handle of an earlier dispatch with `layout="token"`.
            topk_idx: As in `dispatch`, and so are the next two. Results have `recv_topk_idx` only with it.
            topk_weights: See there.
            x_scales: See there.
            y: The rows of combines, if they lie in the same array each time. Default: what `PreparedThroughput.combine` gets.
            y_weights: The `topk_weights` of combines: `[rows of recv_x, num_topk]` float32 to add up over the ranks too.
            bias: As in `combine`, and so is the next one. With a bias, `y` has its dtype.
            compress: See there.
            async_finish: As in `dispatch`, for both calls.
            stream: The stream of all calls; default: the current stream at each call, of the library of `x`.

        Returns:
            An object whose methods `dispatch()` and `combine(y)` make the calls.

        Raises:
            EPInputError: If an argument is wrong, or while the stream of the last call is captured in a CUDA graph.
            EPOutOfMemoryError: If the caller holds too many results.
            EPUnavailableError: With `compress="fp8"`, if the GPU of a rank cannot convert to FP8.
            EPTimeoutError: If a peer did not answer in an earlier call.

        Example:
            >>> step = buffer.prepare_throughput(x, sent.handle)
            >>> out = step.combine(experts(step.dispatch().recv_x)).x
        """
        backend, info = self._live(), self._info
        with self._call_lock:
            call = begin_call(backend, x, async_finish, None, stream)
            check_handle(info, handle)
            if handle.layout != "token":
                raise EPInputError(
                    f"handle.layout={handle.layout!r}; expected 'token', because prepared calls move rows by token only. Call "
                    f"dispatch(handle=) and combine"
                )
            inputs = dispatch_inputs(info, call.stream, x, topk_idx, topk_weights, x_scales, handle, None, 1)
            biases = bias_views(info, call.stream, bias, handle, None)
            weights = None if y_weights is None else weights_of_rows(info, call.stream, y_weights, "y_weights", handle)
            preparation = ThroughputPreparation(
                x, inputs, weights, biases, compression(self.config, compress, "rank"), call.async_finish, stream
            )
            given = {"x": inputs.x, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights, "x_scales": inputs.scales}
            for name, view in (*given.items(), ("y_weights", weights), *(("bias", one) for one in biases)):
                if view is not None:
                    check_in_place(view, name)
            dtypes = COMBINE_DTYPES if not biases else (biases[0].dtype,)

            def view_rows(given: Any) -> View:
                rows = combine_rows(info, call.stream, given, "y", handle, dtypes)
                check_in_place(rows, "y")
                return rows

            prepared = backend.prepare_throughput(preparation)
            texts = None if self._annotate is None else nvtx_ranges.throughput_texts(preparation, prepared)
            return PreparedThroughput(prepared, self._call_lock, view_rows, y, self._annotate, texts)

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
        x_scales: Any = None,
        num_max_tokens: int | None = None,
        stream: Any = None,
    ) -> LowLatencyDispatchResult:
        """Send a few tokens to their experts as fast as possible. Rows arrive expert by expert. For decoding.

        The host never waits, so a CUDA graph can capture the call. Keep the result as long as you read it after replays.

        Args:
            x: `[num_tokens, hidden]` bfloat16. (NaNs of all ones may arrive as other NaNs.) Or rows that the program has quantised, which
                arrive bit for bit, with `use_fp8=False`: `[num_tokens, hidden]` of a type of 1 byte, or `[num_tokens, n]` uint8
                or int8 for anything else, such as two numbers of 4 bits in a byte. `n` is a multiple of 16. A row and its scales take less
                than a row of bfloat16.
            topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers; -1 skips. A token that names an expert more than once gets
                a row for each choice, and `low_latency_combine` adds each. An expert has room for `num_ranks * num_max_tokens` rows.
                Later rows are dropped, and the log says so once.
            topk_weights: `[num_tokens, num_topk]` float32, or None. With weights here, `low_latency_combine` needs one message round less.
            use_fp8: Convert rows to float8_e4m3fn before sending, with a scale for each 128 channels. GPUs without FP8 (sm_80) warn once,
                and rows arrive as bfloat16, without scales.
            round_scale: Make the scales powers of two.
            use_ue8m0: Deliver such scales as their 8-bit exponents.
            async_finish: As in `dispatch`.
            return_recv_hook: Only send. The result's `hook` receives, on the same stream. No SM is held in between. Call hooks in the
                order of their calls; at most `num_slots` may be open. (The next call runs a hook that an exception has lost.) In a CUDA
                graph, a call and its hook are in the same capture. Do not replay a whole call between the two halves of another one: that
                ends the buffer, and the next call or wait raises EPInputError.
            cumulative_local_expert_recv_stats: `[num_local_experts]` int32; the call adds the number of tokens that arrive.
            wait_recv_cost_stats: `[num_ranks]` int64; the call adds the nanoseconds until the last row of each source had arrived. (The
                host backend gets all rows at once, so each other source counts for the whole wait.)
            x_scales: `[num_tokens, n]` of any type: the scales of quantised rows, which travel with them.
            num_max_tokens: The most tokens that a rank has in this call, the same on all ranks. Results have room for as many. Default:
                `num_max_tokens_per_rank`.
            stream: As in `dispatch`.

        Returns:
            `recv_x`, `recv_x_scales`, `num_recv_tokens_per_expert`, `handle`, `event`, `hook`.

        Raises:
            EPInputError: If an argument is wrong, or the buffer was made without `low_latency=True`. Nothing was launched.
            EPTimeoutError: If a peer did not answer in an earlier call.

        Example:
            >>> sent = buffer.low_latency_dispatch(x, topk_idx, topk_weights=topk_weights)
            >>> y = experts(sent.recv_x, sent.recv_x_scales, sent.num_recv_tokens_per_expert)
            >>> out = buffer.low_latency_combine(y, topk_idx, topk_weights, sent.handle).x
        """
        with (lock := self._call_lock):
            lock.progress.name = "low_latency_dispatch"
            forms, arrays = self._forms["low_latency_dispatch"], (x, topk_idx, topk_weights)
            options = (
                use_fp8,
                round_scale,
                use_ue8m0,
                async_finish,
                return_recv_hook,
                cumulative_local_expert_recv_stats,
                wait_recv_cost_stats,
                x_scales,
                num_max_tokens,
                stream,
            )
            if (known := forms.repeat(options, arrays)) is not None:
                return known
            backend, with_hook = self._low_latency(), flag(return_recv_hook, "return_recv_hook")
            call = begin_call(backend, x, async_finish, None, stream)
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
                x_scales,
                num_max_tokens,
            )
            if not with_hook and stream is None:
                forms.note(inputs.x.shape, options, arrays, inputs, call)
            if self._annotate is None:
                return backend.low_latency_dispatch(inputs, call, with_hook)
            with self._annotate(nvtx_ranges.low_latency_dispatch_text(inputs)):
                return backend.low_latency_dispatch(inputs, call, with_hook)

    def low_latency_combine(
        self,
        y: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: LowLatencyHandle,
        *,
        allow_multiple_reduction: bool = True,
        reduce: str | None = None,
        compress: str | None = None,
        zero_copy: bool = False,
        out: Any = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        stream: Any = None,
    ) -> LowLatencyCombineResult:
        """Return the experts' outputs: each token gets the sum of its experts' rows, times its weights, added up in float32.

        Like `low_latency_dispatch`, a CUDA graph can capture it.

        Args:
            y: `[num_local_experts, num_ranks * num_max_tokens, hidden]` bfloat16, in the order of `recv_x`; in any memory.
            topk_idx: As given to `low_latency_dispatch`, or -1 for choices that are not to be added (with `allow_multiple_reduction`, for
                all of a token's experts on one rank). Any other change is an EPInputError. GPUs add what the dispatch was given, and a
                later call or `check` raises. Do not write to it, or to `topk_weights`, before the call or its hook has run.
            topk_weights: `[num_tokens, num_topk]` float32; the same as in `low_latency_dispatch`, if that got some.
            handle: The handle of that call.
            allow_multiple_reduction: An expert rank adds up (and rounds to bfloat16) its own experts' rows of a token and sends one.
                False: it sends one row for each expert, and the token's rank adds them up; not with masked ranks or `on_timeout="mask"` on
                GPUs. It must be the same on all ranks, as must the dispatch of `handle`; a difference breaks the buffer.
            reduce: Another name for it, as in `combine`: "rank" is `allow_multiple_reduction=True`, and "topk" is False. With "topk" the
                bits are the same for any number of ranks and any placement of experts.
            compress: The form of the rows on the way, as in `combine`: None, "fp8" or "log10". A rank rounds its sum of a token's rows to
                bfloat16 and compresses it. `hidden` is a multiple of 512, nodes may be several, and the value is the same on all ranks;
                a difference breaks the buffer. Not with `allow_multiple_reduction=False`.
            zero_copy: `y` is the array of `get_low_latency_combine_buffer`. The call reads rows in place in any case.
            out: `[num_tokens, hidden]` bfloat16 for the result, outside of `y`; default: memory of the buffer.
            async_finish: As in `dispatch`.
            return_recv_hook: As in `low_latency_dispatch`.
            stream: As in `dispatch`.

        Returns:
            `x` `[num_tokens, hidden]` bfloat16 (zero for tokens that went nowhere), `event`, `hook`.

        Raises:
            EPInputError: If an argument is wrong. Nothing was launched.
            EPUnavailableError: With `compress="fp8"`, if the GPU of a rank cannot convert to FP8.
            EPTimeoutError: If a peer did not answer in an earlier call.

        Example:
            >>> out = buffer.low_latency_combine(y, topk_idx, topk_weights, sent.handle).x
        """
        with (lock := self._call_lock):
            lock.progress.name = "low_latency_combine"
            forms, arrays = self._forms["low_latency_combine"], (y, topk_idx, topk_weights)
            options = allow_multiple_reduction, reduce, compress, zero_copy, out, async_finish, return_recv_hook, stream
            if (known := forms.repeat(options, arrays, handle)) is not None:
                return known
            backend, with_hook = self._low_latency(), flag(return_recv_hook, "return_recv_hook")
            framework_of(y, "y")  # below, an error would name it x
            call = begin_call(backend, y, async_finish, None, stream)
            inputs = low_latency_combine_inputs(
                self._info, call.stream, y, topk_idx, topk_weights, handle, allow_multiple_reduction, out, reduce, compress
            )
            if flag(zero_copy, "zero_copy"):
                _check_zero_copy(backend, inputs.y, handle.framework)
            elif not with_hook and stream is None:
                forms.note((inputs.y.shape, handle.num_tokens), options, arrays, inputs, call)
            if self._annotate is None:
                return backend.low_latency_combine(inputs, call, with_hook)
            with self._annotate(nvtx_ranges.low_latency_combine_text(inputs)):
                return backend.low_latency_combine(inputs, call, with_hook)

    def prepare_low_latency(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        *,
        y: Any = None,
        out: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        cumulative_local_expert_recv_stats: Any = None,
        wait_recv_cost_stats: Any = None,
        x_scales: Any = None,
        num_max_tokens: int | None = None,
        allow_multiple_reduction: bool = True,
        reduce: str | None = None,
        compress: str | None = None,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        stream: Any = None,
    ) -> PreparedLowLatency:
        """Prepare low-latency calls with the same arrays in each step, as `prepare_throughput` prepares others.

        The dispatches send `topk_weights`. `PreparedLowLatency` says which arrays have to stay as they are, and how long results are valid.

        Args:
            x: As in `low_latency_dispatch`, and so are the next two. The program updates them, and `x_scales`, in place. Not of JAX.
            topk_idx: See there.
            topk_weights: See there, but not None.
            y: The experts' outputs, if they lie in the same array in each step. Default: what `PreparedLowLatency.combine` gets.
            out: As in `low_latency_combine`.
            use_fp8: As in `low_latency_dispatch`, and so are the next six.
            round_scale: See there.
            use_ue8m0: See there.
            cumulative_local_expert_recv_stats: See there.
            wait_recv_cost_stats: See there.
            x_scales: See there.
            num_max_tokens: See there.
            allow_multiple_reduction: As in `low_latency_combine`, and so are the next three.
            reduce: See there.
            compress: See there.
            zero_copy: See there.
            async_finish: As in `dispatch`, for both calls.
            return_recv_hook: As in `low_latency_dispatch`, for both calls.
            stream: As in `prepare_throughput`.

        Returns:
            An object whose methods `dispatch()` and `combine(y)` make the calls.

        Raises:
            EPInputError: As `prepare_throughput`, or if the buffer was made without `low_latency=True`.
            EPUnavailableError: As `prepare_throughput`, and so is the next one.
            EPTimeoutError: See there.

        Example:
            >>> step = buffer.prepare_low_latency(x, topk_idx, topk_weights)
            >>> sent = step.dispatch()
            >>> out = step.combine(experts(sent.recv_x, sent.recv_x_scales, sent.num_recv_tokens_per_expert)).x
        """
        backend, info = self._low_latency(), self._info
        with_hook, is_zero_copy = flag(return_recv_hook, "return_recv_hook"), flag(zero_copy, "zero_copy")
        with self._call_lock:
            call = begin_call(backend, x, async_finish, None, stream)
            inputs = low_latency_dispatch_inputs(
                info,
                call.stream,
                x,
                topk_idx,
                topk_weights,
                use_fp8,
                round_scale,
                use_ue8m0,
                cumulative_local_expert_recv_stats,
                wait_recv_cost_stats,
                x_scales,
                num_max_tokens,
            )
            if inputs.topk_weights is None:
                raise argument_error(None, "topk_weights", "float32 weights, which combines need", "Pass them.")
            for name in ("x", "topk_idx", "topk_weights", "x_scales"):
                if getattr(inputs, name) is not None:
                    check_in_place(getattr(inputs, name), name)
            capacity = info.config.num_ranks * inputs.num_max_tokens
            form = form_of_combine(info, allow_multiple_reduction, reduce, compress)
            into = None if out is None else sums_view(info, call.stream, out, inputs.x.shape[0])

            def view_rows(given: Any) -> View:
                rows = expert_rows(info, call.stream, given, capacity)
                check_in_place(rows, "y")
                if into is not None:
                    check_apart(into, rows)
                if is_zero_copy:
                    _check_zero_copy(backend, rows, inputs.x.framework)
                return rows

            preparation = LowLatencyPreparation(x, inputs, *form, into, with_hook, call.async_finish, stream)
            prepared = backend.prepare_low_latency(preparation)
            texts = None if self._annotate is None else nvtx_ranges.low_latency_texts(preparation, prepared)
            return PreparedLowLatency(prepared, self._call_lock, view_rows, y, self._annotate, texts)

    def get_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Any:
        """Return memory in which the experts can write their outputs for `low_latency_combine(zero_copy=True)`.

        Args:
            handle: The handle of a `low_latency_dispatch`.

        Returns:
            `[num_local_experts, num_ranks * num_max_tokens, hidden]` bfloat16, in the framework of that call. All handles of a Buffer
            get the same memory.

        Raises:
            EPInputError: If the buffer was made without `low_latency=True`, if the handle is of another buffer, or if the call was
                given JAX arrays, which are read-only.
            EPOutOfMemoryError: If the first such call finds no GPU memory for it.

        Example:
            >>> y = buffer.get_low_latency_combine_buffer(sent.handle)
        """
        backend = self._low_latency()
        check_low_latency_handle(self._info, handle)
        if handle.framework.name == "jax":
            raise EPInputError(
                "get_low_latency_combine_buffer: JAX arrays are read-only; expected a handle of another framework. Give "
                "low_latency_combine an array of yours"
            )
        with self._call_lock:
            return backend.low_latency_combine_view(handle.framework, handle.capacity).to_framework()

    def mask_rank(self, rank: int) -> None:
        """Exclude a rank from low-latency calls: this rank sends it nothing and waits for nothing from it.

        Its tokens do not arrive here, its experts contribute nothing, and the results for the other ranks stay right. This waits for
        earlier calls of this rank, whose hooks must have been called. Throughput calls ignore the mask.

        Args:
            rank: A rank of the buffer's communicator, not this one.

        Raises:
            EPInputError: If there is no such rank, if it is this one, or if a hook is open.

        Example:
            >>> buffer.mask_rank(7)
        """
        self._set_mask(rank, True)

    def unmask_rank(self, rank: int) -> None:
        """Include a masked rank again.

        All ranks must have made the same number of low-latency calls, and no call may be running or wait for its hook. All ranks call this
        before the next such call: for `rank`, or on that rank itself for each rank that it masked. Put a barrier before it and another
        one after it. Do not use handles from before: one side may exclude the rank and the other side may not.

        Args:
            rank: As in `mask_rank`.

        Raises:
            EPInputError: If there is no such rank, if it is this one, or if a hook is open.

        Example:
            >>> buffer.unmask_rank(7)
        """
        self._set_mask(rank, False)

    def query_masked_ranks(self) -> list[int]:
        """List the ranks that low-latency calls exclude: given to `mask_rank`, or timed out (`on_timeout="mask"`). This does not wait.

        Returns:
            The ranks, ascending.

        Example:
            >>> buffer.query_masked_ranks()
            [7]
        """
        return self._low_latency().masked_ranks()

    @property
    def num_sms(self) -> int:
        """SMs that the next `dispatch` and `combine` occupy (GPUs only). Set it between calls, to the same number on all ranks.

        Raises:
            EPConfigError: If it is set to anything but a whole number from 1 to 1024.
            EPDestroyedError: If the buffer was destroyed.

        Example:
            >>> buffer.num_sms = 8  # leave more SMs to a matrix product on another stream
        """
        return self._existing().num_sms

    @num_sms.setter
    def num_sms(self, num_sms: int) -> None:
        self._live().num_sms = whole_number(num_sms, "num_sms", 1, MAX_SMS, error=EPConfigError)

    def autotune(
        self, *, num_tokens: int | None = None, dtype: Any = None, max_seconds: float = 25.0, save: bool = True
    ) -> TuningResult:
        """Measure dispatch and combine with several numbers of SMs and shapes of their copies, use the best choice, and store it.

        Collective, on GPUs. All ranks pass the same arguments. It compiles kernels and measures them on a random routing, and waits for
        all earlier work. The calls of this Buffer have the chosen shapes from now on, and the chosen number of SMs, unless the program
        has passed `num_sms=` or set the property. Prepared calls and captured CUDA graphs that exist keep their shapes.

        The choice has the fewest SMs with which dispatch and combine together take at most 2 % longer than the fastest candidate. It is
        stored beside the kernel cache of rank 0. Later Buffers of the same sizes, on as many GPUs of the same names, use it. Results have
        the same bits with every choice. `DEEPEP_RT_TUNING=0` leaves stored choices out.

        Over several nodes, and on GPUs without TMA (before sm_90), only the number of SMs is measured.

        Args:
            num_tokens: Tokens of each rank in the measurement; default: the most that this Buffer takes. Choose what the program sends.
            dtype: Element type of the dispatched rows; default: that of the Buffer. FP8 rows come with their scales. Combine is measured
                with the Buffer's own type.
            max_seconds: After so many seconds no more candidates are measured. Kernels that are not compiled after 60 % of them are left
                out. A round that has begun is finished.
            save: Store the choice for later Buffers.

        Returns:
            The choice and all times. It prints as a table.

        Raises:
            EPInputError: If an argument is wrong. On every rank, if the ranks pass different ones.
            EPUnavailableError: On the host backend, which has nothing to tune; if ranks share a GPU; or if the Buffer cannot make
                throughput calls.
            EPOutOfMemoryError: On every rank, if one has no memory for the arrays, or holds too many results.
            EPTimeoutError: If a peer did not answer.

        Example:
            >>> with Buffer(comm, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256) as buffer:
            ...     print(buffer.autotune())
        """
        config = self.config
        most = config.num_max_tokens_per_rank
        num_tokens = most if num_tokens is None else whole_number(num_tokens, "num_tokens", 1, most)
        name = config.dtype if dtype is None else dtype_name(dtype)
        if not isinstance(name, str) or name not in DTYPES or (config.hidden * DTYPES[name].itemsize) % ROW_ALIGNMENT:
            expected = f"an element type whose rows have a multiple of {ROW_ALIGNMENT} bytes, one of {', '.join(DTYPES)}"
            raise argument_error(dtype, "dtype", expected, "Pass one of them.")
        if config.hidden * DTYPES[name].itemsize > config.row_bytes:
            raise EPInputError(
                f"dtype={name!r}; expected rows no wider than those of {config.dtype}, the Buffer's. Pass such a type."
            )
        limit_s, saves = seconds(max_seconds, "max_seconds", MAX_TIMEOUT_S), flag(save, "save")
        backend = self._live()
        with self._call_lock:
            try:
                return backend.autotune(num_tokens, name, limit_s, saves)
            finally:
                for forms in self._forms.values():  # they have the kernels from before
                    forms.forget()

    def copy_ceiling(self, *, row_bytes: int | None = None, num_rows: int | None = None, iterations: int = 5) -> float:
        """Measure the bandwidth of the links: every rank sends rows to all others at once, without any lookup or wait.

        Collective. This waits for all earlier work. It is the largest of `copy_ceilings`.

        Args:
            row_bytes: Bytes of a row, a multiple of 16; default: the widest row of this buffer.
            num_rows: Rows for each peer (fewer if they do not fit this buffer's memory, or 64 MiB a rank on the host backend); default:
                16,384 for all peers together, so that the start of a kernel or copy takes little of the time.
            iterations: Pushes in one timing, up to 1,000,000. All three arguments are the same on all ranks.

        Returns:
            Bytes a second that the slowest rank sends to the others (on one rank: to itself).

        Raises:
            EPInputError: If a number is out of range. On every rank, if the ranks give different numbers.
            EPOutOfMemoryError: On every rank, if one has no memory for the rows (host backend).
            EPTimeoutError: If a peer did not answer.

        Example:
            >>> print(f"{buffer.copy_ceiling() / 1e9:.0f} GB/s")
        """
        return max(self.copy_ceilings(row_bytes=row_bytes, num_rows=num_rows, iterations=iterations).values())

    def copy_ceilings(
        self, *, row_bytes: int | None = None, num_rows: int | None = None, iterations: int = 5
    ) -> dict[str, float]:
        """Measure the bandwidth of the links as `copy_ceiling` does, and tell it for each method.

        On GPUs of one node: "kernel", which pushes rows as `dispatch` does, with `num_sms` SMs; "kernel on all SMs"; and "copy engines",
        which are copies of the driver to all peers at once. Over several nodes: "puts to other nodes". On the host backend: "messages".

        Args:
            row_bytes: As in `copy_ceiling`, and so are the next two.
            num_rows: See there.
            iterations: See there.

        Returns:
            For each method, the bytes a second that the slowest rank sends to the others (on one rank: to itself).

        Raises:
            EPInputError: As in `copy_ceiling`, and so are the next two.
            EPOutOfMemoryError: See there.
            EPTimeoutError: See there.

        Example:
            >>> rates = buffer.copy_ceilings()
            >>> print(f"{rates['kernel'] / max(rates.values()):.0%}")
        """
        most = self.config.row_bytes
        row_bytes = most if row_bytes is None else row_bytes
        row_bytes = whole_number(row_bytes, "row_bytes", ROW_ALIGNMENT, most, multiple_of=ROW_ALIGNMENT)
        num_rows = -(-_USUAL_ROWS // max(self.config.num_ranks - 1, 1)) if num_rows is None else num_rows
        num_rows = whole_number(num_rows, "num_rows", 1, _MOST_ROWS)
        iterations = whole_number(iterations, "iterations", 1, _MOST_ITERATIONS)
        backend = self._live()
        with self._call_lock:
            return backend.copy_ceilings(row_bytes, num_rows, iterations)

    @property
    def backend(self) -> str:
        """The backend in use, "cuda" or "host"."""
        return self._existing().name

    def describe(self) -> BufferDescription:
        """Describe the Buffer: ranks, nodes, hosts and GPUs, the transport and the path between nodes with the reasons, what was measured
        for them, and memory. This reads what the ranks found when they made the Buffer, and is not collective.

        Returns:
            The description. It prints as a table.

        Raises:
            EPDestroyedError: After `destroy()`.

        Example:
            >>> print(buffer.describe())
            >>> buffer.describe().path
            'hierarchical'
        """
        return self._existing().description

    def check(self) -> None:
        """Raise what the next call would raise: a silent peer, a difference between ranks, or a wrong input.

        This reads pinned memory (under a microsecond), waits for nothing and is not collective. It sees what the GPU has done so far.
        A loop that only replays CUDA graphs makes no calls that could raise: check after each replay, or after some. After a time-out,
        every replay gives NaN in its floating-point results, and bytes of 255 in quantised rows.

        Raises:
            EPTimeoutError: If a peer did not answer. The Buffer is broken.
            EPInputError: If ranks gave different arguments, or an argument was wrong.
            EPDestroyedError: After `destroy()`.

        Example:
            >>> graph.replay()
            >>> buffer.check()
        """
        self._live().check()

    def synchronize(self) -> None:
        """Wait on the host for all calls so far. If they were all on one stream, this waits for all work of that stream.

        Raises:
            EPTimeoutError: If a peer did not answer.
            EPInputError: While that stream is captured in a CUDA graph.

        Example:
            >>> buffer.synchronize()  # before reading a clock, or using results without a stream
        """
        backend = self._live()
        with backend.context:
            backend.synchronize()

    def statistics(self) -> Statistics:
        """Return what this rank has counted since the Buffer was made: calls, rows, bytes, waits for each rank, and use of memory.

        The Buffer has to be made with `statistics=True`. This is not collective, and waits for no call: it reads what the GPU has finished
        so far. A call that runs at the time may be counted in part. Any thread may call it.

        Returns:
            The numbers so far. Subtract an earlier result for those of an interval.

        Raises:
            EPInputError: If the Buffer was made without statistics, or while the stream of the last call is captured in a CUDA graph.
            EPDestroyedError: After `destroy()`.

        Example:
            >>> counted = buffer.statistics()
            >>> counted.dispatch.calls, counted.dispatch.wait_s
            (12, (0.0, 0.0031, 0.0002, 0.0002))
        """
        backend = self._existing()
        if not self.config.statistics:
            raise EPInputError(
                "statistics=False; expected a Buffer that counts its calls. Make it with statistics=True, or set DEEPEP_RT_STATISTICS=1"
            )
        return backend.counters().of_rank(self._rank, time.monotonic() - self._made_at)

    def sleep(self, *, keep_results: bool = False) -> None:
        """Give the memory of this Buffer back to the GPU, until `wake`. Collective, between calls.

        It waits for all work of this GPU. What stays is about 1 MB, results that lie in memory of their own, the code of kernels, and with
        several nodes the memory of the network.
        Addresses do not change: after `wake`, captured CUDA graphs, prepared calls, compiled JAX programs and handles work as before. Until
        then, do not replay such graphs and do not read results. Results that the caller holds are lost: their arrays exist after `wake`,
        with undefined contents. Calls of a Buffer that sleeps raise EPAsleepError. `destroy`, `describe` and `statistics` work.

        On the host backend there is no such memory. There it meets the other ranks and refuses calls, and results stay.

        Args:
            keep_results: Copy the results that the caller holds to host memory, and back in `wake`. Ranks may differ in it.

        Raises:
            EPUnavailableError: If the memory cannot sleep: all of it is NVSHMEM's or cudaIpc's. The Buffer stays awake.
            EPInputError: If a hook is open, a rank is masked, or the stream of the last call is captured in a CUDA graph.
            EPOutOfMemoryError: On every rank, if the memory of one host does not suffice for what is kept. The Buffer stays awake.
            EPTimeoutError: If a rank does not call it. EPPeerError, if that rank makes another call.
            EPAsleepError: If the Buffer sleeps already.

        Example:
            >>> buffer.sleep()  # on all ranks
            >>> train_with_all_of_the_memory()
            >>> buffer.wake()
            >>> graph.replay()
        """
        keeps_results, backend = flag(keep_results, "keep_results"), self._live()
        lock = self._call_lock
        with lock:
            lock.progress.name = "sleep"
            backend.sleep(keeps_results)
            lock.fall_asleep()

    def wake(self) -> None:
        """Take memory again, at the same addresses, after `sleep`. Collective.

        After a `shrink` in which this rank has left, it waits until the other members call `admit`.

        Raises:
            EPOutOfMemoryError: On every rank, if the GPU of one has too little memory. The Buffer still sleeps: free memory, and call this
                again on all ranks.
            EPTimeoutError: If a rank does not call it. The Buffer still sleeps.
            EPInputError: If the Buffer is awake.
            EPDestroyedError: After `destroy()`.

        Example:
            >>> buffer.wake()  # on all ranks, before the first call or replay
        """
        lock = self._call_lock
        with lock.waking():
            lock.progress.name = "wake"
            assert self._backend is not None
            if self._members is not None and self._members.has_left:
                self._members.come_back(self._backend)
            else:
                self._backend.wake()

    @staticmethod
    def join(
        rendezvous: Any, *, max_ranks: int, slot: int | None = None, limit_s: float | None = None, **settings: Any
    ) -> Buffer:
        """Make a Buffer in a new process that takes a free slot of an existing one. Its members take it in with `admit`.

        The memory and the kernels are made before, so the members wait for milliseconds.

        Args:
            rendezvous: `buffer.rendezvous` of the members, or the store that they were given.
            max_ranks: That of the members.
            slot: The slot to take. Default: the first free one.
            limit_s: Seconds after which this gives up. Default: `timeout_s`.
            settings: The other arguments of `Buffer`, as the members have them.

        Returns:
            The Buffer. Its rank is its slot.

        Raises:
            EPConfigError: If the settings differ from those of the members.
            EPTimeoutError: If no slot becomes free, or the members do not call `admit`.

        Example:
            >>> buffer = Buffer.join("10.0.0.1:29600", max_ranks=8, num_max_tokens_per_rank=128, hidden=7168, num_topk=8, num_experts=256)
            >>> buffer.members
            (0, 1, 2, 3)
        """
        return Buffer(_Joining(slot, limit_s), max_ranks=max_ranks, rendezvous=rendezvous, **settings)

    @property
    def rank(self) -> int:
        """The rank of this process. With `max_ranks` it is a slot, and stays the same while others come and go."""
        return self._rank

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that have a process, ascending. Without `max_ranks`, these are all.

        Raises:
            EPDestroyedError: After `destroy()`.
        """
        self._existing()
        return tuple(range(self.config.num_ranks)) if self._members is None else self._members.slots

    @property
    def rendezvous(self) -> Any:
        """Where other processes join: an address, or the store that the Buffer was given. None without `max_ranks`."""
        return None if self._members is None else self._members.rendezvous.place

    def shrink(self, lost: Iterable[int] | None = None) -> tuple[int, ...]:
        """Go on without ranks that are lost. Collective over the others, after an EPPeerLostError or any other EPTimeoutError.

        If a rank is lost while the Buffer sleeps, `wake` raises, and this wakes the others.
        It ends the calls of this GPU, whatever they wait for. The experts of the ranks that are left out are skipped from now on, as -1 is.
        Results that the caller holds stay; handles and hooks are refused. Captured graphs with a new routing in them, or with both
        low-latency calls, and prepared calls go on.

        Args:
            lost: Ranks to leave out. Ranks whose processes have ended, that are masked, or that were silent for `timeout_s` are left out
                in any case. A rank that calls this for itself leaves: its Buffer sleeps, and the host keeps its results. `wake` then asks
                the others to take it in again with `admit`. Its graphs stay.

        Returns:
            The members from now on.

        Raises:
            EPEvictedError: If the other ranks have left this one out.
            EPInputError: Without `max_ranks`, or during a capture.
            EPUnavailableError: If the store does not answer, or the GPU does not end its work. Call it again, or destroy the Buffer.

        Example:
            >>> try:
            ...     loss = step(batch)
            ... except EPPeerLostError:
            ...     buffer.shrink()
            ...     restore(buffer.members)
        """
        last, remedy = self.config.num_ranks - 1, "Pass ranks to leave out, or nothing."
        given = tuple(whole_number(rank, "lost", 0, last, remedy=remedy) for rank in (() if lost is None else lost))
        members, backend = self._changeable("shrink")
        if self._rank in given:
            with self._call_lock.changing_members():
                members.leave(backend)
                self._call_lock.fall_asleep()
            return members.slots
        with self._call_lock.changing_members(wakes=not members.has_left):
            members.shrink(backend, {*given, *backend.lost_ranks()})
        return members.slots

    def admit(self) -> tuple[int, ...]:
        """Take in processes that wait in `join`. Collective over the members. Without such a process, this takes about a millisecond.

        It waits for all calls of this rank. Handles and hooks of before are refused then, as after `shrink`.

        Returns:
            The ranks that have come; empty if there are none.

        Raises:
            EPEvictedError: If the other ranks have left this one out.
            EPInputError: Without `max_ranks`, or during a capture.

        Example:
            >>> if step_number % 10 == 0 and (new := buffer.admit()):
            ...     send_weights(new)
        """
        members, backend = self._changeable("admit")
        before = set(members.slots)
        with self._call_lock.changing_members():
            members.admit(backend)
        return tuple(slot for slot in members.slots if slot not in before)

    def _changeable(self, method: str) -> tuple[Members, Backend]:
        self._existing()
        if self._members is None:
            raise EPInputError(f"{method}() of a Buffer whose ranks are fixed; expected one with slots. Make it with max_ranks=")
        assert self._backend is not None
        return self._members, self._backend

    def trim(self) -> int:
        """Give memory back that this rank has taken for more results than `num_slots`, and that is free now. Not collective.

        On GPUs whose memory is CUDA's virtual memory, the pool of results grows when results that the caller holds fill it. It keeps what
        it has until this call, `sleep` or `destroy`. This waits for all work of this GPU.

        Returns:
            The bytes of results that this rank has given back.

        Raises:
            EPInputError: While the stream of the last call is captured in a CUDA graph.
            EPTimeoutError: If a peer did not answer in an earlier call.

        Example:
            >>> del results
            >>> buffer.trim()
            67108864
        """
        backend = self._live()
        with self._call_lock:
            return backend.trim()

    @property
    def is_asleep(self) -> bool:
        """Whether the Buffer sleeps.

        Raises:
            EPDestroyedError: After `destroy()`.
        """
        self._existing()
        return self._call_lock.is_asleep

    def destroy(self, in_touch: bool = True) -> None:
        """Release the memory. Collective; do not use results afterwards. A second call does nothing.

        On one node with CUDA's virtual memory, a rank waits for no other, and frees its own memory at once, whatever happened before.

        With several nodes, and with memory of NVSHMEM, all ranks have to take part. Three kinds of ranks tell the others that they leave,
        and wait for no rank: a rank with a call that timed out, a rank that an exception took out of the `with` block, and a rank that has
        masked others. The memory of the network, or all memory if NVSHMEM provides it, then stays allocated until the processes end, and a
        new Buffer may be made.

        A silent rank is waited for in two rounds of `timeout_s` (30 s at least), with a warning every 30 seconds. Then the memory stays
        allocated too, and this raises EPTimeoutError with the names of such ranks. With `on_timeout="mask"` a round takes `timeout_s`, and
        this warns instead.

        A signal handler or another thread may destroy a Buffer during a call. The call then raises EPDestroyedError, and this rank tells
        the others.

        Args:
            in_touch: False if the program knows that a rank is lost. This rank then waits for no other.

        Raises:
            EPTimeoutError: If a rank did not come, or if a peer did not answer in an earlier call that the host did not wait for.
                The Buffer is destroyed all the same. EPPeerError, if that rank has said why.
            EPInputError: As `synchronize`. The Buffer is destroyed, but the memory of all ranks stays allocated until the processes end.

        Example:
            >>> buffer.destroy()  # the end of a with block does the same
        """
        self._destroy(flag(in_touch, "in_touch"))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._destroy(error is None, error)  # after an error, the other ranks may not get here

    def __del__(self) -> None:
        if (backend := self._backend) is not None:  # release may be collective, and destructors run at no agreed time
            if (notice := backend.call_lock.notice) is not None:
                notice.leave(process_end.END, "its program dropped the Buffer without destroy()")
                process_end.deliver_at_exit(notice)
            stays = "" if backend.drop() else ": its memory stays allocated until the process ends, or until nothing can use it"
            _log.warning("a Buffer was dropped without destroy()%s", stays)
            warnings.warn("a Buffer was dropped without destroy(); use `with Buffer(...)`", ResourceWarning, stacklevel=2)

    def _existing(self) -> Backend:
        """Return the backend, also of a Buffer that sleeps."""
        self._call_lock.check_exists()
        assert self._backend is not None
        return self._backend

    def _live(self) -> Backend:
        self._call_lock.check()
        assert self._backend is not None  # calls are refused before it goes
        return self._backend

    def _low_latency(self) -> Backend:
        if not self.config.low_latency:
            raise EPInputError(
                "low_latency=False; expected a Buffer with memory for low-latency calls. Make it with low_latency=True"
            )
        return self._live()

    def _set_mask(self, rank: int, masked: bool) -> None:
        backend, mine, last = self._low_latency(), self._rank, self.config.num_ranks - 1
        rank = whole_number(rank, "rank", 0, last, remedy=f"Pass the rank to exclude, other than this one ({mine}).")
        if rank not in self.members:
            raise EPInputError(
                f"rank={rank}; expected a rank that has a process: {self.members}. A slot without one takes no part."
            )
        if rank == mine:
            raise argument_error(rank, "rank", f"0 to {last}, other than this one ({mine})", "Pass another rank.")
        with self._call_lock:
            backend.set_mask(rank, masked)

    def _destroy(self, in_touch: bool, error: BaseException | None = None) -> None:
        self._call_lock.refuse("this Buffer was destroyed; make a new one")
        backend, self._backend = self._backend, None
        if backend is None:
            return
        if self._members is not None:
            self._members.close()
        if self._watch is not None:
            self._watch.close()

        def finish(interruption: BaseException | None) -> None:
            if backend.call_lock.notice is not None:
                backend.call_lock.notice.drain()
            try:
                backend.destroy(in_touch and interruption is None, error or interruption)
            finally:
                if backend.call_lock.notice is not None:
                    backend.call_lock.notice.close()
                if self._members is not None:
                    self._members.end()
                if self.config.statistics:
                    from . import _statistics_files

                    _statistics_files.end(self)
                self._forms.clear()  # they hold the backend

        self._call_lock.drain(finish)


def _check_zero_copy(backend: Backend, rows: View, framework: Framework) -> None:
    if rows.ptr != backend.low_latency_combine_view(framework, rows.shape[1]).ptr:
        raise EPInputError(
            "zero_copy=True; expected y=get_low_latency_combine_buffer(handle). Pass that array, or leave out zero_copy"
        )


def check_buffer(buffer: Any) -> None:
    """Raise EPInputError unless `buffer` is a Buffer, for the wrappers of frameworks."""
    instance(buffer, "buffer", Buffer, "Pass the Buffer that dispatches.")


def info_of(buffer: Buffer) -> BufferInfo:
    """Return the number, sizes and device of a Buffer, for the wrappers of frameworks. It outlives the Buffer."""
    return buffer._info


def buffer_of(serial: int) -> Buffer:
    """Return the Buffer with this number, for the wrappers of frameworks.

    Raises:
        EPDestroyedError: If the program has dropped the Buffer.
    """
    for buffer in list(_living):
        if buffer._info.serial == serial:
            return buffer
    raise EPDestroyedError("the Buffer of this call is gone; keep it as long as its results")


def low_latency_dispatch_into(buffer: Buffer, backend: Backend, inputs: LowLatencyDispatchInputs, call: Call) -> None:
    """Make a low-latency dispatch whose results lie in `inputs.into`, for the wrappers of frameworks. The caller holds the call lock."""
    if buffer._annotate is None:
        backend.low_latency_dispatch(inputs, call, False)
        return
    with buffer._annotate(nvtx_ranges.low_latency_dispatch_text(inputs)):
        backend.low_latency_dispatch(inputs, call, False)


def notice_of(buffer: Buffer) -> FailureNotice | None:
    """Return what tells the other ranks of a Buffer that this rank leaves it or refuses a call; None after `destroy`."""
    return None if buffer._backend is None else buffer._backend.call_lock.notice


def backend_of(buffer: Buffer, *, low_latency: bool = False) -> Backend:
    """Return the backend of a Buffer, for the wrappers of frameworks.

    Raises:
        EPDestroyedError: After `destroy()`.
        EPInputError: If `low_latency`, and the Buffer was made without it.
    """
    return buffer._low_latency() if low_latency else buffer._live()
