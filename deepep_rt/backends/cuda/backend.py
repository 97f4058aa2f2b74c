"""The CUDA backend: it makes and destroys a Buffer's state on the GPU, together with the other ranks, and offers its calls."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from ... import _env
from ..._finalizers import may_call_cuda, run_waiting
from ...arrays.view import HOST, View
from ...comm.communicator import Communicator
from ...comm.consensus import Consensus, agreed, begin_step
from ...comm.failure_notice import FailureNotice
from ...config import MAX_NODES, Config
from ...cuda import driver
from ...cuda.local_heap import LocalHeap, SavedMemory
from ...cuda.nics import line_rate, list_nics
from ...cuda.provider import allocator_of, describe_ways
from ...cuda.topology import choose_device
from ...cuda.transport import MemoryRequest, SymmetricAllocator, SymmetricMemory, VirtualMemory
from ...description import LinkRates
from ...errors import EPConfigError, EPInputError, EPOutOfMemoryError, EPUnavailableError
from ...jit import compiler
from ...kernels.layout import Layout
from ...network import Choice, NetworkOptions
from ...results import CombineResult, DispatchResult, LowLatencyCombineResult, LowLatencyDispatchResult, generations
from ...statistics import Counters
from ...tuned import Tuning, TuningResult
from .. import saved_tunings
from ..agreement import announce
from ..base import BufferInfo, Call, CallForm, LowLatencyPreparation, PreparedCalls, ThroughputPreparation
from ..call_lock import CallLock
from ..hooks import OrdinaryLowLatency, OrdinaryThroughput, check_can_sleep
from ..path_choice import AgreedPath, Measure, agree_on_path, describe, usual_rates
from .autotune import autotune
from .expert_rows import ExpertRows
from .forms import form_of
from .fp8_rows import Fp8Rows
from .handle_tables import CudaHandleTables
from .link_rates import measure_links
from .low_latency import LowLatency
from .monitor import whole_call
from .result_memory import CallMemory
from .runtime import CudaRuntime
from .statistics import GpuStatistics
from .throughput import NodesThroughput, Throughput, ThroughputCalls

_TRANSPORT_NAMES = {"nvshmem": "NVSHMEM", "nixl": "a relay over NIXL", "mpi": "a relay over MPI", "wire": "the wire"}
MEASURE: Callable[..., LinkRates] | None = measure_links
"""Measures the links of GPUs for `path="auto"`. None: the usual rates of the transport decide."""

_dropped: list[CudaBackend] = []
"""Backends of Buffers that the program has dropped, and whose memory something may still use."""
_MIN_DESTROY_TIMEOUT_S = 30.0  # ranks may end their work at different times
_STOP_S = 10.0  # for the GPU's work, when no kernel waits for another rank any more


class CudaBackend:
    """A Buffer's GPU side; see `base.Backend`. All ranks have agreed on `config`.

    Handles know their Buffer by `serial`, its number in this process. `local_rank` chooses the GPU, unless the program did. If the pool is
    full, `copy_when_full` lets results be copied out of symmetric memory, instead of an error. `network` has options for the start of
    NVSHMEM, if this Buffer starts it.
    """

    name, shared_name = "cuda", ""

    def __init__(
        self,
        communicator: Communicator,
        config: Config,
        serial: int,
        *,
        local_rank: int,
        copy_when_full: bool,
        network: NetworkOptions | None = None,
        hosts: tuple[str, ...],
        transport: Choice,
    ) -> None:
        self.comm = comm = communicator.Dup()
        self._consensus = Consensus(comm)
        allocator = allocator_of(config, _env.symmetric_memory())
        device = choose_device(comm, local_rank, self._consensus, allocator)
        with self._consensus.step():
            self.context = driver.CurrentContext()
            _dropped[:] = [dropped for dropped in _dropped if not dropped._free_if_unused()]
            driver.trim_memory_pool()  # other Buffers of this process may have left free memory there
            free_bytes, arch, name = driver.free_bytes(), compiler.target_arch(), driver.device_name(device)
            allocator.check_available()
        path, told = None, comm.allgather((f"{name} ({arch})", _env.symmetric_memory()))
        gpus, providers = zip(*told, strict=True)
        if len(set(providers)) > 1:
            raise EPConfigError(
                f"DEEPEP_RT_SYMMETRIC_MEMORY is {', '.join(providers)} on ranks 0 to {len(told) - 1}; expected the same on all ranks. Set "
                f"it for all of them."
            )
        self._config = config
        if config.has_network:
            measure = None
            if MEASURE is not None and config.num_nodes <= MAX_NODES and self._may_measure(allocator):
                allocate = functools.partial(self._allocate, allocator, network=network)
                measure = functools.partial(MEASURE, device=device, arch=arch, context=self.context, allocate=allocate)
            path = self._agree_on_path(config, hosts, gpus, measure, network)
            config = dataclasses.replace(config, path=path.choice.name)
        self._tuning_key = saved_tunings.key_of(config, gpus)
        mine = saved_tunings.load(self._tuning_key, config) if comm.Get_rank() == 0 else None
        gathered = comm.allgather((free_bytes, arch, mine and saved_tunings.plain(mine)))
        all_free_bytes, archs, (choice_of_first, *_) = zip(*gathered, strict=True)
        stored = saved_tunings.of_plain(choice_of_first) if choice_of_first else None  # no two ranks may use different ones
        self._archs, self._sms_are_set = archs, not config.leaves_sms
        if stored is not None and config.leaves_sms:
            config = dataclasses.replace(config, num_sms=stored.num_sms, leaves_sms=False)
        self._config, layout = config, Layout(config)
        self.info = BufferInfo(serial, config, device)
        self.description = describe(self.name, config, hosts, gpus, transport, path, _memory_of(layout, False))
        self.call_lock = CallLock(self.context)
        self.tables = CudaHandleTables(self.info, layout)
        self._describe_tuning(stored)
        _check_free_memory(layout, all_free_bytes)
        self._memory = self._allocate(allocator, layout, network)
        self._frees_alone = self._memory.is_local and not config.has_relay  # the relay of a peer may still send here
        self._saved = SavedMemory(())  # what a sleep keeps of tables and results
        self._saved_flags = SavedMemory(())  # and of flags, which begin anew if others wake
        self._resources = ExitStack()
        self._resources.callback(self._memory.free)
        try:
            with self._consensus.step():  # peers write to control memory only after all ranks have cleared theirs
                self.runtime = CudaRuntime(
                    self.info,
                    layout,
                    comm,
                    self._memory,
                    arch,
                    self.context,
                    self.call_lock,
                    self._resources,
                    stored.shapes if stored else {},
                )
                self._monitor = self.runtime.monitor
                if config.has_slots:
                    self.runtime.begin_generation(comm.numbers, 0)
                self.throughput = (
                    NodesThroughput(self.runtime, layout.nodes, copy_when_full)
                    if layout.nodes
                    else Throughput(self.runtime, copy_when_full)
                )
                self.low_latency = LowLatency(self.runtime, archs)
                self._statistics = self._make_statistics(layout)
                driver.synchronize(0)
            if self.runtime.network is not None:
                self.runtime.network.start_relay()
            kind = self._memory.way, self.throughput.results.grows
            ways, grow = zip(*(comm.allgather(kind) if config.has_network else [kind]), strict=True)  # each host has its own
            regions = _memory_of(layout, self._memory.heap is not None)
            self.description = dataclasses.replace(
                self.description, provider=describe_ways(ways), grows=all(grow), memory=regions
            )
        except Exception:
            if self._frees_alone:
                if self._stops_in_time(False):
                    self._resources.close()
            elif self._all_ranks_free(self._memory.consensus is None, config.timeout_s):
                self._resources.close()
                self._free_communicators()
            raise
        # A method that only passes a call on would add to the host's time of each call.
        memory = CallMemory(self.runtime)
        by_expert = ExpertRows(self.runtime, self.throughput, memory)
        self._calls = ThroughputCalls(self.runtime, self.throughput, by_expert, Fp8Rows(self.runtime, memory, archs))
        self.dispatch, self.combine = self._calls.dispatch, self._calls.combine
        self.low_latency_dispatch, self.low_latency_combine = self.low_latency.dispatch, self.low_latency.combine
        self.low_latency_combine_view = self.low_latency.combine_view
        self.set_mask, self.masked_ranks = self.low_latency.set_mask, self.low_latency.masked_ranks
        self.copy_ceilings = self.throughput.copy_ceilings
        self.check, self.synchronize = self.runtime.monitor.check, self.runtime.synchronize
        self.purposes = self.runtime.purposes
        self._listen()
        between_groups = ""
        if config.has_network:
            between_groups = f" and {_TRANSPORT_NAMES[config.transport]} between groups of {config.node_size}"
        announce(comm, f"CUDA ({arch})", f"NVLink or PCIe peer access{between_groups}", layout.size_hint["total"])

    def _may_measure(self, allocator: SymmetricAllocator) -> bool:
        """Return whether all ranks may measure links. Collective.

        Ranks of other Buffers would have to allocate memory for it too, and may have saved rates. A complete kernel cache has no kernel
        for it.
        """
        comm = self.comm
        return not any(comm.allgather(allocator.is_shared(comm) or _env.assert_cached()))

    def _agree_on_path(
        self,
        config: Config,
        hosts: Sequence[str],
        gpus: Sequence[str],
        measure: Measure | None,
        network: NetworkOptions | None,
    ) -> AgreedPath:
        topology = {
            "backend": self.name,
            "transport": config.transport,
            "ranks_per_node": config.node_size,
            "hosts": list(hosts),
            "gpus": list(gpus),
        }
        if network is not None and config.has_wire:
            topology["wire"] = [network.wire_bandwidth, network.wire_latency]
        usual = usual_rates(config.transport, len(set(hosts)), line_rate(list_nics()))  # those of rank 0 count
        return agree_on_path(self.comm, config, topology, usual, measure)

    def _allocate(self, allocator: SymmetricAllocator, layout: Layout, network: NetworkOptions | None) -> SymmetricMemory:
        """Allocate symmetric memory on all ranks, or on none."""
        config, comm, near_bytes = self._config, self.comm, layout.near_bytes
        num_slots = config.num_ranks if config.has_slots else None
        request = MemoryRequest(near_bytes, config.timeout_s, config.node_size, network, num_slots=num_slots)
        if config.has_network and not config.has_relay:
            request = dataclasses.replace(request, num_bytes=layout.symmetric.num_bytes)
            if not config.has_ring:
                request = dataclasses.replace(request, near_bytes=near_bytes, network_start=layout.network_start)
        if not config.has_relay:  # the ranks allocate together, so they fail together
            return allocator.allocate(comm, request)
        memory = None
        try:
            with self._consensus.step():
                memory = allocator.allocate(comm, request)
        except BaseException as error:
            # If another host failed, all ranks of this one have the memory, and free it together. No rank uses it yet.
            if memory is not None and (memory.is_local or isinstance(error, EPUnavailableError)):
                memory.free()
            raise
        assert memory is not None
        return memory

    def _make_statistics(self, layout: Layout) -> GpuStatistics | None:
        if not self._config.statistics:
            return None
        return GpuStatistics(layout, self.runtime.state, self.context, self.throughput.results, self._resources)

    @property
    def num_sms(self) -> int:
        """SMs of the next dispatch and combine."""
        return self.throughput.num_sms

    @num_sms.setter
    def num_sms(self, num_sms: int) -> None:
        self.throughput.num_sms = num_sms
        self._sms_are_set = True

    @whole_call("kPhaseDispatchRows")
    def autotune(self, num_tokens: int, dtype: str, limit_s: float, saves: bool) -> TuningResult:
        """Measure, save the choice and use it from now on; see `Buffer.autotune`."""
        with self.context:
            result = autotune(self.runtime, self.throughput, self._archs, self._tuning_key, num_tokens, dtype, limit_s, saves)
            self.runtime.use_shapes(result.chosen.shapes)
        if not self._sms_are_set:
            self.throughput.num_sms = result.chosen.num_sms
        self._describe_tuning(result.chosen)
        return result

    def _describe_tuning(self, tuning: Tuning | None) -> None:
        if tuning is not None:
            self.description = dataclasses.replace(self.description, tuning=str(tuning))

    def begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Choose the stream of a call; raise if an earlier call timed out."""
        self.runtime.monitor.check_peers()
        return self.runtime.order.begin(x, async_finish, previous_event, stream)

    def call_form(self, inputs: Any, call: Call) -> CallForm | None:
        """Return the form of a call without a hook, if it has one; see `CallForms`."""
        return form_of(self.runtime, self.throughput, self.low_latency, inputs, call)

    def prepare_throughput(self, preparation: ThroughputPreparation) -> PreparedCalls[DispatchResult, CombineResult]:
        """Prepare calls; see `Buffer.prepare_throughput`. Each call copies arrays in host memory, so such calls are ordinary ones."""
        if any(view.device == HOST for view in preparation.arrays):
            return OrdinaryThroughput(self, preparation)
        return self._calls.prepare(preparation)

    def prepare_low_latency(
        self, preparation: LowLatencyPreparation
    ) -> PreparedCalls[LowLatencyDispatchResult, LowLatencyCombineResult]:
        """Prepare calls; see `Buffer.prepare_low_latency`. Each call copies arrays in host memory, so such calls are ordinary ones."""
        given = preparation.dispatch
        if any(
            view is not None and view.device == HOST for view in (given.x, given.topk_idx, given.topk_weights, given.x_scales)
        ):
            return OrdinaryLowLatency(self, preparation, self.low_latency.hooks)
        return self.low_latency.prepare(preparation)

    def counters(self, during_capture: bool = False) -> Counters:
        """Return what `Buffer.statistics` tells, of what the GPU has done so far."""
        assert self._statistics is not None
        if not during_capture:
            with self.context:
                self.runtime.order.check_not_captured("statistics()")
        return self._statistics.counters()

    def copy(self, source: int, out: View, stream: int | None) -> None:
        """Copy GPU memory in the order of the stream."""
        assert stream is not None
        driver.copy_async(out.ptr, source, out.nbytes, stream)

    @whole_call("kPhaseDispatchRows")
    def sleep(self, keeps_results: bool) -> None:
        """Give memory back to the GPU; see `Buffer.sleep`. The kernels' State and the status page stay."""
        memory, heap = self._memory_that_sleeps()
        check_can_sleep(self.low_latency.hooks, self.masked_ranks())
        with self.context:
            self._finish_calls("sleep()")
            met = begin_step(self.comm, self._monitor.failure_notice, self._config.timeout_s, "sleep")
            agreed(met, self._end_work)  # of a rank that still sends to this one, too
            self._saved, self._saved_flags = agreed(met, functools.partial(self._save, keeps_results))
            met.release()
            memory.sleep()
            heap.sleep()
            self.runtime.stream_pool.trim()

    def _save(self, keeps_results: bool) -> tuple[SavedMemory, SavedMemory]:
        """Give up free memory, and copy what has to stay to host memory."""
        runtime, results = self.runtime, self.throughput.results
        results.shrink()
        kept = runtime.in_use(with_results=keeps_results) + (results.in_use() if keeps_results else [])
        return SavedMemory(kept), SavedMemory(runtime.flags)

    @whole_call("kPhaseDispatchRows")
    def wake(self) -> None:
        """Take memory again, at the same addresses; see `Buffer.wake`. After an error, which is that of all ranks, the Buffer sleeps."""
        memory, heap = self._memory_that_sleeps()
        self._monitor.check_peers()
        with self.context, ExitStack() as undone:
            met = begin_step(self.comm, self._monitor.failure_notice, self._config.timeout_s, "wake")
            undone.callback(heap.sleep)
            agreed(met, heap.wake)
            memory.wake(self.comm, self._config.timeout_s)
            undone.callback(memory.sleep)
            if self._config.low_latency:
                self.low_latency.clear_inboxes()
            self._saved.restore()
            self._saved_flags.restore()
            agreed(met, functools.partial(driver.synchronize, 0))  # peers write only after all ranks have their flags
            met.release()
            undone.pop_all()
        self._saved = self._saved_flags = SavedMemory(())

    def _listen(self) -> None:
        """Wait no longer for a rank that has left."""
        self.comm.timeout_s, notice = self._config.timeout_s, self._monitor.failure_notice
        self.comm.heard = functools.partial(notice.heard, "a step of all ranks")
        self._consensus.listen(notice)

    def lose(self, rank: int, reason: str) -> None:
        """Note that the process of a rank has ended. Kernels that wait for it end. This makes no call of CUDA, so it waits for nothing."""
        self._monitor.failure_notice.lose(rank, reason)
        if self._config.has_slots:  # otherwise no kernel reads it
            self.runtime.page.lost.value |= 1 << rank

    def lost_ranks(self) -> tuple[int, ...]:
        """Return the ranks that this one knows to be lost, ascending."""
        return self._monitor.lost_ranks(self.masked_ranks())

    def leave_members(self) -> None:
        """Give the memory back, without the other members; see `Buffer.shrink`. The host keeps results."""
        memory, heap = self._memory_that_sleeps()
        with self.context:
            self.runtime.order.check_not_captured("shrink()")
            self._end_calls(aborts=False)
            self.low_latency.hooks.drop_all()
            self._save_own_results(memory)
            self._saved.add(self.runtime.in_use(with_results=True))
            memory.sleep()
            heap.sleep()
            self.runtime.stream_pool.trim()

    def change_members(self, comm: Communicator, notice: FailureNotice, generation: int, aborts: bool) -> None:
        """Begin a generation with other members; see `Buffer.shrink`. After an error there is no memory until this succeeds."""
        memory, runtime = self._memory.heap, self.runtime
        assert memory is not None
        with self.context:
            runtime.order.check_not_captured("a change of the members")
            self._end_calls(aborts)
            self.low_latency.begin_generation()
            self._save_own_results(memory)
            if runtime.local_heap is not None and not runtime.local_heap.is_mapped:  # this process comes back
                runtime.local_heap.wake()
            memory.replace(comm, self._config.timeout_s)
            runtime.begin_generation(comm.numbers, generation)
            if self._config.low_latency:
                self.low_latency.clear_inboxes()
            self._saved.restore()
            agreed(comm, functools.partial(driver.synchronize, 0))  # peers write only after all members are ready
            self._saved = self._saved_flags = SavedMemory(())
        generations[0] += 1
        self.info.since = generations[0]
        self.comm = runtime.comm = comm
        self._consensus = Consensus(comm)
        self._monitor.begin_generation(notice)
        self.call_lock.notice = notice
        self._listen()

    def _save_own_results(self, memory: VirtualMemory) -> None:
        """Copy the results in symmetric memory to the host. A change that has failed before has done it, if there is no memory now."""
        if memory.is_mapped:
            self._saved = SavedMemory(self.throughput.results.in_use())

    def _end_calls(self, aborts: bool) -> None:
        """Wait for all work of this GPU. Kernels that still wait for a rank after `timeout_s`, or at once with `aborts`, give up."""
        if not aborts and self._stops_in_time(True):
            return
        if not self._stops_in_time(False):
            raise EPUnavailableError(
                "the GPU does not end its work; expected that it ends. End this process, and let another join"
            )

    def trim(self) -> int:
        """Give back memory that is free; see `Buffer.trim`."""
        with self.context:
            self._finish_calls("trim()")
            self._end_work()
            self.runtime.stream_pool.trim()
            return self.throughput.results.shrink()

    def _finish_calls(self, action: str) -> None:
        self.runtime.order.check_not_captured(action)
        self.runtime.synchronize()

    def _end_work(self) -> None:
        """Wait for all work of this GPU, also of other libraries. Raise EPUnavailableError if it does not end in time."""
        if not self._stops_in_time(True):
            raise EPUnavailableError("the GPU does not end its work; expected that it ends. Wait for the program's own work.")
        driver.synchronize_all()

    def _memory_that_sleeps(self) -> tuple[VirtualMemory, LocalHeap]:
        memory, local = self._memory.heap, self.runtime.local_heap
        if memory is None or local is None:
            raise EPUnavailableError(
                f"this memory cannot sleep: {self.description.provider}; expected virtual memory of CUDA. Set "
                f"DEEPEP_RT_SYMMETRIC_MEMORY=heap on all ranks, which says why there is none."
            )
        return memory, local

    def destroy(self, in_touch: bool, error: BaseException | None) -> None:
        """Release everything, if all ranks can. `error` is the exception that ends the Buffer; the other ranks hear of it.

        `in_touch` says whether the other ranks call this too. Raise EPTimeoutError if a rank is silent, unless time-outs mask ranks.
        """
        runtime = self.runtime
        runtime.is_destroyed = True
        try:
            self._destroy(in_touch, error)
        finally:
            if runtime.network is not None:
                runtime.network.close()
            self.low_latency.close()
        if not runtime.monitor.is_broken:  # then the GPU may still be busy
            run_waiting()  # the relay has ended, and no call may follow

    def _destroy(self, in_touch: bool, error: BaseException | None) -> None:
        monitor, is_sound = self.runtime.monitor, False
        try:
            if error is not None:
                monitor.failure_notice.notify(error)
            if in_touch and not monitor.is_broken:
                self.runtime.wait_for_calls()
                is_sound = not monitor.is_broken and not self.masked_ranks()
        finally:
            if self._statistics is not None:
                self._statistics.close()
            if self._frees_alone:
                self._leave(is_sound)
            else:
                self._leave_together(is_sound)

    def drop(self) -> bool:
        """The program has dropped the Buffer: free its memory without the other ranks. Return whether that was possible now.

        It waits for nothing, and lets kernels that run send their rows. Memory that they, the program or a captured graph may still use is
        looked at again when a Buffer is made.
        """
        if not self._frees_alone:
            return False
        with suppress(EPUnavailableError):  # the context has failed, and the memory with it
            if may_call_cuda() and self._free_if_unused():
                return True
        _dropped.append(self)
        return False

    def _free_if_unused(self) -> bool:
        """Free the memory of a Buffer that was dropped, unless something may still use it. Return whether it is free."""
        runtime = self.runtime
        if runtime.order.has_captured or runtime.in_use(with_results=True) or self.throughput.results.in_use():
            return False
        with self.context, driver.relaxed_capture_mode():
            try:
                has_ended = runtime.order.end().done()
            except EPInputError:  # the program captures its stream
                return False
            if has_ended:
                self.low_latency.close()
                self._free_memory()
        return has_ended

    def _leave(self, is_sound: bool) -> None:
        """Free the memory without the other ranks. `is_sound` says whether no call of this rank has failed."""
        if self._stops_in_time(is_sound):
            self._free_memory()
        else:
            warnings.warn(
                "the GPU does not end its work; expected work that ends. The memory of this Buffer stays allocated",
                stacklevel=2,
            )
        if is_sound:
            self._free_communicators()

    def _leave_together(self, is_sound: bool) -> None:
        """Free the memory on all ranks. If one may never come to free its own, free what no network writes to."""
        config = self._config
        limit_s = config.timeout_s if config.on_timeout == "mask" else max(config.timeout_s, _MIN_DESTROY_TIMEOUT_S)
        if self._all_ranks_free(is_sound, limit_s):
            self._free_memory()
            self._free_communicators()
            return
        if self._memory.heap is not None and self._stops_in_time(False):
            self._memory.heap.free()  # peers keep alive what they still write to
        for consensus in (self._consensus, self._memory.consensus):
            if consensus is not None and consensus.silent_ranks:
                if config.on_timeout == "raise":
                    raise consensus.timeout_error()
                warnings.warn(f"{consensus.timeout_error()} The memory of this Buffer stays allocated", stacklevel=2)

    def _stops_in_time(self, is_sound: bool) -> bool:
        """Return whether the work of this GPU has ended in time. Unless the Buffer is sound, kernels stop waiting for other ranks."""
        with self.context:
            try:
                if not is_sound and (runtime := getattr(self, "runtime", None)) is not None:
                    runtime.monitor.abort_waits()
                end = driver.end_of_work()
            except EPUnavailableError:  # the context has failed, and its work with it
                return True
            limit = time.monotonic() + (self._config.timeout_s if is_sound else _STOP_S)
            while not (is_over := end.done()) and time.monotonic() < limit:
                time.sleep(1e-4)
        return is_over

    def _free_memory(self) -> None:
        self.runtime.order.drop_arguments()
        self._resources.close()

    def _all_ranks_free(self, is_sound: bool, limit_s: float) -> bool:
        """Ask all ranks whether they can free their memory. Memory is freed by all ranks or by none."""
        return self._memory.all_free(self._consensus.all_ok(is_sound, "destroy their Buffer", limit_s), limit_s)

    def _free_communicators(self) -> None:
        self._consensus.free()
        self.comm.Free()


def _memory_of(layout: Layout, is_virtual: bool) -> dict[str, int]:
    """Return the bytes of each region. A network of NVSHMEM has low-latency inboxes of its own, if the region is virtual memory."""
    hint, config = layout.size_hint, layout.config
    if config.has_relay:
        return hint | {"pinned on the host": layout.network_bytes + layout.ring_bytes}
    if not (config.has_network and is_virtual):
        return hint
    inboxes = layout.symmetric.sizes["low_latency"]
    return hint | {"low_latency of the network": inboxes, "total": hint["total"] + inboxes}


def _check_free_memory(layout: Layout, free_bytes: Sequence[int]) -> None:
    """Raise on all ranks if one has too little memory. `free_bytes` are those of each rank's GPU."""
    hint = layout.size_hint
    for rank, free in enumerate(free_bytes):
        if free < hint["total"]:
            regions = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in hint.items())
            raise EPOutOfMemoryError(
                f"a Buffer of these sizes takes {hint['total'] / 1e9:.2f} GB a rank ({regions}); rank {rank} has {free / 1e9:.2f} GB "
                f"free. Lower num_max_tokens_per_rank or num_slots"
            )
