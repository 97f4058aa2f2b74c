"""Start the experts of a layer while their rows still arrive. Compare with the same layer in sequence.

mpirun -n 4 python examples/experts_as_rows_arrive.py
"""

from common import comm, need, parse, rank_on_host, say

torch = need("torch")

from deepep_rt import Buffer  # noqa: E402
from deepep_rt.torch import grouped_mlp  # noqa: E402

TOPK, EACH = 4, 4  # EACH: experts of each rank


def layer(buffer, x, topk_idx, weights, w1, w2, signals):
    """With signals, the first product takes each tile of 128 rows once it is here, on the SMs that the dispatch leaves free."""
    sent = buffer.dispatch(x, topk_idx, weights, layout="expert", expert_alignment=128, signals=signals)
    y = grouped_mlp(sent, w1, w2)  # silu(x @ gate) * (x @ up), and the second product
    return buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True).x


def main():
    sizes = dict(tokens=("tokens of each rank", 2048, 64), hidden=("elements of a row", 2048, 256))
    args = parse(__doc__, sizes=sizes)
    device = torch.device("cuda", rank_on_host() % torch.cuda.device_count()) if args.on_gpu else torch.device("cpu")
    if args.on_gpu:
        torch.cuda.set_device(device)
    random = torch.Generator(device).manual_seed(comm.rank)

    def normal(*shape):
        return torch.randn(shape, generator=random, device=device).bfloat16()

    num_experts = EACH * comm.size
    x = normal(args.tokens, args.hidden)
    weights, topk_idx = torch.rand(args.tokens, num_experts, generator=random, device=device).topk(TOPK)
    w1 = normal(EACH, args.hidden, args.hidden) / args.hidden**0.5  # gate and up
    w2 = normal(EACH, args.hidden // 2, args.hidden) / args.hidden**0.5
    given = x, topk_idx, weights, w1, w2
    sizes = dict(num_max_tokens_per_rank=args.tokens, hidden=args.hidden, num_topk=TOPK, num_experts=num_experts)
    with Buffer(comm, **sizes, backend=args.backend) as buffer:
        for _ in range(3):
            assert torch.equal(layer(buffer, *given, signals=True), layer(buffer, *given, signals=False))
        say(f"{buffer.backend}: {comm.size} ranks, {args.tokens} tokens each, the same bits with signals and without")
        if args.on_gpu:
            for signals in (False, True):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(10):
                    layer(buffer, *given, signals=signals)
                end.record()
                torch.cuda.synchronize()
                say(f"{100 * begin.elapsed_time(end):8.1f} us a layer, {'experts as rows arrive' if signals else 'in sequence'}")
    say("OK")


if __name__ == "__main__":
    main()
