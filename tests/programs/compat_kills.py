"""Low-latency calls of DeepEP V1 with `enable_shrink`, in which processes are killed. The others mask them and go on, with right results.

Usage: compat_kills.py [--seed N]. It needs no MPI. Its processes are copies of the first one, which has loaded the libraries.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import signal
import time
import traceback
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any

import torch
from limits import seconds

import deepep_rt.compat as deep_ep
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import StoreServer

RANKS, LOCAL, TOKENS, HIDDEN, TOPK, STEPS = 4, 2, 6, 64, 3, 10
EXPERTS, TIMEOUT_S, LATEST_S = RANKS * LOCAL, seconds(5), 0.05


class Rank:
    """One process. It makes steps when its parent says so."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank, self.step = rank, 0
        comm: Any = StoreCommunicator(StoreClient("127.0.0.1", port), "start", rank, RANKS)
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, RANKS, EXPERTS)
        self.buffer = deep_ep.Buffer(None, int(1e6), num_bytes, low_latency_mode=True, enable_shrink=True, comm=comm)

    def masked(self) -> list[int]:
        status = torch.empty(RANKS, dtype=torch.int32)
        self.buffer.low_latency_query_mask_buffer(status)
        return status.nonzero().flatten().tolist()

    def inputs(self, source: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Make the rows, choices and weights of a rank in this step. Sums of such rows are exact."""
        made = torch.Generator().manual_seed(1000 * self.step + source)
        x = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=made).to(torch.bfloat16)
        topk_idx = torch.rand((TOKENS, EXPERTS), generator=made).topk(TOPK, dim=1)[1]
        weights = 2.0 ** torch.randint(-1, 2, topk_idx.shape, generator=made)
        return x, topk_idx, weights.float()

    def make_step(self, lost: Collection[int]) -> None:
        """Dispatch and combine, and compare each number. Rows of ranks in `lost` may be there until this rank has masked them."""
        self.step += 1
        masked = self.masked()
        assert set(masked) <= set(lost), (masked, lost)
        x, topk_idx, weights = self.inputs(self.rank)
        hooked = dict(return_recv_hook=self.step % 2 == 1)
        packed, count, handle, _, hook = self.buffer.low_latency_dispatch(x, topk_idx, TOKENS, EXPERTS, use_fp8=False, **hooked)
        if hook is not None:
            hook()
        self._check_rows(packed, count, masked, lost)
        combined, _, hook = self.buffer.low_latency_combine(packed.clone(), topk_idx, weights, handle, **hooked)
        if hook is not None:
            hook()
        owner = topk_idx // LOCAL
        sums = [
            x.float()
            * weights.masked_fill(torch.isin(owner, torch.tensor(list(without), dtype=torch.int64)), 0).sum(1, keepdim=True)
            for without in (masked, lost)
        ]
        for token, row in enumerate(combined.float()):
            assert any(torch.equal(row, one[token]) for one in sums), (self.rank, self.step, token, masked, lost)

    def _check_rows(self, packed: torch.Tensor, count: torch.Tensor, masked: Collection[int], lost: Collection[int]) -> None:
        sent = [self.inputs(source) for source in range(RANKS)]
        for expert in range(LOCAL):
            got = packed[expert, : int(count[expert])]
            rows = [x[(idx == self.rank * LOCAL + expert).any(1)] for x, idx, _ in sent]
            found = []
            for without in (masked, lost):
                wanted = torch.cat([part for source, part in enumerate(rows) if source not in without])
                found.append(torch.equal(got, wanted))
            assert any(found), (self.rank, self.step, expert, masked, lost)

    def run(self, command: str, lost: list[int]) -> list[int]:
        """Do what the parent asks for. Return the masked ranks."""
        if command == "normal":
            x, topk_idx, _ = self.inputs(self.rank)
            in_rank = torch.stack([(topk_idx // LOCAL == rank).any(1) for rank in range(RANKS)], 1)
            layout = self.buffer.get_dispatch_layout(topk_idx, EXPERTS)
            rows, *_, handle, _ = self.buffer.dispatch(
                x,
                num_tokens_per_rank=layout[0],
                num_tokens_per_expert=layout[2],
                is_token_in_rank=in_rank,
                topk_idx=topk_idx,
                topk_weights=torch.ones(topk_idx.shape),
            )
            out, *_ = self.buffer.combine(rows, handle)
            assert torch.equal(out.float(), x.float() * in_rank.sum(1, keepdim=True))
        elif command == "mask":
            for rank in lost:
                self.buffer.low_latency_update_mask_buffer(rank, True)
        elif command == "clean":
            self.buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
        else:
            for _ in range(STEPS):
                self.make_step(lost)
        return self.masked()


def rank_main(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["DEEPEP_RT_TIMEOUT_S"] = str(TIMEOUT_S)
    try:
        mine = Rank(rank, port)
        pipe.send(([], 0.0))
        while (given := pipe.recv())[0] != "end":
            start = time.monotonic()
            pipe.send((mine.run(*given), time.monotonic() - start))
        mine.buffer.destroy()
        pipe.send(([], 0.0))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


class Parent:
    """Starts the ranks, kills them, and tells them what to do."""

    def __init__(self, seed: int) -> None:
        self.rng, self.server, self.lost = random.Random(seed), StoreServer(), list[int]()
        self.processes, self.pipes = {}, {}
        for rank in range(RANKS):
            mine, theirs = mp.get_context("fork").Pipe()
            process = mp.get_context("fork").Process(
                target=rank_main, args=(rank, int(self.server.address.split(":")[1]), theirs)
            )
            process.start()
            self.processes[rank], self.pipes[rank] = process, mine
        self.server.serve_in_thread()  # after the copies were made, which must have no threads
        self.answers(self.pipes)

    def answers(self, ranks: Collection[int]) -> dict[int, Any]:
        found = {}
        for rank in ranks:
            assert self.pipes[rank].poll(120), f"rank {rank} is silent"
            found[rank] = self.pipes[rank].recv()
            assert not isinstance(found[rank], str), f"rank {rank}: {found[rank]}"
        return found

    def all_run(self, command: str, lost: Collection[int] = (), kills: int | None = None) -> float:
        """Let all living ranks run a command, and kill one of them meanwhile. Return the seconds of the slowest."""
        for pipe in self.pipes.values():
            pipe.send((command, [*self.lost, *lost] if kills is None else [*self.lost, kills]))
        if kills is not None:
            time.sleep(self.rng.random() * LATEST_S)
            self.kill(kills)
        found = self.answers(self.pipes)
        self.masks = {rank: masked for rank, (masked, _) in found.items()}
        return max(seconds for _, seconds in found.values())

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join()
        del self.pipes[rank]
        self.lost.append(rank)

    def are_masked(self) -> bool:
        return all(masked == sorted(self.lost) for masked in self.masks.values())


def main(seed: int) -> None:
    parent = Parent(seed)
    first, second, third = parent.rng.sample(range(RANKS), 3)
    try:
        parent.all_run("normal")
        parent.all_run("steps")
        assert parent.are_masked()
        # A call that waits for the rank masks it. The next ones do not wait.
        took_s = parent.all_run("steps", kills=first) + parent.all_run("steps")
        assert parent.are_masked(), parent.masks
        # The program hears of the loss in another way, and masks the rank before a call waits for it.
        parent.kill(second)
        parent.all_run("mask")
        took_s += parent.all_run("steps")
        assert parent.are_masked(), parent.masks
        # A call without tokens finds the lost rank. The last rank goes on alone.
        parent.kill(third)
        took_s += parent.all_run("clean")
        assert parent.are_masked(), parent.masks
        took_s += parent.all_run("steps")
        assert took_s < TIMEOUT_S, f"calls waited for killed processes until timeout_s: {took_s} s"
        for pipe in parent.pipes.values():
            pipe.send(("end", []))
        parent.answers(parent.pipes)
        for rank in parent.pipes:
            parent.processes[rank].join()
            assert parent.processes[rank].exitcode == 0
        print("OK")
    finally:
        for process in parent.processes.values():
            process.kill()
        parent.server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args().seed)
