"""Compare low-latency calls of deepep_rt.jax inside compiled functions with the oracle, bit for bit."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import low_latency_oracle
import numpy as np
import oracle
from low_latency_rounds import (
    MAX_TOKENS,
    assert_same,
    expected_arrivals,
    expert_outputs,
    make_low_latency_buffer,
    make_low_latency_inputs,
)
from mpi4py import MPI
from scenario_table import FORMATS, OPAQUE, few_tokens
from scenarios import SUM
from spmd import main, raises

from deepep_rt import Buffer, EPInputError
from deepep_rt import jax as ep


def _tokens(rank: int) -> int:
    """Return the tokens of a rank: at least one, because tracing refuses none (`check_wrong_calls`)."""
    return (5, 1, MAX_TOKENS, 3)[rank % 4]


def _step(buffer: Buffer, late_weights: bool, reduce_early: bool, options: dict[str, bool], compress: str | None = None) -> Any:
    """Return a compiled step that dispatches, and combines given outputs of experts."""

    @jax.jit
    def step(x: jax.Array, idx: jax.Array, weights: jax.Array, y: jax.Array) -> Any:
        sent = ep.low_latency_dispatch(buffer, x, idx, None if late_weights else weights, **options)
        how = dict(allow_multiple_reduction=reduce_early, compress=compress)
        return sent, ep.low_latency_combine(buffer, y, idx, weights, sent.handle, **how)

    return step


def _check_steps(
    comm: MPI.Intracomm,
    buffer: Buffer,
    step: Any,
    reduce_early: bool,
    options: dict[str, bool],
    seeds: range,
    compress: str | None = None,
) -> None:
    """Run a compiled step with several inputs."""
    rank = comm.Get_rank()
    for seed in seeds:
        inputs, y = (
            make_low_latency_inputs(comm, seed, _tokens, idx_dtype="int32", hidden=buffer.config.hidden),
            expert_outputs(buffer, seed, special=bool(seed % 2)),
        )
        how = dict(reduce_early=reduce_early, compress=compress)
        expected = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, **how)
        mine = inputs[rank]
        sent, back = jax.block_until_ready(step(mine.x, mine.topk_idx, mine.topk_weights, y[rank]))
        got = jax.tree.map(np.asarray, sent)
        low_latency_oracle.check_dispatch(got, expected_arrivals(buffer, rank, inputs, options))
        assert_same(f"combine, reduce_early={reduce_early}", np.asarray(back.x), expected)


def check_every_format(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm) as buffer:
        for i, options in enumerate(FORMATS):
            late, early = bool(i % 2), i != 3
            with ep.errors():
                _check_steps(comm, buffer, _step(buffer, late, early, options), early, options, range(3))


def check_quantised_rows(comm: MPI.Intracomm) -> None:
    """Rows that the program has quantised, and fewer rows than the most."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer, ep.errors():
        for kind, most in itertools.product(("NVFP4", "FP8 with float32 scales", "signed bytes"), (MAX_TOKENS, MAX_TOKENS - 1)):
            few = dict(num_max_tokens=most)
            row = few_tokens(kind, lambda rank: min(_tokens(rank), MAX_TOKENS - 1), **{**OPAQUE[kind], "options": few})
            row = replace(row, topk=buffer.config.num_topk, each=buffer.config.num_local_experts, hidden=buffer.config.hidden)
            made = row.start(buffer.config)
            mine, y = made.inputs[rank], made.outputs(SUM)[rank]

            @jax.jit
            def step(x: Any, idx: Any, weights: Any, scales: Any, y: Any, most: int = most) -> Any:
                how = dict(use_fp8=False, x_scales=scales, num_max_tokens=most)
                sent = ep.low_latency_dispatch(buffer, x, idx, weights, **how)
                return sent, ep.low_latency_combine(buffer, y, idx, weights, sent.handle)

            idx = mine.topk_idx.astype(np.int32)
            sent, back = jax.block_until_ready(step(mine.x, idx, mine.topk_weights, mine.scales, y))
            made.check_dispatch(rank, jax.tree.map(np.asarray, sent))
            made.check_sum(rank, jax.tree.map(np.asarray, back), SUM)


def check_compressed_rows(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm, hidden=512) as buffer, ep.errors():
        for compress in ("fp8", "log10"):
            step = _step(buffer, False, True, FORMATS[0], compress)
            _check_steps(comm, buffer, step, True, FORMATS[0], range(2), compress)


def check_a_scan(comm: MPI.Intracomm) -> None:
    """Run steps of decoding in one program, with throughput calls in between. Each step takes the output of the last one."""
    rank = comm.Get_rank()
    inputs = [make_low_latency_inputs(comm, seed, lambda rank: 8, idx_dtype="int32")[rank] for seed in range(6)]
    x = inputs[0].x
    idx, weights = (np.stack([getattr(one, name) for one in inputs]) for name in ("topk_idx", "topk_weights"))
    factor = np.float32(rank + 1)  # of the experts of this rank

    with make_low_latency_buffer(comm) as buffer:
        row = jnp.arange(buffer.config.worst_recv_tokens)

        def step(carry: Any, routing: Any) -> Any:
            x, after = carry
            idx, weights = routing
            sent = ep.low_latency_dispatch(buffer, x, idx, weights, use_fp8=False, after=after)
            is_row = row[None, :] < sent.num_recv_tokens_per_expert[:, None]
            y = jnp.where(is_row[..., None], sent.recv_x * factor.astype(x.dtype), 0).astype(x.dtype)
            low = ep.low_latency_combine(buffer, y, idx, weights, sent.handle)
            slow = ep.dispatch(buffer, low.x, idx, weights, after=low.token)
            back = ep.combine(buffer, slow.recv_x, slow.handle)
            return (back.x, back.token), (low.x, sent.num_recv_tokens_per_expert)

        start = jnp.asarray(x), jnp.zeros(1, jnp.float32)
        with ep.errors():
            decode = jax.jit(lambda start, routing: jax.lax.scan(step, start, routing)[1])
            sums, counts = jax.block_until_ready(decode(start, (idx, weights)))

        for i in range(len(inputs)):
            sent = buffer.low_latency_dispatch(x, idx[i], topk_weights=weights[i], use_fp8=False)
            np.testing.assert_array_equal(counts[i], np.asarray(sent.num_recv_tokens_per_expert))
            y = (np.asarray(sent.recv_x).astype(np.float32) * factor).astype(x.dtype)
            low = np.asarray(buffer.low_latency_combine(y, idx[i], weights[i], sent.handle).x)
            assert_same(f"step {i}", np.asarray(sums[i]), low)
            slow = buffer.dispatch(low, idx[i], weights[i])
            x = np.asarray(buffer.combine(slow.recv_x, slow.handle).x)


def check_slots(comm: MPI.Intracomm) -> None:
    """Compiled steps give the bits of the Buffer's own calls with -1 for absent slots, also when a rank has left or come back."""
    size, rank = comm.Get_size(), comm.Get_rank()
    last, slots = size - 1, min(size + 2, 8)
    inputs = make_low_latency_inputs(comm, 1, _tokens, idx_dtype="int32", num_experts=4 * slots)[rank]
    x, idx, weights = inputs.x, inputs.topk_idx, inputs.topk_weights
    with make_low_latency_buffer(comm, num_experts=4 * slots, max_ranks=slots, rendezvous="auto") as buffer:
        y = expert_outputs(buffer, 1)[rank]
        step = _step(buffer, False, True, dict(use_fp8=False))

        def compare() -> Any:
            kept = np.where(np.isin(idx // 4, buffer.members), idx, -1)
            with ep.errors():
                sent, back = jax.block_until_ready(step(x, idx, weights, y))
            plain = buffer.low_latency_dispatch(x, kept, topk_weights=weights, use_fp8=False)
            counts = np.asarray(plain.num_recv_tokens_per_expert)
            np.testing.assert_array_equal(sent.num_recv_tokens_per_expert, counts)
            for expert, count in enumerate(counts):
                assert_same(f"expert {expert}", np.asarray(sent.recv_x[expert, :count]), np.asarray(plain.recv_x[expert, :count]))
            assert_same("sums", np.asarray(back.x), np.asarray(buffer.low_latency_combine(y, kept, weights, plain.handle).x))
            return sent.handle

        handle = compare()
        if size == 1:
            return
        buffer.shrink([rank] if rank == last else [])
        if rank != last:
            assert buffer.members == tuple(range(last))
            compare()
            with raises(EPInputError, "handle is of "), ep.errors():
                jax.block_until_ready(ep.low_latency_combine(buffer, y, idx, weights, handle))
            compare()
            while not buffer.admit():
                time.sleep(1e-3)
        else:
            buffer.wake()
        compare()


def check_wrong_calls(comm: MPI.Intracomm) -> None:
    """JAX raises errors while it traces. No rank makes a call, and the Buffer stays usable."""
    mine: oracle.RankInputs = make_low_latency_inputs(comm, 1, _tokens, idx_dtype="int32")[comm.Get_rank()]
    given = mine.x, mine.topk_idx, mine.topk_weights
    with make_low_latency_buffer(comm) as buffer:

        def dispatch(x: Any = given[0], idx: Any = given[1], weights: Any = given[2], **options: Any) -> Any:
            return jax.jit(lambda x, idx, weights: ep.low_latency_dispatch(buffer, x, idx, weights, **options))(x, idx, weights)

        sizes = buffer.config
        shape = (sizes.num_local_experts, sizes.worst_recv_tokens, sizes.hidden)
        y = jnp.zeros(shape, jnp.bfloat16)
        with raises(EPInputError, "x.dtype=float32", "bfloat16"):
            dispatch(x=mine.x.astype(np.float32))
        with raises(EPInputError, "x_scales.shape="):
            dispatch(x=mine.x.view(np.int8)[:, ::2], use_fp8=False, x_scales=np.ones((1 + len(mine.x), 2), np.float32))
        with raises(EPInputError, "num_max_tokens=0"):
            dispatch(num_max_tokens=0)
        with raises(EPInputError, "x.shape=[0, ", "topk_idx -1"):
            dispatch(mine.x[:0], mine.topk_idx[:0], mine.topk_weights[:0])
        with raises(EPInputError, "topk_idx=None"):
            ep.low_latency_dispatch(buffer, mine.x, None)
        with raises(EPInputError, "topk_idx.shape="):
            dispatch(idx=mine.topk_idx[:, :-1])
        with raises(EPInputError, "use_ue8m0"):
            dispatch(use_fp8=False, use_ue8m0=True)
        with raises(EPInputError, "after=", "token"):
            dispatch(after=mine.x)
        with raises(EPInputError, "low-latency calls have no gradient", "dispatch and combine"):
            jax.grad(lambda x: ep.low_latency_dispatch(buffer, x, *given[1:], use_fp8=False).recv_x.sum().astype(jnp.float32))(
                given[0]
            )
        sent = dispatch()
        with raises(EPInputError, "handle=<Dispatched>", "low_latency_dispatch"):
            ep.low_latency_combine(buffer, y, *given[1:], ep.Dispatched(*[None] * 5))
        with raises(EPInputError, "y.dtype=float32"):
            ep.low_latency_combine(buffer, y.astype(jnp.float32), *given[1:], sent.handle)
        with make_low_latency_buffer(comm) as other, raises(EPInputError, "handle is of another Buffer"):
            ep.low_latency_combine(other, y, *given[1:], sent.handle)
        back = jax.block_until_ready(ep.low_latency_combine(buffer, y, *given[1:], sent.handle))
        assert not np.asarray(back.x).any()
    plain = make_low_latency_buffer(comm, low_latency=False)
    with plain as buffer, raises(EPInputError, "low_latency=True"):
        ep.low_latency_dispatch(buffer, *given)


if __name__ == "__main__":
    main(__name__)
