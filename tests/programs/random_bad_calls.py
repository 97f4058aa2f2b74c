"""Generated bad calls on the host backend. Valid rounds in between are compared with the oracles.

Usage: random_bad_calls.py [NUMBER [SECONDS [SEED]]]. NUMBER counts the bad calls of all ranks. After SECONDS, no further round begins.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import low_latency_oracle
import numpy as np
import oracle
from expect import raises
from generated_calls import Call, Caller, wrong_array
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer

from deepep_rt import Buffer, EPConfigError, EPInputError

NUMBER, LIMIT_S, SEED = 1200, 60.0, 1
HIDDEN, TOPK, TOKENS, CALLS_A_ROUND = 256, 4, 8, 25


def _calls(comm: MPI.Intracomm, buffer: Buffer, held: dict[str, Any]) -> list[Call]:
    """List valid calls. Replacements keep the numbers of tokens, because a call that is valid by chance would wait for the other ranks."""
    x, idx, weights = held["inputs"].x, held["inputs"].topk_idx, held["inputs"].topk_weights
    array, sent, low = wrong_array, held["sent"], held["low"]
    options: dict[str, Any] = {"async_finish": False, "previous_event": None, "stream": None}
    option_kinds: dict[str, Any] = {"async_finish": "flag", "previous_event": "stream", "stream": "stream"}
    low_option_kinds = {"async_finish": "flag", "stream": "stream", "return_recv_hook": "flag"}
    arrays = {"x": array, "topk_idx": array}
    new = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_worst_tokens": 5, "expert_alignment": 1, **options}
    foreign = {"handle": lambda r, _: held["foreign"] if r.random() < 0.2 else r.choice([low.handle, sent, 7, "h", {}])}
    foreign_low = {"handle": lambda r, _: held["foreign low"] if r.random() < 0.2 else r.choice([sent.handle, low, None, "h"])}
    rows = {"y": held["y"], "topk_idx": idx, "topk_weights": weights, "handle": low.handle}
    numbers = {"expert_alignment": "number", "num_worst_tokens": "number"}
    low_flags = {"use_fp8": "flag", "round_scale": "flag", "use_ue8m0": "flag", **low_option_kinds}
    combine_flags = {"allow_multiple_reduction": "flag", "zero_copy": "flag", **low_option_kinds}
    good_stats = {
        "cumulative_local_expert_recv_stats": np.zeros(buffer.config.num_local_experts, np.int32),
        "wait_recv_cost_stats": np.zeros(comm.Get_size(), np.int64),
    }
    sizes = dict(num_max_tokens_per_rank=8, hidden=256, num_topk=2, num_experts=8)
    settings: dict[str, Any] = dict.fromkeys(sizes, "number")
    settings |= {"dtype": "any", "backend": "any", "on_timeout": "any", "on_exhausted": "any", "low_latency": "flag"}
    settings |= {"path": "any", "num_max_recv_tokens": "number"}
    no_sizes = ("backend", "on_timeout", "on_exhausted", "path")
    set_num_sms = partial(setattr, buffer, "num_sms")
    return [
        Call("dispatch", buffer.dispatch, new, {**arrays, "topk_weights": array, **numbers, **option_kinds, **foreign}),
        Call("dispatch, known", buffer.dispatch, {"x": x, "handle": sent.handle, **options}, {"x": array, **option_kinds, **foreign}),
        Call("combine", buffer.combine, {"x": sent.recv_x, "handle": sent.handle, "bias": x, **options},
             {"x": array, "bias": _wrong_bias, **option_kinds, **foreign}),
        Call("low_latency_dispatch", buffer.low_latency_dispatch, {"x": x, "topk_idx": idx, **good_stats},
             {**arrays, **low_flags, "cumulative_local_expert_recv_stats": array, "wait_recv_cost_stats": array}),
        Call("low_latency_combine", buffer.low_latency_combine, {**rows, "out": np.zeros_like(x)},
             {"y": array, "topk_idx": array, "topk_weights": array, "out": array, **combine_flags, **foreign_low}),
        Call("get_low_latency_combine_buffer", buffer.get_low_latency_combine_buffer, {"handle": low.handle}, foreign_low),
        Call("mask_rank", buffer.mask_rank, {"rank": 0}, {"rank": "number"}),
        Call("unmask_rank", buffer.unmask_rank, {"rank": 0}, {"rank": "number"}),
        Call("copy_ceiling", buffer.copy_ceiling, {"num_rows": 1, "iterations": 1, "row_bytes": 16},
             {"num_rows": "number", "iterations": "number", "row_bytes": "number"}),
        Call("destroy", buffer.destroy, {}, {"in_touch": "flag"}),
        Call("num_sms", lambda num_sms: set_num_sms(num_sms), {"num_sms": 8}, {"num_sms": "number"}, (EPConfigError,)),
        Call("size_hint", Buffer.size_hint, {"num_ranks": 1, **sizes},
             {name: kind for name, kind in settings.items() if name not in no_sizes}, (EPConfigError,)),
        Call("Buffer", lambda **given: Buffer(MPI.COMM_SELF, **given).destroy(), {**sizes, "backend": "host"}, settings, (EPConfigError,)),
    ]  # fmt: skip


def _wrong_bias(random: Any, good: Any) -> Any:
    """Wrap sequences, because an empty sequence is a valid list of biases."""
    wrong = wrong_array(random, good)
    return [wrong] if isinstance(wrong, (list, tuple)) else wrong


def _disagree(comm: MPI.Intracomm, buffer: Buffer, held: dict[str, Any], number: int) -> None:
    """Make a call that is valid on each rank and differs between ranks, so that every rank raises."""
    if comm.Get_size() == 1:
        return
    is_culprit = comm.Get_rank() == number % comm.Get_size()
    x, idx = held["inputs"].x, held["inputs"].topk_idx
    wrong = idx.copy()
    wrong[number % len(idx), number % TOPK] = buffer.config.num_experts + number
    kinds = {
        "topk_idx": lambda: buffer.dispatch(x, wrong if is_culprit else idx),
        "x of this call": lambda: buffer.dispatch(x.astype(np.float16) if is_culprit else x, idx),
        "topk_weights": lambda: buffer.dispatch(x, idx, held["inputs"].topk_weights if is_culprit else None),
        "kind": lambda: buffer.dispatch(x, idx, handle=held["sent"].handle if is_culprit else None),
    }
    words = list(kinds)[number % len(kinds)]
    with raises(EPInputError, words):
        kinds[words]()


def _valid_round(comm: MPI.Intracomm, buffer: Buffer, seed: int) -> dict[str, Any]:
    """Make a round of each mode, and compare it with the oracles. Return its arguments and results for bad calls."""
    rank, experts = comm.Get_rank(), buffer.config.num_experts
    settings = dict(hidden=HIDDEN, num_topk=TOPK, num_experts=experts, dtype="bfloat16")
    inputs = inputs_of_all(comm, seed, lambda rank: 1 + (seed + rank) % TOKENS, **settings)
    mine = inputs[rank]
    sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, experts))
    rows = [oracle.expected_dispatch(peer, inputs, experts).x for peer in range(comm.Get_size())]
    oracle.check_sums(buffer.combine(rows[rank], sent.handle), rank, inputs, rows, experts)
    low = buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=mine.topk_weights, use_fp8=False)
    low_latency_oracle.check_dispatch(low, low_latency_oracle.expected_dispatch(rank, inputs, experts, fp8=False))
    shape = (experts // comm.Get_size(), TOKENS * comm.Get_size(), HIDDEN)
    y = [low_latency_oracle.outputs(seed, peer, shape) for peer in range(comm.Get_size())]
    wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=True)
    got = buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, low.handle).x
    assert got.view(np.uint16).tolist() == wanted.view(np.uint16).tolist()
    return {"inputs": mine, "sent": sent, "low": low, "y": y[rank]}


def check_generated_bad_calls(comm: MPI.Intracomm) -> None:
    number, limit_s, seed = NUMBER, LIMIT_S, SEED
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    for i, word in enumerate(words):
        number, limit_s, seed = (
            int(word) if i == 0 else number,
            float(word) if i == 1 else limit_s,
            int(word) if i == 2 else seed,
        )
    rank, ranks, start = comm.Get_rank(), comm.Get_size(), time.monotonic()
    sizes = dict(num_experts=4 * ranks, hidden=HIDDEN, num_topk=TOPK, dtype="bfloat16", num_max_tokens_per_rank=TOKENS)
    with make_buffer(comm, low_latency=True, **sizes) as buffer, make_buffer(comm, low_latency=True, **sizes) as other:
        foreign = _valid_round(comm, other, 0)
        held: dict[str, Any] = {}

        def calls() -> list[Call]:
            return _calls(comm, buffer, held)

        caller = Caller((seed, rank), calls)
        rounds = 0
        while comm.allreduce(caller.report.done) < number and comm.allreduce(time.monotonic() - start, MPI.MAX) < limit_s:
            held.clear()
            held |= _valid_round(comm, buffer, 1000 * seed + rounds)
            held |= {"foreign": foreign["sent"].handle, "foreign low": foreign["low"].handle}
            caller.make(CALLS_A_ROUND if rounds % 5 or rank else 3 * CALLS_A_ROUND)  # so that ranks are late at times
            _disagree(comm, buffer, held, rounds)
            rounds += 1
        _valid_round(comm, buffer, 999)
    done = comm.allreduce(caller.report.done)
    if rank == 0:
        print(f"{done} bad calls in {rounds} rounds, {time.monotonic() - start:.1f} s: {caller.report.by_error}", flush=True)
    assert done >= number or time.monotonic() - start > limit_s


if __name__ == "__main__":
    main(__name__)
