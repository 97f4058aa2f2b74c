"""Decode with low-latency calls while a rank dies and another process takes its place.

It starts its own processes: python examples/elastic_decode.py --ranks 3 --slots 4

The other ranks mask the lost one and go on at once. A few steps later they shrink, and then admit the new process between two steps. On
GPUs, a rank captures its calls in one CUDA graph, and replays it with all later members. Each rank checks all of its tokens.
"""

import argparse
import itertools
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import torch
except ImportError:
    sys.exit(f"{sys.argv[0]} needs torch: pip install torch")

from deepep_rt import Buffer
from deepep_rt.torch import communicator

TOKENS, HIDDEN, TOPK = 8, 128, 3  # TOKENS: of each rank in a step
LOCAL = 3  # expert slots of a rank. The last one is no expert: it receives the votes of the members
STEPS = 20  # of a phase, at least. There is a phase for each change
GO_ON, SHRINK, END = range(3)  # votes


class Decoder:
    """The step of one rank. The tensors of its inputs and results stay the same."""

    def __init__(self, slot, slots, device):
        self.slot, self.slots, self.rng = slot, slots, torch.Generator().manual_seed(slot)
        rows, make = TOKENS + slots, dict(device=device)
        self.x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, **make)
        self.idx, self.weights = torch.full((rows, TOPK), -1, **make), torch.zeros(rows, TOPK, **make)
        self.idx[TOKENS:, 0] = torch.arange(slots) * LOCAL + LOCAL - 1  # the rows of votes, one for each slot
        experts = torch.randn(slots * LOCAL, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5
        self.all_experts = experts.bfloat16().to(device)  # to check tokens; a real rank has its own experts only
        self.experts, self.graph = self.all_experts[slot * LOCAL : (slot + 1) * LOCAL], None

    def calls(self):
        sent = self.buffer.low_latency_dispatch(self.x, self.idx, use_fp8=False)
        y = torch.bmm(sent.recv_x, self.experts)
        self.out = self.buffer.low_latency_combine(y, self.idx, self.weights, sent.handle).x
        self.votes, self.num_votes = sent.recv_x[-1, :, 0], sent.num_recv_tokens_per_expert[-1:]

    def step(self, vote):
        """Decode new tokens. Return the highest vote of the members.

        A call that masks a rank brings the same votes to all others. So they shrink and end after the same step.
        """
        self.x[:TOKENS] = torch.randn(TOKENS, HIDDEN, generator=self.rng)
        self.x[TOKENS:] = vote
        is_expert = torch.arange(self.slots * LOCAL) % LOCAL < LOCAL - 1
        choices = torch.multinomial(is_expert.float().expand(TOKENS, -1), TOPK, generator=self.rng)  # a random router
        self.idx[:TOKENS], self.weights[:TOKENS] = choices, torch.rand(TOKENS, TOPK, generator=self.rng)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.calls()
        if self.x.is_cuda:
            torch.cuda.synchronize()
            self.buffer.check()
        return int(self.votes[: self.num_votes.item()].max())

    def capture(self):
        """Capture the calls in a CUDA graph, after the first step."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.calls()

    def check(self, present, leaving):
        """Compare each token with the sum over the experts of the members.

        In the step that masks a rank, a token may have its results, or not.
        """
        rows = self.all_experts[self.idx[:TOKENS]].float()  # [tokens, topk, hidden, hidden]
        outs = torch.einsum("th,tkhg->tkg", self.x[:TOKENS].float(), rows) * self.weights[:TOKENS, :, None]
        owner, is_right = self.idx[:TOKENS] // LOCAL, torch.zeros(TOKENS, dtype=torch.bool, device=outs.device)
        for members in (present, present - leaving):
            has_process = torch.isin(owner, torch.tensor(sorted(members), device=owner.device))
            error = (outs * has_process[:, :, None]).sum(1) - self.out[:TOKENS].float()
            is_right |= error.abs().amax(1) < 0.05
        assert is_right.all(), f"rank {self.slot}: wrong tokens with members {sorted(present)}"


def run_rank(link, args, folder, slot, rendezvous, joins):
    """Run one rank. `link` leads to the parent."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.backend == "cuda":
        device = torch.device("cuda", slot % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # graphs are not captured on the default stream
    settings = dict(num_max_tokens_per_rank=TOKENS + args.slots, hidden=HIDDEN, num_topk=TOPK, num_experts=args.slots * LOCAL)
    settings |= dict(low_latency=True, on_timeout="mask", backend=args.backend, max_ranks=args.slots, rendezvous=rendezvous)
    decoder = Decoder(slot, args.slots, device)  # before it joins, because the members then wait for its first step
    if joins:
        buffer = Buffer.join(slot=slot, **settings)
    else:
        torch.distributed.init_process_group("gloo", f"file://{folder}/first", rank=slot, world_size=args.ranks)
        buffer = Buffer(communicator(), **settings)
    decoder.buffer = buffer
    phase, times, count, masked, verdict = "join" if joins else "start", [time.perf_counter()], 0, set(), GO_ON
    while verdict != END:
        vote = END if link.poll() else SHRINK if phase == "mask" and len(times) > STEPS else GO_ON
        present = {*buffer.members} - masked
        verdict, count = decoder.step(vote), count + 1  # `count`: steps with these members, the same number on all of them
        times.append(time.perf_counter())
        masked = {*buffer.query_masked_ranks()}
        decoder.check(present, masked)
        if masked and phase != "mask":
            phase, times = "mask", times[-2:]
        if len(times) == STEPS + 1:
            pauses = [end - begin for begin, end in itertools.pairwise(times)]
            link.send((phase, buffer.members, max(pauses), statistics.median(pauses)))
        if device.type == "cuda" and decoder.graph is None:
            decoder.capture()
        if verdict == SHRINK:
            buffer.shrink()
            phase, times, count, masked = "shrink", times[-1:], 0, set()
        elif count % STEPS == 0 and buffer.admit():  # takes a millisecond without such a process
            phase, times, count, masked = "admit", times[-1:], 0, set()
    buffer.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.device_count() else "host")
    parser.add_argument("--ranks", type=int, default=3, help="processes at the start, 2 or more")
    parser.add_argument("--slots", type=int, default=4, help="the most processes")
    parser.add_argument("--seed", type=int, help="of the victim and the pauses")
    args = parser.parse_args()
    rng, context, living = random.Random(args.seed), multiprocessing.get_context("forkserver"), {}
    context.set_forkserver_preload(["torch", "deepep_rt.torch"])  # processes start at once
    command = [sys.executable, "-m", "deepep_rt", "store", "--ends-with-last-client"]
    store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rendezvous = store.stdout.readline().strip()

    def start(slot, joins=False):
        link, its_end = context.Pipe()
        process = context.Process(target=run_rank, args=(its_end, args, folder, slot, rendezvous, joins), daemon=True)
        process.start()
        its_end.close()  # if the process ends, `link` raises EOFError
        living[slot] = process, link

    def report(expected, what, of=None):
        """Wait until these members have made the steps of a phase, and print a line."""
        found = [living[slot][1].recv() for slot in of or living]
        assert all(phase == expected for phase, *_ in found), found
        assert all(members == tuple(sorted(living)) for _, members, *_ in found) or expected == "mask"
        pause, step = (1e3 * max(values) for values in list(zip(*found, strict=True))[2:])
        print(f"{what}: {step:.2f} ms a step, longest pause {pause:.1f} ms", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for slot in range(args.ranks):
            start(slot)
        report("start", f"{args.backend}, {args.ranks} ranks")
        time.sleep(rng.random())
        victim = rng.choice(sorted(living))
        living.pop(victim)[0].kill()  # kill -9
        report("mask", f"rank {victim} killed and masked")
        report("shrink", f"members {sorted(living)} after shrink")
        members, slot = sorted(living), rng.choice(sorted({*range(args.slots)} - {*living}))
        start(slot, joins=True)
        report("admit", f"members {sorted(living)} after admit", members)
        report("join", f"rank {slot}, which joined", [slot])
        time.sleep(rng.random())
        living[slot][1].send("end")
        for process, _ in living.values():
            process.join()
            assert process.exitcode == 0
    print("OK")


if __name__ == "__main__":
    main()
