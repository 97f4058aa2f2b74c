"""Generated bad calls on the host backend. Valid rounds in between are compared with the oracles.

Usage: random_bad_calls.py [NUMBER [SECONDS [SEED]]]. NUMBER counts the bad calls of all ranks. After SECONDS, no further round begins.
"""

from __future__ import annotations

import inspect
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
from spmd import inputs_of_all, main, make_buffer, same_bits

from deepep_rt import Buffer, EPConfigError, EPInputError, NetworkOptions

NUMBER, LIMIT_S, SEED = 1200, 60.0, 1
HIDDEN, TOPK, TOKENS, CALLS_A_ROUND = 512, 4, 8, 25


OPTIONS: dict[str, Any] = {"async_finish": False, "previous_event": None, "stream": None}
OPTION_KINDS: dict[str, Any] = {"async_finish": "flag", "previous_event": "stream", "stream": "stream"}
LOW_OPTION_KINDS = {"async_finish": "flag", "stream": "stream", "return_recv_hook": "flag"}
FP8_KINDS = {"use_fp8": "flag", "round_scale": "flag", "use_ue8m0": "flag"}
NUMBERS = {"expert_alignment": "number", "num_worst_tokens": "number"}
LAYOUT_KINDS = {"layout": "word", "zero_padding": "flag", "scales_layout": "word", **FP8_KINDS}
FORM_KINDS = {"reduce": "word", "compress": "word"}
_array = wrong_array


def _calls(comm: MPI.Intracomm, buffer: Buffer, held: dict[str, Any]) -> list[Call]:
    """List valid calls. Replacements keep the numbers of tokens, because a call that is valid by chance would wait for the other ranks."""
    return [
        *_throughput_calls(buffer, held),
        *_prepared_calls(buffer, held),
        *_low_latency_calls(comm, buffer, held),
        *_other_calls(buffer),
    ]


def _throughput_calls(buffer: Buffer, held: dict[str, Any]) -> list[Call]:
    x, idx, weights = held["inputs"].x, held["inputs"].topk_idx, held["inputs"].topk_weights
    sent, rows, low = held["sent"], held["expert rows"], held["low"]
    arrays = {"x": _array, "topk_idx": _array, "topk_weights": _array}
    new = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_worst_tokens": 5, "expert_alignment": 1, **OPTIONS}
    by_expert = {**new, "layout": "expert", "zero_padding": True, "use_fp8": True, "num_worst_tokens": 64}
    wrong = {"handle": lambda r, _: held["foreign"] if r.random() < 0.2 else r.choice([low.handle, sent, 7, "h", {}])}
    known, back = {"x": x, "handle": sent.handle, **OPTIONS}, {"x": sent.recv_x, "handle": sent.handle, "bias": x, **OPTIONS}
    back_rows = {"x": rows.recv_x, "handle": rows.handle, "topk_weights": rows.recv_topk_weights, "weighted": True, **OPTIONS}
    back_kinds = {"x": _array, "bias": _wrong_bias, "weighted": "flag", **FORM_KINDS, **OPTION_KINDS, **wrong}
    other_layout = {"layout": lambda r, _: r.choice(["expert", "rows", 3])}
    of_rows = {"x": _array, "topk_weights": _array, "weighted": "flag", **FORM_KINDS, **OPTION_KINDS}
    return [
        Call("dispatch", buffer.dispatch, new, {**arrays, **NUMBERS, **LAYOUT_KINDS, **OPTION_KINDS, **wrong}),
        Call("dispatch, expert", buffer.dispatch, by_expert, {**arrays, **NUMBERS, **LAYOUT_KINDS, **OPTION_KINDS, **wrong}),
        Call("dispatch, known", buffer.dispatch, known, {"x": _array, **FP8_KINDS, **OPTION_KINDS, **wrong, **other_layout}),
        Call("combine", buffer.combine, back, back_kinds),
        Call("combine, expert", buffer.combine, back_rows, {**of_rows, "handle": lambda r, _: r.choice([sent.handle, low.handle, rows])}),
    ]  # fmt: skip


def _prepared_calls(buffer: Buffer, held: dict[str, Any]) -> list[Call]:
    """Preparing is no collective, and so are calls of prepared objects that refuse their rows."""
    mine, sent, step, low_step = held["inputs"], held["sent"], held["step"], held["low step"]
    arrays = {"x": mine.x, "topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}
    kinds = dict.fromkeys(arrays, _array)
    given = {**arrays, "handle": sent.handle, "y": sent.recv_x, "y_weights": np.zeros((len(sent.recv_x), TOPK), np.float32)}
    wrong = {
        "y": _array,
        "y_weights": _array,
        "bias": _wrong_bias,
        "compress": "word",
        "async_finish": "flag",
        "stream": "stream",
    }
    handles = {"handle": lambda r, _: r.choice([held["expert rows"].handle, held["foreign"], held["low"].handle, 7])}
    low = {**arrays, "y": held["y"], "out": np.zeros_like(mine.x)}
    low_kinds = {"y": _array, "out": _array, "allow_multiple_reduction": "flag", "zero_copy": "flag"}
    return [
        Call("prepare_throughput", buffer.prepare_throughput, {**given, "bias": mine.x}, {**kinds, **wrong, **handles}),
        Call("prepare_low_latency", buffer.prepare_low_latency, low, {**kinds, **low_kinds, **FP8_KINDS, **FORM_KINDS, **LOW_OPTION_KINDS}),
        Call("prepared combine", step.combine, {"y": sent.recv_x}, {"y": _array}),
        Call("prepared low_latency_combine", low_step.combine, {"y": held["y"]}, {"y": _array}),
    ]  # fmt: skip


def _low_latency_calls(comm: MPI.Intracomm, buffer: Buffer, held: dict[str, Any]) -> list[Call]:
    x, idx, weights = held["inputs"].x, held["inputs"].topk_idx, held["inputs"].topk_weights
    sent, low = held["sent"], held["low"]
    wrong = {"handle": lambda r, _: held["foreign low"] if r.random() < 0.2 else r.choice([sent.handle, low, None, "h"])}
    stats = {
        "cumulative_local_expert_recv_stats": np.zeros(buffer.config.num_local_experts, np.int32),
        "wait_recv_cost_stats": np.zeros(comm.Get_size(), np.int64),
    }
    given = {"y": held["y"], "topk_idx": idx, "topk_weights": weights, "handle": low.handle, "out": np.zeros_like(x)}
    kinds = {**dict.fromkeys(("y", "topk_idx", "topk_weights", "out"), _array), **FORM_KINDS, **LOW_OPTION_KINDS, **wrong}
    return [
        Call("low_latency_dispatch", buffer.low_latency_dispatch, {"x": x, "topk_idx": idx, **stats},
             {"x": _array, "topk_idx": _array, **FP8_KINDS, **LOW_OPTION_KINDS, **dict.fromkeys(stats, _array)}),
        Call("low_latency_combine", buffer.low_latency_combine, given,
             {**kinds, "allow_multiple_reduction": "flag", "zero_copy": "flag"}),
        Call("get_low_latency_combine_buffer", buffer.get_low_latency_combine_buffer, {"handle": low.handle}, wrong),
        Call("mask_rank", buffer.mask_rank, {"rank": 0}, {"rank": "number"}),
        Call("unmask_rank", buffer.unmask_rank, {"rank": 0}, {"rank": "number"}),
    ]  # fmt: skip


def _other_calls(buffer: Buffer) -> list[Call]:
    sizes = dict(num_max_tokens_per_rank=8, hidden=256, num_topk=2, num_experts=8)
    settings: dict[str, Any] = dict.fromkeys((*sizes, "num_slots", "num_sms", "low_latency_sms"), "number")
    settings |= {"ranks_per_node": "number", "path": "any", "num_max_recv_tokens": "number"}
    settings |= {"dtype": "any", "on_timeout": "any", "low_latency": "flag", "statistics": _wrong_optional_flag}
    settings |= {
        "backend": "any",
        "on_exhausted": "any",
        "network": "any",
        "check_inputs": _wrong_optional_flag,
        "timeout_s": "seconds",
    }
    of_sizes = inspect.signature(Buffer.size_hint).parameters
    set_num_sms = partial(setattr, buffer, "num_sms")
    network = {"transport": "word", "nvshmem_remote_transport": "word", "ibgda": _wrong_optional_flag, "service_level": "number"}
    network |= {
        "connections_per_peer": "number",
        "queue_depth": "number",
        "nics": "word",
        "bootstrap_interface": _wrong_interface,
    }
    return [
        Call("copy_ceiling", buffer.copy_ceiling, {"num_rows": 1, "iterations": 1, "row_bytes": 16},
             {"num_rows": "number", "iterations": "number", "row_bytes": "number"}),
        Call("autotune", buffer.autotune, {"num_tokens": 1, "dtype": "bfloat16"},
             {"num_tokens": "number", "dtype": "any", "max_seconds": "seconds", "save": "flag"}),
        Call("destroy", buffer.destroy, {}, {"in_touch": "flag"}),
        Call("num_sms", lambda num_sms: set_num_sms(num_sms), {"num_sms": 8}, {"num_sms": "number"}, (EPConfigError,)),
        Call("size_hint", Buffer.size_hint, {"num_ranks": 1, **sizes},
             {name: kind for name, kind in settings.items() if name in of_sizes}, (EPConfigError,)),
        Call("Buffer", lambda **given: Buffer(MPI.COMM_SELF, **given).destroy(), {**sizes, "backend": "host"},
             settings, (EPConfigError,)),
        Call("NetworkOptions", NetworkOptions, {}, network, (EPConfigError,)),
    ]  # fmt: skip


def _wrong_optional_flag(random: Any, _: Any) -> Any:
    """None stands for the default."""
    return random.choice(["", "yes", 2, -1, 1.0, [], b"1", np.int8(3), object()])


def _wrong_interface(random: Any, _: Any) -> Any:
    return random.choice(["", "eth 0", "eth0\0", "\ud800", 3, b"eth0", ["eth0"], object()])


def _wrong_bias(random: Any, good: Any) -> Any:
    """Wrap sequences, because an empty sequence is a valid list of biases."""
    wrong = wrong_array(random, good)
    return [wrong] if isinstance(wrong, (list, tuple)) else wrong


def _disagree(comm: MPI.Intracomm, buffer: Buffer, held: dict[str, Any], number: int) -> None:
    """Make a call that is valid on each rank and differs between ranks, so that every rank raises."""
    if comm.Get_size() == 1:
        return
    is_culprit = comm.Get_rank() == number % comm.Get_size()
    x, idx, weights = held["inputs"].x, held["inputs"].topk_idx, held["inputs"].topk_weights
    rows, wrong = held["expert rows"], idx.copy()
    wrong[number % len(idx), number % TOPK] = buffer.config.num_experts + number
    back = partial(buffer.combine, rows.recv_x, rows.handle, topk_weights=rows.recv_topk_weights)
    calls = [
        ("topk_idx", lambda: buffer.dispatch(x, wrong if is_culprit else idx)),
        ("x of this call", lambda: buffer.dispatch(x.astype(np.float16) if is_culprit else x, idx)),
        ("topk_weights", lambda: buffer.dispatch(x, idx, weights if is_culprit else None)),
        ("kind", lambda: buffer.dispatch(x, idx, handle=held["sent"].handle if is_culprit else None)),
        ("kind", lambda: buffer.dispatch(x, idx, layout="expert" if is_culprit else "token")),
        ("x of this call", lambda: buffer.dispatch(x, idx, use_fp8=is_culprit)),
        ("kind", lambda: back(weighted=is_culprit)),
        ("kind", lambda: back(reduce="topk" if is_culprit else "rank")),
        ("kind", lambda: back(weighted=True, compress="fp8" if is_culprit else None)),
        ("kind", lambda: back(weighted=True, compress="fp8" if is_culprit else "log10")),
        ("kind", lambda: held["step"].dispatch() if is_culprit else buffer.dispatch(x, idx)),
    ]
    words, call = calls[number % len(calls)]
    with raises(EPInputError, words):
        call()


def _valid_round(comm: MPI.Intracomm, buffer: Buffer, seed: int) -> dict[str, Any]:
    """Make a round of each mode, and compare it with the oracles. Return its arguments and results for bad calls."""
    rank, experts = comm.Get_rank(), buffer.config.num_experts
    settings = dict(hidden=HIDDEN, num_topk=TOPK, num_experts=experts, dtype="bfloat16")
    inputs = inputs_of_all(comm, seed, lambda rank: 1 + (seed + rank) % TOKENS, **settings)
    mine, nodes = inputs[rank], {"node_size": buffer.config.node_size} if buffer.config.has_network else {}
    sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, experts))
    rows = [oracle.expected_dispatch(peer, inputs, experts).x for peer in range(comm.Get_size())]
    oracle.check_sums(buffer.combine(rows[rank], sent.handle), rank, inputs, rows, experts, **nodes)
    by_expert = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout="expert")
    expected = [oracle.expected_expert_rows(peer, inputs, experts) for peer in range(comm.Get_size())]
    oracle.check_expert_rows(by_expert, expected[rank])
    sums = [
        oracle.rows_by_token(peer, inputs, experts, found.x, found, weights=found.weights) for peer, found in enumerate(expected)
    ]
    back = buffer.combine(by_expert.recv_x, by_expert.handle, topk_weights=by_expert.recv_topk_weights, weighted=True)
    assert same_bits(back.x, oracle.expected_sums(rank, inputs, sums, experts, **nodes)[0])
    low = buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=mine.topk_weights, use_fp8=False)
    low_latency_oracle.check_dispatch(low, low_latency_oracle.expected_dispatch(rank, inputs, experts, fp8=False))
    shape = (experts // comm.Get_size(), TOKENS * comm.Get_size(), HIDDEN)
    y = [low_latency_oracle.outputs(seed, peer, shape) for peer in range(comm.Get_size())]
    wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=True)
    got = buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, low.handle).x
    assert same_bits(got, wanted)
    step = buffer.prepare_throughput(mine.x, sent.handle)
    assert same_bits(step.combine(rows[rank]).x, buffer.combine(rows[rank], sent.handle).x)
    low_step = buffer.prepare_low_latency(mine.x, mine.topk_idx, mine.topk_weights, use_fp8=False)
    low_step.dispatch()
    assert same_bits(low_step.combine(y[rank]).x, wanted)
    return {"inputs": mine, "sent": sent, "expert rows": by_expert, "low": low, "y": y[rank], "step": step, "low step": low_step}


def _counted(buffer: Buffer) -> dict[str, Any]:
    """Return the statistics without the clock."""
    return {**buffer.statistics().to_dict(), "seconds": 0}


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
    made = partial(make_buffer, comm, low_latency=True, statistics=True, **sizes)
    with made() as buffer, made() as other:
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
            before = _counted(buffer)
            caller.make(CALLS_A_ROUND if rounds % 5 or rank else 3 * CALLS_A_ROUND)  # so that ranks are late at times
            assert _counted(buffer) == before, "a call that raised was counted"
            _disagree(comm, buffer, held, rounds)
            rounds += 1
        _valid_round(comm, buffer, 999)
    done = comm.allreduce(caller.report.done)
    if rank == 0:
        print(f"{done} bad calls in {rounds} rounds, {time.monotonic() - start:.1f} s: {caller.report.by_error}", flush=True)
    assert done >= number or time.monotonic() - start > limit_s


if __name__ == "__main__":
    main(__name__)
