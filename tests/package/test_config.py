"""`config`: accepted and refused values, the texts of errors, and the derived numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from generated_configs import configs
from hypothesis import given
from hypothesis import strategies as st

from deepep_rt import Buffer, EPConfigError, _env
from deepep_rt.arrays.dtypes import DTYPES
from deepep_rt.config import MAX_ROW_BYTES, MAX_TIMEOUT_S, Config, declared_ranks_per_node, rows_per_copy
from deepep_rt.kernels.tuning import arch_number, combine_constants, tuning

GOOD = dict(num_ranks=8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_topk": 0}, ["num_topk=0", "from 1 to 32"]),
        ({"num_topk": 33}, ["num_topk=33", "from 1 to 32"]),
        ({"num_topk": 8, "num_experts": 0}, ["num_experts=0"]),
        ({"num_experts": 255}, ["num_experts=255", "multiple of the 8 ranks"]),
        ({"num_topk": 16, "num_experts": 8}, ["num_topk=16", "num_experts (8)"]),
        ({"hidden": 7}, ["hidden=7", "14 bytes", "multiple of 16"]),
        ({"hidden": 0}, ["hidden=0"]),
        ({"hidden": -16}, ["hidden=-16"]),
        ({"hidden": 16.0}, ["hidden=16.0", "whole number"]),
        ({"hidden": True}, ["hidden=True"]),
        ({"hidden": 65536}, ["131072 bytes", "at most 98304"]),
        ({"num_max_tokens_per_rank": 0}, ["num_max_tokens_per_rank=0"]),
        ({"num_ranks": 0}, ["num_ranks=0"]),
        ({"num_slots": 0}, ["num_slots=0"]),
        ({"num_sms": 0}, ["num_sms=0"]),
        ({"dtype": "bf16"}, ["'bf16'", "bfloat16"]),
        ({"timeout_s": 0}, ["timeout_s=0", "positive"]),
        ({"timeout_s": float("nan")}, ["timeout_s=nan"]),
        ({"timeout_s": float("inf")}, ["timeout_s=inf", "1e+09 (30 years) at most"]),
        ({"timeout_s": 1e10}, ["timeout_s=10000000000.0", "at most"]),
        ({"hidden": np.float64(16)}, ["hidden=", "16.0", "whole number"]),
        ({"hidden": np.True_}, ["hidden=", "True"]),
        ({"ranks_per_node": 3}, ["ranks_per_node=3", "divisor", "(8)"]),
        ({"ranks_per_node": 0}, ["ranks_per_node=0", "divisor"]),
        ({"ranks_per_node": True}, ["ranks_per_node=True", "divisor"]),
        ({"low_latency": "yes"}, ["low_latency='yes'", "True or False"]),
        ({"low_latency": 2}, ["low_latency=2", "True or False"]),
        (
            {"low_latency": True, "hidden": 12, "dtype": "float32"},
            ["rows of bfloat16", "hidden=12", "24 bytes", "multiple of 16"],
        ),
        ({"check_inputs": "no"}, ["check_inputs='no'", "True or False"]),
        ({"path": "short"}, ["path='short'", "'auto' or 'hierarchical' or 'direct'"]),
        ({"recv_limit": 0}, ["num_max_recv_tokens=0", "from 1 to 32768"]),
        ({"recv_limit": 32769, "ranks_per_node": 4}, ["num_max_recv_tokens=32769", "from 1 to 32768"]),
    ],
)
def test_errors_name_bad_values(change: dict, words: list[str]) -> None:
    with pytest.raises(EPConfigError) as caught:
        Config(**{**GOOD, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_numbers_of_numpy_become_those_of_python() -> None:
    wanted = Config(**GOOD, ranks_per_node=4, timeout_s=2.5, low_latency=False, check_inputs=True)
    sizes = {name: np.int64(value) for name, value in GOOD.items()}
    given = Config(**sizes, ranks_per_node=np.uint8(4), timeout_s=np.float32(2.5), low_latency=np.False_, check_inputs=np.True_)
    assert given == wanted
    assert [type(value) for value in vars(given).values()] == [type(value) for value in vars(wanted).values()]
    assert Buffer.size_hint(**sizes) == Buffer.size_hint(**GOOD)


def test_the_longest_time_limit_is_a_number_of_nanoseconds() -> None:
    assert int(Config(**GOOD, timeout_s=MAX_TIMEOUT_S).timeout_s * 1e9) < 2**62


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config(**GOOD).hidden = 1


def test_timeout_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPEP_RT_TIMEOUT_S", raising=False)
    assert Config(**GOOD).timeout_s == 300
    monkeypatch.setenv("DEEPEP_RT_TIMEOUT_S", "")
    assert Config(**GOOD).timeout_s == 300
    monkeypatch.setenv("DEEPEP_RT_TIMEOUT_S", "1.5")
    assert Config(**GOOD).timeout_s == 1.5
    assert Config(**GOOD, timeout_s=7).timeout_s == 7


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "-1", "0", "1e10", "1" * 5000])
def test_a_wrong_timeout_of_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DEEPEP_RT_TIMEOUT_S", text)
    with pytest.raises(EPConfigError, match=r"DEEPEP_RT_TIMEOUT_S='.*; expected a number of seconds, 1e") as caught:
        Config(**GOOD)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("text", "num_ranks", "node"), [("2", 8, 2), ("8", 4, 4), ("4", 4, 4), ("1", 3, 1), ("", 4, None)])
def test_nodes_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, num_ranks: int, node: int | None) -> None:
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", text)
    assert declared_ranks_per_node(num_ranks) == node


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("two", "='two'; expected a number of ranks"),
        ("0", "='0'; expected a number of ranks"),
        ("²", "='²'; expected a number of ranks"),
        ("1" * 4301, "='1111.*; expected a number of ranks"),
        ("1" * 19, "='1111.*; expected a number of ranks"),
        ("4", r"=4; expected a divisor of the number of ranks \(6\)"),
    ],
)
def test_wrong_nodes_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", text)
    with pytest.raises(EPConfigError, match="DEEPEP_RT_RANKS_PER_NODE" + message):
        declared_ranks_per_node(6)


@pytest.mark.parametrize("text", ["²", "1" * 4301, "-1", "x"])
def test_wrong_variables_of_launchers_are_ignored(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", *(name for _, *names in _env._LAUNCHERS for name in names)):
        monkeypatch.setenv(name, text)
    assert (_env.world_size(), _env.local_rank(), _env.launch()) == (0, None, None)


def test_a_buffer_takes_the_nodes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", "2")
    sizes = dict(num_max_tokens_per_rank=8, hidden=32, num_topk=1, num_experts=1, backend="host")
    with Buffer(MPI.COMM_SELF, **sizes) as buffer:
        assert buffer.config.ranks_per_node == 1


def test_check_inputs_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in (("1", True), ("on", True), ("0", False), ("", False), ("No", False)):
        monkeypatch.setenv("DEEPEP_RT_DEBUG", text)
        assert Config(**GOOD).check_inputs is value
    monkeypatch.setenv("DEEPEP_RT_DEBUG", "maybe")
    with pytest.raises(EPConfigError, match="DEEPEP_RT_DEBUG='maybe'; expected 0 or 1"):
        Config(**GOOD)


@given(configs())
def test_derived_numbers(config: Config) -> None:
    assert config.num_local_experts * config.num_ranks == config.num_experts
    assert config.row_bytes % 16 == 0
    assert config.row_bytes == config.hidden * DTYPES[config.dtype].itemsize
    assert config.scale_bytes * 32 >= config.hidden > (config.scale_bytes - 4) * 32
    assert config.num_max_sent_rows <= config.num_max_recv_tokens == config.worst_recv_tokens
    assert config.num_nodes == 1
    constants = config.constants()
    assert all(name.startswith("k") and type(value) is int for name, value in constants.items())
    assert constants["kNumLocalExperts"] * constants["kNumRanks"] == constants["kNumExperts"]


@pytest.mark.parametrize(
    ("nodes", "limit", "most"),
    [(1, None, 16 * 64), (1, 5, 16 * 64), (4, None, 2 * 64 * 8), (4, 5, 5), (4, 16 * 64, 16 * 64), (16, None, 2 * 64 * 8)],
)
def test_rows_that_a_dispatch_may_bring(nodes: int, limit: int | None, most: int) -> None:
    """On one node every row that can arrive has room. The limit holds once a job turns out to have several nodes."""
    config = Config(16, 64, 128, 8, 32, recv_limit=limit)
    config = dataclasses.replace(config, ranks_per_node=16 // nodes)
    assert (config.num_nodes, config.num_max_recv_tokens, config.worst_recv_tokens) == (nodes, most, 16 * 64)
    assert config.settings()["num_max_recv_tokens"] == limit


def test_the_default_is_never_above_what_can_arrive() -> None:
    assert Config(2, 64, 128, 8, 32, ranks_per_node=1).num_max_recv_tokens == 2 * 64


@given(configs(), st.sampled_from(["sm_80", "sm_90", "sm_90a", "sm_100", "compute_80"]))
def test_blocks_fit_the_hardware(config: Config, arch: str) -> None:
    chosen = tuning(config, arch)
    assert chosen["kHasTma"] == (arch_number(arch) >= 90)
    for kind in ("Dispatch", "Combine"):
        assert chosen[f"k{kind}Threads"] % 32 == 0
        assert 32 * chosen[f"k{kind}CopyWarps"] < chosen[f"k{kind}Threads"] <= 1024
        shared = chosen[f"k{kind}SharedBytes"]
        assert shared <= 227 * 1024
        if chosen["kHasTma"]:
            assert chosen["kStageBytes"] >= config.row_bytes + 128, "a row may begin anywhere in a line"
            assert chosen["kStageBytes"] % 128 == 0
            assert chosen[f"k{kind}Stages"] >= 2, "copies into and out of shared memory overlap"
            assert shared == chosen["kStageBytes"] * chosen[f"k{kind}CopyWarps"] * chosen[f"k{kind}Stages"]


@pytest.mark.parametrize(("num_slots", "depth"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_the_ring_depth_divides_the_epochs(num_slots: int, depth: int) -> None:
    """Epochs have 32 bits, and wrap around to 0. The order of the slots must stay the same then."""
    config = Config(2, 8, 256, 2, 4, low_latency=True, num_slots=num_slots)
    assert config.low_latency_ring_depth == config.constants()["kRingDepth"] == depth


@given(st.integers(1, MAX_ROW_BYTES // 16).map(lambda n: 16 * n))
def test_rows_per_copy(row_bytes: int) -> None:
    rows = rows_per_copy(row_bytes)
    assert 1 <= rows <= 32
    assert rows & (rows - 1) == 0
    assert rows == 1 or rows * row_bytes <= 16 * 1024
    assert rows == 32 or 2 * rows * row_bytes > 16 * 1024, "twice as many rows would fit"


def test_arch_names() -> None:
    assert [arch_number(name) for name in ("sm_80", "sm_90a", "compute_80", "sm_100f", "sm_120")] == [80, 90, 80, 100, 120]
    for name in ("sm80", "90", "sm_", "sm_90b", "compute_90 "):
        with pytest.raises(EPConfigError, match="expected a name such as"):
            arch_number(name)


def test_combine_constants() -> None:
    wide, narrow = (combine_constants(Config(**GOOD, dtype="float32"), dtype) for dtype in ("float32", "bfloat16"))
    assert wide["kRowBytes"] == 2 * narrow["kRowBytes"] == 7168 * 4


@given(configs(), st.integers(1, 256))
def test_most_tokens_of_low_latency_calls(config: Config, num_ranks: int) -> None:
    """The tables of a block of a dispatch fit its shared memory with this number of tokens, but not with one more."""
    config = dataclasses.replace(config, num_ranks=num_ranks, num_experts=32 * num_ranks, hidden=1024)

    def shared_bytes(tokens: int) -> int:
        table = max(
            2 * tokens * config.num_topk, num_ranks * -(-tokens // 32) * 4
        )  # the experts of tokens, then the bitmaps of arrivals; a thread reads 8 bytes at a time
        table = -(-table // 8) * 8
        assert dataclasses.replace(config, num_max_tokens_per_rank=tokens).low_latency_table_bytes == table
        return table + 4 * config.num_experts + 9 * num_ranks

    most = config.most_low_latency_tokens
    assert shared_bytes(most) <= 160 * 1024 < shared_bytes(most + 1) + 4
    dataclasses.replace(config, num_max_tokens_per_rank=most, low_latency=True)
    with pytest.raises(EPConfigError, match=f"expected at most {most} for low-latency calls"):
        dataclasses.replace(config, num_max_tokens_per_rank=most + 1, low_latency=True)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "torch.bfloat16", "torch.float8_e4m3fn", "numpy.float32", "jax.numpy.bfloat16", "ml_dtypes.bfloat16"]
)
def test_dtypes_of_array_libraries(dtype: str) -> None:
    library, _, name = dtype.rpartition(".")
    given = getattr(pytest.importorskip(library), name) if library else name
    assert Config(**GOOD, dtype=given) == Config(**GOOD, dtype=name)


@pytest.mark.parametrize("dtype", [None, 3, "float", [1], np.complex64])
def test_other_objects_are_no_dtypes(dtype: object) -> None:
    with pytest.raises(EPConfigError, match=r"dtype=.*; expected one of bfloat16"):
        Config(**GOOD, dtype=dtype)
