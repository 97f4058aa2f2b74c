"""Compare calls of deepep_rt.jax inside compiled functions with the same layer computed without communication."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from limits import seconds
from mpi4py import MPI
from spmd import idle_barrier, inputs_of_all, main, make_buffer, raises

from deepep_rt import EPDestroyedError, EPInputError, EPTimeoutError
from deepep_rt import jax as ep
from deepep_rt.arrays.compressed_rows import COMPRESSIONS
from deepep_rt.jax.callbacks import callbacks_of

HIDDEN, TOPK, TOKENS = 32, 3, 12
NAMES = ("deepep_rt.dispatch", "deepep_rt.combine")


def _layers(
    comm: MPI.Intracomm, num: int = 2, tokens: int = TOKENS, skip: float = 0.2, slots: int | None = None
) -> SimpleNamespace:
    """Make random layers of 4 experts a rank (or slot), this rank's tokens, and the routing of each layer with skipped experts."""
    ranks, rank = slots or comm.Get_size(), comm.Get_rank()
    experts, common, own = 4 * ranks, np.random.default_rng(1), np.random.default_rng([2, rank])
    idx = own.random((num, tokens, experts)).argsort(axis=2)[:, :, :TOPK]
    idx = np.where(own.random(idx.shape) < skip, -1, idx).astype(np.int32)
    return SimpleNamespace(
        experts=experts,
        first=4 * rank,
        matrices=jnp.asarray(common.standard_normal((num, experts, HIDDEN, HIDDEN), np.float32) / 8),
        mixing=jnp.asarray(common.standard_normal((num, HIDDEN, HIDDEN), np.float32) / 8),
        x=jnp.asarray(own.standard_normal((tokens, HIDDEN), np.float32)),
        idx=jnp.asarray(idx),
        weights=jnp.asarray(own.random(idx.shape, np.float32)),
    )


def _buffer(comm: MPI.Intracomm, **settings: Any) -> Any:
    return make_buffer(comm, **{**dict(num_experts=4 * comm.Get_size(), hidden=HIDDEN, num_topk=TOPK), **settings})


def _apply(x: jax.Array, idx: jax.Array, weights: jax.Array, matrices: jax.Array) -> jax.Array:
    """Return the sum over a token's experts of weight * tanh(token @ matrix). Every expert computes every token."""
    gate = (jax.nn.one_hot(idx, len(matrices)) * weights[..., None]).sum(1)  # zeros for -1
    return jnp.einsum("ned,ne->nd", jnp.tanh(jnp.einsum("nh,ehd->ned", x, matrices)), gate)


def _dense(
    x: jax.Array, idx: jax.Array, weights: jax.Array, matrices: jax.Array, mixing: jax.Array, after: Any = None
) -> jax.Array:
    """Compute the layer without communication. Mixing is linear, so its gradient needs the output of combine."""
    return x + _apply(x, idx, weights, matrices) @ mixing


def _parallel(buffer: Any) -> Callable[..., jax.Array]:
    """Return the layer over all ranks. Its `matrices` are those of this rank's experts."""

    def layer(
        x: jax.Array, idx: jax.Array, weights: jax.Array, matrices: jax.Array, mixing: jax.Array, after: Any = None
    ) -> jax.Array:
        sent = ep.dispatch(buffer, x, idx, weights, after=after)
        y = _apply(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights, matrices)
        return x + ep.combine(buffer, y, sent.handle).x @ mixing

    return layer


def _unrolled(layer: Callable[..., jax.Array], x: jax.Array, *stacked: jax.Array) -> jax.Array:
    for parts in zip(*stacked, strict=True):
        x = layer(x, *parts)
    return x


def _scanned(layer: Callable[..., jax.Array], x: jax.Array, *stacked: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, parts: (layer(x, *parts), None), x, stacked)[0]


def _loss(run: Callable[..., jax.Array], idx: jax.Array, x: jax.Array, *others: jax.Array) -> jax.Array:
    weights, matrices, mixing = others
    return jnp.square(run(x, idx, weights, matrices, mixing)).sum()


def _gradients(run: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(partial(_loss, run), argnums=(1, 2, 3, 4)))


def _compare(comm: MPI.Intracomm, model: SimpleNamespace, run: Callable[..., jax.Array]) -> None:
    """Compare values and gradients of `run(x, idx, weights, this rank's matrices, mixing)` with those of the dense layers."""
    mine = slice(model.first, model.first + 4)
    given = model.idx, model.x, model.weights
    if not hasattr(model, "expected"):
        loss, (x, weights, matrices, mixing) = _gradients(partial(_unrolled, _dense))(*given, model.matrices, model.mixing)
        total = np.zeros_like(matrices)  # the tokens of all ranks contribute to the gradient of an expert
        comm.Allreduce(np.array(matrices), total)
        model.expected = loss, (x, weights, total[:, mine], mixing)
    loss, gradients = jax.block_until_ready(_gradients(run)(*given, model.matrices[:, mine], model.mixing))
    np.testing.assert_allclose(loss, model.expected[0], rtol=1e-5)
    for name, a, b in zip(("x", "topk_weights", "matrices", "mixing"), gradients, model.expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f"gradient of {name}")


@contextlib.contextmanager
def _calls(*buffers: Any) -> Any:
    """Record the calls of Buffers in order: d(ispatch), k(nown routing), c(ombine). A second Buffer has capital letters."""
    made: list[str] = []

    def recording(call: Callable[..., Any], letter: Callable[[str], str], name: str) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            made.append(letter("k" if options.get("handle") else name))
            return call(*args, **options)

        return recorded

    for buffer, letter in zip(buffers, (str.lower, str.upper), strict=False):
        buffer.dispatch, buffer.combine = recording(buffer.dispatch, letter, "d"), recording(buffer.combine, letter, "c")
    yield made
    for buffer in buffers:
        del buffer.dispatch, buffer.combine


def check_rows_that_arrive(comm: MPI.Intracomm) -> None:
    """Rows arrive bit for bit, with room for all rows or fewer. Padding is zero, so sums may include it."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    inputs = inputs_of_all(
        comm, 3, lambda rank: 5 * (rank % 3) + 1, hidden=HIDDEN, num_topk=TOPK, num_experts=experts, idx_dtype="int32"
    )
    on_nodes = {"ranks_per_node": max(ranks // 2, 1)}
    for settings, dtypes in (({}, ("float32", "bfloat16", "float16", "int8")), (on_nodes, ("bfloat16",))):
        with _buffer(comm, **settings) as buffer:
            for dtype, rows in itertools.product(dtypes, (None, 7, 0)):
                mine = inputs[rank]
                x = jnp.asarray(mine.x.astype(dtype))
                got = jax.jit(partial(ep.dispatch, buffer, num_worst_tokens=rows))(x, mine.topk_idx, mine.topk_weights)
                room = buffer.config.num_max_recv_tokens if rows is None else rows
                want = [oracle.expected_dispatch(r, inputs, experts, num_worst_tokens=room) for r in range(ranks)]
                y = [one.x.astype(dtype) for one in want]
                np.testing.assert_array_equal(got.recv_x, y[rank])
                np.testing.assert_array_equal(got.recv_topk_idx, want[rank].topk_idx)
                np.testing.assert_array_equal(got.recv_topk_weights, want[rank].topk_weights)
                np.testing.assert_array_equal(got.num_recv_tokens_per_expert, want[rank].num_recv_per_expert)
                assert got.handle.num_recv_tokens.tolist() == [want[rank].num_recv]
                assert got.recv_topk_idx.dtype == jnp.int32
                if dtype != "int8":
                    back = jax.jit(partial(ep.combine, buffer))(got.recv_x, got.handle).x
                    how = dict(node_size=buffer.config.node_size, all_worst=[room] * ranks)
                    np.testing.assert_array_equal(back, oracle.expected_sums(rank, inputs, y, experts, **how)[0])


def check_wide_expert_numbers(comm: MPI.Intracomm) -> None:
    """With 64-bit types enabled, expert numbers are int64 by default."""
    model = _layers(comm, 1)
    with _buffer(comm) as buffer:
        want = ep.dispatch(buffer, model.x, model.idx[0])
        jax.config.update("jax_enable_x64", True)
        try:
            idx = jnp.asarray(np.asarray(model.idx[0]), jnp.int64)
            got = jax.jit(partial(ep.dispatch, buffer))(model.x, idx)
            jax.block_until_ready(got)
        finally:
            jax.config.update("jax_enable_x64", False)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
        np.testing.assert_array_equal(got.recv_topk_idx, want.recv_topk_idx)
        np.testing.assert_array_equal(got.recv_x, want.recv_x)


def check_gradients(comm: MPI.Intracomm) -> None:
    model = _layers(comm, 1)
    with _buffer(comm) as buffer, _calls(buffer) as calls:
        with jax.checking_leaks():  # callbacks must keep no arrays
            _compare(comm, model, partial(_unrolled, _parallel(buffer)))
        assert "".join(calls) == "dckc"


def _by_expert(buffer: Any, rows: int | None = None, alignment: int = 1, reduce: str = "rank") -> Callable[..., jax.Array]:
    """Return the layer over all ranks. Its experts take their rows as they lie."""

    def layer(
        x: jax.Array, idx: jax.Array, weights: jax.Array, matrices: jax.Array, mixing: jax.Array, after: Any = None
    ) -> jax.Array:
        how = dict(layout="expert", num_worst_tokens=rows, expert_alignment=alignment, reduce=reduce)
        sent = ep.dispatch(buffer, x, idx, weights, **how, after=after)
        y = jnp.tanh(jax.lax.ragged_dot(sent.recv_x, matrices, jnp.diff(sent.expert_offsets)))
        return x + ep.combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights, reduce=reduce).x @ mixing

    return layer


def check_no_vmap(comm: MPI.Intracomm) -> None:
    mine = inputs_of_all(
        comm, 4, lambda rank: 5, hidden=HIDDEN, num_topk=TOPK, num_experts=4 * comm.Get_size(), idx_dtype="int32"
    )[0]
    x, idx = jnp.asarray(mine.x)[None], jnp.asarray(mine.topk_idx)[None]
    with _buffer(comm) as buffer:
        for transform in (jax.vmap, lambda f: jax.jit(jax.vmap(f)), lambda f: jax.vmap(jax.grad(lambda *given: f(*given).sum()))):
            with raises(EPInputError, "inside of jax.vmap", "one call for the whole batch"):
                transform(lambda x, idx: ep.dispatch(buffer, x, idx).recv_x)(x, idx)


def check_gradients_by_expert(comm: MPI.Intracomm) -> None:
    model = _layers(comm)
    with _buffer(comm) as buffer, _calls(buffer) as calls:
        _compare(comm, model, partial(_unrolled, _by_expert(buffer)))
        assert "".join(calls) == "dcdckckc"
        _compare(comm, model, partial(_scanned, _by_expert(buffer, 2 * TOKENS * TOPK * comm.Get_size(), 8)))
        _compare(comm, model, partial(_unrolled, ep.checkpoint(_by_expert(buffer, alignment=4))))
        _compare(comm, model, partial(_unrolled, _by_expert(buffer, reduce="topk")))
    with _buffer(comm) as buffer, raises(EPInputError, "reduce='topk' with layout='token'"):
        ep.dispatch(buffer, jnp.ones((2, HIDDEN)), np.zeros((2, TOPK), np.int32), reduce="topk")


def check_rows_by_expert(comm: MPI.Intracomm) -> None:
    """Rows arrive bit for bit, and padding is zero. Weights that do not multiply rows return to their choices."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    inputs = inputs_of_all(
        comm, 4, lambda rank: 5 * (rank % 3) + 1, hidden=HIDDEN, num_topk=TOPK, num_experts=4 * ranks, idx_dtype="int32"
    )
    mine = inputs[rank]
    with _buffer(comm) as buffer:
        for rows, alignment in ((None, 1), (64, 4), (7, 1), (0, 2)):
            send = partial(ep.dispatch, buffer, layout="expert", num_worst_tokens=rows, expert_alignment=alignment)
            got = jax.jit(send)(jnp.asarray(mine.x), mine.topk_idx, mine.topk_weights)
            room = TOPK * buffer.config.num_max_recv_tokens if rows is None else rows
            want = oracle.expected_expert_rows(rank, inputs, 4 * ranks, num_worst_tokens=room, expert_alignment=alignment)
            np.testing.assert_array_equal(got.recv_x, want.x)
            np.testing.assert_array_equal(got.recv_topk_weights, want.weights)
            np.testing.assert_array_equal(got.expert_offsets, want.offsets)
            np.testing.assert_array_equal(got.num_recv_tokens_per_expert, want.num_recv_per_expert)
            assert got.handle.num_recv_tokens.tolist() == [want.num_recv]
            assert got.recv_topk_idx is None
    with _buffer(comm) as buffer, raises(EPInputError, "layout='rows'; expected 'token' or 'expert'"):
        ep.dispatch(buffer, jnp.asarray(mine.x), mine.topk_idx, layout="rows")
    with _buffer(comm) as buffer:
        sent = ep.dispatch(buffer, jnp.asarray(mine.x), mine.topk_idx, mine.topk_weights)
        with raises(EPInputError, "weighted=True with a handle of layout='token'"):
            ep.combine(buffer, sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights)


def check_packed_rows(comm: MPI.Intracomm) -> None:
    """Rows of two 4-bit numbers in a byte are half as wide as the Buffer's, outside of compiled functions and inside."""
    model, own = _layers(comm, 1), np.random.default_rng([6, comm.Get_rank()])
    x = jnp.asarray(own.integers(0, 256, (TOKENS, HIDDEN // 2), np.uint8))
    with _buffer(comm) as buffer:
        for layout in ("token", "expert"):
            plain = buffer.dispatch(x, model.idx[0], layout=layout)
            expected = np.asarray(plain.recv_x)
            run = partial(ep.dispatch, buffer, layout=layout, num_worst_tokens=100)
            for call in (run, jax.jit(run)):
                rows = np.asarray(call(x, model.idx[0]).recv_x)
                assert rows.shape == (100, HIDDEN // 2), rows.shape
                np.testing.assert_array_equal(rows[: len(expected)], expected)
                assert not rows[len(expected) :].any()


def check_compressed_rows(comm: MPI.Intracomm) -> None:
    """Sums have the bits of the Buffer's own combine. Gradients are those of rows that travel as they are."""
    model, own = _layers(comm, 1), np.random.default_rng([5, comm.Get_rank()])
    x, factors = (jnp.asarray(own.standard_normal((TOKENS, 128), np.float32)) for _ in range(2))
    idx, weights = model.idx[0], model.weights[0]
    with _buffer(comm, hidden=128) as buffer:

        @partial(jax.jit, static_argnames=("layout", "compress"))
        @partial(jax.grad, argnums=(0, 1), has_aux=True)
        def gradients(x: jax.Array, weights: jax.Array, layout: str, compress: str | None) -> Any:
            sent = ep.dispatch(buffer, x, idx, weights, layout=layout)
            gains = sent.recv_topk_weights if layout == "expert" else None
            out = ep.combine(buffer, sent.recv_x * 3, sent.handle, topk_weights=gains, compress=compress).x
            return (out * factors).sum(), out

        for layout in ("token", "expert"):
            expected, plain = jax.block_until_ready(gradients(x, weights, layout, None))
            for compress in COMPRESSIONS:
                got, out = jax.block_until_ready(gradients(x, weights, layout, compress))
                sent = buffer.dispatch(x, idx, weights, layout=layout)
                y = jax.block_until_ready(sent.recv_x * 3)
                how = dict(topk_weights=sent.recv_topk_weights, weighted=True) if layout == "expert" else {}
                np.testing.assert_array_equal(out, buffer.combine(y, sent.handle, compress=compress, **how).x)
                if not buffer.config.has_network:  # a rank may have no token at another node
                    assert not np.array_equal(out, plain), f"{compress}: the rows were not compressed"
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_array_equal(a, b)

        sent = ep.dispatch(buffer, x, idx, layout="expert")
        for words, wrong in (
            ("compress='fp4'; expected 'fp8' or 'log10'", dict(compress="fp4")),
            ("compress='fp8' with reduce='topk'", dict(compress="fp8", reduce="topk")),
        ):
            with raises(EPInputError, words):
                jax.jit(partial(ep.combine, buffer, **wrong))(sent.recv_x, sent.handle)
    with _buffer(comm) as buffer:
        sent = ep.dispatch(buffer, model.x, idx)
        with raises(EPInputError, f"hidden={HIDDEN}; expected a multiple of 128 with compress='log10'"):
            jax.jit(partial(ep.combine, buffer, compress="log10"))(sent.recv_x, sent.handle)


def check_gradient_of_weights_alone(comm: MPI.Intracomm) -> None:
    """Only the rank of the expert gives the gradient of a weight. The zeros of the other ranks give none."""
    model = _layers(comm, 1)
    idx, weights = model.idx[0], model.weights[0]
    with _buffer(comm) as buffer:

        @jax.jit
        def gradient(weights: jax.Array) -> jax.Array:
            return jax.grad(lambda w: jnp.exp(ep.dispatch(buffer, model.x, idx, w).recv_topk_weights).sum())(weights)

        np.testing.assert_allclose(gradient(weights), np.where(idx >= 0, np.exp(weights), 0), rtol=1e-6)


def _tied(model: SimpleNamespace, buffer: Any, layout: str, drops: bool, x: jax.Array, weights: jax.Array, mats: jax.Array):
    """Return the loss of a layer whose experts return plain zeros if they drop their rows."""
    sent = ep.dispatch(buffer, x, model.idx[0], weights, layout=layout)
    by_expert = layout == "expert"
    y = jnp.tanh(sent.recv_x @ mats) * (1.0 if by_expert else sent.recv_topk_weights.sum(1)[:, None])
    y = jnp.zeros(sent.recv_x.shape) if drops else y
    return (ep.combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights if by_expert else None).x ** 2).sum()


def check_gradients_of_all_ranks(comm: MPI.Intracomm) -> None:
    """All ranks make the calls of a backward pass: a rank that drops its rows, and one whose program drops gradients."""
    model, first = _layers(comm, 1), comm.Get_rank() == 0
    given = model.x, model.weights[0], model.mixing[0]
    for layout, compiled in itertools.product(("token", "expert"), (False, True)):
        with _buffer(comm) as buffer:
            for drops_rows, drops_gradients in ((first, False), (False, first)):
                loss = partial(_tied, model, buffer, layout, drops_rows)
                gradients = jax.grad(loss, argnums=(0, 1, 2))

                def run(*given: jax.Array, some: bool = drops_gradients, gradients: Any = gradients) -> Any:
                    return gradients(*given)[2] if some else gradients(*given)

                with _calls(buffer) as calls:
                    jax.block_until_ready((jax.jit(run) if compiled else run)(*given))
                    jax.effects_barrier()  # outside of compiled functions, nothing waits for calls whose results nothing reads
                made = comm.allgather("".join(calls))
                assert made == ["dckc"] * comm.Get_size(), (layout, compiled, drops_rows, drops_gradients, made)


def check_a_rank_without_gradients(comm: MPI.Intracomm) -> None:
    """A rank whose program needs fewer gradients is named by those that wait for it."""
    if comm.Get_size() == 1:
        return
    model, last = _layers(comm, 1), comm.Get_size() - 1
    given = model.x, model.weights[0], model.mixing[0]
    for numbers, words in (((2,), "a dispatch"), ((), "a combine")):
        words = f"rank {last} does not run the gradient of {words}"
        with raises(EPTimeoutError, words), _buffer(comm, timeout_s=6.0) as buffer, contextlib.ExitStack() as stack:
            stack.callback(idle_barrier, comm)  # the last rank leaves after the others have waited
            loss, skips = partial(_tied, model, buffer, "token", False), comm.Get_rank() == last
            needed = numbers if skips else (0, 1, 2)
            step = jax.jit(jax.grad(loss, argnums=needed) if needed else loss).lower(*given).compile()
            idle_barrier(comm)  # ranks compile for different times
            with ep.errors():
                jax.block_until_ready(step(*given))
                if not skips:
                    buffer.synchronize()
            if skips:
                raise EPTimeoutError(words, rank=last, peer=last, phase="")


_dense_gradients = _gradients(partial(_unrolled, _dense))


def _compare_members(comm: MPI.Intracomm, model: SimpleNamespace, members: tuple[int, ...], runs: list[Any]) -> None:
    """Compare compiled gradients with those of dense layers in which choices of absent slots are -1."""
    mine, is_member = slice(model.first, model.first + 4), comm.Get_rank() in members
    idx = jnp.where(jnp.isin(model.idx // 4, jnp.asarray(members)), model.idx, -1)
    loss, (x, weights, matrices, mixing) = _dense_gradients(idx, model.x, model.weights, model.matrices, model.mixing)
    total = np.zeros_like(matrices)
    comm.Allreduce(np.array(matrices) * is_member, total)
    for run in runs if is_member else ():
        with ep.errors():
            got, gradients = jax.block_until_ready(run(model.idx, model.x, model.weights, model.matrices[:, mine], model.mixing))
        np.testing.assert_allclose(got, loss, rtol=1e-5)
        for name, a, b in zip(
            ("x", "topk_weights", "matrices", "mixing"), gradients, (x, weights, total[:, mine], mixing), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f"gradient of {name} with members {members}")


def check_slots(comm: MPI.Intracomm) -> None:
    """Choices of absent slots count as -1, in values and gradients. Compiled functions go on when ranks leave and come back."""
    size, rank = comm.Get_size(), comm.Get_rank()
    last, slots = size - 1, min(size + 2, 8)
    model = _layers(comm, slots=slots)
    with _buffer(comm, num_experts=4 * slots, max_ranks=slots, rendezvous="auto") as buffer:
        runs = [_gradients(partial(_unrolled, _parallel(buffer))), _gradients(partial(_scanned, _by_expert(buffer)))]
        _compare_members(comm, model, tuple(range(size)), runs)
        if size == 1:
            return
        send, back = {}, {}
        for layout in ("token", "expert"):
            send[layout] = jax.jit(partial(ep.dispatch, buffer, layout=layout))(model.x, model.idx[0])
            back[layout] = jax.jit(partial(ep.combine, buffer))
            jax.block_until_ready(back[layout](send[layout].recv_x, send[layout].handle))
        _, pull = jax.vjp(lambda x: ep.dispatch(buffer, x, model.idx[0]).recv_x, model.x)
        buffer.shrink([rank] if rank == last else [])
        assert buffer.is_asleep == (rank == last)
        others = tuple(range(last))
        _compare_members(comm, model, others, runs)
        if rank != last:
            for name, call in (
                ("token", lambda: back["token"](send["token"].recv_x, send["token"].handle)),
                ("expert", lambda: back["expert"](send["expert"].recv_x, send["expert"].handle)),
                ("gradient", lambda: pull(send["token"].recv_x)),
            ):
                with raises(EPInputError, "handle is of", "generation"), ep.errors():
                    jax.block_until_ready(call())
                    buffer.synchronize()
                    print(f"{name}: no error about a routing of an older generation")
        if rank == last:
            buffer.wake()
        else:
            while not buffer.admit():
                time.sleep(1e-3)
        _compare_members(comm, model, tuple(range(size)), runs)


def check_gradients_outside_of_jit(comm: MPI.Intracomm) -> None:
    model = _layers(comm, 1)
    with _buffer(comm) as buffer:
        sent = ep.dispatch(buffer, model.x, model.idx[0])
        assert sent.recv_topk_weights is None
        _, pull = jax.vjp(lambda x: ep.combine(buffer, ep.dispatch(buffer, x, model.idx[0]).recv_x, sent.handle).x, model.x)
        owner = np.where(model.idx[0] >= 0, model.idx[0] // 4, comm.Get_size())
        copies = [len(set(row) - {comm.Get_size()}) for row in owner.tolist()]  # each rank returns a token once
        np.testing.assert_allclose(pull(jnp.ones_like(model.x))[0], np.tile(np.array(copies)[:, None], HIDDEN), rtol=1e-6)
        known = len(callbacks_of(buffer))
        for _ in range(3):
            ep.combine(buffer, sent.recv_x, sent.handle)
        assert len(callbacks_of(buffer)) == known, "JAX compiles each call again"


def check_gradients_of_dropped_rows(comm: MPI.Intracomm) -> None:
    """Dropped rows contribute neither to sums nor to gradients. A round trip multiplies a token by a factor, which is also its gradient."""
    model = _layers(comm, 1)
    with _buffer(comm) as buffer:

        @jax.jit
        def round_trip(x: jax.Array) -> jax.Array:
            sent = ep.dispatch(buffer, x, model.idx[0], num_worst_tokens=7)
            return ep.combine(buffer, sent.recv_x, sent.handle).x

        out, pull = jax.vjp(round_trip, model.x)
        factors = np.asarray(out / model.x)
        np.testing.assert_allclose(factors, np.round(factors), atol=1e-4)
        np.testing.assert_allclose(pull(jnp.ones_like(out))[0], factors, atol=1e-4)
        assert comm.allreduce(float(factors[:, 0].sum())) < 7 * comm.Get_size() + 0.5


def check_two_layers_of_one_buffer(comm: MPI.Intracomm) -> None:
    with _buffer(comm) as buffer, _calls(buffer) as calls:
        _compare(comm, _layers(comm), partial(_unrolled, _parallel(buffer)))
        assert "".join(calls) == "dcdckckc"


def check_a_buffer_for_each_layer(comm: MPI.Intracomm) -> None:
    with _buffer(comm) as one, _buffer(comm, num_max_tokens_per_rank=TOKENS) as two:
        first, second = _parallel(one), _parallel(two)
        _compare(comm, _layers(comm), lambda x, *stacked: second(first(x, *(s[0] for s in stacked)), *(s[1] for s in stacked)))


def check_scan(comm: MPI.Intracomm) -> None:
    with _buffer(comm) as buffer, _calls(buffer) as calls:
        _compare(comm, _layers(comm, 3), partial(_scanned, _parallel(buffer)))
        assert "".join(calls) == "dcdcdckckckc", "".join(calls)


def check_recomputation(comm: MPI.Intracomm) -> None:
    """Each way of recomputation makes its calls in order: dispatch, combine and their gradients, layer by layer from the last."""
    keep = jax.checkpoint_policies.save_only_these_names(*NAMES)
    model = _layers(comm)
    mine = model.matrices[:, model.first : model.first + 4]
    with _buffer(comm) as buffer:
        layer = _parallel(buffer)
        for run, expected in (
            (partial(_unrolled, ep.checkpoint(layer)), "dcdc" + "dckc" * 2),
            (partial(_scanned, ep.checkpoint(layer)), "dcdc" + "dckc" * 2),
            (partial(_scanned, jax.checkpoint(layer)), "dcdc" + "dckc" * 2),
            (partial(_unrolled, jax.checkpoint(layer, policy=keep)), "dcdc" + "kc" * 2),
        ):
            with _calls(buffer) as calls:
                _compare(comm, model, run)
                assert "".join(calls) == expected, "".join(calls)
            # This gradient is constant, so it does not order the calls. Part of it is padding.
            with _calls(buffer) as calls:
                alone = jax.jit(jax.grad(lambda x: run(x, model.idx, model.weights, mine, model.mixing)[1:].sum()))  # noqa: B023
                jax.block_until_ready(alone(model.x))
                assert "".join(calls) == expected, "".join(calls)


def check_the_token_of_a_checkpoint_has_a_name(comm: MPI.Intracomm) -> None:
    """`checkpoint` passes the token as `after` and not as another option of the layer."""
    with raises(TypeError, "after"):
        ep.checkpoint(lambda x, twice=False: x * (1 + bool(twice)))(jnp.ones(3))
    named = ep.checkpoint(lambda x, twice=False, after=None: x * (1 + (twice is not False)))
    assert jax.grad(lambda x: named(x).sum())(jnp.ones(3)).tolist() == [1, 1, 1]


def check_independent_calls_keep_their_order(comm: MPI.Intracomm) -> None:
    """`after` orders micro-batches that do not depend on each other. Their gradients have the reverse order."""
    models = [_layers(comm, 1), _layers(comm, 1, skip=0.7)]
    with _buffer(comm) as one, _buffer(comm) as two:

        @jax.jit
        @jax.value_and_grad
        def step(xs: list[jax.Array], slow: jax.Array) -> jax.Array:
            late = xs[0] + jnp.sin(slow @ slow).sum() * 0  # without `after`, XLA dispatches the second one first
            first = ep.dispatch(one, late, models[0].idx[0])
            second = ep.dispatch(two, xs[1], models[1].idx[0], after=first.handle.token)
            done = ep.combine(one, first.recv_x, first.handle, after=second.handle.token)
            last = ep.combine(two, second.recv_x, second.handle, after=done.token)
            return (done.x**2).sum() + (last.x**3).sum()

        slow = jnp.ones((300 * (1 + comm.Get_rank()),) * 2)
        sets = [[len({e // 4 for e in row if e >= 0}) for row in model.idx[0].tolist()] for model in models]
        copies = [np.array(counts, np.float32)[:, None] for counts in sets]  # each rank returns a token once
        for _ in range(10):
            with _calls(one, two) as calls:
                _, gradients = jax.block_until_ready(step([model.x for model in models], slow))
                assert "".join(calls) == "dDcCKkCc", "".join(calls)
            np.testing.assert_allclose(gradients[0], 2 * copies[0] ** 2 * models[0].x, rtol=1e-5)
            np.testing.assert_allclose(gradients[1], 3 * copies[1] ** 3 * models[1].x ** 2, rtol=1e-5)


def check_ranks_without_tokens(comm: MPI.Intracomm) -> None:
    """All expert numbers are -1: first on one rank, which has one row, then on every rank."""
    first = comm.Get_rank() == 0
    for tokens, skip in ((1 if first else TOKENS, 1.0 if first else 0.2), (TOKENS, 1.0)):
        with _buffer(comm) as buffer:
            _compare(comm, _layers(comm, tokens=tokens, skip=skip), partial(_unrolled, _parallel(buffer)))


def check_many_steps(comm: MPI.Intracomm) -> None:
    """One compiled function runs with many routings. Results are right although the host does not wait in between."""
    model = _layers(comm, 20)
    with _buffer(comm) as buffer:
        step, dense = jax.jit(_parallel(buffer)), jax.jit(_dense)
        mine = slice(model.first, model.first + 4)
        x, want = model.x, model.x
        for idx, weights, matrices, mixing in zip(model.idx, model.weights, model.matrices, model.mixing, strict=True):
            x, want = step(x, idx, weights, matrices[mine], mixing), dense(want, idx, weights, matrices, mixing)
        np.testing.assert_allclose(x, want, rtol=1e-3, atol=1e-4)


def check_wrong_arguments(comm: MPI.Intracomm) -> None:
    """JAX raises errors while it traces, and no rank makes a call."""
    model = _layers(comm, 1)
    x, idx, weights = model.x, model.idx[0], model.weights[0]
    with _buffer(comm) as buffer, _calls(buffer) as calls:
        call = jax.jit(partial(ep.dispatch, buffer), static_argnames="num_worst_tokens")
        for words, bad in (
            (("x.shape=", f"expected [num_tokens, {HIDDEN}]"), lambda: call(x[:, :16], idx, weights)),
            (("topk_idx", "int32"), lambda: call(x, weights, weights)),
            (("topk_weights.shape=",), lambda: call(x, idx, weights[:3])),
            (("x.shape=[65, ", "at most 64 tokens"), lambda: call(jnp.zeros((65, HIDDEN)), jnp.zeros((65, TOPK), int))),
            (("x.shape=[0, ", "-1"), lambda: call(x[:0], idx[:0], weights[:0])),
            (("num_worst_tokens",), lambda: call(x, idx, num_worst_tokens=10**6)),
            (("complex64",), lambda: call(x.astype(jnp.complex64), idx)),
        ):
            with raises(EPInputError, *words):
                bad()
        assert not calls
        sent = call(x, idx, weights)
        with raises(EPInputError, "x.shape=", f"expected [{sent.recv_x.shape[0]}, {HIDDEN}]"):
            ep.combine(buffer, x, sent.handle)
        with raises(EPInputError, "topk_idx=None"):
            ep.dispatch(buffer, x, None)
        with raises(EPInputError, "x.dtype=float8_e4m3fn", "gradient", "bfloat16"):
            jax.grad(lambda x: ep.dispatch(buffer, x, idx).recv_x.astype(jnp.float32).sum())(x.astype(jnp.float8_e4m3fn))
        with raises(EPInputError, "tuple", "deepep_rt.jax.dispatch"):
            ep.combine(buffer, sent.recv_x, tuple(sent))
        with _buffer(comm) as other, raises(EPInputError, "another Buffer"):
            ep.combine(other, sent.recv_x, sent.handle)
        with raises(EPInputError, "after=float32[12,32]", "token"):
            call(x, idx, after=x)


def check_errors_of_a_call(comm: MPI.Intracomm) -> None:
    """JAX shows the exception of a callback as text, and `errors` raises the exception itself. The Buffer stays usable."""
    model = _layers(comm, 1)
    x, idx = model.x, model.idx[0]
    bad = idx.at[3, 1].set(model.experts + 5)
    with _buffer(comm) as buffer:
        call = jax.jit(lambda x, idx: ep.dispatch(buffer, x, idx).recv_x)
        with raises(EPInputError, "token 3", f"expert {model.experts + 5}"), ep.errors():
            jax.block_until_ready(call(x, bad))
        with raises(Exception, "EPInputError", f"expert {model.experts + 5}"):
            jax.block_until_ready(call(x, bad))
        with raises(EPInputError, "token 3"), ep.errors():  # the first error, because later ones may follow from it
            with contextlib.suppress(Exception):
                jax.block_until_ready(call(x, bad))
            jax.block_until_ready(call(x, idx.at[5, 0].set(-7)))
        with raises(RuntimeError, "mine"), ep.errors():
            raise RuntimeError("mine")  # an exception of the program
        assert np.isfinite(jax.block_until_ready(call(x, idx))).all()


def check_a_destroyed_buffer(comm: MPI.Intracomm) -> None:
    """A compiled function may outlive its Buffer. A call of it then raises EPDestroyedError."""
    model = _layers(comm, 1)
    with _buffer(comm) as buffer:
        call = jax.jit(lambda x, idx: ep.dispatch(buffer, x, idx).recv_x)
        jax.block_until_ready(call(model.x, model.idx[0]))
    with raises(EPDestroyedError, "destroyed"), ep.errors():
        jax.block_until_ready(call(model.x, model.idx[0]))
    with raises(Exception, "EPDestroyedError", "destroyed"):
        jax.block_until_ready(call(model.x, model.idx[0]))


def check_a_silent_rank(comm: MPI.Intracomm) -> None:
    model = _layers(comm, 1)
    if comm.Get_size() == 1:
        return
    with raises(EPTimeoutError, "rank 0"), _buffer(comm, timeout_s=seconds(1.0)) as buffer:
        call = jax.jit(lambda x, idx: ep.dispatch(buffer, x, idx).recv_x).lower(model.x, model.idx[0]).compile()
        comm.Barrier()  # without it, the first rank to compile might time out
        if comm.Get_rank() == 0:
            time.sleep(seconds(3.0))
            raise EPTimeoutError("rank 0 is the silent one", rank=0, peer=0, phase="")
        with ep.errors():
            jax.block_until_ready(call(model.x, model.idx[0]))
            buffer.synchronize()


if __name__ == "__main__":
    main(__name__)
