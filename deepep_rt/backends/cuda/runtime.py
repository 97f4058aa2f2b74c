"""The state of a Buffer on its GPU that both modes share: memory, loaded kernels, call order, and reports from kernels."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...arrays.host_memory import Result
from ...arrays.view import HOST, Framework, View
from ...comm.communicator import Communicator
from ...config import STAGE_BYTES, Config
from ...cuda import driver
from ...cuda.local_heap import LocalHeap
from ...cuda.slots import Slots
from ...cuda.stream_tracking import StreamPool
from ...cuda.transport import SymmetricMemory
from ...errors import EPDestroyedError, EPError, EPInputError, EPOutOfMemoryError
from ...jit import build, compiler, launch
from ...jit.build import build_together
from ...jit.launch import Launcher
from ...kernels import structs
from ...kernels.layout import Layout
from ...kernels.source import kernel_constants
from ...kernels.table import KERNELS, low_latency_kernels, throughput_kernels
from ...results import Views
from ...tuned import CALLS, CopyShape
from ..base import BufferInfo
from ..call_lock import CallLock
from ..purposes import Purposes
from .monitor import Monitor, StatusPage
from .network_memory import NetworkMemory, Wire, WiredLauncher
from .stream_order import CallOrder

if TYPE_CHECKING:
    from ...cuda.wire import WireMemory  # it needs sockets, whose module takes milliseconds to load


def to_device(device: int, stream: int, pool: StreamPool, *views: View | None) -> list[View | None]:
    """Return the same arrays in GPU memory; copy those that lie in host memory. Raise EPInputError if a capture had to copy."""
    staged = []
    for view in views:
        if view is not None and view.device == HOST:
            if driver.is_capturing(stream):
                raise EPInputError(
                    "an array is in host memory, and each replay of the CUDA graph would read it again; expected arrays on the GPU in a "
                    "capture. Copy the array to the GPU before"
                )
            memory = pool.allocate(view.nbytes, stream)
            driver.copy_async(memory.ptr, view.ptr, view.nbytes, stream)
            view = replace(view, ptr=memory.ptr, device=device, owner=(memory, view.owner))
        staged.append(view)
    return staged


def read_kernels(config: Config, ordinal: int) -> None:
    """Read the kernels of a Buffer from the cache while its GPU starts, for those that have the usual shape."""
    with suppress(EPError):  # the step that loads the kernels raises it, on all ranks
        layout, arch = Layout(config), compiler.target_arch(ordinal)
        for name, dtype in throughput_kernels(config) + low_latency_kernels(config):
            launch.read(KERNELS[name], kernel_constants(layout, arch, KERNELS[name], dtype), arch)


_EMPTY = 256  # the address that stands for an array without elements; no kernel reads it


class CudaRuntime:
    """A Buffer's memory and kernels on one GPU, without its calls.

    The constructor clears the flags in symmetric memory. `resources` releases what the constructor and `slots` acquire. `shapes` are those
    of the kernels `dispatch` and `combine` that are not the usual ones.
    """

    def __init__(
        self,
        info: BufferInfo,
        layout: Layout,
        comm: Communicator,
        memory: SymmetricMemory,
        arch: str,
        context: driver.CurrentContext,
        call_lock: CallLock,
        resources: ExitStack,
        shapes: Mapping[str, CopyShape] | None = None,
    ) -> None:
        self.info, self.config, self.device = info, info.config, info.device
        self.layout, self.comm, self.rank = layout, comm, comm.numbers[comm.Get_rank()]
        self.call_lock, self.context = call_lock, context
        self.memory, self.regions = memory, layout.symmetric
        self.is_destroyed = False
        self.launchers: dict[tuple[str, str | None], Launcher] = {}
        self._launches: dict[str, list[int]] = {}
        self._slots: list[tuple[Slots, bool]] = []  # whether they are tables
        self.local_heap: LocalHeap | None = None
        """The memory of slots, if the Buffer can sleep."""
        if memory.heap is not None:
            self.local_heap = LocalHeap()
            resources.callback(self.local_heap.free)
        self.purposes = Purposes()
        self.arch, self._resources = arch, resources
        self._allows_overlap = True
        self.use_shapes(shapes or {})
        self.state = driver.allocate(layout.local.num_bytes)
        resources.callback(driver.free, self.state)
        driver.fill(self.state, 0, layout.local.num_bytes)
        self._clear_flags()
        self.network = NetworkMemory(comm, layout, memory, self.state, resources) if self.config.has_network else None
        of_wait = functools.partial(CudaRuntime._purpose_of_wait, weakref.proxy(self))  # no cycle: see _finalizers
        self.page = StatusPage(layout, self.rank, self.purposes, of_wait)
        resources.callback(self.page.free)
        watched: dict[str, Any] = {}
        if self.network is not None:
            watched = {"check_network": self.network.check, "network_progress": self.network.progress}
        self.monitor = Monitor(comm, self.config, self.page, self.state, call_lock.check, call_lock.progress, **watched)
        call_lock.notice = self.monitor.failure_notice
        self.order = CallOrder(self.device, self.context, self.monitor.check)
        resources.callback(driver.release_stream, self.order.own_stream)
        self.stream_pool = StreamPool()
        resources.callback(self.stream_pool.trim)

    def address_of_region(self, name: str) -> int:
        """Address of a region of symmetric memory on this rank."""
        return self.memory.ptr + self.regions.offsets[name]

    @property
    def flags(self) -> list[tuple[int, int]]:
        """The parts of symmetric memory that ranks of a node tell each other about calls in: the address and the bytes of each."""
        parts = [(self.address_of_region("control"), self.regions.sizes["control"])]
        if self.config.low_latency:
            parts.append((self.address_of_region("low_latency"), self.layout.low_latency.offsets["staged_headers"]))
        return parts

    def _clear_flags(self) -> None:
        for address, num_bytes in self.flags:
            driver.fill(address, 0, num_bytes)

    def begin_generation(self, members: Sequence[int], generation: int) -> None:
        """Let all kernels begin anew, with these members. No work of this GPU may use the memory. Statistics stay."""
        layout, absent = self.layout, [slot for slot in range(self.config.num_ranks) if slot not in members]
        driver.fill(self.state, 0, layout.local.offsets["statistics"])
        driver.fill(self.state + layout.local.offsets["longest_waits"], 0, layout.local.sizes["longest_waits"])
        self._clear_flags()
        state = np.zeros(1, structs.State.dtype({}))
        state["absent"], state["generation"] = sum(1 << slot for slot in absent), generation
        state["members"] = sum((number ^ 15) << 4 * place for place, number in enumerate(sorted(members))) ^ 0xFFFFFFFF
        state["members_reciprocal"] = -(-(1 << 31) // len(members))
        masked = np.zeros(self.config.num_ranks, np.uint32)
        masked[absent] = 1
        for values, region in ((state, "state"), (masked, "masked")):
            driver.copy_async(self.state + layout.local.offsets[region], values.ctypes.data, values.nbytes, 0)
        driver.synchronize(0)
        self.page.clear()
        for launches in self._launches.values():
            launches[0] = 0

    def slots(self, num_bytes: int, count: int = 0, *, are_tables: bool = False) -> Slots:
        """Make Slots that live as long as the Buffer. `are_tables`: a handle needs their contents, also after a sleep."""
        slots = Slots(num_bytes, count, self.local_heap)
        self._resources.callback(slots.destroy)
        self._slots.append((slots, are_tables))
        return slots

    def in_use(self, *, with_results: bool) -> list[tuple[int, int]]:
        """Return the slots that the program or a captured graph holds: the address and the bytes of each. All tables, and with
        `with_results` all others too.
        """
        return [part for slots, are_tables in self._slots if are_tables or with_results for part in slots.in_use()]

    def load(self, kernels: Sequence[tuple[str, str | None]]) -> None:
        """Load kernels, each a name and a dtype. If one is not in the cache, the kernels after it are compiled at the same time."""
        for number, (name, dtype) in enumerate(kernels, 1):
            misses = build.stats.misses
            self.launcher(name, dtype)
            if number < len(kernels) and build.stats.misses > misses:
                build_together([(KERNELS[name], self._constants(name, dtype)) for name, dtype in kernels[number:]], self.arch)

    def launcher(self, name: str, dtype: str | None = None) -> Launcher:
        """Return the launcher of a kernel in the kernel table. The first call loads the kernel. A kernel with `dtype` is compiled once for
        each dtype.
        """
        launcher = self.launchers.get((name, dtype))
        if launcher is None:
            kernel, constants = KERNELS[name], self._constants(name, dtype)
            function = launch.load(kernel, constants, self.arch)
            fixed = {
                "peers": self.memory.peers,
                "state": self.state,
                "status_page": self.page.ptr,
                "timeout_ns": int(self.config.timeout_s * 1e9),
                "rank": self.rank,
                "pes": self.memory.network_ids,
            }
            launches = self.launches("nodes" if name == "link_rates" or "_nodes" in name else name.partition("_")[0])
            wired = kernel.puts(self.config) and self.config.has_wire
            launcher = (WiredLauncher if wired else Launcher)(kernel, function, constants, fixed, launches)
            if isinstance(launcher, WiredLauncher):
                launcher.wire = self._wire
            self.launchers[name, dtype] = launcher
            launcher.allow_overlap(self._allows_overlap)
        return launcher

    @functools.cached_property
    def _wire(self) -> Wire:
        options = cast("WireMemory", self.memory).options
        values = {"fs_per_byte": round(1e6 / options.wire_bandwidth), "latency_ns": 1000 * options.wire_latency}
        launch = self.launcher("wire").prepare(Wire.NUM_BLOCKS, values)
        return Wire(launch, self.state + self.layout.local.offsets["wire"], self._resources)

    def launches(self, epoch: str) -> list[int]:
        """Return a list whose first number counts the launches that advance an epoch of the kernels: that of "dispatch", "combine", or
        "nodes" for both calls over several nodes.
        """
        return self._launches.setdefault(epoch, [0])

    def _purpose_of_wait(self, phase: int, epoch: int) -> str:
        """Return the purpose of the call in which a kernel waits. Empty: it has none, or replays of CUDA graphs advance epochs too."""
        if self.order.has_captured:
            return ""
        return self.purposes.of_launch("nodes" if self.config.has_network else structs.EPOCHS.get(phase, ""), epoch)

    def _constants(self, name: str, dtype: str | None) -> dict[str, int]:
        return kernel_constants(self.layout, self.arch, KERNELS[name], dtype, self.shapes.get(name))

    def use_shapes(self, shapes: Mapping[str, CopyShape]) -> None:
        """Set the shapes of `dispatch` and `combine` for later launchers. Launchers that other objects hold keep theirs.

        Kernels that are missing get the usual shape.
        """
        self.shapes = dict(shapes)
        self.dispatch_copy_bytes = shapes["dispatch"].copy_bytes if "dispatch" in shapes else STAGE_BYTES
        """The most bytes of one copy of `dispatch`, unless a row is larger."""
        self.launchers = {key: launcher for key, launcher in self.launchers.items() if key[0] not in CALLS}

    def allow_overlap(self, allowed: bool) -> None:
        """Set whether launches from now on may start while the kernel before them ends."""
        self._allows_overlap = allowed
        for launcher in self.launchers.values():
            launcher.allow_overlap(allowed)

    # --- arguments and results ---------------------------------------------------------------------------------------------------

    def on_device(self, stream: int, *views: View | None) -> Sequence[Any]:
        """Return the same arrays in GPU memory; copy those that lie in host memory."""
        for view in views:
            if view is not None and view.device == HOST:
                return to_device(self.device, stream, self.stream_pool, *views)
        return views

    def result(self, ptr: int, shape: tuple[int, ...], dtype: str, owner: Any, framework: Framework, stream: int | None) -> View:
        """Make the View of a result. Work on `stream` may still write it. None: consumers do not wait for that.

        Raise EPDestroyedError if the Buffer was destroyed.
        """
        if self.is_destroyed:
            raise EPDestroyedError(
                "the Buffer of this result was destroyed before the first access to this array. Access result arrays before destroy()"
            )
        work = None if stream is None else driver.StreamWork(stream, self.context)
        return View(ptr, shape, dtype, self.device, owner, framework, work)

    def for_caller(
        self, make_views: Callable[[], Views], is_host_caller: bool, stream: int, given: View | None = None
    ) -> Callable[[], Views]:
        """Copy the results to host memory now, if the caller's arrays lie there. `given` is that of `to_host`."""
        if not is_host_caller:
            return make_views
        copied = self.to_host(make_views(), stream, given)
        self.monitor.check()
        return lambda: copied

    def to_host(self, views: Views, stream: int, given: View | None = None) -> Views:
        """Copy results to host memory, once the work of the stream is done.

        `given` is an array of the caller that is a result. It is not copied.

        Raise EPOutOfMemoryError if the host has too little memory; the call was made. Raise what breaks the Buffer meanwhile, and
        EPDestroyedError if it is destroyed.
        """
        # Copies wait in the driver, where the host does not hear of a peer that leaves.
        self._await(driver.CudaEvent(stream), self.call_lock.check)
        copied: Views = {}
        for name, view in views.items():
            if view is not None and view is not given:
                try:
                    copy = Result(view.shape, view.dtype)
                except MemoryError as error:
                    memory_error = EPOutOfMemoryError(
                        f"host memory does not suffice for {name} {list(view.shape)} ({error}); expected room for the results of a call "
                        f"with arrays in host memory. Pass arrays on the GPU, or fewer tokens."
                    )
                    memory_error.call_made = True
                    raise memory_error from error
                driver.copy_async(copy.ptr, view.ptr, view.nbytes, stream)
                view = copy.view(view.framework)
            copied[name] = view
        driver.synchronize(stream)
        return copied

    # --- waiting -----------------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait on the host for all calls; raise what kernels report, and if the Buffer is destroyed meanwhile."""
        self.wait_for_calls(self.call_lock.check)

    def wait_for_calls(self, check_ended: Callable[[], None] = lambda: None) -> None:
        """Wait on the host for all calls; raise what kernels report. `check_ended` runs often. Its exception ends the wait."""
        end = self.order.end()
        self._await(end, check_ended)
        self.order.synchronize(end)

    def _await(self, end: driver.CudaEvent, check_ended: Callable[[], None]) -> None:
        self.monitor.begin_wait()
        while not end.done():
            check_ended()
            # The caller may have queued work that waits for a lost peer without a limit. So a time-out has to end this wait.
            self.monitor.check_peers()
            self.monitor.check_failure_notices()
            time.sleep(1e-5)


def address_of(view: View | None) -> int:
    """The address that a kernel gets. 0 means: no such array. An empty array may lie at 0; kernels get another address for it."""
    return 0 if view is None else view.ptr or _EMPTY
