"""Check that the backward passes of all ranks make the same calls, whatever needs a gradient on each rank.

`tests/gpu/test_torch_on_gpus.py` runs these checks on GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import spmd
import torch
from mpi4py import MPI
from spmd import idle_barrier, main, raises
from torch.utils.checkpoint import checkpoint
from torch_layers import BOUND, EACH, buffer_for, close, dense, device, experts, matrices, tokens_of_all

from deepep_rt import EPInputError, EPTimeoutError
from deepep_rt.torch import combine, dispatch

LIMIT_S = 4.0  # for the ranks that wait; the other calls of such a Buffer are done by then
FORMS: tuple[dict[str, Any], ...] = (
    dict(),
    dict(fp8=True),
    dict(layout="expert"),
    dict(layout="expert", reduce="topk"),
    dict(layout="expert", fp8=True, num_worst_tokens=256),
)


@contextmanager
def same_calls(comm: MPI.Intracomm, buffer: Any, expected: str) -> Iterator[None]:
    """Check which calls each rank makes: d(ispatch), k(nown routing) and c(ombine)."""
    made, plain = [], (buffer.dispatch, buffer.combine)

    def recorded(call: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
        made.append("k" if options.get("handle") else name)
        return call(*args, **options)

    buffer.dispatch, buffer.combine = (functools.partial(recorded, call, name) for call, name in zip(plain, "dc", strict=True))
    yield
    buffer.dispatch, buffer.combine = plain
    assert set(comm.allgather("".join(made))) == {expected}, "".join(made)


def run_layer(
    buffer: Any,
    x: Any,
    idx: Any,
    weights: Any,
    mats: Any,
    *,
    drops: bool,
    layout: str = "token",
    fp8: bool = False,
    reduce: str = "rank",
    **how: Any,
) -> Any:
    """A layer whose experts take rows in either order. With `drops`, they return plain zeros."""
    sent = dispatch(buffer, x, idx, weights, layout=layout, fp8=fp8, reduce=reduce, **how)
    rows = sent.recv_x
    if drops:
        y = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
    elif layout == "token":
        y = experts(rows, sent.recv_topk_idx, sent.recv_topk_weights, mats)
    else:
        ends = sent.expert_offsets.tolist()
        parts = [torch.tanh(rows[a:b] @ mat) for a, b, mat in zip(ends[:-1], ends[1:], mats, strict=True)]
        y = torch.cat([*parts, torch.zeros_like(rows[ends[-1] :])])
    weights_of_rows = sent.recv_topk_weights if layout == "expert" else None
    return combine(buffer, y, sent.handle, topk_weights=weights_of_rows, fp8_grad=fp8, reduce=reduce)


class Situation:
    """A layer on this rank, with the gradients that it should have.

    Args:
        comm: The ranks.
        seed: Of the tokens.
        needs: The leaves of a rank that need a gradient: some of "x", "w" (weights) and "m" (matrices).
        drops: Whether the experts of a rank return plain zeros.
        how: More arguments of `tokens_of_all`.
    """

    def __init__(self, comm: MPI.Intracomm, seed: int, needs: Callable[[int], str], drops: Callable[[int], bool], **how: Any):
        rank, tokens, mats = comm.Get_rank(), tokens_of_all(comm, seed, **how), matrices(comm, seed)
        x, self.idx, weights = tokens[rank].leaves()
        mine = slice(EACH * rank, EACH * (rank + 1))
        self.leaves = dict(x=x, w=weights, m=mats[mine].to(device(), copy=True))
        for name, leaf in self.leaves.items():
            leaf.requires_grad_(name in needs(rank))
        self.seed_grad, self.drops = tokens[rank].seed_grad.to(device()), drops(rank)
        for of in tokens:  # dropped rows contribute nothing
            dropped = torch.tensor([drops(r) for r in range(comm.Get_size())])[of.idx.clamp_min(0) // EACH]
            of.idx = of.idx.masked_fill(dropped, -1)
        of_ranks, mats_grad = dense(tokens, mats)
        _, x_grad, w_grad = of_ranks[rank]
        self.expected = dict(x=x_grad, w=w_grad, m=mats_grad[mine])

    @property
    def needed(self) -> dict[str, torch.Tensor]:
        return {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}

    def out(self, buffer: Any, **how: Any) -> torch.Tensor:
        x, weights, mats = self.leaves.values()
        return run_layer(buffer, x, self.idx, weights, mats, drops=self.drops, **how)

    def backward(self, out: torch.Tensor, **how: Any) -> None:
        (out * self.seed_grad).sum().backward(**how)

    def compare(self, bound: float, times: int = 1) -> None:
        """Check the gradients, and forget them."""
        for name, leaf in self.needed.items():
            got = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # None: nothing contributes to it
            close(got, times * self.expected[name], bound, f"the gradient of {name}")
            leaf.grad = None


def situations(comm: MPI.Intracomm) -> dict[str, Situation]:
    last = comm.Get_size() - 1
    make = functools.partial(Situation, comm)
    first = dict(first=EACH) if last else {}
    return {
        "only experts learn, and rank 0 without rows returns zeros": make(1, lambda r: "m", lambda r: r == 0, **first),
        "only the x of rank 0 needs a gradient": make(2, lambda r: "x" if r == 0 else "", lambda r: False),
        "only the weights of rank 0 need gradients": make(3, lambda r: "w" if r == 0 else "", lambda r: False),
        "only the experts of the last rank learn": make(4, lambda r: "m" if r == last else "", lambda r: False),
        "the last rank drops its rows and needs nothing": make(5, lambda r: "" if r == last else "xwm", lambda r: r == last),
        "all ranks drop their rows": make(6, lambda r: "xwm", lambda r: True),
        "rank 0 has no tokens": make(7, lambda r: "m", lambda r: r == 0, counts=lambda r: 0 if r == 0 else 6),
    }


def check_whatever_needs_a_gradient(comm: MPI.Intracomm) -> None:
    for how in FORMS:
        with buffer_for(comm) as buffer:
            for what, here in situations(comm).items():
                with same_calls(comm, buffer, "dckc"):
                    here.backward(here.out(buffer, **how))
                try:
                    here.compare(0.1 if how.get("fp8") else BOUND)
                except AssertionError as error:
                    raise AssertionError(f"{what}, {how}: {error}") from None


def check_nothing_needs_a_gradient(comm: MPI.Intracomm) -> None:
    """Without gradients in PyTorch, calls leave no graph. With them, they do, because other ranks may need one."""
    here = Situation(comm, 8, lambda rank: "", lambda rank: False)
    with buffer_for(comm) as buffer:
        with torch.no_grad():
            assert not here.out(buffer).requires_grad
        with same_calls(comm, buffer, "dckc"):
            here.backward(here.out(buffer))


def check_checkpoints(comm: MPI.Intracomm) -> None:
    """The recomputation also makes the same calls on all ranks."""
    with buffer_for(comm) as buffer:
        for how in (dict(), dict(layout="expert")):
            for what, here in situations(comm).items():
                for reentrant in (False, True):
                    if reentrant and not comm.allreduce(bool(here.needed.keys() - "m"), MPI.LAND):
                        continue  # PyTorch repeats such a part only on ranks where an input needs a gradient
                    x, weights, mats = here.leaves.values()
                    part = functools.partial(run_layer, buffer, drops=here.drops, **how)
                    with same_calls(comm, buffer, "dcdckc" if how or reentrant else "dckdc"):
                        here.backward(checkpoint(part, x, here.idx, weights, mats, use_reentrant=reentrant))
                    try:
                        here.compare(BOUND)
                    except AssertionError as error:
                        raise AssertionError(f"{what}, {how}, {reentrant}: {error}") from None


def check_retained_graphs(comm: MPI.Intracomm) -> None:
    """Several combines of one dispatch, each with a backward pass of its own, also on a rank that drops its rows."""
    with buffer_for(comm) as buffer:
        for what, here in situations(comm).items():
            x, weights, mats = here.leaves.values()
            with same_calls(comm, buffer, "d" + "ckc" * 3):
                sent = dispatch(buffer, x, here.idx, weights)
                for number in range(3):
                    run = torch.zeros_like(sent.recv_x) if here.drops else None
                    y = experts(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights, mats) if run is None else run
                    here.backward(combine(buffer, y, sent.handle), retain_graph=number < 2)
            here.compare(BOUND, times=3)
            with same_calls(comm, buffer, "ck"):  # the graph of the dispatch is gone
                combine(buffer, torch.zeros_like(sent.recv_x), sent.handle).sum().backward()
            assert what


def check_gradients_of_some_inputs(comm: MPI.Intracomm) -> None:
    last = comm.Get_size() - 1
    with buffer_for(comm) as buffer:
        for how in FORMS[:3]:
            for names, drops in (("x", True), ("w", True), ("xw", True), ("m", False)):
                here = Situation(comm, 9, lambda r: "xwm", lambda r: drops and r == last)  # noqa: B023
                with same_calls(comm, buffer, "dck" if names == "m" else "dckc"):
                    inputs = [here.leaves[name] for name in names]
                    found = torch.autograd.grad(here.out(buffer, **how), inputs, here.seed_grad)
                for name, gradient in zip(names, found, strict=True):
                    close(gradient, here.expected[name], 0.1 if how.get("fp8") else BOUND, f"the gradient of {name}")


def check_weights_beside_rows_without_a_gradient(comm: MPI.Intracomm) -> None:
    """Rows of bytes have no gradient. The weights that travel with them do, on the ranks that need it."""
    here = Situation(comm, 10, lambda r: "w" if r == 0 else "", lambda r: False)
    x, weights = torch.ones(here.leaves["x"].shape, dtype=torch.uint8, device=device()), here.leaves["w"]
    with buffer_for(comm) as buffer:
        with same_calls(comm, buffer, "dc"):
            sent = dispatch(buffer, x, here.idx, weights)
            assert not sent.recv_x.requires_grad
            (sent.recv_topk_weights * 3).sum().backward()
        if weights.requires_grad:
            assert torch.equal(weights.grad, (here.idx >= 0) * 3.0)
        sent = dispatch(buffer, x, here.idx)
        with same_calls(comm, buffer, "ck"):
            combine(buffer, torch.ones(sent.recv_x.shape, device=device()), sent.handle).sum().backward()


def _skip(comm: MPI.Intracomm, words: str, run: Callable[[Any, bool], None], **how: Any) -> None:
    """Check what the ranks that wait say of the last rank, which leaves out a part of its backward pass in `run(buffer, skips)`."""
    last = comm.Get_size() - 1
    skips = comm.Get_rank() == last
    with raises(EPTimeoutError, f"rank {last} does not run {words}"), buffer_for(comm, timeout_s=LIMIT_S, **how) as buffer:
        try:
            run(buffer, skips)
            if not skips:
                buffer.synchronize()
        finally:
            idle_barrier(comm)  # the last rank leaves after the others have waited
        if skips:
            raise EPTimeoutError(f"rank {last} does not run {words}", rank=last, peer=last, phase="")


def check_who_leaves_a_backward_pass_out(comm: MPI.Intracomm) -> None:
    """The error names the rank, and the call whose backward pass it does not run."""
    if comm.Get_size() == 1:
        return
    here = Situation(comm, 11, lambda rank: "xwm", lambda rank: False)

    def without_the_loss(buffer: Any, skips: bool) -> None:
        for number in range(2):
            out = here.out(buffer)
            if number == 0 or not skips:
                here.backward(out)

    def without_gradients(buffer: Any, skips: bool) -> None:
        with torch.set_grad_enabled(not skips):
            out = here.out(buffer, layout="expert")
        if not skips:
            here.backward(out)

    def without_x(buffer: Any, skips: bool) -> None:
        out = here.out(buffer)
        torch.autograd.grad(out, [here.leaves["m"], *([] if skips else [here.leaves["x"]])], here.seed_grad)

    def without_recomputation(buffer: Any, skips: bool) -> None:
        x, weights, mats = (leaf.detach() if skips else leaf for leaf in here.leaves.values())
        part = functools.partial(run_layer, buffer, drops=False)
        out = checkpoint(part, x, here.idx, weights, mats, use_reentrant=True)
        if not skips:
            here.backward(out)

    _skip(comm, "the backward of combine call 2", without_the_loss)
    _skip(comm, "the backward of combine call 1", without_gradients)
    _skip(comm, "the backward of dispatch call 1", without_x)
    if spmd.backend == "host":  # on GPUs the host waits in that call, which kernels do not number
        _skip(comm, "dispatch call 2, which a checkpoint computes again", without_recomputation)


def check_a_rank_that_leaves_before_its_backward_pass(comm: MPI.Intracomm) -> None:
    """The others hear why it left, and which backward pass it does not run."""
    if comm.Get_size() == 1:
        return
    here, last = Situation(comm, 13, lambda rank: "xwm", lambda rank: False), comm.Get_size() - 1
    words = [] if spmd.backend == "cuda" else [f"rank {last} does not run the backward of combine call 1"]
    if comm.Get_rank() == last:
        words = []
    with raises(Exception, "the loss is NaN", *words), buffer_for(comm) as buffer:
        out = here.out(buffer)
        if comm.Get_rank() == last:
            raise ValueError("the loss is NaN")
        here.backward(out)
        buffer.synchronize()


def check_another_call_than_a_backward_pass(comm: MPI.Intracomm) -> None:
    """A rank that leaves its backward pass out makes its next call instead. All ranks hear of the difference, and may go on."""
    if (
        comm.Get_size() == 1 or spmd.backend == "cuda"
    ):  # there, routing and rows are two kernels, and the ranks wait for different ones
        return
    last = comm.Get_size() - 1
    here = Situation(comm, 12, lambda rank: "xwm", lambda rank: False)
    with buffer_for(comm) as buffer:
        out = here.out(buffer)
        skips = comm.Get_rank() == last
        words = [] if skips else [f"rank {last} does not run the backward of combine call 1"]
        with raises(EPInputError, "the ranks disagree on the", *words):
            if skips:
                here.out(buffer)
            else:
                here.backward(out)
        with same_calls(comm, buffer, "dckc"):
            here.backward(here.out(buffer))
        here.compare(BOUND)


if __name__ == "__main__":
    main(__name__)
