"""Train a mixture-of-experts layer with experts on several ranks. Compare with the same layer on one rank.

mpirun -n 4 python examples/moe_torch.py                      # without torch.distributed
mpirun -n 4 python examples/moe_torch.py --distributed gloo   # with it; on GPUs also nccl
"""

import os

from common import comm, compare, need, parse, rank_on_host, say

torch = need("torch")

from deepep_rt import Buffer  # noqa: E402
from deepep_rt.torch import combine, communicator, dispatch  # noqa: E402

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # its name before PyTorch 2.10


def initialize(backend):
    """Initialise torch.distributed on one host, with the ranks of MPI."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.distributed.init_process_group(backend, rank=comm.rank, world_size=comm.size)


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(rank, args):
    """Make the tokens of a rank, and the results that the layer shall learn."""
    x = random(1 + rank, args.tokens, args.hidden).to(args.device)
    return x, x.roll(1, dims=1) * x.sign()


def run_experts(rows, ends, w1, w2):
    """Return the output of each row's expert. Rows lie expert by expert, and `ends` has the end of each expert's rows."""
    return grouped_mm(torch.nn.functional.silu(grouped_mm(rows, w1, offs=ends)), w2, offs=ends)


def run_alone(x, topk_idx, topk_weights, w1, w2):
    """The layer on one rank: copy tokens to their experts, and add up the weighted outputs."""
    order = topk_idx.flatten().argsort(stable=True)  # of (token, choice), by expert
    ends = topk_idx.flatten().bincount(minlength=len(w1)).cumsum(0).int()
    token = order // topk_idx.shape[1]
    y = run_experts(x[token], ends, w1, w2) * topk_weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, y)


def train(layer, parameters, x, target, args, over_ranks=lambda tensor: tensor):
    """Return the loss of each step. Every rank has a part of it, and `over_ranks` adds the parts up."""
    router, w1, w2 = learning = [p.clone().requires_grad_() for p in parameters]
    optimizer = torch.optim.SGD(learning, lr=args.hidden / 8)
    losses = []
    for _ in range(args.steps):
        weights, experts = (x @ router).softmax(1).topk(args.topk)
        loss = (layer(x, experts, weights, w1, w2) - target).square().sum() / (comm.size * args.tokens * args.hidden)
        optimizer.zero_grad()
        loss.backward()
        router.grad = over_ranks(router.grad)  # those of w1 and w2 are complete: their rows came from all ranks
        optimizer.step()
        losses.append(over_ranks(loss.detach()).item())
    return losses


def main():
    sizes = {"tokens": ("tokens of each rank", 128, 64), "hidden": ("length of a row", 256, 64), "steps": ("of training", 25, 40)}
    sizes |= {"topk": ("experts of a token", 2, 2), "experts": ("of all ranks, rounded down to a multiple of them", 16, 8)}
    args = parse(__doc__, sizes, distributed=dict(choices=("gloo", "nccl"), help="initialise torch.distributed first"))
    args.experts -= args.experts % comm.size
    args.device = torch.device("cpu")
    if args.backend != "host" and torch.cuda.is_available():
        args.device = torch.device("cuda", rank_on_host() % torch.cuda.device_count())
        torch.cuda.set_device(args.device)
    if args.distributed:
        initialize(args.distributed)
    ranks = communicator()  # their order may differ from that of MPI
    rank = ranks.Get_rank()

    def over_ranks(tensor):
        if args.distributed:
            torch.distributed.all_reduce(tensor)
            return tensor
        return torch.from_numpy(ranks.allreduce(tensor.cpu().numpy().reshape(-1))).view_as(tensor).to(args.device)

    hidden, experts = args.hidden, args.experts
    shapes = (hidden, experts), (experts, hidden, 2 * hidden), (experts, 2 * hidden, hidden)
    router, w1, w2 = (random(0, *shape).to(args.device) / shape[-2] ** 0.5 for shape in shapes)
    local = slice(rank * experts // comm.size, (rank + 1) * experts // comm.size)
    sizes = dict(num_max_tokens_per_rank=args.tokens, hidden=hidden, num_topk=args.topk, num_experts=experts)
    with Buffer(ranks, **sizes, dtype="float32", backend=args.backend) as buffer:

        def layer(x, topk_idx, topk_weights, w1, w2):
            sent = dispatch(buffer, x, topk_idx, topk_weights, layout="expert")  # send each token to the ranks of its experts
            y = run_experts(sent.recv_x, sent.expert_offsets[1:], w1, w2)
            return combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights)  # send back and add up

        losses = train(layer, (router, w1[local], w2[local]), *tokens_of(rank, args), args, over_ranks)
        say(f"{buffer.backend}: {comm.size} ranks, {args.tokens} tokens of {hidden}, top-{args.topk} of {experts} experts")

    everything = (torch.cat(parts) for parts in zip(*(tokens_of(rank, args) for rank in range(comm.size)), strict=True))
    alone = train(run_alone, (router, w1, w2), *everything, args)
    compare(losses, alone)
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
