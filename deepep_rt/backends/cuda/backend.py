"""The CUDA backend: dispatch and combine as kernel launches over symmetric memory. `backends/host/backend.py` has the same face."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ...arrays.view import HOST, Framework, View
from ...comm import call_signature
from ...comm.communicator import Communicator
from ...comm.rendezvous import Consensus, agree_on_measurement, begin_measurement
from ...config import COMBINE_DTYPES, MAX_RANKS_PER_NODE, MAX_ROUTE_BLOCKS, ROUTE_THREADS, Config, rows_per_copy
from ...cuda import driver
from ...cuda import nvshmem as symmetric
from ...cuda.pool import Slot, Slots
from ...cuda.stream_memory import StreamPool
from ...cuda.topology import choose_device
from ...errors import EPDestroyedError, EPInputError, EPOutOfMemoryError, EPUnavailableError
from ...jit import build as jit
from ...jit.launch import Launcher
from ...kernels.layout import Layout
from ...kernels.source import kernel_constants
from ...kernels.table import KERNELS
from ...network import NetworkOptions
from ...results import CombineResult, DispatchHandle, DispatchResult, Views
from ..agreement import announce
from ..call_lock import CallLock
from ..calls import BufferInfo, Call, CombineInputs, DispatchInputs
from .handle_tables import CudaHandleTables
from .monitor import Watch
from .result_memory import ResultMemory
from .status_page import HostPage
from .stream_order import CallOrder
from .transfer import to_device, to_host

_PARTING_S = 30.0  # at least: ranks may end their work at different times
_EMPTY = 256  # stands for the address of an array without elements, and is never followed


class DeviceBackend:
    """A Buffer's GPU side.

    Args:
        communicator: The ranks.
        config: The sizes that they agreed on.
        serial: The Buffer's number in this process, by which handles are known.
        copy_when_full: Copy results out of symmetric memory when the pool is full, instead of raising.
        network: What NVSHMEM is started with, if it is started here.
    """

    name = "cuda"

    def __init__(
        self,
        communicator: Communicator,
        config: Config,
        serial: int,
        *,
        copy_when_full: bool,
        network: NetworkOptions | None = None,
    ) -> None:
        self._comm, self.config, self._serial, self._copy_when_full = communicator.Dup(), config, serial, copy_when_full
        self.num_sms = config.num_sms  # of the next calls
        self._consensus = Consensus(self._comm)
        self._destroyed = False
        self.device = choose_device(self._comm, self._consensus)
        self._layout = Layout(config)
        self._map = self._layout.symmetric
        with self._consensus.step():
            self.context = driver.CurrentContext()
            driver.trim_memory_pool()  # what other Buffers of this process have left there is free
            free_bytes, self._arch = driver.free_bytes(), jit.current_arch()
            symmetric.load()
        self.call_lock = CallLock(self.context)
        self.info = BufferInfo(serial, config, self.device)
        self.tables = CudaHandleTables(self.info, self._layout)
        all_free_bytes, self._archs = zip(*self._comm.allgather((free_bytes, self._arch)), strict=True)
        self._check_memory(all_free_bytes)
        self._memory = symmetric.SymmetricMemory(self._comm, self._map.num_bytes, config.timeout_s, config.node_size, network)
        self._held = ExitStack()  # what destroy gives back
        self._held.callback(self._memory.free)
        try:
            with self._consensus.step():  # after it, nobody writes to control memory that is still being cleared
                self._make_own_part()
        except Exception:
            if self._all_part(not self._memory.is_of_several_buffers, config.timeout_s):
                self._free()
            raise
        self._comm.timeout_s = config.timeout_s
        between = f" and NVSHMEM between groups of {config.node_size}" if config.has_network else ""
        transport = f"NVLink or PCIe peer access{between}"
        announce(self._comm, f"CUDA ({self._arch})", transport, self._layout.size_hint["total"])

    # --- the calls ---------------------------------------------------------------------------------------------------------------

    def begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Decide where a call runs; raise if an earlier one timed out."""
        self._watch.check_peers()
        return self._order.begin(x, async_finish, previous_event, stream)

    def dispatch(self, inputs: DispatchInputs, call: Call) -> DispatchResult:
        """The steps of a dispatch: a landing place, the routing (unless it is known), the rows, and what the host has to know."""
        self._check_near()
        config, stream = self.config, call.stream
        self._order.enter(call)
        known = inputs.handle
        tell_host = known is None and inputs.num_worst_tokens is None
        if tell_host and call.capture is not None:
            raise EPInputError("the host cannot wait for counts in a CUDA graph capture; pass num_worst_tokens=, or handle=")
        x, idx, weights, scales = self._on_device(stream, inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.scales)
        row_bytes, scale_bytes = x.row_bytes, scales.row_bytes if scales else 0
        idx_bytes = idx.itemsize if idx else 0
        # Counts do not lie with the rows: who keeps counts must not keep those.
        if known is not None:
            capacity, slot = known.num_recv_rows, known.routing
            counts_slot = self._counts.acquire(stream, call.caller_stream)
            counts_at = counts_slot.ptr
        else:
            capacity = config.num_max_recv_tokens if inputs.num_worst_tokens is None else inputs.num_worst_tokens
            counts_slot = slot = self._handles.acquire(stream, call.caller_stream)
            counts_at = slot.ptr + self._handle_map.offsets["counts"]
        shape = self._layout.result(capacity, row_bytes, scale_bytes, idx_bytes, idx is not None)
        place = self._results.place(shape.num_bytes, call)
        if known is None:
            self._launch_route(stream, slot, idx, inputs.expert_alignment, tell_host)
        at, parts = place.offset, shape.offsets
        self._launcher("dispatch")(
            stream,
            self.num_sms,
            {
                "row_bytes": row_bytes,
                "x": x.ptr,
                "scales": address_of(scales),
                "topk_idx": address_of(idx),
                "topk_weights": address_of(weights),
                "handle": slot.ptr,
                "recv_x_offset": at + parts["x"],
                "recv_scales_offset": at + parts["scales"],
                "recv_topk_idx_offset": at + parts["topk_idx"],
                "recv_topk_weights_offset": at + parts["topk_weights"],
                "recv_src_idx_offset": at + parts["src_idx"],
                "capacity": capacity,
                "num_recv": counts_at + self._counts_map.offsets["num_recv"],
                "num_recv_per_expert": counts_at + self._counts_map.offsets["num_recv_per_expert"],
                "scale_bytes": scale_bytes,
                "idx_bytes": idx_bytes,
                "rows_per_copy": rows_per_copy(row_bytes),
                "call_signature": call_signature.pack("dispatch", *_dtypes(x, idx, weights, scales), scale_bytes),
            },
        )
        given = inputs.topk_idx, inputs.topk_weights, inputs.scales
        self._order.leave(call, (x, idx, weights, scales, inputs.x, *given), (slot, counts_slot), *given)
        num_rows, counts = capacity, known.num_recv_tokens_per_expert_list if known else None
        if tell_host:
            num_rows, counts = self._watch.await_counts()
        owner, base = self._results.keep(place, shape.offsets["x"] + num_rows * row_bytes, call)
        sent = x, scales, idx, weights
        views = self._dispatched(parts, num_rows, sent, rows=(base, owner), counts=(counts_at, counts_slot), stream=stream)
        handle = known or DispatchHandle(x.shape[0], num_rows, counts, self._serial, slot, {})
        self._watch.check_inputs()
        return DispatchResult(handle, self._order.event(call), self._for_caller(views, inputs.x.device == HOST, stream))

    def combine(self, inputs: CombineInputs, call: Call) -> CombineResult:
        """One launch: rows land in the landing region and are added up."""
        self._check_near()
        config, stream, handle = self.config, call.stream, inputs.handle
        self._order.enter(call)
        x, weights, *biases = self._on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        staging = self._layout.staging(x.row_bytes)
        landing = self._map.offsets["landing"]
        num_tokens = handle.num_tokens
        shape = self._layout.combined(num_tokens, x.row_bytes, weights is not None)
        owner = self._results.for_sums(shape.num_bytes, call)
        out, out_weights = owner.ptr + shape.offsets["x"], owner.ptr + shape.offsets["topk_weights"]
        self._launcher("combine", x.dtype)(
            stream,
            self.num_sms,
            {
                "num_tokens": num_tokens,
                "y": x.ptr,
                "topk_weights": address_of(weights),
                "bias_0": address_of(biases[0]) if biases else 0,
                "bias_1": address_of(biases[1]) if len(biases) > 1 else 0,
                "handle": handle.routing.ptr,
                "out": out,
                "out_topk_weights": out_weights,
                "recv_x_offset": landing + staging.offsets["x"],
                "recv_topk_weights_offset": landing + staging.offsets["topk_weights"],
                "capacity": handle.num_recv_rows,
                "call_signature": call_signature.pack("combine", *_dtypes(x, None, weights)),
            },
        )
        given = inputs.topk_weights, *inputs.biases
        self._order.leave(call, (x, weights, biases, inputs.x, *given), handle, *given)
        dtype, framework, with_weights = x.dtype, x.framework, weights is not None

        def views() -> Views:
            made: Views = {"x": self._result(out, (num_tokens, config.hidden), dtype, owner, framework, stream)}
            if with_weights:
                made["topk_weights"] = self._result(
                    out_weights, (num_tokens, config.num_topk), "float32", owner, framework, stream
                )
            return made

        self._watch.check_inputs()
        return CombineResult(self._order.event(call), self._for_caller(views, inputs.x.device == HOST, stream))

    def copy_ceiling(self, row_bytes: int, num_rows: int, iterations: int) -> float:
        """Bytes a second that every rank pushes to all others at once; see `Buffer.copy_ceiling`."""
        self._check_near()
        config, stream = self.config, self._order.own_stream
        ranks = config.num_ranks
        agree_on_measurement(self._comm, config.timeout_s, row_bytes=row_bytes, num_rows=num_rows, iterations=iterations)
        room = min(self._map.sizes["landing"], self._map.sizes["pool"]) // (ranks * row_bytes)
        num_rows = max(1, min(num_rows, room))
        values = {
            "num_rows": num_rows,
            "src": self._memory.ptr + self._map.offsets["pool"],
            "recv_x_offset": self._map.offsets["landing"],
            "row_bytes": row_bytes,
        }
        launch = self._launcher("copy_bandwidth")
        times = []
        for _ in range(3):
            self.synchronize()
            begin_measurement(self._comm, config.timeout_s)
            begin = driver.CudaEvent(stream, timing=True)
            for _ in range(iterations):
                launch(stream, self.num_sms, values)
            times.append(driver.elapsed_ms(begin, driver.CudaEvent(stream, timing=True)) / iterations)
        begin_measurement(self._comm, config.timeout_s)
        slowest = max(self._comm.allgather(sorted(times)[1]))
        return num_rows * max(ranks - 1, 1) * row_bytes / slowest * 1e3

    def copy(self, source: int, out: View, stream: int | None) -> None:
        """Copy GPU memory in the order of the stream."""
        assert stream is not None
        driver.copy_async(out.ptr, source, out.nbytes, stream)

    def check(self) -> None:
        """Raise what kernels have reported; see `Buffer.check`."""
        self._watch.check()

    def synchronize(self) -> None:
        self._wait_for_calls(self.call_lock.check)

    def _wait_for_calls(self, check_ended: Callable[[], None] = lambda: None) -> None:
        end = self._order.end()
        self._watch.start_listening()
        while not end.done():
            check_ended()
            self._watch.check_peers()  # behind a call that timed out may lie what waits for that peer without a limit
            self._watch.listen()
            time.sleep(1e-5)
        self._order.synchronize(end)

    def destroy(self, in_touch: bool, error: BaseException | None) -> None:
        self._destroyed = True
        sound = False
        try:
            if error is not None:
                self._watch.notify(error)
            if in_touch and not self._watch.is_broken:
                self._wait_for_calls()
                sound = self._is_sound()
        finally:
            limit_s = self.config.timeout_s
            together = self._all_part(sound, limit_s if self.config.on_timeout == "mask" else max(limit_s, _PARTING_S))
        if together:
            self._order.forget_arguments()
            self._free()
            return
        # Peers may still write to this memory, or never come to free theirs.
        for consensus in (self._consensus, self._memory.consensus):
            if consensus is not None and consensus.silent_ranks:
                if self.config.on_timeout == "raise":
                    raise consensus.timeout_error()
                warnings.warn(f"{consensus.timeout_error()}. The memory of this Buffer stays taken", stacklevel=2)

    def _all_part(self, sound: bool, limit_s: float) -> bool:
        return self._memory.all_free(self._consensus.all_ok(sound, "destroy their Buffer", limit_s), limit_s)

    def _is_sound(self) -> bool:
        return not self._watch.is_broken

    def _free(self) -> None:
        self._held.close()
        self._consensus.free()
        self._comm.Free()

    # --- construction ------------------------------------------------------------------------------------------------------------

    def _make_own_part(self) -> None:
        """What a rank makes without any other: memory, tables and kernels."""
        config = self.config
        base = self._memory.ptr
        for region in ("control", "low_latency"):  # flags start at zero
            if self._map.sizes[region]:
                driver.fill(base + self._map.offsets[region], 0, self._map.sizes[region])
        local_bytes = self._layout.local.num_bytes
        self._state = driver.allocate(local_bytes)
        self._held.callback(driver.free, self._state)
        driver.fill(self._state, 0, local_bytes)
        self._handle_map = self._layout.handle
        self._handles = self._slots(self._handle_map.num_bytes, self._layout.num_handles)
        self._counts_map = self._layout.counts
        self._counts = self._slots(self._counts_map.num_bytes, self._layout.num_handles)
        self._page = HostPage(self._layout, self._comm.Get_rank())
        self._held.callback(self._page.free)
        self._watch = Watch(self._comm, config, self._page, self._state, self.call_lock.check)
        self._order = CallOrder(self.device, self.context, self._watch.check)
        self._held.callback(driver.release_stream, self._order.own_stream)
        self._stream_pool = StreamPool()
        self._held.callback(self._stream_pool.destroy)
        self._results = ResultMemory(base, self._map, config.num_slots, self._order, self._stream_pool, self._copy_when_full)
        self._launchers: dict[tuple[str, str | None], Launcher] = {}
        self._is_near = config.num_ranks <= MAX_RANKS_PER_NODE and all(self._memory.peers)
        if self._is_near:
            for kernel in ("route", "dispatch"):
                self._launcher(kernel)
            if config.dtype in COMBINE_DTYPES:
                self._launcher("combine", config.dtype)
        driver.synchronize(0)

    def _slots(self, num_bytes: int, count: int = 0) -> Slots:
        made = Slots(num_bytes, count)
        self._held.callback(made.destroy)
        return made

    def _check_memory(self, free_bytes: Sequence[int]) -> None:
        need = self._layout.size_hint["total"]
        short = [(rank, bytes_) for rank, bytes_ in enumerate(free_bytes) if bytes_ < need]
        if short:
            parts = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in self._layout.size_hint.items())
            raise EPOutOfMemoryError(
                f"a Buffer of these sizes takes {need / 1e9:.2f} GB a rank ({parts}), but rank {short[0][0]} has "
                f"{short[0][1] / 1e9:.2f} GB free; lower num_max_tokens_per_rank or num_slots"
            )

    def _launcher(self, name: str, dtype: str | None = None) -> Launcher:
        found = self._launchers.get((name, dtype))
        if found is None:
            kernel = KERNELS[name]
            constants = kernel_constants(self._layout, self._arch, kernel, dtype)
            function = jit.load(kernel, constants, self._arch)
            fixed = {
                "peers": self._memory.peers,
                "state": self._state,
                "page": self._page.ptr,
                "timeout_ns": int(self.config.timeout_s * 1e9),
                "rank": self._comm.Get_rank(),
                "pes": self._memory.pes,
            }
            found = self._launchers[name, dtype] = Launcher(kernel, function, constants, fixed)
        return found

    # --- the parts of a call -----------------------------------------------------------------------------------------------------

    def _launch_route(self, stream: int, slot: Slot, idx: View | None, alignment: int, tell_host: bool) -> None:
        assert idx is not None
        if tell_host:
            self._page.expect_counts()
        num_blocks = min(-(-idx.shape[0] // ROUTE_THREADS), MAX_ROUTE_BLOCKS, self.num_sms)
        self._launcher("route")(
            stream,
            max(num_blocks, 1),
            {
                "num_tokens": idx.shape[0],
                "topk_idx": idx.ptr,
                "handle": slot.ptr,
                "idx_bytes": idx.itemsize,
                "expert_alignment": alignment,
                "check": self.config.check_inputs,
                "to_host": tell_host,
            },
        )

    def _dispatched(
        self,
        offsets: dict[str, int],
        num_rows: int,
        sent: Sequence[View | None],
        *,
        rows: tuple[int, Any],
        counts: tuple[int, Any],
        stream: int,
    ) -> Callable[[], Views]:
        """Makes the results of a dispatch, which look like what was `sent` (x, scales, topk_idx, topk_weights).

        Args:
            offsets: Where they lie from `rows` on.
            num_rows: How many rows there are.
            sent: The arguments.
            rows: An address, and what keeps the memory there.
            counts: The same, for the counts.
            stream: That of the call.
        """
        assert sent[0] is not None
        framework = sent[0].framework
        # The arguments themselves are let go: results may outlive them.
        kinds = [(view.dtype, view.shape[1:]) if view else None for view in sent]

        def views() -> Views:
            names = ("x", "scales", "topk_idx", "topk_weights")
            arrays = {name: (kind[0], (num_rows, *kind[1])) for name, kind in zip(names, kinds, strict=True) if kind}
            arrays["src_idx"] = "int32", (num_rows, 2)
            (base, rows_owner), (counts_base, counts_owner) = rows, counts
            made: Views = {
                name: self._result(base + offsets[name], shape, dtype, rows_owner, framework, stream)
                for name, (dtype, shape) in arrays.items()
            }
            for name, shape in (("num_recv", (1,)), ("num_recv_per_expert", (self.config.num_local_experts,))):
                at = counts_base + self._counts_map.offsets[name]
                made[name] = self._result(at, shape, "int32", counts_owner, framework, stream)
            return made

        return views

    def _result(self, ptr: int, shape: tuple[int, ...], dtype: str, owner: Any, framework: Framework, stream: int) -> View:
        if self._destroyed:
            raise EPDestroyedError("the Buffer of this result was destroyed, and nobody had looked at the result; look before")
        return View(ptr, shape, dtype, self.device, owner, framework, driver.StreamWork(stream, self.context))

    def _on_device(self, stream: int, *views: View | None) -> Sequence[Any]:
        for view in views:
            if view is not None and view.device == HOST:
                return to_device(self.device, stream, self._stream_pool, *views)
        return views

    def _for_caller(
        self, views: Callable[[], Views], host_caller: bool, stream: int, given: View | None = None
    ) -> Callable[[], Views]:
        """Results for a caller whose arrays are in host memory are copied there, now."""
        if not host_caller:
            return views
        copied = to_host(views(), stream, given)
        self._watch.check()
        return lambda: copied

    def _check_near(self) -> None:
        if not self._is_near:
            raise EPUnavailableError(
                f"dispatch and combine serve up to {MAX_RANKS_PER_NODE} ranks that reach each other over NVLink; between hosts there are "
                f"only the low-latency calls"
            )


def _dtypes(*views: View | None) -> list[Any]:
    return [view.dtype if view else None for view in views]


def address_of(view: View | None) -> int:
    """A view's address as a kernel wants it: 0 says that there is no such array, which an empty array, whose address is 0, is not."""
    return 0 if view is None else view.ptr or _EMPTY
