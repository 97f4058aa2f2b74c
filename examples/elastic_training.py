"""Train a mixture-of-experts layer while ranks die and others join.

It starts its own processes: python examples/elastic_training.py --ranks 3 --slots 4

Each rank has all dense weights and some of the experts. It writes its experts to a folder every few steps, in place of the checkpoints of
a real program. Ranks are killed in a forward pass, in a backward pass and between steps. The others go on, and new processes join.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time

try:
    import torch
except ImportError:
    sys.exit(f"{sys.argv[0]} needs torch: pip install torch")

from deepep_rt import Buffer, EPPeerLostError
from deepep_rt.torch import combine, communicator, dispatch

TOKENS, HIDDEN, TOPK, EXPERTS = 64, 32, 2, 8  # TOKENS: of each rank in a step; EXPERTS: of the model
STEPS_PER_SAVE, LEARNING_RATE = 5, 4.0
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # its name before PyTorch 2.10


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gather(buffer, rows):
    """Return the rows of all members, `[members, rows, hidden]`.

    The Buffer carries them. It knows the members, and a lost rank raises the same error as in the layer. Groups of torch.distributed would
    have to be made again in each generation.
    """
    members, idx = torch.tensor(buffer.members), torch.full((len(buffer.members) * len(rows), TOPK), -1)
    idx[:, 0] = members.repeat_interleave(len(rows)) * buffer.config.num_local_experts  # the first expert slot of each member
    sent = buffer.dispatch(rows.repeat(len(members), 1), idx.to(rows.device))
    buffer.synchronize()  # a GPU may report a lost rank after the call, and its rows must not reach the weights
    return sent.recv_x.view(len(members), *rows.shape)


def place_experts(held):
    """Return the expert in each expert slot of each member, or -1. `held`: the same, before the change.

    Experts stay at their member, unless it has too many. The rest goes to members with few experts. All members compute the same.
    """
    most, placed, done = -(-EXPERTS // len(held)), {}, set()
    for member, experts in held.items():
        kept = [expert for expert in experts if expert >= 0 and expert not in done][:most]
        placed[member] = [expert if expert in kept else -1 for expert in experts]
        done.update(kept)
    for expert in sorted(set(range(EXPERTS)) - done):
        fewest = max(placed.values(), key=lambda experts: experts.count(-1))
        fewest[fewest.index(-1)] = expert
    return placed


class Trainer:
    """The weights of one rank, and its part of each step. `slot` is its rank in the Buffer."""

    def __init__(self, slot, local, folder, device):
        self.slot, self.local, self.folder, self.device = slot, local, folder, device
        self.step, self.held = 0, [-1] * local  # finished steps; the expert in each expert slot of this rank
        self.dense = (draw(0, HIDDEN + EXPERTS, HIDDEN) / HIDDEN**0.5).to(device).requires_grad_()  # a projection and the router
        self.experts = torch.zeros(2, local, HIDDEN, HIDDEN, device=device, requires_grad=True)  # two layers of each expert
        self.data = draw(1, 256, HIDDEN).to(device)

    def save(self):
        """Write the experts of this rank. If it dies meanwhile, the older files stay."""
        for place, expert in enumerate(self.held):
            if expert >= 0:
                torch.save(self.experts.data[:, place].cpu(), f"{self.folder}/new{self.slot}")
                os.replace(f"{self.folder}/new{self.slot}", f"{self.folder}/expert{expert}")

    def begin_generation(self, buffer):
        """Agree on the weights and on the places of the experts.

        A loss may find some members one step ahead of others, so all take the dense weights of the latest step. Experts of lost ranks come
        from the files, and are a few steps older. A program that wants one state of all weights loads its checkpoint on all ranks.
        """
        self.save()  # other members may take these experts
        facts = torch.zeros(1, HIDDEN, device=self.device)
        facts[0, : 1 + self.local] = torch.tensor([self.step, *self.held])
        found = gather(buffer, torch.cat([self.dense.data, facts]))
        latest, lists = found[found[:, -1, 0].argmax()], found[:, -1, 1 : 1 + self.local].int().tolist()
        self.step = int(latest[-1, 0])
        self.dense.data.copy_(latest[:-1])
        placed = place_experts(dict(zip(buffer.members, lists, strict=True)))
        for place, expert in enumerate(placed[self.slot]):
            if expert not in (-1, self.held[place]):
                file, first = f"{self.folder}/expert{expert}", draw(100 + expert, 2, HIDDEN, HIDDEN) / HIDDEN**0.5
                self.experts.data[:, place] = (torch.load(file) if os.path.exists(file) else first).to(self.device)
        self.held = placed[self.slot]
        numbers = {e: member * self.local + place for member, es in placed.items() for place, e in enumerate(es)}
        self.table = torch.tensor([numbers[expert] for expert in range(EXPERTS)], device=self.device)  # expert: its expert slot

    def train(self, buffer, at, ends):
        """Make a step. Return the mean loss of the members, and whether one of them `ends`. `at` is told the places in the step."""
        batch = torch.Generator().manual_seed(1000 * self.step + self.slot)
        x = self.data[torch.randint(len(self.data), (TOKENS,), generator=batch).to(self.device)]
        projection, router = self.dense.split([HIDDEN, EXPERTS])
        weights, experts = (x @ router.T).softmax(1).topk(TOPK)
        sent = dispatch(buffer, x @ projection.T, self.table[experts], weights, layout="expert")
        at("forward")
        w1, w2, ends_of_experts = *self.experts, sent.expert_offsets[1:]
        y = grouped_mm(grouped_mm(sent.recv_x, w1, offs=ends_of_experts).relu(), w2, offs=ends_of_experts)
        y.register_hook(lambda grad: at("backward"))
        out = combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights)
        loss = (out - x.roll(1, dims=1) * x.sign()).square().mean()
        self.dense.grad = self.experts.grad = None
        (loss / len(buffer.members)).backward()
        facts = torch.zeros(1, HIDDEN, device=self.device)
        facts[0, 0], facts[0, 1] = loss.detach(), ends
        found = gather(buffer, torch.cat([self.dense.grad, facts]))
        self.dense.data -= LEARNING_RATE * found[:, :-1].sum(0)  # in one order, so the weights of members stay equal bit for bit
        self.experts.data -= LEARNING_RATE * self.experts.grad  # complete: the rows came from all members
        self.step += 1
        if self.step % STEPS_PER_SAVE == 0:
            self.save()
        return found[:, -1, 0].mean().item(), found[:, -1, 1].max().item() > 0


def run_rank(link, args, folder, slot, rendezvous):
    """Run one rank. `link` leads to the parent, and `rendezvous` to the Buffer that this process joins."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.backend == "cuda":
        device = torch.device("cuda", slot % torch.cuda.device_count())
        torch.cuda.set_device(device)
    local = -(-EXPERTS // max(args.ranks - 1, 1))  # with one rank less, all experts still have a place
    rows = max(TOKENS, args.slots * (HIDDEN + EXPERTS + 1))  # of `gather`
    settings = dict(num_max_tokens_per_rank=rows, hidden=HIDDEN, num_topk=TOPK, num_experts=args.slots * local, dtype="float32")
    settings |= dict(backend=args.backend, max_ranks=args.slots)
    trainer = Trainer(slot, local, folder, device)  # before it joins, because the members then wait for its first step
    if rendezvous is None:
        torch.distributed.init_process_group("gloo", f"file://{folder}/first", rank=slot, world_size=args.ranks)
        buffer = Buffer(communicator(), rendezvous="auto", **settings)
    else:
        buffer = Buffer.join(rendezvous, slot=slot, **settings)
    orders, is_new, ends = [], True, False

    def at(place):
        if place in orders:
            link.send(time.monotonic())  # the clock of all processes of this host
            os.kill(os.getpid(), signal.SIGKILL)

    while not ends:
        try:
            if is_new:
                trainer.begin_generation(buffer)
            while link.poll():
                orders.append(link.recv())
            loss, ends = trainer.train(buffer, at, "end" in orders and trainer.step >= args.steps)
            if is_new or ends:
                facts = dict(time=time.monotonic(), step=trainer.step, members=buffer.members, loss=loss)
                link.send(facts | dict(dense=trainer.dense.tolist(), rendezvous=buffer.rendezvous))
            at("between steps")
            is_new = bool(buffer.admit())  # a program may call it every few steps
        except EPPeerLostError:
            buffer.shrink()
            is_new = True
    buffer.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.device_count() else "host")
    parser.add_argument("--ranks", type=int, default=3, help="processes at the start, 2 or more")
    parser.add_argument("--slots", type=int, default=4, help="the most processes")
    parser.add_argument("--steps", type=int, default=60, help="steps at least")
    parser.add_argument("--seed", type=int, help="of victims and pauses")
    args = parser.parse_args()
    rng, context, living = random.Random(args.seed), multiprocessing.get_context("forkserver"), {}
    context.set_forkserver_preload(["torch", "deepep_rt.torch"])  # processes start at once

    def start(slot, rendezvous=None):
        link, its_end = context.Pipe()
        process = context.Process(target=run_rank, args=(its_end, args, folder, slot, rendezvous), daemon=True)
        process.start()
        its_end.close()  # if the process ends, `link` raises EOFError
        living[slot] = process, link

    def report(what, since=None):
        """Wait until all members have finished a step. Compare them, and print a line."""
        found = [link.recv() for _, link in living.values()]
        for facts in found:
            assert facts["members"] == tuple(sorted(living))
            assert all(facts[name] == found[0][name] for name in ("step", "loss", "dense")), "members differ"
        seconds = f", next step finished {max(facts['time'] for facts in found) - since:.2f} s later" if since else ""
        print("step {step}: {what}{seconds}; members {members}, loss {loss:.3f}".format(**found[0], what=what, seconds=seconds))
        return found[0]

    with tempfile.TemporaryDirectory() as folder:
        for slot in range(args.ranks):
            start(slot)
        first = report(f"{args.backend}, {args.ranks} ranks start")
        for place in ("forward", "backward", "between steps"):
            time.sleep(0.2 + rng.random() / 2)
            victim = rng.choice(sorted(living))
            process, link = living.pop(victim)
            link.send(place)
            killed_at = link.recv()
            report(f"rank {victim} killed ({place})", killed_at)
            time.sleep(0.2 + rng.random() / 2)
            slot, began = rng.choice(sorted({*range(args.slots)} - {*living})), time.monotonic()
            start(slot, first["rendezvous"])
            report(f"rank {slot} started and joined", began)
        living[slot][1].send("end")
        last = report("end")
        for process, _ in living.values():
            process.join()
            assert process.exitcode == 0
    assert last["loss"] < 0.8 * first["loss"], "the loss has not fallen"
    print("OK")


if __name__ == "__main__":
    main()
