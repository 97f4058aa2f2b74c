"""Generated bad calls of deepep_rt.torch, deepep_rt.jax and deepep_rt.compat on the host backend, with valid calls in between.

Usage: random_bad_wrapper_calls.py NUMBER SECONDS SEED, as random_bad_calls.py.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import jax.numpy as jnp
import torch
from generated_calls import Call, Caller
from generated_wrapper_calls import jax_calls, torch_calls, v1_calls, wrong_tensor
from mpi4py import MPI
from spmd import main, make_buffer

from deepep_rt import Buffer, EPDestroyedError, EPInputError, EPUnavailableError, compat
from deepep_rt import jax as ep_jax
from deepep_rt import torch as ep_torch

TOKENS, HIDDEN, EACH, CALLS_A_ROUND = 5, 512, 8, 20
warnings.simplefilter("ignore")  # JAX and PyTorch warn about some arguments


def _check_sums(buffer: Buffer, v1: Any, tensors: dict[str, Any], arrays: dict[str, Any], layout: dict[str, Any]) -> None:
    """Each token returns once from each of its ranks."""
    x, ranks_of = tensors["x"], tensors["topk_idx"] // EACH
    wanted = x * torch.tensor([len(set(row.tolist())) for row in ranks_of])[:, None]
    sent = ep_torch.dispatch(buffer, **tensors)
    assert torch.equal(ep_torch.combine(buffer, sent.recv_x, sent.handle), wanted)
    of_jax = ep_jax.dispatch(buffer, **arrays)
    sums = ep_jax.combine(buffer, of_jax.recv_x, of_jax.handle).x.astype(jnp.float32)
    assert (sums == jnp.asarray(wanted.float().numpy())).all()
    recv, *_, handle, _ = v1.dispatch(x, **layout)
    assert torch.equal(v1.combine(recv, handle)[0], wanted)


def check_generated_bad_calls_of_wrappers(comm: MPI.Intracomm) -> None:
    number, limit_s, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    rank, experts, start = comm.Get_rank(), EACH * comm.Get_size(), time.monotonic()
    sizes = dict(num_experts=experts, hidden=HIDDEN, num_topk=2, dtype="bfloat16", num_max_tokens_per_rank=8)
    random = torch.Generator().manual_seed(rank)
    idx = torch.stack([torch.randperm(experts, generator=random)[:2] for _ in range(TOKENS)])
    tensors = {"x": torch.ones(TOKENS, HIDDEN).bfloat16() * (1 + rank), "topk_idx": idx, "topk_weights": torch.ones(TOKENS, 2)}
    arrays = {"x": jnp.full((TOKENS, HIDDEN), 1 + rank, jnp.bfloat16), "topk_idx": jnp.asarray(idx.numpy())}
    arrays["topk_weights"] = jnp.ones((TOKENS, 2))
    v1 = compat.Buffer(comm, num_nvl_bytes=1 << 20, low_latency_mode=True)
    per_rank, _, per_expert, is_in_rank, _ = v1.get_dispatch_layout(idx, experts)
    layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert, topk_idx=idx)
    destroyed = make_buffer(comm, **sizes)
    destroyed.destroy()
    errors = (EPDestroyedError, EPInputError)
    with make_buffer(comm, low_latency=True, **sizes) as buffer:
        calls = [
            *torch_calls(buffer, tensors),
            *jax_calls(buffer, arrays),
            *v1_calls(v1, tensors["x"], layout, tensors["topk_weights"]),
        ]
        calls.append(Call("destroyed", destroyed.dispatch, {"x": tensors["x"], "topk_idx": idx}, {"x": wrong_tensor}, errors))
        caller = Caller((seed, rank, "wrappers"), lambda: calls, (EPUnavailableError,))
        rounds = 0
        while comm.allreduce(caller.report.done) < number and comm.allreduce(time.monotonic() - start, MPI.MAX) < limit_s:
            caller.make(CALLS_A_ROUND if (rounds + rank) % 3 else 3 * CALLS_A_ROUND)  # so that ranks are late at times
            _check_sums(buffer, v1, tensors, arrays, layout)
            rounds += 1
    v1.destroy()
    done = comm.allreduce(caller.report.done)
    if rank == 0:
        print(f"{done} bad calls in {rounds} rounds, {time.monotonic() - start:.1f} s: {caller.report.by_error}", flush=True)


if __name__ == "__main__":
    main(__name__)
