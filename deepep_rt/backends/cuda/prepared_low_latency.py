"""Prepared low-latency calls of the CUDA backend: memory, parameters and results are bound once, and a call only launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ...arrays.view import HOST, View
from ...cuda import driver
from ...cuda.slots import Slot
from ...errors import EPInputError
from ...kernels.structs import LL_RECEIVE
from ...results import Event, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle, Views
from ..base import Call, LowLatencyPreparation
from ..hooks import Hook, HookQueue, Hooks, OwnHooks, check_hook_called, no_dispatch
from .low_latency_kernels import LowLatencyKernels
from .monitor import whole_call
from .repeated_call import RepeatedCall, check_stream
from .runtime import CudaRuntime

_Result = TypeVar("_Result", LowLatencyDispatchResult, LowLatencyCombineResult)


class PreparedLowLatency:
    """See `base.PreparedCalls`. All calls write to the same memory.

    Args:
        runtime: The Buffer's memory and kernels.
        kernels: Parameters and memory of its low-latency kernels.
        hooks: The open hooks of the Buffer.
        preparation: The arguments of the calls.
        warn_of_masked_ranks: Warns of ranks that kernels have masked.

    Raises:
        EPInputError: If the library of `x` has no current stream, and the program has chosen none.
        EPUnavailableError: If a rank's GPU cannot convert to FP8, which the combines need.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        kernels: LowLatencyKernels,
        hooks: Hooks,
        preparation: LowLatencyPreparation,
        warn_of_masked_ranks: Callable[[], None],
    ) -> None:
        given, with_hook, out = preparation.dispatch, preparation.with_hook, preparation.out
        x, idx, weights = given.x, given.topk_idx, given.topk_weights
        assert weights is not None
        check_stream(runtime, x, preparation.stream)
        kernels.check_fp8(given)
        kernels.check_reduction(preparation.reduce_early)
        kernels.check_compression(preparation.compress)
        self._kernels, self._hooks, self._own_hooks, self._with_hook = kernels, hooks, OwnHooks(hooks), with_hook
        self._reduce_early, self._monitor = preparation.reduce_early, runtime.monitor
        self._check_peers = self._monitor.check_peers
        self._warn = warn_of_masked_ranks if runtime.config.on_timeout == "mask" else None
        self._has_dispatched = False
        self._new_handle = new_handle = functools.partial(_new_handle, runtime.info.serial, x)

        format_ = kernels.row_format(given.use_fp8, given.use_ue8m0)
        with runtime.order.before_calls() as stream:
            memory, tables = format_.memory.acquire(stream), kernels.handles.acquire(stream)
            sums = kernels.sums.acquire(stream) if out is None else None
        self._tables = tables
        results = memory.ptr + format_.x, memory.ptr + format_.scales
        params = kernels.dispatch_params(given, (x, idx, weights), format_, tables.ptr, results, with_hook)

        def make_sent(event: Event, stream: int) -> LowLatencyDispatchResult:
            views = functools.partial(kernels.dispatch_views, format_, results, memory, tables, x.framework, stream)
            return LowLatencyDispatchResult(new_handle(tables, None), event, None, views)

        self._dispatch = _RepeatedCall(
            runtime, "ll_dispatch", kernels.num_blocks, params, preparation, (memory, tables), hooks.dispatch, make_sent
        )
        num_tokens = x.shape[0]
        address = out.ptr if sums is None else sums.ptr  # type: ignore[union-attr]
        arrays = 0, idx, weights  # the address of y comes with the first combine
        params = kernels.combine_params(
            preparation.combine_signature, num_tokens, arrays, tables.ptr, address, preparation.reduce_early, True, with_hook
        )

        def make_back(event: Event, stream: int) -> LowLatencyCombineResult:
            def views() -> Views:
                shape = num_tokens, runtime.config.hidden
                return {"x": out or runtime.result(address, shape, "bfloat16", sums, x.framework, stream)}

            return LowLatencyCombineResult(event, None, views)

        own = (tables,) if sums is None else (tables, sums)
        name = kernels.combine_name(num_tokens, preparation.reduce_early, preparation.compress)
        self._combine = _RepeatedCall(runtime, name, kernels.num_blocks, params, preparation, own, hooks.combine, make_back)

    @whole_call("kPhaseLlRows")
    def dispatch(self) -> LowLatencyDispatchResult:
        """Launch the dispatch, or its sending half."""
        self._check_peers()
        if self._with_hook:
            self._own_hooks.check_can_dispatch()
        self._hooks.dispatch.check_can_start(self._with_hook)
        if self._warn is not None:
            self._warn()
        self._has_dispatched = True
        if not self._with_hook:
            return self._dispatch.run()
        sent, hook = self._dispatch.send()
        self._own_hooks.dispatch = hook.state
        sent.handle = self._new_handle(self._tables, hook.state)
        return sent

    def set_rows(self, y: View) -> None:
        """Let later combines read `y`."""
        if y.device == HOST:
            raise EPInputError("y is in host memory; expected GPU memory in prepared calls whose x is there. Move the array")
        if self._with_hook:
            self._own_hooks.check_can_combine()  # the receiving half of a call gets the same rows as its sending half
        self._combine.set_rows(y)

    @whole_call("kPhaseLlCombineRows")
    def combine(self) -> LowLatencyCombineResult:
        """Launch the combine, or its sending half."""
        self._check_peers()
        if not self._has_dispatched:
            raise no_dispatch()
        if not self._reduce_early:
            self._kernels.check_reduction(False)
        if self._with_hook:
            check_hook_called(self._own_hooks.dispatch)
            self._own_hooks.check_can_combine()
        self._hooks.combine.check_can_start(self._with_hook)
        if self._warn is not None:
            self._warn()
        if not self._with_hook:
            return self._combine.run()
        back, hook = self._combine.send()
        self._own_hooks.combine = hook.state
        return back


def _new_handle(serial: int, x: View, tables: Slot, state: Any) -> LowLatencyHandle:
    return LowLatencyHandle(x.shape[0], serial, (tables, state), True, x.framework)


class _RepeatedCall(RepeatedCall[_Result]):
    """A dispatch or a combine, with a hook or without one.

    Args:
        runtime: The Buffer's memory and kernels.
        kernel: Name of the kernel.
        num_blocks: Blocks of its grid.
        params: The members of its Params.
        preparation: The arguments of the calls.
        own: The Buffer's memory that the call uses.
        queue: The queue of its hooks.
        make_result: As of `RepeatedCall.set_launch`.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        kernel: str,
        num_blocks: int,
        params: dict[str, Any],
        preparation: LowLatencyPreparation,
        own: tuple[Slot, ...],
        queue: HookQueue,
        make_result: Callable[[Event, int], _Result],
    ) -> None:
        given = preparation.dispatch
        super().__init__(runtime, Call(-1, None, preparation.async_finish, None, given.x.framework), preparation.stream, own)
        self._queue, self._with_hook, self._preparation = queue, preparation.with_hook, preparation
        launcher = runtime.launcher(kernel)
        self.set_launch(launcher.prepare(num_blocks, params), make_result)
        self._launch_receiving = launcher.prepare(num_blocks, {**params, "phases": LL_RECEIVE})
        halves = (self.launch, self._launch_receiving) if preparation.with_hook else (self.launch,)
        self._set_address_of_rows = [half.member("y") for half in halves] if "y" in params else []
        self.set_arguments((given, preparation.out), given.topk_idx, given.topk_weights)

    def set_rows(self, y: View) -> None:
        """Use other rows of the experts from now on. Only for a combine."""
        given = self._preparation.dispatch
        self.set_arguments((given, self._preparation.out, y), given.topk_idx, given.topk_weights, y)
        for set_address in self._set_address_of_rows:
            set_address(y.ptr)

    def send(self) -> tuple[_Result, Hook]:
        """Launch the sending half. The hook launches the receiving half on the same stream."""
        self._begin()
        with self._monitor.call_half():
            stream = self._call.stream
            self.launch(stream)
            self._note_end()
            hook = self._queue.append(self._receive, lambda: driver.capture_id(stream))
        # The prepared call must not keep the hook: if the caller drops it, the next call runs it.
        result: _Result = object.__new__(type(self._result))
        result.__dict__.update(self._result.__dict__)
        result.hook = hook
        return result, hook

    def _receive(self) -> None:
        self._monitor.check_peers()
        with self._monitor.call_half():
            self._order.enqueue_waits(self._call)
            if self._network is not None:
                self._network.wake()
            self._launch_receiving(self._call.stream)
            self._note_end()
        self._monitor.check()  # after the launch: other ranks wait for this half, whatever the input was

    def _move(self) -> None:
        super()._move()
        if self._with_hook:  # each call has a result of its own, and all share these arrays
            for name in ("recv_x", "recv_x_scales", "num_recv_tokens_per_expert", "x"):
                getattr(self._result, name, None)
