"""Memory of slots whose processes come and go, between real processes without a GPU: see `virtual_gpu`.

heap_slots.py SEED ROUNDS starts ranks. Each round kills one, stops one that is given up, or starts one, at a random moment. The others take
fresh memory with the members that are left. Each member writes to all others all the time, also while others go, and after it is given up.
The processes are copies of one that has loaded the libraries.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import virtual_gpu

from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import StoreServer
from deepep_rt.cuda import heap
from deepep_rt.cuda.transport import MemoryRequest

GPU = virtual_gpu.install()
SLOTS, BYTES, LIMIT_S = 4, 2 * virtual_gpu.UNIT, 20.0
MOST_GIVEN_UP = 4  # processes that run on after the others have left them out; all the time they write


def num_held() -> tuple[int, int]:
    """Count the descriptors of this process, and the mappings of memory of GPUs."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:gpu")


def run_slot(address: str, slot: int, first: int) -> None:
    """Be one member from generation `first` on. The store tells who the members of each generation are."""
    host, port = address.rsplit(":", 1)
    store, held, members = StoreClient(host, int(port)), dict[int, tuple[int, int]](), list[int]()
    memory: heap.HeapMemory | None = None
    number = first

    def write(value: int) -> None:
        for peer in members if memory is not None else ():
            virtual_gpu.words(memory.peers[peer], BYTES)[slot] = value

    while True:
        while not store.check([f"members/{number}"]):
            write(number * SLOTS + slot)
            time.sleep(2e-4)  # for the other processes
            time.sleep(1e-4)
        text = store.get(f"members/{number}").decode()
        if text == "end":
            break
        now = [int(part) for part in text.split(",")]
        while slot not in now:  # it is given up, and does not know that; the parent ends it
            write(0xDEAD)
            time.sleep(1e-4)
        members = now
        comm = StoreCommunicator(store, f"generation/{number}", members.index(slot), len(members), numbers=members)
        comm.timeout_s = LIMIT_S
        if memory is None:
            alone = StoreCommunicator(store, f"alone/{number}/{slot}", 0, 1, numbers=[slot])
            memory = heap.HeapMemory(alone, MemoryRequest(BYTES, LIMIT_S, num_slots=SLOTS))
            places = list(memory.peers)
        memory.replace(comm, LIMIT_S)
        assert list(memory.peers) == places, "addresses changed"
        virtual_gpu.words(memory.ptr, BYTES)[:] = 7
        comm.Barrier()
        write(number * SLOTS + slot)
        comm.Barrier()
        found = virtual_gpu.words(memory.ptr, BYTES)[:SLOTS].tolist()
        expected = [number * SLOTS + other if other in members else 7 for other in range(SLOTS)]
        assert found == expected, f"slot {slot}, generation {number} of {members}: {found}"
        stays = num_held()
        assert held.setdefault(len(members), stays) == stays, f"something stays: {held}, {stays}"
        comm.Barrier()
        store.set(f"done/{number}/{slot}", "")
        number += 1
    if memory is not None:
        memory.free()
    assert GPU.left == (0, 0, 0), GPU.left


def main(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    server = StoreServer()
    server.serve_in_thread()
    host, port = server.address.rsplit(":", 1)
    store = StoreClient(host, int(port))

    context = mp.get_context("forkserver")  # this process has threads
    context.set_forkserver_preload(["heap_slots"])

    def start(slot: int, number: int) -> Any:
        process = context.Process(target=run_slot, args=(server.address, slot, number))
        process.start()
        return process

    living, given_up, kills = {slot: start(slot, 0) for slot in range(3)}, list[Any](), 0
    try:
        for number in range(rounds + 1):
            members = ",".join(map(str, sorted(living))) if number < rounds else "end"
            store.set(f"members/{number}", members)
            if number == rounds:
                break
            end = time.monotonic() + LIMIT_S
            while not store.check([f"done/{number}/{slot}" for slot in living]):
                assert time.monotonic() < end, f"a member hangs in generation {number} of {members}"
                assert all(process.exitcode is None for process in living.values()), "a member failed"
                time.sleep(1e-3)
            time.sleep(rng.random() * 0.01)
            free = [slot for slot in range(SLOTS) if slot not in living]
            if len(living) > 1 and (not free or rng.random() < 0.6):
                slot = rng.choice(sorted(living))
                process = living.pop(slot)
                if rng.random() < 0.8:
                    process.kill()
                    process.join()
                    kills += 1
                else:
                    given_up.append(process)  # it goes on writing
                    if len(given_up) > MOST_GIVEN_UP:
                        given_up[0].kill()
                        given_up.pop(0).join()
            else:
                slot = rng.choice(free)
                living[slot] = start(slot, number + 1)
        for process in living.values():
            process.join()
            assert process.exitcode == 0
        print(f"{kills} kills, {rounds} generations\nOK")
    finally:
        for process in (*living.values(), *given_up):
            process.kill()
        server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
