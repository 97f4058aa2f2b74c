"""The low-latency calls of a Buffer, for decoding: few tokens, fixed shapes, no wait on the host."""

from __future__ import annotations

from typing import Any

from ._buffer_base import BufferBase, begin_call
from ._checks import argument_error, flag, whole_number
from .arrays.frameworks import framework_of
from .arrays.view import Framework, View
from .backends.base import Backend
from .backends.calls import LowLatencyPreparation
from .backends.low_latency_inputs import (
    check_apart,
    check_low_latency_handle,
    expert_rows,
    form_of_combine,
    low_latency_combine_inputs,
    low_latency_dispatch_inputs,
    sums_view,
)
from .errors import EPInputError
from .prepared import PreparedLowLatency, check_in_place
from .results import LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle


class LowLatencyCalls(BufferBase):
    """Low-latency calls. Use `Buffer`."""

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
        """Send a few tokens to their experts as fast as possible. Rows arrive expert by expert. For decoding.

        The host never waits, so a CUDA graph can capture the call. Keep the result as long as you read it after replays.

        Args:
            x: `[num_tokens, hidden]` bfloat16. (NaNs of all ones may arrive as other NaNs.)
            topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers; -1 skips. A token that names an expert more than once gets
                a row for each choice, and `low_latency_combine` adds each. An expert has room for `num_ranks * num_max_tokens_per_rank`
                rows. Later rows are dropped, and the log says so once.
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
        with self._call_lock:
            self._call_lock.progress.name = "low_latency_dispatch"
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
            )
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
            y: `[num_local_experts, num_ranks * num_max_tokens_per_rank, hidden]` bfloat16, in the order of `recv_x`; in any memory.
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
        with self._call_lock:
            self._call_lock.progress.name = "low_latency_combine"
            backend, with_hook = self._low_latency(), flag(return_recv_hook, "return_recv_hook")
            framework_of(y, "y")  # below, an error would name it x
            call = begin_call(backend, y, async_finish, None, stream)
            inputs = low_latency_combine_inputs(
                self._info, call.stream, y, topk_idx, topk_weights, handle, allow_multiple_reduction, out, reduce, compress
            )
            if flag(zero_copy, "zero_copy"):
                _check_zero_copy(backend, inputs.y, handle.framework)
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
        allow_multiple_reduction: bool = True,
        reduce: str | None = None,
        compress: str | None = None,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        stream: Any = None,
    ) -> PreparedLowLatency:
        """Prepare low-latency calls with the same arrays in each step, so that the host takes less time for each of them.

        This checks the arguments, and takes memory for results. It makes no call, and not all ranks need to prepare theirs: prepared and
        ordinary calls match if they have the same dtypes and options. The dispatches send `topk_weights`. `PreparedLowLatency` says which
        arrays have to stay as they are, and how long results are valid.

        Args:
            x: `[num_tokens, hidden]` bfloat16, which the program updates in place. Not of JAX.
            topk_idx: `[num_tokens, num_topk]` int32 or int64, as in `low_latency_dispatch`.
            topk_weights: `[num_tokens, num_topk]` float32.
            y: The experts' outputs, if they lie in the same array in each step, as in `low_latency_combine`. Default: what `combine` gets.
            out: `[num_tokens, hidden]` bfloat16 for the results of combines; default: memory of the buffer.
            use_fp8: As in `low_latency_dispatch`, and so are the next four.
            round_scale: See there.
            use_ue8m0: See there.
            cumulative_local_expert_recv_stats: See there.
            wait_recv_cost_stats: See there.
            allow_multiple_reduction: As in `low_latency_combine`, and so are the next three.
            reduce: See there.
            compress: See there.
            zero_copy: See there.
            async_finish: As in `dispatch`, for both calls.
            return_recv_hook: As in `low_latency_dispatch`, for both calls.
            stream: The stream of all calls; default: the current stream at each call, of the library of `x`.

        Returns:
            An object whose methods `dispatch()` and `combine(y)` make the calls.

        Raises:
            EPInputError: If an argument is wrong, if the buffer was made without `low_latency=True`, or while the stream of the last call
                is captured in a CUDA graph.
            EPUnavailableError: With `compress="fp8"`, if the GPU of a rank cannot convert to FP8.
            EPTimeoutError: If a peer did not answer in an earlier call.

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
            )
            if inputs.topk_weights is None:
                raise argument_error(None, "topk_weights", "float32 weights, which combines need", "Pass them.")
            for name in ("x", "topk_idx", "topk_weights"):
                check_in_place(getattr(inputs, name), name)
            form = form_of_combine(info, allow_multiple_reduction, reduce, compress)
            into = None if out is None else sums_view(info, call.stream, out, inputs.x.shape[0])

            def view_rows(given: Any) -> View:
                rows = expert_rows(info, call.stream, given)
                check_in_place(rows, "y")
                if into is not None:
                    check_apart(into, rows)
                if is_zero_copy:
                    _check_zero_copy(backend, rows, inputs.x.framework)
                return rows

            prepared = backend.prepare_low_latency(
                LowLatencyPreparation(x, inputs, *form, into, with_hook, call.async_finish, stream)
            )
            return PreparedLowLatency(prepared, self._call_lock, view_rows, y)

    def get_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Any:
        """Return memory in which the experts can write their outputs for `low_latency_combine(zero_copy=True)`.

        Args:
            handle: The handle of a `low_latency_dispatch`.

        Returns:
            `[num_local_experts, num_ranks * num_max_tokens_per_rank, hidden]` bfloat16, in the framework of that call. There is one
            for each Buffer.

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
            return backend.low_latency_combine_view(handle.framework).to_framework()

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

    def _set_mask(self, rank: int, masked: bool) -> None:
        backend, mine, last = self._low_latency(), self._rank, self.config.num_ranks - 1
        rank = whole_number(rank, "rank", 0, last, remedy=f"Pass the rank to exclude, other than this one ({mine}).")
        if rank == mine:
            raise argument_error(rank, "rank", f"0 to {last}, other than this one ({mine})", "Pass another rank.")
        with self._call_lock:
            backend.set_mask(rank, masked)


def _check_zero_copy(backend: Backend, rows: View, framework: Framework) -> None:
    if rows.ptr != backend.low_latency_combine_view(framework).ptr:
        raise EPInputError(
            "zero_copy=True; expected y=get_low_latency_combine_buffer(handle). Pass that array, or leave out zero_copy"
        )
