"""Check deepep_rt.torch in functions that torch.compile compiles, and its operators.

`tests/gpu/test_torch_on_gpus.py` runs these checks on GPUs.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mpi4py import MPI
from spmd import idle_barrier, main, make_buffer, raises
from torch.utils.checkpoint import checkpoint
from torch_layers import (
    BOUND,
    EACH,
    HIDDEN,
    TOPK,
    backward,
    buffer_for,
    close,
    compare,
    device,
    experts,
    layer,
    local,
    matrices,
    tokens_of_all,
)
from torch_ties import same_calls, situations

from deepep_rt import EPInputError, EPTimeoutError
from deepep_rt.arrays.compressed_rows import COMPRESSIONS
from deepep_rt.torch import combine, dispatch, low_latency_combine, low_latency_dispatch
from deepep_rt.torch.handles import TIE

BACKENDS = ("aot_eager", *(("inductor",) if shutil.which("g++") else ()))


@contextmanager
def compiler(backend: str, **how: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield a function that compiles functions without graph breaks."""
    torch._dynamo.reset()
    try:
        yield lambda function: torch.compile(function, backend=backend, fullgraph=True, **how)
    finally:
        torch._dynamo.reset()


def layer_by_expert(
    buffer: Any, x: Any, idx: Any, weights: Any, mats: Any, bias: Any = None, fp8: bool = False, **how: Any
) -> Any:
    """A layer whose rows lie expert by expert. Rows past the last expert are multiplied by some matrix: they do not count."""
    sent = dispatch(buffer, x, idx, weights, layout="expert", fp8=fp8, **how)
    row = torch.arange(sent.recv_x.shape[0], device=x.device)
    expert = torch.searchsorted(sent.expert_offsets[1:].long(), row, right=True).clamp(max=len(mats) - 1)
    y = torch.tanh(torch.bmm(sent.recv_x[:, None], mats[expert])[:, 0])
    return combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights, bias=bias)


def check_layers_compile(comm: MPI.Intracomm) -> None:
    """A layer in one graph, with fixed sizes and with sizes that only the call knows. Then other sizes, on a rank none.

    Inductor takes most of the time. Without GPUs, one rank lets it compile half of the cases, and jobs of several ranks the others.
    """
    ranks = comm.Get_size()
    cases = [(one, worst) for one, each in ((layer, 64), (layer_by_expert, 64 * TOPK)) for worst in (each * ranks, None)]
    for backend in BACKENDS:
        for function, worst in cases:
            is_of_one_rank = (function is layer) == (worst is None)
            if backend == "inductor" and device() == "cpu" and is_of_one_rank != (ranks == 1):
                continue
            with compiler(backend) as compiled, buffer_for(comm) as buffer:
                run = compiled(function)
                for seed, counts in enumerate((lambda rank: 5 + rank, lambda rank: 9, lambda rank: 0 if rank == 0 else 7)):
                    tokens, mats = tokens_of_all(comm, seed, counts=counts), matrices(comm, seed)
                    mine, weights_of = tokens[comm.Get_rank()], local(comm, mats)
                    x, idx, weights = mine.leaves()
                    out = run(buffer, x, idx, weights, weights_of, num_worst_tokens=worst)
                    backward(out, mine)
                    compare(comm, tokens, mats, (out, x, weights, weights_of), BOUND)


def check_two_compiled_layers(comm: MPI.Intracomm) -> None:
    """Two layers in a graph, each computed again in the backward pass, with biases and without."""
    tokens, mats = tokens_of_all(comm, 31), matrices(comm, 31)
    mine = tokens[comm.Get_rank()]

    def once(buffer: Any, x: Any, idx: Any, weights: Any, mats: Any) -> Any:
        return layer_by_expert(buffer, x, idx, weights, mats, expert_alignment=16)

    def twice(buffer: Any, x: Any, idx: Any, weights: Any, mats: Any) -> Any:
        x = checkpoint(once, buffer, x, idx, weights, mats, use_reentrant=False)
        return checkpoint(once, buffer, x, idx, weights, mats, use_reentrant=False)

    with buffer_for(comm) as buffer, compiler("aot_eager") as compiled:
        x, idx, weights = mine.leaves()
        weights_of = local(comm, mats)
        out = compiled(twice)(buffer, x, idx, weights, weights_of)
        backward(out, mine)
        compare(comm, tokens, mats, (out, x, weights, weights_of), 4 * BOUND, num_layers=2)


def check_compiled_options(comm: MPI.Intracomm) -> None:
    """Compiled functions give the results of plain ones: FP8 both ways, biases, and a routing that a handle repeats."""
    ranks = comm.Get_size()

    def all_options(buffer: Any, x: Any, idx: Any, weights: Any, bias: Any, fp8: bool) -> Any:
        sent = dispatch(buffer, x, idx, weights, layout="expert", fp8=fp8, num_worst_tokens=64 * TOPK * ranks)
        again = dispatch(buffer, 2 * x, handle=sent.handle)
        y = torch.tanh(sent.recv_x + again.recv_x)
        return combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights, bias=(bias, x), fp8_grad=fp8)

    mine = tokens_of_all(comm, 32)[comm.Get_rank()]
    with buffer_for(comm) as buffer, compiler("aot_eager") as compiled:
        for fp8 in (False, True):
            found = []
            for run in (all_options, compiled(all_options)):
                x, idx, weights = mine.leaves()
                bias = mine.seed_grad.to(device()).clone().requires_grad_()
                out = run(buffer, x, idx, weights, bias, fp8)
                backward(out, mine)
                found.append((out, x.grad, weights.grad, bias.grad))
            for plain, compiled_one, name in zip(*found, ("out", "x.grad", "weights.grad", "bias.grad"), strict=True):
                close(compiled_one, plain.detach().cpu(), 1e-6, name)


def check_compressed_rows(comm: MPI.Intracomm) -> None:
    """Compiled functions have the bits of plain ones, and gradients of rows that travel as they are. Tracing refuses wrong arguments."""
    mine = tokens_of_all(comm, 36)[comm.Get_rank()]

    def round_trip(buffer: Any, x: Any, idx: Any, weights: Any, **how: Any) -> Any:
        sent = dispatch(buffer, x, idx, weights, layout="expert")
        return combine(buffer, torch.tanh(sent.recv_x), sent.handle, topk_weights=sent.recv_topk_weights, bias=x, **how)

    def bits(run: Any, compress: str | None) -> tuple[torch.Tensor, ...]:
        x, idx, weights = mine.leaves()
        out = run(buffer, x, idx, weights, compress=compress)
        backward(out, mine)
        return out.detach(), x.grad, weights.grad

    with buffer_for(comm) as buffer, compiler("aot_eager") as compiled:
        run = compiled(round_trip)
        refused = [(dict(compress="fp4"), "compress='fp4'"), (dict(compress="fp8", reduce="topk"), "with reduce='topk'")]
        for wrong, words in refused:
            with raises(Exception, words):
                run(buffer, *mine.leaves(), **wrong)
        expected = bits(round_trip, None)
        for compress in COMPRESSIONS:
            plain, other = bits(round_trip, compress), bits(run, compress)
            assert all(torch.equal(*pair) for pair in zip(plain, other, strict=True))
            assert all(torch.equal(*pair) for pair in zip(other[1:], expected[1:], strict=True))
            assert buffer.config.has_network or not torch.equal(other[0], expected[0])


def check_a_part_is_compiled(comm: MPI.Intracomm) -> None:
    """The handle of a compiled dispatch serves a plain combine. That of a plain dispatch is refused in a compiled function."""
    tokens, mats = tokens_of_all(comm, 33), matrices(comm, 33)
    mine, weights_of = tokens[comm.Get_rank()], local(comm, mats)
    with buffer_for(comm) as buffer, compiler("aot_eager") as compiled:
        x, idx, weights = mine.leaves()
        sent = compiled(dispatch)(buffer, x, idx, weights)
        gains = [(sent.recv_topk_weights * (sent.recv_topk_idx == e)).sum(1, keepdim=True) for e in range(EACH)]
        y = sum(gain * torch.tanh(sent.recv_x @ mat) for gain, mat in zip(gains, weights_of, strict=True))
        out = combine(buffer, y, sent.handle)
        backward(out, mine)
        compare(comm, tokens, mats, (out, x, weights, weights_of), BOUND)
        assert sent.num_recv_tokens_per_expert_list is None

        plain = dispatch(buffer, x.detach(), idx)
        with raises(Exception, "from outside of this compiled function"):
            compiled(combine)(buffer, plain.recv_x, plain.handle)
        for more in (dict(topk_idx=idx), dict(num_worst_tokens=9), dict(expert_alignment=2), dict(layout="expert")):
            with raises(Exception, "handle= with a routing or sizes"):
                dispatch(buffer, x, handle=sent.handle, **more)
        with raises(Exception, "len(bias)=3; expected at most 2"):
            combine(buffer, sent.recv_x, sent.handle, bias=[x, x, x])
        with raises(Exception, "topk_idx=None without handle"):
            compiled(dispatch)(buffer, x.detach())


def check_operators(comm: MPI.Intracomm) -> None:
    """torch.library.opcheck: schema, registration of gradients, fake tensors, and compiled results and gradients."""
    mine = tokens_of_all(comm, 34, counts=lambda rank: 6)[comm.Get_rank()]
    with buffer_for(comm) as buffer:
        serial = buffer._info.serial
        for layout, alignment, reduce, compress in (
            ("token", 1, "rank", "fp8"),
            ("expert", 4, "rank", "log10"),
            ("expert", 1, "topk", None),
        ):
            x, idx, weights = mine.leaves()
            check = torch.library.opcheck
            check(torch.ops.deepep_rt.dispatch, (x, TIE, idx, weights, serial, None, alignment, layout, False, reduce))
            check(torch.ops.deepep_rt.dispatch, (x, TIE, idx, None, serial, 64, alignment, layout, False, reduce))
            rows, _, recv_weights, *_, handle = torch.ops.deepep_rt.dispatch(
                x, TIE, idx, weights, serial, None, alignment, layout, False, reduce
            )
            rows, recv_weights, handle = (t.detach().requires_grad_() for t in (rows, recv_weights, handle))
            given = recv_weights if layout == "expert" else None
            check(torch.ops.deepep_rt.combine, (rows, TIE, handle, given, x, None, serial, len(x), False, reduce, compress))
            check(torch.ops.deepep_rt.combine, (rows, TIE, handle, None, None, None, serial, len(x), False, reduce, None))
            check(torch.ops.deepep_rt.send_again, (x, TIE, handle, serial, len(rows), layout == "expert", False, reduce))
            with torch.no_grad():
                check(
                    torch.ops.deepep_rt.send_back,
                    (rows.detach(), handle.detach(), handle.detach(), recv_weights.detach(), serial, len(x), reduce),
                )


def _tied_layer(buffer: Any, x: Any, idx: Any, weights: Any, mats: Any, drops: bool, layout: str, fp8: bool) -> Any:
    """A layer whose experts return plain zeros on the ranks that drop their rows."""
    if layout == "token":
        return layer(buffer, x, idx, weights, mats, run=_zeros if drops else experts, fp8=fp8, fp8_grad=fp8)
    if not drops:
        return layer_by_expert(buffer, x, idx, weights, mats, fp8=fp8)
    sent = dispatch(buffer, x, idx, weights, layout="expert", fp8=fp8)
    return combine(buffer, _zeros(sent.recv_x), sent.handle, topk_weights=sent.recv_topk_weights)


def _zeros(rows: Any, *_: Any) -> Any:
    return torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)


def check_whatever_needs_a_gradient(comm: MPI.Intracomm) -> None:
    """Graphs keep the calls of backward passes, also on ranks that need no gradient or use no row."""
    for backend, layout, fp8 in (*((name, "expert", False) for name in BACKENDS), ("aot_eager", "token", True)):
        for what, here in situations(comm).items():
            with compiler(backend) as compiled, buffer_for(comm) as buffer:
                run, (x, weights, mats) = compiled(_tied_layer), here.leaves.values()
                with same_calls(comm, buffer, "dckc"):
                    here.backward(run(buffer, x, here.idx, weights, mats, here.drops, layout, fp8))
                try:
                    here.compare(0.1 if fp8 else BOUND)
                except AssertionError as error:
                    raise AssertionError(f"{what}, {backend}, {layout}: {error}") from None


def check_a_known_routing_needs_a_gradient(comm: MPI.Intracomm) -> None:
    """The second dispatch of a routing has a backward pass on all ranks too."""
    for what, here in situations(comm).items():
        with compiler("aot_eager") as compiled, buffer_for(comm) as buffer:

            @compiled
            def run(buffer: Any, x: Any, idx: Any, weights: Any, mats: Any, drops: bool) -> Any:
                sent = dispatch(buffer, x, idx, weights)
                again = dispatch(buffer, 2 * x, handle=sent.handle)
                y = _zeros(sent.recv_x) if drops else again.recv_x * mats.sum() + sent.recv_x
                return combine(buffer, y, again.handle)

            x, weights, mats = here.leaves.values()
            with same_calls(comm, buffer, "dkckcc"):
                here.backward(run(buffer, x, here.idx, weights, mats, here.drops))
            assert what


def check_who_leaves_a_backward_pass_out(comm: MPI.Intracomm) -> None:
    if comm.Get_size() == 1:
        return
    here, last = situations(comm)["all ranks drop their rows"], comm.Get_size() - 1
    with compiler("aot_eager") as compiled, buffer_for(comm, timeout_s=4.0) as buffer:
        run, (x, weights, mats) = compiled(_tied_layer), here.leaves.values()
        given = x, here.idx, weights, mats, here.drops, "token", False
        for _ in range(2):
            out = run(buffer, *given)
        idle_barrier(comm)  # some ranks may compile longer
        words = f"rank {last} does not run the backward of combine call 2"
        with raises(EPTimeoutError, words), contextlib.ExitStack() as stack:
            stack.callback(idle_barrier, comm)
            if comm.Get_rank() == last:
                raise EPTimeoutError(words, rank=last, peer=last, phase="")
            here.backward(out)
            buffer.synchronize()
        buffer.destroy(in_touch=False)


def _decode_quantised(buffer: Any, x: Any, scales: Any, idx: Any, weights: Any, most: int | None) -> Any:
    sent = low_latency_dispatch(buffer, x, idx, use_fp8=False, x_scales=scales, num_max_tokens=most)
    y = torch.zeros(*sent.recv_x.shape[:2], buffer.config.hidden, dtype=torch.bfloat16, device=x.device)
    y[..., : sent.recv_x.shape[2]] = sent.recv_x.bfloat16() * sent.recv_x_scales[..., :1]
    return low_latency_combine(buffer, y, idx, weights, sent.handle), sent.num_recv_tokens_per_expert


def check_quantised_rows(comm: MPI.Intracomm) -> None:
    """Rows that the program has quantised, and fewer rows than the most, plain and compiled."""
    experts = EACH * comm.Get_size()
    settings = dict(
        hidden=4 * HIDDEN, num_topk=TOPK, num_experts=experts, num_max_tokens_per_rank=8, dtype="bfloat16", low_latency=True
    )
    with make_buffer(comm, **settings) as buffer, compiler("aot_eager") as compiled:
        run = compiled(_decode_quantised)
        for seed, most in enumerate((None, 6)):
            mine = tokens_of_all(comm, seed, counts=lambda rank: 6 if rank else 5)[comm.Get_rank()]
            x, idx, weights = (
                (mine.x.repeat(1, 2) * 20).to(torch.uint8).to(device()),
                mine.idx.to(device()),
                mine.weights.to(device()),
            )
            scales = torch.arange(len(x) * 3, dtype=torch.int16, device=device()).view(-1, 3)
            (plain, counts), (other, _) = (f(buffer, x, scales, idx, weights, most) for f in (_decode_quantised, run))
            assert torch.equal(plain, other)
            sent = buffer.low_latency_dispatch(x, idx, use_fp8=False, x_scales=scales, num_max_tokens=most)
            assert torch.equal(sent.num_recv_tokens_per_expert, counts)
            assert sent.recv_x.shape == (buffer.config.num_local_experts, comm.Get_size() * (most or 8), x.shape[1])
            assert (sent.recv_x.dtype, sent.recv_x_scales.dtype, sent.recv_x_scales.shape[2]) == (torch.uint8, torch.int16, 3)
            y = torch.zeros(*sent.recv_x.shape[:2], buffer.config.hidden, dtype=torch.bfloat16, device=x.device)
            y[..., : sent.recv_x.shape[2]] = sent.recv_x.bfloat16() * sent.recv_x_scales[..., :1]
            assert torch.equal(buffer.low_latency_combine(y, idx, weights, sent.handle).x, plain)


def _decode(buffer: Any, x: Any, idx: Any, weights: Any, use_fp8: bool, with_weights: bool, compress: str | None) -> Any:
    sent = low_latency_dispatch(buffer, x, idx, weights if with_weights else None, use_fp8=use_fp8)
    rows = sent.recv_x
    if use_fp8:
        groups = rows.float().unflatten(-1, (sent.recv_x_scales.shape[-1], 128)) * sent.recv_x_scales[..., None]
        rows = groups.flatten(-2).bfloat16()
    y = rows * 2
    return low_latency_combine(buffer, y, idx, weights, sent.handle, compress=compress), sent.num_recv_tokens_per_expert


def check_low_latency_calls(comm: MPI.Intracomm) -> None:
    """Plain, compiled, and the Buffer's own calls give the same bits."""
    experts = EACH * comm.Get_size()
    settings = dict(
        hidden=4 * HIDDEN, num_topk=TOPK, num_experts=experts, num_max_tokens_per_rank=8, dtype="bfloat16", low_latency=True
    )
    kinds = ((False, False, None), (False, True, "log10"), (True, True, None))
    with make_buffer(comm, **settings) as buffer, compiler("aot_eager") as compiled:
        run = compiled(_decode)
        for seed, (use_fp8, with_weights, compress) in enumerate(kinds):
            mine = tokens_of_all(comm, seed, counts=lambda rank: 8 if rank else 5)[comm.Get_rank()]
            x, idx, weights = mine.x.repeat(1, 4).bfloat16().to(device()), mine.idx.to(device()), mine.weights.to(device())
            given = x, idx, weights, use_fp8, with_weights, compress
            (plain, counts), (other, other_counts) = (f(buffer, *given) for f in (_decode, run))
            assert torch.equal(plain, other)
            assert torch.equal(counts, other_counts)
            sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights if with_weights else None, use_fp8=use_fp8)
            assert torch.equal(sent.num_recv_tokens_per_expert, counts)
            if not use_fp8:
                back = buffer.low_latency_combine(sent.recv_x * 2, idx, weights, sent.handle, compress=compress).x
                assert torch.equal(back, plain)


def check_low_latency_operators(comm: MPI.Intracomm) -> None:
    """Like check_operators. Rows of a dispatch that no token fills are undefined, so its results are not compared here."""
    experts = EACH * comm.Get_size()
    settings = dict(
        hidden=HIDDEN, num_topk=TOPK, num_experts=experts, num_max_tokens_per_rank=8, dtype="bfloat16", low_latency=True
    )
    with make_buffer(comm, **settings) as buffer:
        mine, serial = tokens_of_all(comm, 35, counts=lambda rank: 8)[comm.Get_rank()], buffer._info.serial
        x, idx, weights = mine.x.bfloat16().to(device()), mine.idx.to(device()), mine.weights.to(device())
        some = ("test_schema", "test_autograd_registration", "test_faketensor")
        dispatch_op, combine_op = torch.ops.deepep_rt.low_latency_dispatch, torch.ops.deepep_rt.low_latency_combine
        for use_fp8, use_ue8m0 in ((False, False), (True, False), (True, True)):
            given = (x, idx, weights, None, serial, use_fp8, use_ue8m0, use_ue8m0, 8)
            torch.library.opcheck(dispatch_op, given, test_utils=some)
        given = (x.view(torch.uint8)[:, :16].contiguous(), idx, weights, weights, serial, False, False, False, 8)
        torch.library.opcheck(dispatch_op, given, test_utils=some)
        rows, _, tables = dispatch_op(x, idx, weights, None, serial, False, False, False, 8)
        sizes = (serial, len(x), True, 8 * comm.Get_size(), False, None)
        torch.library.opcheck(combine_op, (rows, idx, weights, tables, *sizes))
        with raises(EPInputError, "no gradient"):
            low_latency_dispatch(buffer, x.requires_grad_(), idx, use_fp8=False).recv_x.sum().backward()
        sent = low_latency_dispatch(buffer, x.detach(), idx, use_fp8=False)
        with raises(EPInputError, "handle is not that of"):
            low_latency_combine(buffer, sent.recv_x, idx, weights, None)
        with raises(EPInputError, "topk_idx.shape"):
            low_latency_combine(buffer, sent.recv_x, idx[:, :2].contiguous(), weights, sent.handle)
        low_latency_combine(buffer, sent.recv_x, idx, weights, sent.handle)


if __name__ == "__main__":
    main(__name__, *sys.argv[1:])
