"""Calls inside `jax.shard_map`, over the devices of all processes of `jax.distributed`. The first argument is the address of rank 0."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import deepep_rt.jax as ep
from deepep_rt import Buffer

TOKENS, HIDDEN, TOPK, EACH = 8, 16, 2, 4


def run(comm: MPI.Intracomm) -> None:
    """Compare a layer whose experts double their rows, and its gradient, with NumPy."""
    rng, experts = np.random.default_rng(0), EACH * comm.size
    x = rng.standard_normal((comm.size * TOKENS, HIDDEN), np.float32)
    idx = rng.random((comm.size * TOKENS, experts)).argsort(1)[:, :TOPK].astype(np.int32)
    weights = rng.random((comm.size * TOKENS, TOPK), np.float32)
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    part, mine = P("ranks"), slice(comm.rank * TOKENS, (comm.rank + 1) * TOKENS)
    arrays = [jax.make_array_from_process_local_data(NamedSharding(mesh, part), a[mine]) for a in (x, idx, weights)]
    sizes = dict(num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=experts, dtype="float32")
    with Buffer(comm, **sizes, backend="host") as buffer:

        def layer(x: jax.Array, idx: jax.Array, weights: jax.Array) -> jax.Array:
            sent = ep.dispatch(buffer, x, idx, weights, layout="expert", num_worst_tokens=TOKENS * TOPK * comm.size)
            return ep.combine(buffer, 2 * sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights).x

        sharded = jax.shard_map(layer, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)
        out = jax.jit(sharded)(*arrays)
        gradient = jax.jit(jax.grad(lambda *given: sharded(*given).sum()))(*arrays)
        factor = 2 * weights.sum(1, keepdims=True)
        for got, wanted in ((out, factor * x), (gradient, np.broadcast_to(factor, x.shape))):
            np.testing.assert_allclose(np.asarray(got.addressable_shards[0].data), wanted[mine], rtol=1e-5)
    print("passed", flush=True)


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[1], world.size, world.rank)
    run(world)
