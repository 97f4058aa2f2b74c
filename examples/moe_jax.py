"""Train a mixture-of-experts layer with experts on several ranks, compiled by JAX. Compare with the same layer on one rank.

mpirun -n 4 python examples/moe_jax.py
"""

import os

import numpy as np
from common import comm, compare, need, parse, say

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX leaves no memory for the Buffer
jax = need("jax")
import jax.numpy as jnp  # noqa: E402

from deepep_rt import Buffer  # noqa: E402
from deepep_rt.jax import combine, dispatch, use_gpu_of_rank  # noqa: E402


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def tokens_of(rank, args):
    """Make the tokens of a rank, and the results that the layer shall learn."""
    x = random(1 + rank, args.tokens, args.hidden)
    return x, np.roll(x, 1, axis=1) * np.sign(x)


def run_experts(rows, sizes, w1, w2):
    """Return the output of each row's expert. Rows lie expert by expert, and `sizes` has the number of each expert's rows."""
    return jax.lax.ragged_dot(jax.nn.silu(jax.lax.ragged_dot(rows, w1, sizes)), w2, sizes)


def run_alone(x, topk_idx, topk_weights, w1, w2):
    """The layer on one rank: copy tokens to their experts, and add up the weighted outputs."""
    order = jnp.argsort(topk_idx.ravel(), stable=True)  # of (token, choice), by expert
    sizes = jnp.bincount(topk_idx.ravel(), length=len(w1)).astype(jnp.int32)
    token = order // topk_idx.shape[1]
    y = run_experts(jnp.take(x, token, axis=0), sizes, w1, w2) * topk_weights.ravel()[order, None]
    return jnp.zeros_like(x).at[token].add(y)


def train(layer, parameters, x, target, args, over_ranks=lambda array: array):
    """Return the loss of each step. Every rank has a part of it, and `over_ranks` adds the parts up."""

    @jax.jit
    @jax.value_and_grad
    def loss_of(parameters):
        router, w1, w2 = parameters
        weights, experts = jax.lax.top_k(jax.nn.softmax(x @ router), args.topk)
        return jnp.square(layer(x, experts, weights, w1, w2) - target).sum() / (comm.size * args.tokens * args.hidden)

    losses = []
    for _ in range(args.steps):
        loss, (router, *experts) = loss_of(parameters)
        gradients = over_ranks(router), *experts  # the gradients of the experts are complete: their rows came from all ranks
        parameters = jax.tree.map(lambda p, g: p - args.hidden / 8 * g, parameters, gradients)
        losses.append(float(over_ranks(loss)))
    return losses


def main():
    device = use_gpu_of_rank(comm)  # before another library starts CUDA
    sizes = {"tokens": ("tokens of each rank", 128, 64), "hidden": ("length of a row", 256, 64), "steps": ("of training", 25, 50)}
    sizes |= {"topk": ("experts of a token", 2, 2), "experts": ("of all ranks, rounded down to a multiple of them", 16, 8)}
    args = parse(__doc__, sizes)
    args.experts -= args.experts % comm.size
    args.on_gpu &= device.platform == "gpu"
    if not args.on_gpu:
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    jax.config.update("jax_default_matmul_precision", "highest")  # with TF32 the two trainings would differ
    shapes = (
        (args.hidden, args.experts),
        (args.experts, args.hidden, 2 * args.hidden),
        (args.experts, 2 * args.hidden, args.hidden),
    )
    router, w1, w2 = (jnp.asarray(random(0, *shape) / shape[-2] ** 0.5) for shape in shapes)
    local = slice(comm.rank * args.experts // comm.size, (comm.rank + 1) * args.experts // comm.size)

    sizes = dict(num_max_tokens_per_rank=args.tokens, hidden=args.hidden, num_topk=args.topk, num_experts=args.experts)
    with Buffer(comm, **sizes, dtype="float32", backend="cuda" if args.on_gpu else "host") as buffer:

        def layer(x, topk_idx, topk_weights, w1, w2):
            sent = dispatch(buffer, x, topk_idx, topk_weights, layout="expert")  # send each token to the ranks of its experts
            y = run_experts(sent.recv_x, jnp.diff(sent.expert_offsets), w1, w2)
            return combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights).x  # send back and add up

        def over_ranks(array):
            return comm.allreduce(np.asarray(array))

        losses = train(layer, (router, w1[local], w2[local]), *tokens_of(comm.rank, args), args, over_ranks)
        say(
            f"{buffer.backend}: {comm.size} ranks, {args.tokens} tokens of {args.hidden}, top-{args.topk} of {args.experts} experts"
        )

    everything = map(np.concatenate, zip(*(tokens_of(rank, args) for rank in range(comm.size)), strict=True))
    alone = train(run_alone, (router, w1, w2), *everything, args)
    compare(losses, alone)


if __name__ == "__main__":
    main()
