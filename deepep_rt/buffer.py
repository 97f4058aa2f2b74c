"""`Buffer`: expert-parallel dispatch and combine over the ranks of a communicator. Readers start here.

A call takes three steps. `backends/inputs` turns the arguments into checked Views. `backends/cuda` or `backends/host` moves the rows. The
results hold Views, which become arrays of the caller's framework at first access (`results`). The low-latency calls are in
`_low_latency_calls`, and the life of a Buffer is in `_buffer_base`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ._checks import argument_error, choice, whole_number
from ._low_latency_calls import LowLatencyCalls
from .backends.base import Backend
from .backends.calls import BufferInfo
from .backends.inputs import (
    combine_inputs,
    dispatch_inputs,
)
from .config import MAX_SMS, ROW_ALIGNMENT, Config, declared_ranks_per_node
from .description import BufferDescription
from .errors import EPConfigError
from .kernels.layout import Layout
from .network import NetworkOptions
from .results import (
    CombineResult,
    DispatchHandle,
    DispatchResult,
)

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from .comm.communicator import Communicator

_MOST_ROWS, _MOST_ITERATIONS = (1 << 31) - 1, 10**6  # of a measurement; kernels count rows in 32 bits
_serials = itertools.count(1)


class Buffer(LowLatencyCalls):
    """Sends tokens to the ranks of their experts (`dispatch`), and adds up the experts' outputs at the tokens' rank (`combine`).

    Making a Buffer, destroying it, and every call are collective: all ranks of `comm` make the same calls in the same order. So one thread
    at a time may call it. A second thread gets an `EPInputError` during a call of the first one.

    In a call, all ranks must give the same dtypes and the same arguments. Numbers of tokens may differ. Ranks that differ get an
    `EPInputError`. On GPUs, if the host does not wait, a later call raises it, and that call still runs. A low-latency call that differs
    breaks the Buffer there.

    Args:
        comm: An mpi4py communicator, or what `deepep_rt.torch.communicator` makes of a process group. Its ranks are the expert-parallel
            group. On GPUs, NVSHMEM starts over the ranks of a process's first Buffer. Later Buffers may be over groups of these ranks. All
            groups then make theirs at the same time, over as many ranks and of the same sizes.
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
        num_sms: SMs that a dispatch or combine occupies; the property of this name changes it between calls.
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
            slower; the log says so once, at INFO), or raise "error". The host backend has no pool.
        path: The way of rows between nodes. "hierarchical" sends a token once to each node, and a rank there passes it on over NVLink.
            "direct" sends it to each rank. "auto" chooses by what is measured. All give the same bits.
        num_max_recv_tokens: With several nodes, the most rows that one dispatch may bring to a rank: 1 to `num_ranks *
            num_max_tokens_per_rank`. Memory is for this number. More rows are an error on all ranks. Default: `2 *
            num_max_tokens_per_rank * min(num_topk, num_ranks)`, or that largest number if it is smaller. On one node, all rows that
            can arrive always have room, and this only has to be in range. `config.num_max_recv_tokens` is the number in use.

    Raises:
        EPConfigError: If a size is wrong, or the ranks disagree on one.
        EPUnavailableError: If `backend="cuda"` and something that it needs is missing. With "auto", if only some ranks have a GPU, or if
            there is a CUDA driver that does not start.
        EPOutOfMemoryError: If the GPU has less free memory than `size_hint` says.

    Example:
        >>> from mpi4py import MPI
        >>> from deepep_rt import Buffer
        >>> with Buffer(MPI.COMM_WORLD, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256) as buffer:
        ...     sent = buffer.dispatch(x, topk_idx, topk_weights)
        ...     y = experts(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights)
        ...     out = buffer.combine(y, sent.handle).x
    """

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
        path: str = "auto",
        num_max_recv_tokens: int | None = None,
    ) -> None:
        from .backends.agreement import report_config_error  # agreement and factory load communicators, which import mpi4py
        from .backends.factory import make_backend
        from .comm.convert import communicator_of

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
                ranks_per_node=declared_ranks_per_node(ranks.Get_size()) if ranks_per_node is None else ranks_per_node,
                on_timeout=on_timeout,
                path=path,
                recv_limit=num_max_recv_tokens,
                **{name: value for name, value in optional.items() if value is not None},
            )
        except EPConfigError as error:
            report_config_error(ranks, error, timeout_s)
            raise
        self._start(ranks.Get_rank(), make_backend(ranks, config, backend, next(_serials), on_exhausted, network))

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
            timeout_s=1.0,  # this and check_inputs do not matter here, and would read the environment
            check_inputs=False,
            low_latency=low_latency,
            ranks_per_node=ranks_per_node,
            recv_limit=num_max_recv_tokens,
        )
        return Layout(config).size_hint

    @property
    def backend(self) -> str:
        """The backend in use, "cuda" or "host"."""
        return self._live().name

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
        return self._live().description

    @property
    def num_sms(self) -> int:
        """SMs that the next `dispatch` and `combine` occupy (GPUs only). Set it between calls, to the same number on all ranks.

        Raises:
            EPConfigError: If it is set to anything but a whole number from 1 to 1024.
            EPDestroyedError: If the buffer was destroyed.

        Example:
            >>> buffer.num_sms = 8  # leave more SMs to a matrix product on another stream
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
            topk_weights: `[num_tokens, num_topk]` float32, or None. Needs `topk_idx`.
            x_scales: `[num_tokens, n]`, at most one 4-byte word for 128 channels: `hidden // 128` float32, or packed UE8M0.
            handle: Repeat the routing of an earlier dispatch. The call counts nothing, and the host does not wait.
            num_worst_tokens: Fix the rows of the result, 0 to `config.num_max_recv_tokens`. The host does not wait
                and nothing is allocated, so a CUDA graph can capture the call (keep the result as long as the graph). Rows
                past it are dropped and count in `num_recv_tokens`; the log says so once.
            expert_alignment: Round the count of each expert up to a multiple of this. Not with `handle`, which keeps its counts.
            async_finish: Run on the buffer's own stream. `result.event` marks the end of the call.
            previous_event: Start after this event instead of after the caller's current stream (an `Event`, or an array library's).
            stream: Run on this stream (an array library's, or an integer handle) instead of the caller's current one. An external stream
                (as PyTorch's or CuPy's ExternalStream), given or current, has to outlive the results and the Buffer: the CUDA driver may
                crash otherwise. The first call on a second stream waits for all work of the first one.

        Returns:
            What arrived at this rank, ordered by source rank and source token.

        Raises:
            EPInputError: If an argument is wrong. Nothing was launched.
            EPOutOfMemoryError: If the caller holds too many results and `on_exhausted="error"`, or if the call cannot copy.
                With several nodes, on all ranks, if it brings a rank more rows than `num_max_recv_tokens`; no row is sent.
            EPTimeoutError: If a peer did not answer, also in an earlier call that the host did not wait for.
            EPDestroyedError: After `destroy()`.

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
        """Send rows back to the ranks of their tokens, and add up the rows of each token there, in float32 and in rank order.

        With several nodes, the rows of each node are added up first. The sum of a node other than the token's is rounded to the rows'
        type, because it crosses the network as a row. Then the sums are added up in node order. `topk_weights` are never rounded.

        The host never waits, so a CUDA graph can capture the call (keep the result as long as the graph).

        Args:
            x: `[rows of recv_x, hidden]` bfloat16, float16 or float32, in the order of `recv_x`; in any memory.
            handle: The handle of the dispatch that brought the tokens.
            topk_weights: `[rows of recv_x, num_topk]` float32 to add up over the ranks too (for a backward pass), or None.
            bias: None, one array or two of them, `[num_tokens, hidden]`, dtype of `x`: added to the sum.
            async_finish: As in `dispatch`.
            previous_event: As in `dispatch`.
            stream: As in `dispatch`.

        Returns:
            `x` `[num_tokens, hidden]` (zero, or the bias, for tokens that went nowhere), `topk_weights` and `event`.

        Raises:
            EPInputError: If an argument is wrong. Nothing was launched.
            EPTimeoutError: If a peer did not answer, also in an earlier call that the host did not wait for.
            EPDestroyedError: After `destroy()`.

        Example:
            >>> out = buffer.combine(y, sent.handle, bias=shared_expert_output).x
        """
        backend = self._live()
        with self._call_lock:
            call = self._begin(x, async_finish, previous_event, stream)
            inputs = combine_inputs(self._info, call.stream, x, handle, topk_weights, bias)
            return backend.combine(inputs, call)

    def copy_ceiling(self, *, row_bytes: int | None = None, num_rows: int = 2048, iterations: int = 5) -> float:
        """Measure the bandwidth of the links: every rank pushes rows to all others at once, without any lookup or wait.

        Collective. This waits for all earlier work.

        Args:
            row_bytes: Bytes of a row, a multiple of 16; default: the widest row of this buffer.
            num_rows: Rows for each peer (fewer if they do not fit this buffer's memory, or 64 MiB a rank on the host backend).
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
        most = self.config.row_bytes
        row_bytes = most if row_bytes is None else row_bytes
        row_bytes = whole_number(row_bytes, "row_bytes", ROW_ALIGNMENT, most, multiple_of=ROW_ALIGNMENT)
        num_rows = whole_number(num_rows, "num_rows", 1, _MOST_ROWS)
        iterations = whole_number(iterations, "iterations", 1, _MOST_ITERATIONS)
        backend = self._live()
        with self._call_lock:
            return backend.copy_ceiling(row_bytes, num_rows, iterations)


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
