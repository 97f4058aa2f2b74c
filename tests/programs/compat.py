"""Run the program for DeepEP V1 on the host backend: with a communicator, and with a process group of torch.distributed."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepep_v1
import numpy as np
import torch
from deepep_v1 import World
from limits import seconds
from mpi4py import MPI
from spmd import main, raises

from deepep_rt import (
    Buffer,
    EPConfigError,
    EPDestroyedError,
    EPInputError,
    EPOutOfMemoryError,
    EPTimeoutError,
    EPUnavailableError,
)
from deepep_rt.backends.overflow import too_many_rows
from deepep_rt.comm.mpi import MpiCommunicator
from deepep_rt.compat.buffer_cache import MessageCounts, SharedCounts


def check_normal(comm: MPI.Intracomm) -> None:
    deepep_v1.run_normal(World(comm, "cpu"))


def check_growth(comm: MPI.Intracomm) -> None:
    deepep_v1.run_growth(World(comm, "cpu"))


def check_ranks_only(comm: MPI.Intracomm) -> None:
    deepep_v1.run_ranks_only(World(comm, "cpu"))


def check_low_latency(comm: MPI.Intracomm) -> None:
    deepep_v1.run_low_latency(World(comm, "cpu"))


def check_smaller_maxima(comm: MPI.Intracomm) -> None:
    deepep_v1.run_smaller_maxima(World(comm, "cpu"))


def check_quantised_rows(comm: MPI.Intracomm) -> None:
    deepep_v1.run_quantised_rows(World(comm, "cpu"))


def check_two_in_flight(comm: MPI.Intracomm) -> None:
    deepep_v1.run_two_in_flight(World(comm, "cpu"))


def check_masks(comm: MPI.Intracomm) -> None:
    if comm.Get_size() == 1:
        print("skipped: one rank has no other rank to mask")
        return
    os.environ["DEEPEP_RT_TIMEOUT_S"] = str(seconds(4))
    try:
        deepep_v1.run_masks(World(comm, "cpu"))
        deepep_v1.run_lost_ranks(World(comm, "cpu"))
    finally:
        del os.environ["DEEPEP_RT_TIMEOUT_S"]


def check_handles_taken_apart(comm: MPI.Intracomm) -> None:
    deepep_v1.run_handles_taken_apart(World(comm, "cpu"))


def check_copied_results(comm: MPI.Intracomm) -> None:
    deepep_v1.run_copied_results(World(comm, "cpu"))


def check_gradients(comm: MPI.Intracomm) -> None:
    deepep_v1.run_gradients(World(comm, "cpu"))


def check_runtime(comm: MPI.Intracomm) -> None:
    """Call the methods of DeepEP's C++ object that programs call, on one host."""
    with World(comm, "cpu").buffer() as buffer:
        runtime = buffer.runtime
        assert (runtime.is_available(), runtime.is_internode_available()) == (True, False)
        assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (1, 0)
        assert [runtime.get_root_rdma_rank(is_global) for is_global in (True, False)] == [comm.Get_rank(), 0]
        assert (runtime.get_local_device_id() >= 0) == torch.cuda.is_available()
        if not torch.cuda.is_available():
            with raises(EPUnavailableError, "get_comm_stream"):
                runtime.get_comm_stream()


def check_errors(comm: MPI.Intracomm) -> None:
    deepep_v1.run_errors(World(comm, "cpu"))


def check_number_of_sms(comm: MPI.Intracomm) -> None:
    """A call uses the number of its `config`, or else the one of `set_num_sms`."""
    here, deep_ep = World(comm, "cpu"), deepep_v1.deep_ep
    with here.buffer(int(1e7), 0) as buffer:
        x = torch.ones((3, 256), dtype=torch.bfloat16)
        topk_idx = deepep_v1.routing(here, 1, 3, 2, 4 * comm.Get_size())
        layout = deepep_v1.layout_of(buffer, topk_idx, 4 * comm.Get_size())
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **layout)
        seen = [handle.buffer.num_sms]
        for call in (
            lambda config: buffer.dispatch(x, topk_idx=topk_idx, **layout, config=config),
            lambda config: buffer.dispatch(x, handle=handle, config=config),
            lambda config: buffer.combine(recv_x, handle, config=config),
        ):
            call(deep_ep.Config(6))
            seen.append(handle.buffer.num_sms)
            call(None)
            seen.append(handle.buffer.num_sms)
    assert seen == [deep_ep.Buffer.num_sms, *[6, deep_ep.Buffer.num_sms] * 3]


def check_room_for_results_that_are_held(comm: MPI.Intracomm) -> None:
    """A Buffer has the slots that the program sets, and expert numbers do not keep the memory of rows."""
    here, deep_ep = World(comm, "cpu"), deepep_v1.deep_ep
    try:
        deep_ep.Buffer.num_slots = 5
        with here.buffer(int(1e7), 0) as buffer:
            topk_idx = deepep_v1.routing(here, 1, 3, 2, 4 * comm.Get_size())
            layout = deepep_v1.layout_of(buffer, topk_idx, 4 * comm.Get_size())
            _, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
                torch.ones((3, 256), dtype=torch.bfloat16), topk_idx=topk_idx, topk_weights=torch.ones((3, 2)), **layout
            )
            assert handle.buffer.config.num_slots == 5
            for kept in (recv_idx, recv_weights, handle[3]):
                assert kept.untyped_storage().nbytes() == kept.numel() * kept.itemsize
    finally:
        deep_ep.Buffer.num_slots = 2


def check_outgrown_buffers(comm: MPI.Intracomm) -> None:
    """A Buffer serves calls that just fit, and `destroy` frees outgrown Buffers too."""
    here, handles = World(comm, "cpu"), []
    with here.buffer(1) as buffer:
        for tokens in (3, 128, 300):
            topk_idx = deepep_v1.routing(here, 1, tokens, 2, 4 * comm.Get_size())
            *_, handle, _ = buffer.dispatch(
                torch.ones((tokens, 256), dtype=torch.bfloat16),
                topk_idx=topk_idx,
                **deepep_v1.layout_of(buffer, topk_idx, 4 * comm.Get_size()),
                num_worst_tokens=max(128, tokens) * comm.Get_size(),
            )
            handles.append(handle)
        small, same, large = (handle.buffer for handle in handles)
        assert small is same
        assert small is not large
    for made in (small, large):
        with raises(EPDestroyedError, "destroyed"):
            made.synchronize()


def check_copies_of_a_model(comm: MPI.Intracomm) -> None:
    buffer = deepep_v1.deep_ep.Buffer(None, comm=comm)
    assert copy.deepcopy({"layer": buffer})["layer"] is buffer
    with raises(TypeError, "a Buffer cannot be pickled", "state_dict"):
        pickle.dumps(buffer)
    buffer.destroy()


def check_a_smaller_topk(comm: MPI.Intracomm) -> None:
    """A Buffer of a larger top-k serves a smaller one. It refuses tensors of neither width."""
    here, ranks = World(comm, "cpu"), comm.Get_size()
    x = torch.ones((4, 256), dtype=torch.bfloat16)
    eight, six = (deepep_v1.routing(here, 1, 4, topk, 8 * ranks) for topk in (8, 6))
    with here.buffer(low_latency_mode=True) as buffer:
        for topk_idx in (eight, six):
            weights = torch.ones(topk_idx.shape)
            y, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, 8 * ranks, use_fp8=False)
            assert handle.buffer.config.num_topk == 8, "the existing Buffer serves the call"
            for bad in ((topk_idx, weights[:, :4].clone()), (topk_idx[:, :4].clone(), weights)):
                with raises(EPInputError, ".shape=[4, 4]"):
                    buffer.low_latency_combine(y, *bad, handle)
            buffer.low_latency_combine(y, topk_idx, weights, handle)


@contextmanager
def _nodes(num_nodes: int, size: int) -> Iterator[int]:
    """Declare nodes, and return the ranks of a node."""
    os.environ["DEEPEP_RT_RANKS_PER_NODE"] = str(size // num_nodes)
    try:
        yield size // num_nodes
    finally:
        del os.environ["DEEPEP_RT_RANKS_PER_NODE"]


def check_internode(comm: MPI.Intracomm) -> None:
    if comm.Get_size() == 1:
        print("skipped: one rank is one node")
        return
    with _nodes(2, comm.Get_size()) as ranks_per_node:
        deepep_v1.run_internode(World(comm, "cpu"), ranks_per_node)
        deepep_v1.run_internode_growth(World(comm, "cpu"))
        deepep_v1.run_handles_taken_apart(World(comm, "cpu"))


def check_rows_that_do_not_fit(comm: MPI.Intracomm) -> None:
    """A dispatch brings rank 0 too many rows. Other ranks hear of it later, as on GPUs. All make room, and repeat the call."""
    here, size = World(comm, "cpu"), comm.Get_size()
    if size < 4:
        print("skipped: on fewer ranks, all rows fit")
        return
    real, num_needed, reported = Buffer.dispatch, 128 * size - 1, []

    def dispatch(self: Buffer, *args: Any, **kwargs: Any) -> Any:
        sent = real(self, *args, **kwargs)
        if self.config.num_max_recv_tokens < num_needed:
            reported.append(too_many_rows(0, num_needed, self.config.num_max_recv_tokens))
            if comm.Get_rank() == 0:
                raise reported.pop()
        return sent

    def synchronize(self: Buffer) -> None:
        while reported:
            raise reported.pop()

    x, topk_idx = torch.ones((4, 256), dtype=torch.bfloat16), deepep_v1.routing(here, 1, 4, 1, 2 * size, skip=0)
    with _nodes(2, size), here.buffer(1) as buffer:
        layout = deepep_v1.layout_of(buffer, topk_idx, 2 * size)
        patch = unittest.mock.patch.object
        with patch(Buffer, "dispatch", dispatch), patch(Buffer, "synchronize", synchronize):
            for _ in range(2):
                recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **layout)
                assert handle.buffer.config.num_max_recv_tokens >= num_needed
        assert not reported, "a later call would raise it"
        assert torch.equal(buffer.combine(recv_x, handle)[0], x)


def check_several_hosts(comm: MPI.Intracomm) -> None:
    """On several hosts, whose ranks share no memory, the Buffers of both modes send rows between them."""
    if comm.Get_size() == 1:
        print("skipped: one rank is on one host")
        return
    here, ranks = World(comm, "cpu"), comm.Get_size()
    x, topk_idx = torch.ones((4, 256), dtype=torch.bfloat16), deepep_v1.routing(here, 1, 4, 2, 2 * ranks, skip=0)
    one_each = unittest.mock.patch.object(MpiCommunicator, "ranks_on_host", lambda self: [self.Get_rank()])
    no_memory = unittest.mock.patch("deepep_rt.compat.buffer_cache.SharedCounts", side_effect=OSError("another host"))
    with one_each, no_memory, here.buffer(int(1e7), 1, low_latency_mode=True) as buffer:
        layout = deepep_v1.layout_of(buffer, topk_idx, 2 * ranks)
        recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **layout)
        assert torch.equal(buffer.combine(recv_x, handle)[0], x * layout["is_token_in_rank"].sum(1, keepdim=True))
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, 2 * ranks, use_fp8=False)
        weights = torch.full(topk_idx.shape, 0.5)
        assert torch.equal(buffer.low_latency_combine(rows, topk_idx, weights, handle)[0], x)
        assert (buffer.runtime.get_num_rdma_ranks(), buffer.runtime.get_rdma_rank()) == (ranks, comm.Get_rank())


def check_neither_group_nor_communicator(comm: MPI.Intracomm) -> None:
    with raises(EPConfigError, "group", "comm"):
        deepep_v1.deep_ep.Buffer(None)


def check_no_streams_without_a_gpu(comm: MPI.Intracomm) -> None:
    buffer = deepep_v1.deep_ep.Buffer(None, comm=comm)
    with raises(EPUnavailableError, "get_comm_stream"):
        buffer.get_comm_stream()
    with buffer.capture() as event:  # the work has finished
        event.current_stream_wait()


def check_two_groups(comm: MPI.Intracomm) -> None:
    """Even and odd ranks form groups that run different calls at the same time."""
    half = comm.Split(comm.Get_rank() % 2, -comm.Get_rank())
    if comm.Get_rank() % 2:
        deepep_v1.run_growth(World(half, "cpu"))
    else:
        deepep_v1.run_ranks_only(World(half, "cpu"))
    half.Free()


def check_a_size_hint_for_other_ranks(comm: MPI.Intracomm) -> None:
    """The constructor takes memory for a size hint only if the hint is for this number of ranks."""
    ranks = comm.Get_size()
    deepep_v1.deep_ep.Buffer.get_low_latency_rdma_size_hint(16, deepep_v1.HIDDEN, ranks + 1, ranks + 1)
    with World(comm, "cpu").buffer(low_latency_mode=True, enable_shrink=True):
        pass


def check_shared_counts(comm: MPI.Intracomm) -> None:
    """A rank reads the numbers of all ranks, call by call. It may correct its own, and an error names a rank that wrote none."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = SharedCounts(comm, timeout_s=seconds(0.5))
    for call in range(5):
        counts.post([0, 0])
        counts.post([rank, call])
        comm.Barrier()  # the start of a call would wait for all ranks too
        assert counts.read(2).tolist() == [[r, call] for r in range(size)]
    if rank != size - 1:
        counts.post([rank])
    with raises(EPTimeoutError, f"tokens of rank {size - 1}") as caught:
        counts.read(1)
    assert caught.error.peer == size - 1
    comm.Barrier()


def check_no_file_stays(comm: MPI.Intracomm) -> None:
    """The file of shared memory goes if a rank does not come, if an exception ends the making, and if memory is full."""
    rank, ranks, made = comm.Get_rank(), MpiCommunicator(comm), []
    make = tempfile.mkstemp

    def recorded(**options: Any) -> tuple[int, str]:
        made.append(make(**options))
        return made[-1]

    with unittest.mock.patch("tempfile.mkstemp", recorded):
        met = ranks.meet(20.0, "a test", "all ranks to meet")
        met.timeout_s = 0.5
        if rank == 0 and comm.Get_size() > 1:
            with raises(EPTimeoutError):
                SharedCounts(met, timeout_s=0.5)
        comm.Barrier()
        met = ranks.meet(20.0, "a test", "all ranks to meet")
        if rank == 0:
            with unittest.mock.patch("mmap.mmap", side_effect=KeyError("mine")), raises(KeyError):
                SharedCounts(met, timeout_s=0.5)
        else:
            met.bcast(None)
        no_room = unittest.mock.patch("os.ftruncate", side_effect=OSError("no room"))
        with no_room, raises(EPUnavailableError, "rank 0: no room"):
            SharedCounts(ranks.meet(20.0, "a test", "all ranks to meet"), timeout_s=0.5)
    assert len(made) == (0 if rank else 2 + (comm.Get_size() > 1))
    assert not any(os.path.exists(path) for _, path in made)


def check_tags_are_given_back(comm: MPI.Intracomm) -> None:
    """Destroyed Buffers, also those of calls, keep no tags."""
    here = World(comm, "cpu")
    with here.buffer(int(1e7), 1, low_latency_mode=True) as buffer:
        _dispatch(here, buffer)
    assert MpiCommunicator(comm)._duplicate._in_use == {0}


def check_message_counts(comm: MPI.Intracomm) -> None:
    """A rank reads the numbers of all ranks. If a rank does not come, this read and all later ones raise."""
    rank, size = comm.Get_rank(), comm.Get_size()
    ranks = MpiCommunicator(comm)
    counts = MessageCounts(ranks.Dup(), timeout_s=seconds(0.5))
    for call in range(5):
        counts.post([0])
        counts.post([rank, call])
        assert counts.read(2).tolist() == [[r, call] for r in range(size)]
    counts.close(in_touch=True)
    counts = MessageCounts(ranks.Dup(), timeout_s=seconds(0.5))
    if rank != size - 1:
        for _ in range(2):
            counts.post([rank])
            with raises(EPTimeoutError, f"rank {size - 1}", "the number of tokens"):
                counts.read(1)
    comm.Barrier()
    counts.close(in_touch=True)


def check_shared_counts_without_a_folder(comm: MPI.Intracomm) -> None:
    no_folder = unittest.mock.patch("tempfile.mkstemp", side_effect=FileNotFoundError("no folder"))
    with no_folder, raises(EPUnavailableError, "rank 0: no folder"):
        SharedCounts(comm, timeout_s=seconds(0.5))


def check_a_first_dispatch_that_others_do_not_make(comm: MPI.Intracomm) -> None:
    """An abandoned collective of the library does not mix with the program's collectives."""
    here, size = World(comm, "cpu"), comm.Get_size()
    os.environ["DEEPEP_RT_TIMEOUT_S"] = str(seconds(1))
    try:
        buffer = deepep_v1.deep_ep.Buffer(None, int(1e7), comm=comm)
    finally:
        del os.environ["DEEPEP_RT_TIMEOUT_S"]
    if comm.Get_rank() == 0 and size > 1:
        with raises(EPTimeoutError, "the first dispatch of its kind"):
            _dispatch(here, buffer)
    received = np.zeros(size, np.int64)
    comm.Iallgather(np.array([100 + comm.Get_rank()]), received).Wait()
    assert received.tolist() == [100 + rank for rank in range(size)]
    buffer.destroy()


def check_an_error_after_a_call_was_made(comm: MPI.Intracomm) -> None:
    """The other ranks have made the call, so the rank with the error has to count it too."""
    here = World(comm, "cpu")
    with here.buffer(int(1e7), 0) as buffer:
        expected = _dispatch(here, buffer)[0]
        real = Buffer.dispatch

        def dispatch(self: Buffer, *args: Any, **kwargs: Any) -> Any:
            real(self, *args, **kwargs)
            error = EPOutOfMemoryError("none left")
            error.call_made = True
            raise error

        with unittest.mock.patch.object(Buffer, "dispatch", dispatch if comm.Get_rank() == 0 else real):
            if comm.Get_rank() == 0:
                with raises(EPOutOfMemoryError):
                    _dispatch(here, buffer)
            else:
                _dispatch(here, buffer)
        # If the ranks counted calls differently, this call would wait until it times out.
        assert torch.equal(_dispatch(here, buffer)[0], expected)


def _dispatch(here: Any, buffer: Any) -> Any:
    topk_idx = deepep_v1.routing(here, 1, 3, 2, 4 * here.comm.Get_size())
    layout = deepep_v1.layout_of(buffer, topk_idx, 4 * here.comm.Get_size())
    return buffer.dispatch(torch.ones((3, 256), dtype=torch.bfloat16), topk_idx=topk_idx, **layout)


def check_normal_with_a_group(comm: MPI.Intracomm) -> None:
    with deepep_v1.settings_of_deepep_tests("cpu"), deepep_v1.world_of_a_group(comm, "cpu") as here:
        deepep_v1.run_normal(here)


def check_low_latency_with_a_group(comm: MPI.Intracomm) -> None:
    with deepep_v1.settings_of_deepep_tests("cpu"), deepep_v1.world_of_a_group(comm, "cpu") as here:
        deepep_v1.run_low_latency(here)


if __name__ == "__main__":
    main(__name__)
