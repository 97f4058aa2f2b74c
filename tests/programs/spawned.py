"""A program without mpirun: python spawned.py cuda|host N starts N processes. Without N, torchrun has started them.

With `one-gpu` after N, each process sees one GPU.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from datetime import timedelta

import deepep_v1
import torch
import torch.distributed as dist
from expect import raises
from limits import seconds
from ports import free_port

from deepep_rt import Buffer, EPTimeoutError, _env
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.torch import communicator

HIDDEN, TOPK = 256, 2


def check_round_trips(backend: str, group: dist.ProcessGroup) -> None:
    """Make both kinds of calls, with experts that return their rows."""
    ranks = communicator(group)
    assert isinstance(ranks, StoreCommunicator)
    assert communicator(group) is ranks
    experts, device = 4 * ranks.Get_size(), "cuda" if backend == "cuda" else "cpu"
    x = torch.randn(20 + ranks.Get_rank(), HIDDEN, device=device).bfloat16()
    idx = torch.rand(x.shape[0], experts, device=device).argsort(1)[:, :TOPK].contiguous()
    sizes = dict(num_max_tokens_per_rank=32, hidden=HIDDEN, num_topk=TOPK, num_experts=experts, low_latency=True)
    with Buffer(ranks, backend=backend, **sizes) as buffer:
        assert sum(ranks.allgather(x.shape[0])) == sum(20 + rank for rank in range(ranks.Get_size()))
        sent = buffer.dispatch(x, idx)
        num_copies = deepep_v1.tokens_in_ranks(idx, ranks.Get_size(), experts).sum(1, keepdim=True)
        assert deepep_v1.difference(buffer.combine(sent.recv_x, sent.handle).x, x.float() * num_copies) < 1e-5
        weights = torch.full(idx.shape, 1 / TOPK, device=device)
        quick = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        back = buffer.low_latency_combine(quick.recv_x, idx, weights, quick.handle).x
        assert deepep_v1.difference(back, x) < 1e-5


def check_failure_notice(backend: str, ranks: StoreCommunicator) -> None:
    """A rank leaves its Buffer after an exception. The other ranks raise at once."""
    experts, device = ranks.Get_size(), "cuda" if backend == "cuda" else "cpu"
    x, idx = torch.ones(4, HIDDEN, device=device).bfloat16(), torch.zeros(4, 1, dtype=torch.int64, device=device)
    sizes = dict(num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=1, num_experts=experts, timeout_s=seconds(30))
    start = time.monotonic()
    if ranks.Get_rank() == 0:
        with raises(KeyError, "mine"), Buffer(ranks, backend=backend, **sizes):
            raise KeyError("mine")
    else:
        with (
            raises(EPTimeoutError, "rank 0", "left the Buffer", "KeyError", "mine"),
            Buffer(ranks, backend=backend, **sizes) as buffer,
        ):
            for _ in range(2):
                buffer.dispatch(x, idx)
    assert time.monotonic() - start < seconds(20)
    ranks.Barrier()


def check_rank_that_makes_its_buffer_late(ranks: StoreCommunicator) -> None:
    """A rank makes its Buffer after the other ranks have timed out. All ranks retry, and then make it together."""
    late = ranks.Get_rank() == ranks.Get_size() - 1
    for pause in (seconds(1.2), seconds(0.1), 0, 0) if late else (0, 0, 0, 0):
        time.sleep(pause)
        try:
            buffer = Buffer(
                ranks,
                num_max_tokens_per_rank=8,
                hidden=HIDDEN,
                num_topk=1,
                num_experts=ranks.Get_size(),
                timeout_s=seconds(0.5),
                backend="host",
            )
            break
        except EPTimeoutError:
            continue
    buffer.destroy()


def make_group_by_hand(store: dist.Store, name: str, rank: int, size: int) -> dist.ProcessGroup:
    """Make a group that torch.distributed does not list, over a separate store. vLLM's data-parallel engines have such groups."""
    prefix = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(prefix, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.ProcessGroupGloo(prefix, rank, size, timeout=timedelta(seconds=seconds(60)))
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def check_all(backend: str) -> None:
    if backend == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    check_round_trips(backend, dist.group.WORLD)
    check_failure_notice(backend, communicator())
    if dist.get_world_size() > 1:
        check_rank_that_makes_its_buffer_late(communicator())
    is_heap = _env.symmetric_memory() != "nvshmem"
    if backend == "host" or is_heap:  # NVSHMEM needs groups before the first Buffer of all ranks
        for odd in (0, 1):
            members = list(range(odd, dist.get_world_size(), 2))
            group = dist.new_group(members) if members else None
            if dist.get_rank() in members:
                check_round_trips(backend, group)
    world = deepep_v1.World(communicator(), "cuda" if backend == "cuda" else "cpu", dist.group.WORLD)
    deepep_v1.run_normal(world)
    deepep_v1.run_growth(world)
    deepep_v1.run_low_latency(world)
    if backend == "host" and world.num_ranks > 1:
        os.environ["DEEPEP_RT_RANKS_PER_NODE"] = "1"  # between nodes, numbers of tokens travel over the store
        deepep_v1.run_internode(world, 1)
        deepep_v1.run_internode_growth(world)
        del os.environ["DEEPEP_RT_RANKS_PER_NODE"]
    assert "mpi4py.MPI" not in sys.modules
    assert not (is_heap and "nvshmem.bindings" in sys.modules)
    dist.barrier()
    if dist.get_rank() == 0:
        print("all passed", flush=True)
    dist.destroy_process_group()


def _spawned(rank: int, size: int, backend: str, ports: tuple[int, int], one_gpu: bool) -> None:
    if one_gpu:  # CUDA has not started yet
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(size)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank]
    address = dict(init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=size)
    store = dist.TCPStore("127.0.0.1", ports[1], is_master=rank == 0, wait_for_workers=False)
    if backend == "host":
        check_round_trips(backend, make_group_by_hand(store, "before the default group", rank, size))
    dist.init_process_group("gloo", **address)
    if backend == "host":
        check_round_trips(backend, make_group_by_hand(store, "in another order", size - 1 - rank, size))
    check_all(backend)
    gc.collect()  # errors that the checks expected hold frames with Buffers, in cycles
    time.sleep(seconds(2) * bool(rank))  # until rank 0 has closed its store
    dist.init_process_group("gloo", **address)  # deepep_rt must not keep the old store, which would answer here
    check_round_trips(backend, dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    backend = sys.argv[1]
    if len(sys.argv) > 2:
        size = int(sys.argv[2])
        method = "fork" if backend == "host" else "spawn"  # CUDA needs spawn, which imports everything again
        given = size, backend, (free_port(), free_port()), "one-gpu" in sys.argv
        torch.multiprocessing.start_processes(_spawned, given, nprocs=size, start_method=method)
    else:
        dist.init_process_group(os.environ.get("BACKEND", "gloo"))
        check_all(backend)


if __name__ == "__main__":
    main()
