"""The throughput calls of a Buffer, for training and prefill: many tokens, results as large as what arrives."""

from __future__ import annotations

from typing import Any

from ._buffer_base import BufferBase, begin_call
from ._checks import whole_number
from .arrays.view import View
from .backends.calls import ThroughputPreparation
from .backends.inputs import bias_views, check_handle, combine_inputs, combine_rows, compression, dispatch_inputs, weights_of_rows
from .config import COMBINE_DTYPES, MAX_SMS, ROW_ALIGNMENT
from .errors import EPConfigError, EPInputError
from .prepared import PreparedThroughput, check_in_place
from .results import CombineResult, DispatchHandle, DispatchResult

_MOST_ROWS, _MOST_ITERATIONS = (1 << 31) - 1, 10**6  # of a measurement; kernels count rows in 32 bits
_USUAL_ROWS = 16_384  # that a rank sends in one push of a measurement


class ThroughputCalls(BufferBase):
    """Throughput calls. Use `Buffer`."""

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
        layout: str | None = None,
        zero_padding: bool = False,
        scales_layout: str = "row",
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
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
                With several nodes, on all ranks, if it brings a rank more rows than `num_max_recv_tokens`; no row is sent.
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
        with self._call_lock:
            self._call_lock.progress.name = "dispatch"
            call = begin_call(backend, x, async_finish, previous_event, stream)
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
            )
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
        with self._call_lock:
            self._call_lock.progress.name = "combine"
            call = begin_call(backend, x, async_finish, previous_event, stream)
            inputs = combine_inputs(self._info, call.stream, x, handle, topk_weights, bias, weighted, reduce, compress)
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
            y: The rows of combines, if they lie in the same array each time. Default: what `combine` gets.
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
            return PreparedThroughput(prepared, self._call_lock, view_rows, y)

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
