"""Whole numbers of NumPy: every public argument takes them. No call computes in their width, and none keeps one."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)
import numpy as np
import pytest

from deepep_rt import Buffer, EPConfigError, EPError, EPInputError, EPUnavailableError, NetworkOptions
from deepep_rt.comm.store_server import StoreServer
from deepep_rt.config import Config

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
MPI = pytest.importorskip("mpi4py.MPI", reason="the host backend needs MPI")

deep_ep = pytest.importorskip("deepep_rt.compat")
ep_jax = pytest.importorskip("deepep_rt.jax")
ep_torch = pytest.importorskip("deepep_rt.torch")

TOKENS, HIDDEN, TOPK, EXPERTS = 5, 256, 2, 8
SIZES = dict(num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS)
X = np.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).astype("bfloat16")
IDX = np.arange(TOKENS * TOPK).reshape(TOKENS, TOPK) % EXPERTS
WEIGHTS = np.ones((TOKENS, TOPK), np.float32)


def _no_arithmetic(name: str) -> Callable[..., Any]:
    def compute(self: np.generic, *_: Any) -> Any:
        raise AssertionError(f"{type(self).__name__}.{name}: a NumPy number got past the checks, and was computed with")

    return compute


_OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or", "xor"]
_COMPUTING = {f"__{side}{name}__": _no_arithmetic(name) for name in _OPERATORS for side in ("", "r")} | {
    f"__{name}__": _no_arithmetic(name) for name in ("neg", "abs", "invert")
}
WIDTHS = [
    type(f"Spy_{kind.__name__}", (kind,), _COMPUTING)
    for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
]


@pytest.fixture(scope="module")
def world() -> Iterator[dict[str, Any]]:
    """A Buffer of each kind, of one rank, and the results of its calls."""
    with ExitStack() as held:
        plain = held.enter_context(Buffer(MPI.COMM_SELF, backend="host", **SIZES))
        server = StoreServer()
        server.serve_in_thread()
        held.callback(server.close)
        low = held.enter_context(Buffer(MPI.COMM_SELF, backend="host", low_latency=True, **SIZES))
        v1 = deep_ep.Buffer(MPI.COMM_SELF, num_nvl_bytes=1 << 20, low_latency_mode=True, enable_shrink=True)
        held.callback(v1.destroy)
        rows, idx = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.from_numpy(IDX)
        counted = v1.get_dispatch_layout(idx, EXPERTS)
        layout = dict(num_tokens_per_rank=counted[0], is_token_in_rank=counted[3], num_tokens_per_expert=counted[2], topk_idx=idx)
        v2 = deep_ep.ElasticBuffer(MPI.COMM_SELF, **_V2)
        held.callback(v2.destroy)
        received, _, _, handle, _ = v2.dispatch(rows, idx, num_experts=EXPERTS)
        packed = torch.zeros(TOKENS, HIDDEN // 2, dtype=torch.uint8), torch.zeros(TOKENS, HIDDEN // 16, dtype=torch.uint8)
        sent = dict(received=received, handle=handle, packed=packed)
        yield dict(store=server.address, plain=plain, low=low, v1=v1, v2=v2, rows=rows, idx=idx, layout=layout, **sent)


_V2 = dict(num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=TOPK)


Case = tuple[int, Callable[[dict[str, Any], Any], Any]]  # a number that is allowed, and what it is given to


def _make(name: str) -> Callable[[dict[str, Any], Any], None]:
    """Make a Buffer."""

    def make(world: dict[str, Any], value: Any) -> None:
        sizes = {**SIZES, name: value}
        Buffer(MPI.COMM_SELF, **sizes, backend="host", low_latency=name == "low_latency_sms").destroy()

    return make


def _hint(name: str) -> Callable[[dict[str, Any], Any], dict[str, int]]:
    return lambda w, v: Buffer.size_hint(**{"num_ranks": 4, "low_latency": True, **SIZES, name: v})


def _set_num_sms(world: dict[str, Any], value: Any) -> None:
    buffer = world["plain"]
    before = buffer.num_sms
    buffer.num_sms = value
    assert type(buffer.num_sms) is int
    buffer.num_sms = before


def _send(**options: Any) -> Any:
    sent = options.pop("buffer").dispatch(X, IDX, **options)
    return sent.recv_x.shape, type(sent.handle.num_recv_rows), sent.num_recv_tokens_per_expert_list


def _run_experts(w: dict[str, Any], **options: Any) -> list[list[float]]:
    weights = torch.ones(TOKENS, TOPK)
    w1, w2 = torch.zeros(EXPERTS, HIDDEN, 16).bfloat16(), torch.zeros(EXPERTS, 8, HIDDEN).bfloat16()
    return ep_torch.expert_mlp(w["plain"], w["rows"], w["idx"], weights, w1, w2, **options).tolist()


def _send_tensors(w: dict[str, Any], **options: Any) -> Any:
    sent = ep_torch.dispatch(w["plain"], w["rows"], w["idx"], **options)
    return sent.recv_x.shape, type(sent.handle.num_recv_rows), sent.num_recv_tokens_per_expert_list


def _decode(call: Callable[..., Any], *arguments: Any, most: Any) -> tuple[int, ...]:
    return tuple(call(*arguments, num_max_tokens=most).recv_x.shape)


def _prepare_decode(w: dict[str, Any], most: Any) -> Any:
    return w["low"].prepare_low_latency(X, IDX, WEIGHTS, num_max_tokens=most).dispatch().recv_x.shape


def _send_v1(w: dict[str, Any], **options: Any) -> Any:
    rows, _, _, counts, *_ = w["v1"].dispatch(w["rows"], **w["layout"], **options)
    return rows.shape, counts


def _measure(method: str, name: str) -> Callable[[dict[str, Any], Any], bool]:
    return lambda w, v: bool(getattr(w["plain"], method)(**{"row_bytes": 16, "num_rows": 4, "iterations": 1, name: v}))


def _tune(world: dict[str, Any], num_tokens: Any) -> str:
    """Return the refusal of the host backend, which comes after the checks of all arguments."""
    try:
        world["plain"].autotune(num_tokens=num_tokens)
    except EPUnavailableError as error:
        return str(error)
    raise AssertionError("the host backend has nothing to tune")


def _make_v2(name: str) -> Callable[[dict[str, Any], Any], None]:
    return lambda w, v: deep_ep.ElasticBuffer(MPI.COMM_SELF, **{**_V2, name: v}).destroy()


def _send_v2(w: dict[str, Any], **options: Any) -> Any:
    rows, *_, handle, _ = w["v2"].dispatch(w["rows"], w["idx"], **{"num_experts": EXPERTS, **options})
    assert {
        type(getattr(handle, name)) for name in ("num_experts", "expert_alignment", "num_max_tokens_per_rank", "num_sms")
    } == {int}
    return rows.shape, handle.num_recv_tokens_per_expert_list


def _make_v1(name: str) -> Callable[[dict[str, Any], Any], None]:
    return lambda w, v: deep_ep.Buffer(MPI.COMM_SELF, **{name: v}).destroy()


def _positional(call: Callable[..., Any], **arguments: int) -> dict[str, Case]:
    """Make a case for each argument of a call, with the other arguments as given here. The call gets the world first."""

    def case(name: str) -> Callable[[dict[str, Any], Any], Any]:
        return lambda w, v: call(w, *{**arguments, name: v}.values())

    return {name: (good, case(name)) for name, good in arguments.items()}


def _named(prefix: str, cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{prefix}.{name}": case for name, case in cases.items()}


_LL = dict(num_max_dispatch_tokens_per_rank=8, hidden=HIDDEN, num_ranks=4, num_experts=EXPERTS)
_HINT = _positional(lambda w, *numbers: deep_ep.get_low_latency_rdma_size_hint(*numbers), **_LL)
_NVSHMEM = dict(service_level=3, connections_per_peer=4, queue_depth=128)
_NETWORK = dict(**_NVSHMEM, wire_bandwidth=100, wire_latency=5)
_V1_CALL = dict(num_max_dispatch_tokens_per_rank=8, num_experts=EXPERTS)

# A public argument that is missing here fails a test below.
CASES: dict[str, Case] = {
    **{f"Buffer.{name}": (good, _make(name)) for name, good in {**SIZES, "num_slots": 2, "num_sms": 24}.items()},
    **{
        f"Buffer.{name}": (good, _make(name))
        for name, good in {"low_latency_sms": 64, "ranks_per_node": 1, "num_max_recv_tokens": 8}.items()
    },
    **{f"Buffer.size_hint.{name}": (good, _hint(name)) for name, good in {"num_ranks": 4, **SIZES}.items()},
    **{f"Buffer.size_hint.{name}": (2, _hint(name)) for name in ("num_slots", "ranks_per_node", "num_max_recv_tokens")},
    "Buffer.max_ranks": (
        2,
        lambda w, v: Buffer(MPI.COMM_SELF, backend="host", max_ranks=v, rendezvous=w["store"], **SIZES).destroy(),
    ),
    "Buffer.shrink.lost": (0, lambda w, v: w["plain"].shrink([v])),
    "Buffer.join.max_ranks": (2, lambda w, v: Buffer.join(0, max_ranks=v, **SIZES)),
    "Buffer.join.slot": (1, lambda w, v: v is None or Buffer.join(0, max_ranks=2, slot=v, **SIZES)),
    "Buffer.num_sms (set)": (16, _set_num_sms),
    "Buffer.autotune.num_tokens": (4, _tune),
    "Buffer.dispatch.num_worst_tokens": (8, lambda w, v: _send(buffer=w["plain"], num_worst_tokens=v)),
    "Buffer.dispatch.expert_alignment": (4, lambda w, v: _send(buffer=w["plain"], expert_alignment=v)),
    "Buffer.low_latency_dispatch.num_max_tokens": (6, lambda w, v: _decode(w["low"].low_latency_dispatch, X, IDX, most=v)),
    "Buffer.prepare_low_latency.num_max_tokens": (6, lambda w, v: _prepare_decode(w, v)),
    "torch.low_latency_dispatch.num_max_tokens": (
        6,
        lambda w, v: _decode(ep_torch.low_latency_dispatch, w["low"], w["rows"], w["idx"], most=v),
    ),
    "jax.low_latency_dispatch.num_max_tokens": (6, lambda w, v: _decode(ep_jax.low_latency_dispatch, w["low"], X, IDX, most=v)),
    "Buffer.mask_rank.rank": (0, lambda w, v: w["low"].mask_rank(v)),
    "Buffer.unmask_rank.rank": (0, lambda w, v: w["low"].unmask_rank(v)),
    **{
        f"Buffer.{method}.{name}": (16, _measure(method, name))
        for method in ("copy_ceiling", "copy_ceilings")
        for name in ("row_bytes", "num_rows", "iterations")
    },
    **_named(
        "NetworkOptions",
        _positional(lambda w, *n: NetworkOptions(**dict(zip(_NETWORK, n, strict=True))).common(), **_NETWORK),
    ),
    "torch.expert_mlp.num_worst_tokens": (127, lambda w, v: _run_experts(w, num_worst_tokens=v)),
    "torch.dispatch.num_worst_tokens": (8, lambda w, v: _send_tensors(w, num_worst_tokens=v)),
    "torch.dispatch.expert_alignment": (4, lambda w, v: _send_tensors(w, expert_alignment=v)),
    "jax.dispatch.num_worst_tokens": (8, lambda w, v: ep_jax.dispatch(w["plain"], X, IDX, num_worst_tokens=v).recv_x.shape),
    "jax.dispatch.expert_alignment": (
        4,
        lambda w, v: ep_jax.dispatch(w["plain"], X, IDX, expert_alignment=v).num_recv_tokens_per_expert.tolist(),
    ),
    **{f"compat.Buffer.{name}": (8, _make_v1(name)) for name in ("num_nvl_bytes", "num_rdma_bytes", "num_qps_per_rank")},
    "compat.Buffer.set_num_sms.new_num_sms": (20, lambda w, v: deep_ep.Buffer.set_num_sms(v)),
    "compat.Buffer.get_dispatch_config.num_ranks": (4, lambda w, v: repr(deep_ep.Buffer.get_dispatch_config(v))),
    "compat.Buffer.get_combine_config.num_ranks": (4, lambda w, v: repr(deep_ep.Buffer.get_combine_config(v))),
    **_named("compat.get_low_latency_rdma_size_hint", _HINT),
    **_named("compat.Buffer.get_low_latency_rdma_size_hint", _HINT),
    "compat.Buffer.get_dispatch_layout.num_experts": (
        EXPERTS,
        lambda w, v: w["v1"].get_dispatch_layout(w["idx"], v)[0].tolist(),
    ),
    "compat.Buffer.dispatch.expert_alignment": (4, lambda w, v: _send_v1(w, expert_alignment=v)),
    "compat.Buffer.internode_dispatch.expert_alignment": (4, lambda w, v: _send_v1(w, expert_alignment=v)),  # dispatch serves it
    "compat.Buffer.dispatch.num_worst_tokens": (8, lambda w, v: _send_v1(w, num_worst_tokens=v)),
    **_named(
        "compat.Buffer.low_latency_dispatch",
        _positional(lambda w, *n: w["v1"].low_latency_dispatch(w["rows"], w["idx"], *n)[1].tolist(), **_V1_CALL),
    ),
    **_named(
        "compat.Buffer.low_latency_dispatch_fp4",
        _positional(lambda w, *n: w["v1"].low_latency_dispatch_fp4(*w["packed"], w["idx"], *n)[2].tolist(), **_V1_CALL),
    ),
    **_named(
        "compat.Buffer.clean_low_latency_buffer",
        _positional(
            lambda w, *n: w["v1"].clean_low_latency_buffer(*n),
            num_max_dispatch_tokens_per_rank=8,
            hidden=HIDDEN,
            num_experts=EXPERTS,
        ),
    ),
    "compat.Buffer.low_latency_update_mask_buffer.rank_to_mask": (
        0,
        lambda w, v: w["v1"].low_latency_update_mask_buffer(v),
    ),
    **{
        f"compat.ElasticBuffer.{name}": (good, _make_v2(name))
        for name, good in {
            **_V2,
            "num_bytes": 8,
            "num_cpu_bytes": 0,
            "sl_idx": 3,
            "num_allocated_qps": 8,
            "num_cpu_timeout_secs": 30,
            "num_gpu_timeout_secs": 30,
        }.items()
    },
    **_named(
        "compat.ElasticBuffer.get_buffer_size_hint",
        _positional(lambda w, *n: deep_ep.ElasticBuffer.get_buffer_size_hint(MPI.COMM_SELF, *n), **_V2),
    ),
    **_named(
        "compat.ElasticBuffer.get_theoretical_num_sms",
        _positional(lambda w, *n: w["v2"].get_theoretical_num_sms(*n), num_experts=EXPERTS, num_topk=TOPK, num_scaleout_topk=0),
    ),
    "compat.ElasticBuffer.get_theoretical_num_qps.num_sms": (4, lambda w, v: w["v2"].get_theoretical_num_qps(v)),
    **{
        f"compat.ElasticBuffer.dispatch.{name}": (good, lambda w, v, name=name: _send_v2(w, **{name: v}))
        for name, good in {
            "num_experts": EXPERTS,
            "num_max_tokens_per_rank": 8,
            "expert_alignment": 4,
            "num_sms": 8,
            "num_qps": 3,
        }.items()
    },
    **{
        f"compat.ElasticBuffer.combine.{name}": (
            8,
            lambda w, v, name=name: w["v2"].combine(w["received"], w["handle"], **{name: v})[0].shape,
        )
        for name in ("num_sms", "num_qps")
    },
    **{
        f"compat.Config.{name}": (8, lambda w, v, name=name: repr(deep_ep.Config(**{name: v})))
        for name in inspect.signature(deep_ep.Config).parameters
    },
    **_named(
        "compat.Config.get_nvl_buffer_size_hint",
        _positional(lambda w, *n: deep_ep.Config().get_nvl_buffer_size_hint(*n), hidden_bytes=512, num_ranks=4),
    ),
    **_named(
        "compat.Config.get_rdma_buffer_size_hint",
        _positional(lambda w, *n: deep_ep.Config().get_rdma_buffer_size_hint(*n), hidden_bytes=512, num_ranks=4),
    ),
}
ALWAYS_RAISE = {"compat.Buffer.get_local_buffer_tensor.offset"}
MAY_BE_NONE = (
    "Buffer.num_sms",
    "Buffer.max_ranks",
    "join.slot",
    "autotune.num_tokens",
    "num_worst_tokens",
    "num_max_tokens",
    "num_max_recv_tokens",
    "ranks_per_node",
    "row_bytes",
    "num_rows",
    *_NVSHMEM,
    "ElasticBuffer.num_bytes",
    "ElasticBuffer.dispatch.num_max_tokens_per_rank",
    "ElasticBuffer.dispatch.expert_alignment",
)
MADE_BY_CALLS = {
    "Handle",
    "TracedHandle",
    "Dispatched",
    "LowLatencyHandle",
    "LowLatencyDispatched",
    "Combined",
    "EPHandle",
}  # the caller makes none of these


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return all public calls by their names in this test."""
    modules = {"torch": ep_torch, "jax": ep_jax, "compat": deep_ep}
    found = [("Buffer", Buffer), ("NetworkOptions", NetworkOptions)]
    for prefix, module in modules.items():
        found += [(f"{prefix}.{name}", getattr(module, name)) for name in module.__all__ if name not in MADE_BY_CALLS]
    found += [("compat.get_low_latency_rdma_size_hint", deep_ep.get_low_latency_rdma_size_hint)]
    for name, what in found:
        if inspect.isclass(what):
            yield from ((f"{name}.{n}", f) for n, f in inspect.getmembers(what, callable) if not n.startswith("_"))
        if callable(what):
            yield name, what


def _whole_arguments() -> set[str]:
    found = set()
    for name, function in _public():
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # of C
            continue
        for parameter in parameters.values():
            if re.search(r"\bint\b", str(parameter.annotation)):
                found.add(f"{name}.{parameter.name}")
    return found


def test_every_public_whole_number_is_tried() -> None:
    found = _whole_arguments() - ALWAYS_RAISE
    assert len(found) > 50
    assert found <= set(CASES), f"no case for {sorted(found - set(CASES))}"
    assert {name for name in CASES if "(set)" not in name} <= found, "cases that stand for nothing"


@pytest.mark.parametrize("name", CASES)
def test_no_numpy_number_gets_past(world: dict[str, Any], name: str) -> None:
    """It gives the same result as Python's number, which may be an error. No call computes with it, and none keeps it."""
    good, give = CASES[name]

    def outcome(value: Any) -> Any:
        try:
            return give(world, value)
        except EPError as error:
            return type(error)

    wanted = outcome(good)
    for kind in WIDTHS:
        if good <= np.iinfo(kind.__mro__[1]).max:
            number = kind(good)
            references = sys.getrefcount(number)
            assert outcome(number) == wanted
            assert sys.getrefcount(number) == references, f"{name} keeps the {kind.__name__} that it was given"


WRONG = [True, np.True_, 2.0, np.float32(2), "2", None, np.array([2, 3]), np.array(2), 10**5000, -(1 << 70)]


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_such_number(world: dict[str, Any], name: str) -> None:
    """The error shows a part of it."""
    for wrong in WRONG:
        if wrong is None and name.endswith(MAY_BE_NONE):
            CASES[name][1](world, wrong)
            continue
        with pytest.raises((EPConfigError, EPInputError)) as caught:
            CASES[name][1](world, wrong)
        assert re.search(r"\w=\S.*; expected .*\. [A-Z]", str(caught.value)), str(caught.value)
        assert len(str(caught.value)) < 400


def test_sizes_do_not_overflow() -> None:
    """65536 rows of 2 bytes are 131072 bytes, also if the number of rows has a type of 16 bits."""
    sizes = dict(num_ranks=8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
    narrow = {name: np.uint16(value) for name, value in sizes.items()}
    assert Buffer.size_hint(**narrow) == Buffer.size_hint(**sizes)
    assert all(type(value) is not np.uint16 for value in vars(Config(**narrow)).values())
