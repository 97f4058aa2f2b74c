"""Test deepep_rt.compat on the host backend: settings, streams and tables, and a program for DeepEP V1."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from launch import environment, run_checks, run_command
from paths import PROGRAMS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_size_hint_is_room_for_the_tokens_of_the_rings(num_ranks: int) -> None:
    """A Buffer with the hinted bytes holds that many tokens, within the bytes of rounding and of a wider top-k."""
    from deepep_rt import compat
    from deepep_rt.compat.config import normal_bytes

    config = compat.Config(24, 6, 256)
    hint = config.get_nvl_buffer_size_hint(2 * 7168, num_ranks)
    room = [normal_bytes(num_ranks, tokens, 7168, 8, 256, "bfloat16") for tokens in (3072 - 256, 3072 + 256)]
    assert room[0] < hint < room[1]
    assert config.get_rdma_buffer_size_hint(2 * 7168, num_ranks) == 0


@pytest.mark.parametrize("num_ranks", [9, 16, 72])
def test_size_hints_of_more_ranks_than_a_node_holds(num_ranks: int) -> None:
    """Programs ask before they choose a mode. A node holds up to 8 ranks, and all nodes hold equally many."""
    from deepep_rt import Buffer, compat
    from deepep_rt.compat.config import normal_bytes

    config, node = compat.Config(), 3 if num_ranks == 9 else 8
    nvl, rdma = (get(2 * 7168, num_ranks) for get in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint))
    assert nvl == config.get_nvl_buffer_size_hint(2 * 7168, 8)
    assert nvl + rdma == normal_bytes(num_ranks, 2560, 7168, 8, 8 * num_ranks, "bfloat16", ranks_per_node=node)
    sizes = dict(num_max_tokens_per_rank=128, hidden=7168, num_topk=8, num_experts=4 * num_ranks, low_latency=True)
    with_network = Buffer.size_hint(num_ranks, **sizes, ranks_per_node=node)["total"]
    assert compat.Buffer.get_low_latency_rdma_size_hint(128, 7168, num_ranks, 4 * num_ranks) == with_network


def test_size_hints_of_declared_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepep_rt import EPConfigError, compat

    config = compat.Config()
    nvl = config.get_nvl_buffer_size_hint(2 * 1024, 2)
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", "2")
    assert config.get_nvl_buffer_size_hint(2 * 1024, 4) == nvl
    assert config.get_rdma_buffer_size_hint(2 * 1024, 4) > 0
    assert config.get_rdma_buffer_size_hint(2 * 1024, 2) == 0
    with pytest.raises(EPConfigError, match="DEEPEP_RT_RANKS_PER_NODE=2; expected a divisor"):
        config.get_rdma_buffer_size_hint(2 * 1024, 5)


def test_nodes_larger_than_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepep_rt import EPConfigError
    from deepep_rt.compat import buffer

    ranks = SimpleNamespace(Get_size=lambda: 8)
    monkeypatch.setattr(buffer, "ranks_per_host", lambda ranks: 4)
    assert buffer.placement(ranks)[0] == 4
    for declared, node in (("2", 2), ("4", 4)):
        monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", declared)
        assert buffer.placement(ranks)[0] == node
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", "8")
    with pytest.raises(EPConfigError, match="DEEPEP_RT_RANKS_PER_NODE=8, but a host holds 4 ranks"):
        buffer.placement(ranks)


@pytest.mark.parametrize("low_latency", [False, True])
def test_bytes_for_the_network_count_between_nodes_only(monkeypatch: pytest.MonkeyPatch, low_latency: bool) -> None:
    """In DeepEP they also hold low-latency rows, which take memory of their own here."""
    from mpi4py import MPI

    from deepep_rt import compat

    made: list[int] = []
    monkeypatch.setattr("deepep_rt.compat.buffer.NormalBuffers", lambda ranks, num_bytes, *more: made.append(num_bytes))
    for node in (1, 0):  # 0 stands for fewer ranks than the group has
        monkeypatch.setattr("deepep_rt.compat.buffer.placement", lambda ranks, node=node: (node, True))
        compat.Buffer(None, 1000, 300, low_latency, comm=MPI.COMM_SELF)
    assert made == [1000, 1000 if low_latency else 1300]


def test_more_ranks_than_choices() -> None:
    """Tokens without expert numbers may name 32 ranks of a larger group."""
    import torch

    from deepep_rt.compat.normal import topk_idx_of_ranks

    in_rank = torch.zeros((3, 40), dtype=torch.bool)
    in_rank[0, [39, 2, 7]] = in_rank[2, 8:] = True
    topk_idx = topk_idx_of_ranks(in_rank, 32, 4)
    assert topk_idx.shape == (3, 32)
    assert [sorted(row[row >= 0].tolist()) for row in topk_idx] == [[8, 28, 156], [], [4 * rank for rank in range(8, 40)]]


def test_a_token_of_too_many_ranks() -> None:
    import torch

    from deepep_rt import EPInputError
    from deepep_rt.compat.normal import Routing, check_number_of_ranks

    in_rank = torch.ones((3, 40), dtype=torch.bool)
    routing = Routing(None, None, in_rank, torch.ones(40), 1, 0)
    with pytest.raises(EPInputError, match="a token to 40 ranks, and topk_idx=None; expected at most 32 ranks"):
        check_number_of_ranks(routing, 32, 40)
    check_number_of_ranks(routing, 40, 40)


def test_arguments_between_nodes() -> None:
    """Each argument has the place of DeepEP's, and only `dispatch` takes `num_worst_tokens`."""
    import inspect

    from deepep_rt import compat

    class Recorded(compat.Buffer):
        def __init__(self) -> None:
            self._state = SimpleNamespace(num_nodes=2)

        def dispatch(self, *given: object, **options: object) -> object:
            return inspect.signature(compat.Buffer.dispatch).bind(self, *given, **options).arguments

    buffer, names = Recorded(), list(inspect.signature(compat.Buffer.internode_dispatch).parameters)[1:]
    for count in range(1, len(names) + 1):
        values = dict(zip(names, range(100, 200), strict=False))
        given = buffer.internode_dispatch(*list(values.values())[:count], **dict(list(values.items())[count:]))
        assert {name: value for name, value in given.items() if name not in ("self", "num_worst_tokens")} == values
        assert given.get("num_worst_tokens", 0) == 0
    with pytest.raises(TypeError, match=r"internode_dispatch\(\) got an unexpected keyword argument 'num_worst_tokens'"):
        buffer.internode_dispatch(0, num_worst_tokens=8)
    with pytest.raises(TypeError, match="too many"):
        buffer.internode_dispatch(*range(14))


def test_settings() -> None:
    import numpy as np
    import torch

    from deepep_rt import Buffer, EPConfigError, EPInputError, compat

    assert compat.topk_idx_t is torch.int64
    before = compat.Buffer.num_sms
    try:
        compat.Buffer.set_num_sms(16)
        assert compat.Buffer.get_dispatch_config(8).num_sms == compat.Buffer.get_combine_config(1).num_sms == 16
        compat.Buffer.set_num_sms(np.int64(16))
        assert vars(compat.Buffer.get_dispatch_config(8))["num_sms"] == 16
        for wrong in (15, 0, -2, 1026, "a", 2.0, True, None):
            with pytest.raises(
                EPInputError, match=f"new_num_sms={wrong!r}; expected a whole number from 2 to 1024, a multiple of 2"
            ):
                compat.Buffer.set_num_sms(wrong)
        assert compat.Buffer.num_sms == 16
    finally:
        compat.Buffer.set_num_sms(before)
    assert vars(compat.Config(24, 8, 128)) == {
        "num_sms": 24,
        "num_max_nvl_chunked_send_tokens": 8,
        "num_max_nvl_chunked_recv_tokens": 128,
        "num_max_rdma_chunked_send_tokens": 6,
        "num_max_rdma_chunked_recv_tokens": 256,
    }
    with pytest.raises(EPConfigError, match="num_sms"):
        compat.Config(0)
    sizes = dict(num_max_tokens_per_rank=128, hidden=7168, num_topk=8, num_experts=256)
    hint = compat.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert hint == Buffer.size_hint(8, **sizes, low_latency=True)["total"]
    assert isinstance(compat.Buffer.is_sm90_compiled(), bool)


@pytest.mark.parametrize("how", ["group", "comm"])
def test_an_mpi_communicator(how: str) -> None:
    import torch
    from mpi4py import MPI

    from deepep_rt import EPConfigError, compat

    buffer = compat.Buffer(**{"group": None, how: MPI.COMM_SELF}, num_nvl_bytes=int(1e7))
    try:
        assert (buffer.rank, buffer.group_size, buffer.group) == (0, 1, MPI.COMM_SELF)
        idx = torch.zeros((3, 2), dtype=torch.int64)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
        x, layout = torch.ones((3, 256)), (per_rank, None, in_rank, per_expert)
        assert torch.equal(buffer.dispatch(x, None, *layout, idx)[0], x)
    finally:
        buffer.destroy()
    with pytest.raises(EPConfigError, match="COMM_NULL"):
        compat.Buffer(**{"group": None, how: MPI.COMM_NULL})


def test_tables_of_low_latency_handles_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables come from entries as kernels write them: in any order, some without rows, and old ones after the last."""
    pytest.importorskip("cuda.bindings")
    import numpy as np

    from deepep_rt.arrays.view import HOST
    from deepep_rt.backends.base import BufferInfo
    from deepep_rt.backends.cuda.handle_tables import CudaHandleTables
    from deepep_rt.compat import handles
    from deepep_rt.config import Config
    from deepep_rt.kernels import structs
    from deepep_rt.kernels.layout import Layout

    config = Config(num_ranks=3, num_max_tokens_per_rank=4, hidden=64, num_topk=2, num_experts=6, low_latency=True)
    rows = config.worst_recv_tokens  # of an expert; there are two
    entries = np.zeros(rows, structs.LlEntry.dtype(config.constants()))
    entries["row"], entries["source"], entries["token"] = 5, 2**31 - 1, 99  # values of an earlier call
    places = [
        (2, 3, (2, structs.LL_ELSEWHERE)),
        (0, 1, (0, rows)),
        (0, 2, (structs.LL_NO_ROOM, structs.LL_UNKNOWN)),
        (2, 0, (1, rows + 1)),
        (1, 3, (rows + 3, structs.LL_ELSEWHERE)),  # the call dropped the row before it
    ]
    for i, (source, token, row) in enumerate(places):
        entries[i]["source"], entries[i]["token"], entries[i]["row"] = source, token, row
    layout = Layout(config)
    places_of = layout.low_latency_handle
    memory = np.full(places_of.num_bytes // 4, 77, np.int32)
    memory[places_of.offsets["num_entries"] // 4] = len(places)
    first = places_of.offsets["entries"] // 4
    memory[first : first + entries.nbytes // 4] = entries.view(np.int32)

    tables = CudaHandleTables(BufferInfo(1, config, HOST), layout)  # host memory replaces memory of a GPU
    monkeypatch.setattr(handles, "backend_of", lambda buffer: SimpleNamespace(tables=tables))
    handle = SimpleNamespace(routing=(SimpleNamespace(ptr=memory.ctypes.data), None), capacity=rows)
    tokens, ranges = handles.expert_tables(SimpleNamespace(config=config), handle)
    assert tokens.tolist() == [[1, 0, 3] + [-1] * (rows - 3), [1, 0, -1, 3] + [-1] * (rows - 4)]
    assert [[(int(r) >> 32, int(r) & 0xFFFFFFFF) for r in expert] for expert in ranges] == [
        [(0, 1), (0, 0), (1, 2)],
        [(0, 1), (3, 1), (1, 1)],
    ]


def test_streams_of_calls_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for its previous event. On the communication stream, it waits for the caller's stream if there is no such event."""
    import torch

    from deepep_rt.compat.events import CallStream, EventHandle, EventOverlap

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: str) -> None:
            done.append((self.name, event))

        def record_event(self) -> str:
            return f"the work of the {self.name}"

    done: list[tuple[str, str]] = []
    caller, side = Stream("caller"), Stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: caller)
    tensor = SimpleNamespace(is_cuda=True, record_stream=lambda stream: done.append((stream.name, "uses it")))
    previous = EventOverlap(EventHandle())
    previous.event.event = "an event"
    for how, waits, event in (
        ((), [], None),
        ((previous,), [("caller", "an event")], None),
        ((None, True), [("side", "the work of the caller")], "the work of the caller"),
        ((previous, True), [("side", "an event")], "an event"),
    ):
        done.clear()
        stream = CallStream(tensor, lambda: side, *how)
        assert (done, stream.previous_event) == (waits, event)
        assert stream.options == ({"async_finish": True, "stream": side} if True in how else {})
        done.clear()
        stream.record_use(tensor)
        assert done == ([("side", "uses it"), ("caller", "uses it")] if True in how else [])


def test_the_end_of_a_with_block_waits_for_its_event() -> None:
    from deepep_rt.compat.events import EventOverlap

    waits: list[str] = []
    event = SimpleNamespace(current_stream_wait=lambda: waits.append("now"))
    with EventOverlap(event):
        assert waits == []
    assert waits == ["now"]
    with EventOverlap(None):
        pass


@pytest.mark.parametrize("lost", [[], [1]])
def test_the_normal_mode_does_not_wait_for_ranks_that_are_lost(monkeypatch: pytest.MonkeyPatch, lost: list[int]) -> None:
    from mpi4py import MPI

    from deepep_rt import compat

    in_touch_of: list[bool] = []
    buffer = compat.Buffer(None, int(1e7), low_latency_mode=True, enable_shrink=True, comm=MPI.COMM_SELF)
    monkeypatch.setattr("deepep_rt.compat.buffer_cache.LowLatencyBuffers.masked_ranks", lambda self: lost)
    monkeypatch.setattr(
        "deepep_rt.compat.buffer_cache.NormalBuffers.destroy", lambda self, in_touch: in_touch_of.append(in_touch)
    )
    buffer.destroy()
    assert in_touch_of == [not lost]


def test_a_capture_makes_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from deepep_rt import EPInputError
    from deepep_rt.compat.buffer_cache import check_not_capturing

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check_not_capturing("host")
    with pytest.raises(EPInputError, match="Make one before the capture"):
        check_not_capturing("cuda")


def test_settings_of_the_low_latency_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    from deepep_rt import compat
    from deepep_rt.network import NetworkOptions

    made: list[dict] = []
    monkeypatch.setattr("deepep_rt.compat.buffer.LowLatencyBuffers", lambda ranks, num_bytes, **settings: made.append(settings))
    ibgda, relay = NetworkOptions(ibgda=True, connections_per_peer=12), NetworkOptions(transport="mpi")
    for ranks_on_host, options, settings in (
        (1, {}, {"on_timeout": "raise"}),
        (1, {"allow_nvlink_for_low_latency_mode": False}, {"on_timeout": "raise", "ranks_per_node": 1}),
        (0, {"num_qps_per_rank": 12}, {"on_timeout": "raise", "network": ibgda}),
    ):
        monkeypatch.setattr("deepep_rt.compat.buffer.ranks_per_host", lambda ranks, here=ranks_on_host: here)
        compat.Buffer(None, low_latency_mode=True, comm=MPI.COMM_SELF, **options)
        assert made.pop() == settings
        monkeypatch.setattr(compat.Buffer, "network", relay)
        compat.Buffer(None, low_latency_mode=True, comm=MPI.COMM_SELF, **options)
        assert made.pop() == {**settings, "network": relay}
        monkeypatch.setattr(compat.Buffer, "network", None)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(4, marks=pytest.mark.full)])
def test_program(num_ranks: int) -> None:
    """Run the program. With three ranks, test_processes_that_were_spawned makes the same calls."""
    run_checks(num_ranks, "compat")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_low_latency_calls_go_on_when_processes_are_killed(seed: int) -> None:
    words = str(PROGRAMS / "compat_kills.py"), "--seed", str(seed)
    assert "OK" in run_command(sys.executable, *words, **environment())[0]


def test_check_asks_every_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that replays CUDA graphs makes no call that could raise."""
    from mpi4py import MPI

    from deepep_rt import compat

    asked = []
    for name in ("LowLatencyBuffers", "NormalBuffers"):
        monkeypatch.setattr(f"deepep_rt.compat.buffer_cache.{name}.check", lambda self, name=name: asked.append(name))
    buffer = compat.Buffer(None, int(1e7), low_latency_mode=True, comm=MPI.COMM_SELF)
    buffer.check()
    buffer.destroy()
    assert asked == ["LowLatencyBuffers", "NormalBuffers"]


def test_counts_and_rows_that_no_buffer_sends() -> None:
    """The error comes before ranks exchange numbers or make a Buffer."""
    import torch
    from mpi4py import MPI

    from deepep_rt import EPInputError, compat

    buffer, x, idx = compat.Buffer(MPI.COMM_SELF, 1 << 20), torch.ones(4, 64).bfloat16(), torch.zeros(4, 1, dtype=torch.int64)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)

    def dispatch(x: torch.Tensor, in_rank: torch.Tensor, per_expert: torch.Tensor, topk_idx: torch.Tensor | None = None) -> None:
        counts = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
        buffer.dispatch(x, topk_idx=topk_idx, **counts)

    for wrong in (per_expert.float(), per_expert.to("meta"), per_expert.to_sparse(), per_expert[None]):
        with pytest.raises(EPInputError, match="num_tokens_per_expert"):
            dispatch(x, in_rank, wrong)
    for wrong in (in_rank.to("meta"), in_rank.to_sparse(), in_rank.int()):
        with pytest.raises(EPInputError, match="is_token_in_rank"):
            dispatch(x, wrong, per_expert)
    for wrong in (x.double(), x.to(torch.complex64), x.long(), x.to("meta")):
        with pytest.raises(EPInputError, match=r"x\.dtype=torch\.(float64|complex64|int64); expected one of|x is a meta tensor"):
            dispatch(wrong, in_rank, per_expert, idx)
    dispatch(x, in_rank, per_expert)
    buffer.destroy()


def test_room_of_low_latency_buffers() -> None:
    """It never exceeds what a Buffer takes with the top-k of the call, and fills the memory that the program asked for."""
    from mpi4py import MPI

    from deepep_rt import compat
    from deepep_rt.comm.mpi import MpiCommunicator
    from deepep_rt.compat.buffer_cache import LowLatencyBuffers
    from deepep_rt.config import Config

    comm = MpiCommunicator(MPI.COMM_SELF)
    for num_tokens, num_topk, grows, num_bytes in ((2100, 32, True, 0), (16, 16, False, 1 << 40), (3, 8, False, 1 << 40)):
        room = LowLatencyBuffers(comm, num_bytes)._room(num_tokens, 128, num_topk, 256, grows)
        assert room >= num_tokens
        Config(1, num_max_tokens_per_rank=room, hidden=128, num_topk=num_topk, num_experts=256, low_latency=True)
    hint = compat.Buffer.get_low_latency_rdma_size_hint(100, 128, 1, 256)
    assert [LowLatencyBuffers(comm, hint + more)._room(7, 128, 4, 256, False) for more in (-1, 0, 1)] == [99, 100, 100]
    assert [LowLatencyBuffers(comm, 0)._room(number, 128, 4, 256, grows) for number, grows in ((9, False), (9, True))] == [9, 16]


def test_a_refused_growth_keeps_the_buffer() -> None:
    import torch
    from mpi4py import MPI

    from deepep_rt import EPConfigError, EPInputError, compat

    buffer = compat.Buffer(None, low_latency_mode=True, comm=MPI.COMM_SELF)
    x, idx = torch.zeros((4, 256), dtype=torch.bfloat16), torch.zeros((4, 2), dtype=torch.int64)
    handles = [buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)[2]]
    with pytest.raises(EPConfigError, match="num_max_dispatch_tokens_per_rank=1048576"):
        buffer.low_latency_dispatch(x, idx, 1 << 20, 4, use_fp8=False)
    with pytest.raises(EPInputError, match=r"x.shape=\[4, 256\]; expected at most num_max_dispatch_tokens_per_rank=3 tokens"):
        buffer.low_latency_dispatch(x, idx, 3, 4, use_fp8=False)
    handles.append(buffer.low_latency_dispatch(x, idx, 5, 4, use_fp8=False)[2])
    assert handles[0].buffer is handles[1].buffer
    buffer.destroy()


@pytest.mark.parametrize(
    ("method", "remedy"), [("low_latency_combine_low_precision", "use_logfmt=True"), ("no_such_call", r"coming-from-deepep\.md")]
)
def test_methods_of_other_versions(method: str, remedy: str) -> None:
    from mpi4py import MPI

    from deepep_rt import compat

    buffer = compat.Buffer(None, low_latency_mode=True, comm=MPI.COMM_SELF)
    assert not hasattr(buffer, method)
    with pytest.raises(AttributeError, match=rf"^Buffer\.{method} is not a part of this library\. .*{remedy}"):
        getattr(buffer, method)
    buffer.destroy()


@pytest.mark.parametrize(
    ("call", "options", "refused"),
    [
        ("low_latency_dispatch", dict(use_nvfp4=True), "use_nvfp4=True.*x=\\(rows, scales\\)"),
        ("low_latency_dispatch", dict(x_global_scale=1.0), "x_global_scale=1.0"),
        ("low_latency_dispatch", dict(use_nvfp4=False, x_global_scale=None), ""),
        ("low_latency_combine", dict(overlap=True, comp_signal=3), "overlap=True.*return_recv_hook"),
        ("low_latency_combine", dict(overlap=False, block_m=64, threshold=0, num_sms=3, packed_recv_count=None), ""),
    ],
)
def test_arguments_of_other_versions(call: str, options: dict[str, Any], refused: str) -> None:
    """What they ask for is refused by name, and a neutral value has no effect. Other arguments stay Python's error."""
    from mpi4py import MPI

    from deepep_rt import EPError, EPInputError, compat

    buffer = compat.Buffer(None, low_latency_mode=True, comm=MPI.COMM_SELF, is_intranode=True)
    missing = [None] * (2 if call.endswith("dispatch") else 4)
    sizes = [8, 8] if call.endswith("dispatch") else []
    try:
        with pytest.raises(EPInputError, match=refused or "None") as caught:
            getattr(buffer, call)(*missing, *sizes, **options)
        assert bool(refused) == any(name in str(caught.value) for name in options)
        with pytest.raises(TypeError, match="no_such_argument"):
            getattr(buffer, call)(*missing, *sizes, no_such_argument=1)
    finally:
        with contextlib.suppress(EPError):
            buffer.destroy()
