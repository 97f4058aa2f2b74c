"""`Buffer`: expert-parallel dispatch and combine over the ranks of a communicator. Readers start here.

A call takes three steps. `backends/inputs` turns the arguments into checked Views. `backends/cuda` or `backends/host` moves the rows. The
results hold Views, which become arrays of the caller's framework at first access (`results`). `dispatch` and `combine` are in
`_throughput_calls`, the low-latency calls in `_low_latency_calls`, `autotune` in `_tuning_calls`, and the life of a Buffer in
`_buffer_base`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from . import _env
from ._buffer_base import living_buffers
from ._checks import argument_error, choice
from ._low_latency_calls import LowLatencyCalls
from ._throughput_calls import ThroughputCalls
from ._tuning_calls import TuningCalls
from .backends.base import Backend
from .backends.calls import BufferInfo
from .config import USUAL_SMS, Config, declared_ranks_per_node
from .description import BufferDescription
from .errors import EPConfigError, EPDestroyedError
from .kernels.layout import Layout
from .network import NetworkOptions

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from .comm.communicator import Communicator
    from .comm.failure_notice import FailureNotice

_serials = itertools.count(1)


class Buffer(ThroughputCalls, LowLatencyCalls, TuningCalls):
    """Sends tokens to the ranks of their experts (`dispatch`), and adds up the experts' outputs at the tokens' rank (`combine`).

    Making a Buffer, destroying it, and every call are collective: all ranks of `comm` make the same calls in the same order. So one thread
    at a time may call it. A second thread gets an `EPInputError` during a call of the first one.

    In a call, all ranks must give rows of the same dtypes and sizes, the same kinds of arrays, and the same options. What only one rank
    uses may differ: its number of tokens, `num_worst_tokens`, `bias`, arrays for results, hooks, and its streams and events. If ranks
    differ in anything else, all of them get an `EPInputError` that names the argument and its values. On GPUs, if the host does not
    wait, a later call raises it, and that call still runs. A low-latency call that differs breaks the Buffer there.

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
        num_sms: SMs that a dispatch or combine occupies; the property of this name changes it between calls. Default: what `autotune` has
            stored for such a Buffer on such GPUs, or 24. Pass the same on all ranks.
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
        statistics: Count calls, rows, bytes and waits for `statistics()`. Kernels are compiled for it, and take a little longer. All ranks
            agree on it. Default: `DEEPEP_RT_STATISTICS`.

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
    ) -> None:
        from .backends.agreement import report_wrong_setting  # agreement and factory load communicators, which import mpi4py
        from .backends.factory import make_backend
        from .backends.nvtx_ranges import annotator, mark_calls
        from .comm.convert import communicator_of

        ranks = communicator_of(comm)
        optional: dict[str, Any] = {"timeout_s": timeout_s, "check_inputs": check_inputs, "statistics": statistics}
        try:
            annotate = annotator()
            _env.tuning()  # the backend reads it too; all ranks hear of a wrong value only here
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
                num_sms=USUAL_SMS if num_sms is None else num_sms,
                leaves_sms=num_sms is None,
                low_latency=low_latency,
                low_latency_sms=low_latency_sms,
                ranks_per_node=declared_ranks_per_node(ranks.Get_size()) if ranks_per_node is None else ranks_per_node,
                on_timeout=on_timeout,
                path=path,
                recv_limit=num_max_recv_tokens,
                **{name: value for name, value in optional.items() if value is not None},
            )
        except Exception as error:
            report_wrong_setting(ranks, error, timeout_s)
            raise
        made = make_backend(ranks, config, backend, next(_serials), on_exhausted, network)
        if annotate is not None:
            mark_calls(made, annotate)
        self._start(ranks.Get_rank(), made)

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


def info_of(buffer: Buffer) -> BufferInfo:
    """Return the number, sizes and device of a Buffer, for the wrappers of frameworks. It outlives the Buffer."""
    return buffer._info


def buffer_of(serial: int) -> Buffer:
    """Return the Buffer with this number, for the wrappers of frameworks.

    Raises:
        EPDestroyedError: If the program has dropped the Buffer.
    """
    for buffer in living_buffers():
        if isinstance(buffer, Buffer) and buffer._info.serial == serial:
            return buffer
    raise EPDestroyedError("the Buffer of this call is gone; keep it as long as its results")


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
