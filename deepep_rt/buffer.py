"""`Buffer`: expert-parallel dispatch and combine over the ranks of a communicator. Readers start here.

A call goes one way: the arguments become checked Views (`inputs`), the backend moves the rows (`device` on GPUs, `host` without),
and the results are Views that turn into arrays of the caller's framework when they are first looked at (`results`).
"""

from __future__ import annotations

import itertools
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import layout
from .config import MAX_RANKS_PER_NODE, ROW_ALIGNMENT, Config
from .errors import EPConfigError, EPDestroyedError, EPInputError
from .inputs import Site, combine_inputs, dispatch_inputs
from .results import CombineResult, DispatchHandle, DispatchResult

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from .device import DeviceBackend
    from .host import HostBackend

_serials = itertools.count(1)


class Buffer:
    """Routes tokens to the ranks of their experts (`dispatch`) and adds the experts' outputs up back home (`combine`).

    Making and destroying a Buffer, and every call, is collective: all ranks of `comm` do it in the same order.

    Args:
        comm: An mpi4py communicator; its ranks are the expert-parallel group.
        num_max_tokens_per_rank: Most tokens that one rank gives to one `dispatch`.
        hidden: Elements of a row.
        num_topk: Experts of a token, 1 to 32.
        num_experts: Experts over all ranks, a multiple of the number of ranks; rank r holds the r-th run of them.
        dtype: Widest element type of a row. Narrower rows (FP8 in a bfloat16 buffer) are welcome in each call.
        num_slots: Worst-case dispatch results that fit in the pool at once. Results are trimmed to what arrived.
        backend: "cuda", "host" (NumPy and MPI, no GPU), or "auto": CUDA if there is a GPU.
        timeout_s: Seconds after which a silent peer raises EPTimeoutError; default `DEEPEP_RT_TIMEOUT_S`, or 30.
        num_sms: SMs that a dispatch or combine occupies.
        check_inputs: Report expert numbers out of range from the device (the host backend always does); default `DEEPEP_RT_DEBUG`.
        on_exhausted: What a dispatch does when the caller holds so many results that the pool is full: "copy" the result to
            memory of its own, or raise "error".

    Raises:
        EPConfigError: if a size is wrong, or the ranks disagree on one.
        EPUnavailableError: if `backend="cuda"` and something that it needs is missing.
        EPOutOfMemoryError: if the GPU has less free memory than `size_hint` says.

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
        comm: Intracomm,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: str = "bfloat16",
        num_slots: int = 2,
        backend: str = "auto",
        timeout_s: float | None = None,
        num_sms: int = 24,
        check_inputs: bool | None = None,
        on_exhausted: str = "copy",
    ) -> None:
        if backend not in ("auto", "cuda", "host"):
            raise EPConfigError(f"backend is {backend!r}; expected 'auto', 'cuda' or 'host'")
        if on_exhausted not in ("copy", "error"):
            raise EPConfigError(f"on_exhausted is {on_exhausted!r}; expected 'copy' or 'error'")
        optional: dict[str, Any] = {"timeout_s": timeout_s, "check_inputs": check_inputs}
        self.config = Config(
            num_ranks=comm.Get_size(),
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            dtype=dtype,
            num_slots=num_slots,
            num_sms=num_sms,
            **{name: value for name, value in optional.items() if value is not None},
        )
        from . import comm as _comm  # MPI is needed from here on, not before

        self._backend: HostBackend | DeviceBackend | None = None
        backend = _comm.agree(comm, self.config, backend, on_exhausted)
        if backend == "host":
            from .host import HostBackend

            self._backend = HostBackend(comm, self.config)
        else:
            if self.config.num_ranks > MAX_RANKS_PER_NODE:
                raise EPConfigError(
                    f"{self.config.num_ranks} ranks; the CUDA backend serves 1 to {MAX_RANKS_PER_NODE}, all on one host"
                )
            from .device import DeviceBackend

            self._backend = DeviceBackend(comm, self.config, copy_when_full=on_exhausted == "copy")
        self._site = Site(next(_serials), self.config, self._backend.device)

    @staticmethod
    def size_hint(
        num_ranks: int,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        dtype: str = "bfloat16",
        num_slots: int = 2,
    ) -> dict[str, int]:
        """Bytes of GPU memory that such a Buffer takes on each rank; nothing is allocated.

        Returns:
            Bytes by region ("control", "landing", "pool", "handles") and their sum under "total".

        Example:
            >>> hint = Buffer.size_hint(8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
            >>> print(f"{hint['total'] / 1e9:.2f} GB")
            1.44 GB
        """
        return layout.size_hint(Config(num_ranks, num_max_tokens_per_rank, hidden, num_topk, num_experts, dtype, num_slots))

    @property
    def backend(self) -> str:
        """The backend in use, "cuda" or "host"."""
        return self._live().name

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
            topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers; -1 skips. Not needed with `handle`.
            topk_weights: `[num_tokens, num_topk]` float32, or None.
            x_scales: `[num_tokens, n]`, at most one 4-byte word for 128 channels: `hidden // 128` float32, or packed UE8M0.
            handle: Repeat the routing of an earlier dispatch; nothing is counted and the host does not wait.
            num_worst_tokens: Rows of the result whatever arrives, 0 to `num_ranks * num_max_tokens_per_rank`: the host does not wait
                and nothing is allocated, so the call can be captured in a CUDA graph (keep the result as long as the graph). Rows
                past it are dropped and count in `num_recv_tokens`.
            expert_alignment: Counts for each expert are rounded up to a multiple of this.
            async_finish: Run on the buffer's own stream; `result.event` tells when it is done.
            previous_event: Start after this event instead of after the caller's current stream (an `Event`, or an array library's).
            stream: Run on this stream (an integer handle or an array library's stream) instead of the caller's current one.

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
        with backend.context:
            call = backend.begin(x, async_finish, previous_event, stream)
            inputs = dispatch_inputs(
                self._site, call.stream, x, topk_idx, topk_weights, x_scales, handle, num_worst_tokens, expert_alignment
            )
            return backend.dispatch(self._site, inputs, call)

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
        with backend.context:
            call = backend.begin(x, async_finish, previous_event, stream)
            inputs = combine_inputs(self._site, call.stream, x, handle, topk_weights, bias)
            return backend.combine(self._site, inputs, call)

    def copy_ceiling(self, *, row_bytes: int | None = None, num_rows: int = 2048, iterations: int = 5) -> float:
        """Measure what the links carry: every rank pushes rows to all others at once, with nothing to look up and nobody to wait for.

        Collective; waits for all earlier work.

        Args:
            row_bytes: Bytes of a row, a multiple of 16; default: the widest row of this buffer.
            num_rows: Rows for each peer (fewer if they do not fit this buffer's memory).
            iterations: Pushes that one timing covers.

        Returns:
            Bytes a second that a rank sends to the others (on one rank: to itself), on the slowest rank.

        Example:
            >>> print(f"{buffer.copy_ceiling() / 1e9:.0f} GB/s")
        """
        row_bytes = self.config.row_bytes if row_bytes is None else row_bytes
        if row_bytes % ROW_ALIGNMENT or not 0 < row_bytes <= self.config.row_bytes or num_rows < 1 or iterations < 1:
            raise EPInputError(
                f"copy_ceiling: row_bytes={row_bytes}, num_rows={num_rows}, iterations={iterations}; expected positive numbers, and "
                f"row_bytes a multiple of {ROW_ALIGNMENT} up to {self.config.row_bytes}"
            )
        backend = self._live()
        with backend.context:
            return backend.copy_ceiling(row_bytes, num_rows, iterations)

    def synchronize(self) -> None:
        """Wait on the host for the work of all calls so far.

        Raises:
            EPTimeoutError: if a peer did not answer.
        """
        backend = self._live()
        with backend.context:
            backend.synchronize()

    def destroy(self) -> None:
        """Give the memory back. Collective; results that are still held must not be used afterwards. Safe to call twice."""
        backend, self._backend = self._backend, None
        if backend is not None:
            with backend.context:
                backend.destroy()

    def _live(self) -> HostBackend | DeviceBackend:
        if self._backend is None:
            raise EPDestroyedError("this Buffer was destroyed; make a new one")
        return self._backend

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._backend is not None and error is not None:
            self._backend.abandon()  # the other ranks may not get here: nothing collective may happen on the way out
        self.destroy()

    def __del__(self) -> None:
        if getattr(self, "_backend", None) is not None:  # freeing is collective, and a destructor runs at no agreed time
            warnings.warn("a Buffer was dropped without destroy(); use `with Buffer(...)`", ResourceWarning, stacklevel=2)
