"""Trains a mixture-of-experts layer whose experts live on different ranks, and compares with the same layer on one rank.

mpirun -n 4 python examples/moe_torch.py                        # ranks find each other through MPI alone,
mpirun -n 4 python examples/moe_torch.py --distributed gloo     # or torch.distributed is there already (nccl: with GPUs)
"""

import os

from common import MPI, comm, need, parse, say

torch = need("torch")

from deepep_rt import Buffer  # noqa: E402
from deepep_rt.torch import combine, communicator, dispatch  # noqa: E402


def initialize(backend):
    """torch.distributed over the ranks that mpirun started: Open MPI and MPICH tell them in different variables."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")
    rank, size = next((int(os.environ[r]), int(os.environ[s])) for r, s in names if r in os.environ)
    torch.distributed.init_process_group(backend, rank=rank, world_size=size)


def tokens_of(rank, args):
    """What a rank learns from: tokens, and what the layer shall make of them."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(args.tokens, args.hidden, generator=random)
    return x.to(args.device), (x.roll(1, 1) * x).to(args.device)


def parameters(args):
    """The router, and the two matrices of all experts; the same on all ranks."""
    random = torch.Generator().manual_seed(0)
    shapes = (
        (args.hidden, args.experts),
        (args.experts, args.hidden, 2 * args.hidden),
        (args.experts, 2 * args.hidden, args.hidden),
    )
    return [(torch.randn(shape, generator=random) / args.hidden**0.5).to(args.device) for shape in shapes]


def run_experts(x, topk_idx, topk_weights, w1, w2):
    """For each row of x the weighted sum over those of its experts that are here."""
    out = torch.zeros_like(x)
    for expert in range(len(w1)):
        row, choice = torch.nonzero(topk_idx == expert, as_tuple=True)
        y = torch.relu(x[row] @ w1[expert]) @ w2[expert]
        out = out.index_add(0, row, y * topk_weights[row, choice, None])
    return out


def train(layer, router, w1, w2, x, target, args, over_ranks=lambda tensor: tensor):
    """The loss of each step. A rank adds its part of it; `over_ranks` adds up over the ranks, in place."""
    learning = [p.clone().requires_grad_() for p in (router, w1, w2)]
    optimizer = torch.optim.SGD(learning, lr=0.3, momentum=0.9)
    losses = []
    for _ in range(args.steps):
        weights, experts = (x @ learning[0]).softmax(1).topk(args.topk)
        out = layer(x, experts, weights, *learning[1:])
        loss = (out - target).square().sum() / (comm.size * args.tokens)
        optimizer.zero_grad()
        loss.backward()
        over_ranks(learning[0].grad)  # experts have theirs from all ranks already: their rows came from there
        optimizer.step()
        losses.append(over_ranks(loss.detach()).item() / args.hidden)
    return losses


def main():
    sizes = {
        "tokens": ("tokens of each rank", 256, 64),
        "hidden": ("length of a row", 256, 64),
        "steps": ("training steps", 50, 50),
    }
    sizes |= {"topk": ("experts of a token", 2, 2), "experts": ("of all ranks, rounded down to a multiple of them", 16, 8)}
    args = parse(__doc__, sizes, distributed=dict(choices=("gloo", "nccl"), help="initialise torch.distributed first"))
    args.experts -= args.experts % comm.size
    args.device = torch.device("cpu")
    if args.backend != "host" and torch.cuda.is_available():
        args.device = torch.device("cuda", comm.Split_type(MPI.COMM_TYPE_SHARED).rank % torch.cuda.device_count())
        torch.cuda.set_device(args.device)
    if args.distributed:
        initialize(args.distributed)
    router, w1, w2 = parameters(args)
    mine = slice(comm.rank * args.experts // comm.size, (comm.rank + 1) * args.experts // comm.size)

    def over_ranks(tensor):
        if args.distributed:
            torch.distributed.all_reduce(tensor)
            return tensor
        return tensor.copy_(torch.as_tensor(comm.allreduce(tensor.cpu().numpy())))

    sizes = dict(num_max_tokens_per_rank=args.tokens, hidden=args.hidden, num_topk=args.topk, num_experts=args.experts)
    with Buffer(communicator(), **sizes, dtype="float32", backend=args.backend) as buffer:

        def layer(x, topk_idx, topk_weights, w1, w2):
            sent = dispatch(buffer, x, topk_idx, topk_weights)  # each token to the ranks of its experts
            y = run_experts(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights, w1, w2)
            return combine(buffer, y, sent.handle)  # back to the tokens' ranks, added up

        losses = train(layer, router, w1[mine], w2[mine], *tokens_of(comm.rank, args), args, over_ranks)
        say(
            f"{buffer.backend}: {comm.size} ranks, {args.tokens} tokens of {args.hidden} each, top-{args.topk} of {args.experts} experts"
        )

    everything = (torch.cat(parts) for parts in zip(*(tokens_of(rank, args) for rank in range(comm.size)), strict=True))
    alone = train(run_experts, router, w1, w2, *everything, args)
    for step in sorted({*range(0, args.steps, 10), args.steps - 1}):
        say(f"step {step:2}: loss {losses[step]:.6f}, on one rank {alone[step]:.6f}")
    error = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
    assert losses[-1] < 0.7 * losses[0], "nothing was learned"
    assert error < 1e-4, f"the losses differ by up to {error:.1e} of themselves"
    say(f"largest difference: {error:.1e} of the loss\nOK")
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
