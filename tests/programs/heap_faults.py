"""A rank dies while the ranks of a host share memory: python heap_faults.py N STEP... starts N processes for each step.

They need no GPU and no mpirun. All steps run at the same time, because the ranks mostly wait for the dead one.

The last rank is killed at its step. The other ranks raise an error that names it, in time; nothing of theirs stays mapped or open. Then
they share memory among themselves, while a region that they shared with the dead rank before is still mapped.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import virtual_gpu
from expect import raises
from limits import seconds
from ports import free_port

from deepep_rt import EPTimeoutError
from deepep_rt.comm import descriptors
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.cuda import heap, ipc, virtual_memory
from deepep_rt.cuda.transport import MemoryRequest

TIMEOUT_S, BYTES = seconds(1.5), 3 * virtual_gpu.UNIT
REQUEST = MemoryRequest(BYTES, TIMEOUT_S)
STEPS = {  # module and function: the rank dies before it
    "create": (virtual_memory, "create"),
    "export": (virtual_memory, "export"),
    "introduce": (descriptors, "_introduce"),
    "send": (descriptors, "_send_and_receive"),
    "receive": (descriptors, "_receive"),
    "reserve": (virtual_memory, "reserve"),
    "import": (virtual_memory, "import_from"),
    "map": (virtual_memory, "map_at"),
    "end": (heap, "_end_of_test"),
    "files-send": (descriptors, "_send_and_receive"),
    "pidfd-copy": (descriptors, "_copy_out"),
    "fabric-import": (virtual_memory, "import_from"),
    "ipc-allocate": (ipc, "allocate"),
    "ipc-open": (ipc, "open_from"),
}  # a way before the hyphen is forced


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _open() -> tuple[int, int]:
    """Count the descriptors and the mappings of memory of GPUs. The store opens and closes others."""
    found = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:gpu" in name for name in found), Path("/proc/self/maps").read_text().count("memfd:gpu")


def _comm(store: dist.Store, name: str, rank: int, size: int) -> StoreCommunicator:
    comm = StoreCommunicator(store, name, rank, size)
    comm.timeout_s = TIMEOUT_S
    return comm


def run_rank(step: str, size: int, rank: int, port: int) -> None:
    gpu, victim = virtual_gpu.install(), size - 1
    gpu.has_fabric = True
    way, has_way, _ = step.partition("-")
    if has_way:
        os.environ["DEEPEP_RT_SYMMETRIC_MEMORY"] = f"heap:{way}"
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    ranks = _comm(store, "all", rank, size)
    first = heap.HeapMemory(ranks, REQUEST)
    virtual_gpu.words(first.peers[(rank + 1) % size], BYTES)[:] = rank
    ranks.Barrier()
    before, left = _open(), gpu.left
    if rank == victim:
        module, name = STEPS[step]
        setattr(module, name, _die)
        heap.HeapMemory(ranks, REQUEST)
        _die()
    begin = time.monotonic()
    if step == "end":
        heap.HeapMemory(ranks, REQUEST).free()
    else:
        with raises(EPTimeoutError, f"rank {victim}"):
            heap.HeapMemory(ranks, REQUEST)
        assert time.monotonic() - begin < 2 * TIMEOUT_S + seconds(1)
    assert (_open(), gpu.left) == (before, left)
    assert (virtual_gpu.words(first.peers[victim], BYTES) == victim - 1).all(), "the memory of a dead rank is still there"
    survivors = _comm(store, "survivors", rank, victim)
    second = heap.HeapMemory(survivors, REQUEST)
    virtual_gpu.words(second.peers[(rank + 1) % victim], BYTES)[:] = rank
    survivors.Barrier()
    assert (virtual_gpu.words(second.ptr, BYTES) == (rank - 1) % victim).all()
    survivors.Barrier()
    second.free()
    first.free()
    assert gpu.left == (0, 0, 0)
    assert _open()[1] == 0
    print(f"{step}: rank {rank} passed\n", end="", flush=True)
    time.sleep(0 if rank else seconds(1))  # rank 0 holds the store


def main() -> None:
    size, steps = int(sys.argv[1]), sys.argv[2:]
    ports: dict[str, int] = {}
    for step in steps:
        while (port := free_port()) in ports.values():  # nothing listens there yet
            pass
        ports[step] = port
    start = multiprocessing.get_context("fork").Process  # copies of this process import nothing again
    ranks = {step: [start(target=run_rank, args=(step, size, rank, ports[step])) for rank in range(size)] for step in steps}
    for processes in ranks.values():
        for process in processes:
            process.start()
    for processes in ranks.values():
        for process in processes:
            process.join(seconds(60))
    codes = {step: [process.exitcode for process in processes] for step, processes in ranks.items()}
    assert all(found == [0] * (size - 1) + [-signal.SIGKILL] for found in codes.values()), codes


if __name__ == "__main__":
    main()
