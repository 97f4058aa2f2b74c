"""`Layout` and `structs`: regions never overlap, are aligned, and the size hints are their sums."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from generated_configs import configs
from hypothesis import example, given
from hypothesis import strategies as st

from deepep_rt import Buffer, EPConfigError
from deepep_rt.config import MAX_ROUTE_BLOCKS, Config
from deepep_rt.kernels import structs
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.regions import ALIGNMENT, Map, align_up, arrange
from deepep_rt.kernels.source import source_dir
from deepep_rt.kernels.tuning import MAX_POSITION_BLOCKS

WORDS = {word for path in source_dir().rglob("*.cu*") for word in re.findall(r"\w+", path.read_text())}
"""All structures of the kernels' sources."""


def _check(arranged: Map) -> None:
    end = 0
    for name, offset in arranged.offsets.items():
        assert offset % ALIGNMENT == 0, name
        assert offset >= end, f"{name} overlaps the region before it"
        assert arranged.sizes[name] >= 0
        end = offset + arranged.sizes[name]
    assert end <= arranged.num_bytes < end + ALIGNMENT


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_arrange(sizes: list[int]) -> None:
    arranged = arrange((f"region_{i}", size) for i, size in enumerate(sizes))
    _check(arranged)
    assert list(arranged.sizes.values()) == sizes
    assert set(arranged.constants("Map")) == {f"kMapRegion{i}" for i in range(len(sizes))}


@given(configs())
def test_every_map(config: Config) -> None:
    layout = Layout(config)
    for arranged in (
        layout.control,
        layout.handle,
        layout.symmetric,
        layout.status_page,
        layout.staging(config.row_bytes),
    ):
        _check(arranged)


@given(configs(), st.integers(0, 5000), st.sampled_from([4, 8]), st.booleans())
def test_result_fits_its_slot(config: Config, capacity: int, idx_bytes: int, with_topk: bool) -> None:
    capacity, layout = min(capacity, config.num_max_recv_tokens), Layout(config)
    arranged = layout.result(
        capacity,
        row_bytes=config.row_bytes,
        scale_bytes=config.scale_bytes,
        idx_bytes=idx_bytes,
        with_topk=with_topk,
    )
    _check(arranged)
    assert list(arranged.offsets)[-1] == "x", "trimming a result to what arrived has to be a cut at its end"
    assert arranged.num_bytes <= layout.max_result_bytes
    assert arranged.sizes["x"] == capacity * config.row_bytes


@given(configs())
def test_landing_holds_a_result_and_the_staging(config: Config) -> None:
    layout = Layout(config)
    landing = layout.symmetric.sizes["landing"]
    assert landing >= layout.max_result_bytes
    assert landing >= layout.staging(config.row_bytes).num_bytes


@given(configs())
def test_size_hint_is_the_sum(config: Config) -> None:
    layout = Layout(config)
    hint = layout.size_hint
    assert set(hint) == {"control", "landing", "pool", "sums", "low_latency", "handles", "total"}
    assert hint["total"] == sum(size for name, size in hint.items() if name != "total")
    in_heap = hint["control"] + hint["landing"] + hint["pool"] + hint["sums"] + hint["low_latency"]
    assert layout.symmetric.num_bytes == pytest.approx(in_heap, abs=4 * ALIGNMENT)
    public = Buffer.size_hint(
        config.num_ranks,
        num_max_tokens_per_rank=config.num_max_tokens_per_rank,
        hidden=config.hidden,
        num_topk=config.num_topk,
        num_experts=config.num_experts,
        dtype=config.dtype,
        num_slots=config.num_slots,
    )
    assert public == hint


def test_the_pool_of_several_nodes_has_room_for_the_most_rows_of_a_dispatch() -> None:
    sizes = dict(num_max_tokens_per_rank=64, hidden=1024, num_topk=4, num_experts=64)
    near = Buffer.size_hint(64, **sizes)
    assert Buffer.size_hint(64, **sizes, num_max_recv_tokens=8) == near, "on one node there is room for all rows"
    pools = [Buffer.size_hint(64, **sizes, ranks_per_node=8, num_max_recv_tokens=n)["pool"] for n in (None, 512, 64, 4096)]
    assert pools[0] == pools[1] < near["pool"] == pools[3]
    assert pools[2] < pools[1] / 7


def test_memory_of_several_nodes_grows_with_the_ranks_and_not_faster() -> None:
    """2048 ranks of 256 nodes fit a GPU. Twice as many ranks take at most twice the memory in each region."""
    sizes = dict(num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=8192, ranks_per_node=8)
    hints = {ranks: Buffer.size_hint(ranks, **sizes) for ranks in (512, 1024, 2048)}
    assert hints[2048]["total"] < 4.2e9
    for few, many in ((512, 1024), (1024, 2048)):
        assert all(hints[many][region] <= 2 * hints[few][region] + ALIGNMENT for region in hints[few])


@given(configs(), st.integers(2, 32), st.integers(1, 8), st.sampled_from(["hierarchical", "direct"]), st.data())
def test_a_slot_of_the_network_holds_a_chunk(config: Config, nodes: int, size: int, path: str, data: st.DataObject) -> None:
    """No size of a Buffer leaves a ring that is smaller than a chunk, or a relay's ring with fewer entries than puts on their way."""
    ranks = nodes * size
    config = dataclasses.replace(config, num_ranks=ranks, num_experts=ranks * config.num_topk, ranks_per_node=size, path=path)
    layout = Layout(config)
    assert layout.nodes is not None
    rows = data.draw(st.integers(1, config.row_bytes // 16)) * 16
    scales = data.draw(st.integers(0, config.scale_bytes // 4)) * 4
    chunk = layout.nodes.chunk(rows, scales, data.draw(st.sampled_from([4, 8])), data.draw(st.booleans()))
    assert 1 <= chunk.num_tokens <= 32
    assert chunk.num_bytes <= layout.nodes.slot_bytes
    assert layout.nodes.num_slots >= 2
    assert layout.num_ring_entries >= 2 * layout.nodes.num_flows * layout.nodes.num_slots
    assert layout.num_ring_entries.bit_count() == 1


def test_size_hint_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(num_max_tokens_per_rank=16, hidden=64, num_topk=2, num_experts=8)
    hint = Buffer.size_hint(2, **sizes)
    for name in ("DEEPEP_RT_TIMEOUT_S", "DEEPEP_RT_DEBUG", "DEEPEP_RT_ARCH"):
        monkeypatch.setenv(name, "soon")
    assert Buffer.size_hint(2, **sizes) == hint


@given(configs(), st.sampled_from(["num_max_tokens_per_rank", "hidden", "num_slots"]))
def test_size_hint_is_monotonic(config: Config, name: str) -> None:
    try:
        larger = dataclasses.replace(config, **{name: 2 * getattr(config, name)})
    except EPConfigError:
        return  # above the limit
    small, large = Layout(config).size_hint, Layout(larger).size_hint
    assert all(small[region] <= large[region] for region in small)
    assert large["total"] - small["total"] >= large["pool"] - small["pool"] >= 0


@given(configs())
def test_constants(config: Config) -> None:
    layout = Layout(config)
    constants = layout.constants
    assert all(name.startswith("k") and name.isidentifier() for name in constants)
    assert all(type(value) is int for value in constants.values())
    assert all(value >= 0 for name, value in constants.items() if name not in ("kLlElsewhere", "kLlNoRoom", "kLlUnknown"))
    assert config.constants().items() <= constants.items(), "an offset has the name of a size"
    assert layout.route_stride % 128 == 0
    assert layout.route_stride >= structs.RouteMessage.size(config.constants())
    chunks = constants["kMaxCombineChunks"]
    assert chunks * 32 >= config.num_max_tokens_per_rank, "a flag for every chunk of rows"


@given(configs())
def test_statistics_change_no_offset_and_no_constant_but_their_own(config: Config) -> None:
    """Without statistics, kernels are the same as kernels that know nothing of them."""
    plain, counting = (Layout(dataclasses.replace(config, statistics=on)) for on in (False, True))
    differing = {name for name, value in plain.constants.items() if counting.constants[name] != value}
    assert differing <= {"kHasStatistics", "kLocalExpertRows", "kLocalLongestWaits"}, "no other region moves"
    assert plain.constants["kHasStatistics"] == 0
    assert plain.local.num_bytes == plain.constants["kLocalStatistics"], "it has no byte more"
    ranks, kinds = config.num_ranks, 4
    assert list(counting.local.sizes.items())[-3:] == [
        ("statistics", kinds * (5 + ranks) * 8),
        ("expert_rows", config.num_local_experts * 8),
        ("longest_waits", structs.NUM_PHASES * 2 * ranks * 8),
    ]


@given(configs())
def test_every_region_has_room_for_what_kernels_index(config: Config) -> None:
    """Count as the .cu files do: the number of elements times their bytes. Memory after the end belongs to another region."""
    layout = Layout(config)
    constants = config.constants()
    ranks, tokens, topk, row = config.num_ranks, config.num_max_tokens_per_rank, config.num_topk, config.row_bytes
    chunks, window = layout.constants["kMaxCombineChunks"], structs.WindowMessage.size(constants)
    counts = {"num_recv": 4, "num_recv_per_expert": config.num_local_experts * 4}
    assert layout.control.sizes == {
        "route_inbox": 2 * ranks * layout.route_stride,
        "dispatch_windows": 2 * ranks * window,
        "combine_windows": 2 * ranks * window,
        "dispatch_flags": ranks * 4,
        "combine_flags": ranks * chunks * 4,
        "arrivals": ranks * tokens * 8,
    }
    assert layout.local.sizes == {
        "state": structs.State.size({}),
        "route_blocks": MAX_ROUTE_BLOCKS * structs.RouteBlock.size(constants),
        "ll_dispatch": structs.LlProgress.size({}),
        "ll_combine": structs.LlProgress.size({}),
        "masked": ranks * 4,
        "source_status": ranks * 4,
        "heartbeat_sent": 8,
        "network": structs.NetworkState.size({}),
        "ll_acked": 2 * ranks * 4,
        "waits": 2 * ranks * 8,
        "position_progress": 4 * (1 + MAX_POSITION_BLOCKS),
        "position_counts": MAX_POSITION_BLOCKS * config.num_local_experts * 8,
        **dict.fromkeys(("lost", "statistics", "expert_rows", "longest_waits"), 0),
    }
    assert layout.counts.sizes == counts
    assert layout.handle.sizes == {
        "num_rows": ranks * ranks * 4,
        "serial": 4,
        "generation": 0,
        **counts,
        "send_pos": tokens * ranks * 4,
        "send_list": ranks * tokens * 4,
        "counts": layout.counts.num_bytes,
    }
    assert layout.status_page.sizes == {
        "report": structs.Report.size(constants),
        "mailbox": structs.Mailbox.size(constants),
        "masked": ranks * 4,
        "lost": 4,
    }
    assert layout.staging(row).sizes == {
        "topk_weights": config.num_max_sent_rows * topk * 4,
        "x": config.num_max_sent_rows * row,
    }
    assert layout.low_latency_handle.sizes == {
        "num_entries": 4,
        "epoch": 4,
        "generation": 4 * config.has_slots,
        "excluded": ranks * 4,
        "choices": tokens * topk * 2,
        "num_recv_per_expert": config.num_local_experts * 4,
        "entries": ranks * tokens * structs.LlEntry.size(constants),
    }
    for with_weights in (True, False):
        sizes = {"topk_weights": 7 * topk * 4 * with_weights, "x": 7 * row}
        assert layout.combined(7, row, with_weights).sizes == sizes
    for with_topk in (True, False):
        assert layout.result(7, row, 12, 8, with_topk).sizes == {
            "topk_idx": 7 * topk * 8 * with_topk,
            "topk_weights": 7 * topk * 4 * with_topk,
            "src_idx": 7 * 8,
            "scales": 7 * 12,
            "x": 7 * row,
        }


@given(configs())
def test_what_a_buffer_takes(config: Config) -> None:
    layout = Layout(config)
    row, tokens = config.row_bytes, config.num_max_tokens_per_rank
    worst = layout.result(config.num_max_recv_tokens, row, config.scale_bytes, 8, True).num_bytes
    assert layout.max_result_bytes == worst
    assert layout.symmetric.sizes == {
        "control": layout.control.num_bytes,
        "landing": max(worst, layout.staging(row).num_bytes, layout.choice_staging(min(tokens, 64)).num_bytes),
        "pool": config.num_slots * worst,
        "sums": config.num_slots * layout.combined(tokens, row, True).num_bytes,
        "low_latency": 0,
    }
    assert min(tokens, 64) <= layout.choice_window <= tokens
    assert layout.choice_staging(layout.choice_window).num_bytes <= layout.landing_bytes
    handle = layout.handle.num_bytes + layout.counts.num_bytes
    assert layout.size_hint["handles"] == (2 * config.num_slots + 2) * handle


def test_what_low_latency_takes_more() -> None:
    plain = Config(4, num_max_tokens_per_rank=16, hidden=256, num_topk=4, num_experts=32, num_slots=3)
    config = dataclasses.replace(plain, low_latency=True)
    hint, less = Layout(config).size_hint, Layout(plain).size_hint
    assert hint["low_latency"] == Layout(config).low_latency.num_bytes
    assert hint["handles"] - less["handles"] == 8 * Layout(config).low_latency_handle.num_bytes
    assert hint["low_latency_results"] == Layout(config).low_latency_result(use_fp8=False, use_ue8m0=False).num_bytes
    assert hint["total"] == sum(size for name, size in hint.items() if name != "total")


@given(configs())
def test_low_latency_regions_have_room_for_what_kernels_index(config: Config) -> None:
    ranks, tokens, topk, row = config.num_ranks, config.num_max_tokens_per_rank, config.num_topk, 2 * config.hidden
    header, message = Layout(config).low_latency_header_stride, Layout(config).low_latency_message_stride
    assert header == align_up(structs.LlHeader.size(config.constants()), 128)
    head = align_up(structs.LlMessage.size(config.constants()), 128)
    assert Layout(config).low_latency_head_bytes == head
    assert message == align_up(head + max(row, config.hidden + config.scale_bytes), 128)
    assert Layout(config).route_stride == align_up(structs.RouteMessage.size(config.constants()), 128)
    near = {
        "headers": ranks * header,
        "combine_headers": ranks * structs.LlCombineHeader.size({}),
        "weights": ranks * tokens * topk * 8,
        "messages": ranks * tokens * message,
        "rows": max(ranks, topk) * tokens * row,
    }
    far = {
        "message_flags": ranks * tokens * 8,
        "weight_flags": ranks * 8,
        "row_flags": max(ranks, topk) * tokens * 8,
        "staged_headers": ranks * header,
        "staged_messages": tokens * message,
        "staged_weights": tokens * topk * 8,
        "staged_rows": ranks * tokens * row,
    }
    for ranks_per_node in (None, 1):
        config = dataclasses.replace(config, ranks_per_node=ranks_per_node)
        slots, arranged = config.low_latency_ring_depth, Layout(config).low_latency
        assert arranged.sizes == {
            **dict.fromkeys(("dispatch_acks", "combine_acks"), ranks * 8 * (slots if config.has_network else 1)),
            "heartbeats": ranks * 8,
            **{name: slots * num_bytes for name, num_bytes in near.items()},
            **{name: slots * num_bytes * config.has_network for name, num_bytes in far.items()},
        }
        assert list(arranged.offsets)[-2:] == ["messages", "rows"], "all that is after `messages` is filled with kEmptySentinel"
    experts, capacity = config.num_local_experts, config.worst_recv_tokens
    for use_fp8, use_ue8m0, width, num_bytes in ((False, False, 2, 0), (True, False, 1, 4), (True, True, 1, 1)):
        result = Layout(config).low_latency_result(use_fp8=use_fp8, use_ue8m0=use_ue8m0)
        scales = experts * capacity * (config.hidden // 128) * num_bytes
        assert result.sizes == {"x": experts * capacity * config.hidden * width, "scales": scales}


@given(configs())
@example(Config(4, 40, 64, 7, 20, ranks_per_node=2))
def test_the_offsets_that_kernels_use(config: Config) -> None:
    layout = Layout(config)
    constants, inboxes = layout.constants, layout.symmetric.offsets["low_latency"]
    expected = {}
    for prefix, arranged, start in (
        ("Control", layout.control, 0),
        ("Local", layout.local, 0),
        ("Handle", layout.handle, 0),
        ("StatusPage", layout.status_page, 0),
        ("Ll", layout.low_latency, inboxes),
        ("LlHandle", layout.low_latency_handle, 0),
        *([("Network", layout.nodes.network, layout.symmetric.offsets["network"])] if layout.nodes else []),
    ):
        for name, offset in arranged.offsets.items():
            expected[f"k{prefix}" + name.title().replace("_", "")] = start + offset
    assert {name: constants[name] for name in expected} == expected
    # The host's, or they begin at 0, or a structure has their size.
    unused = {"kHandleCounts", "kLocalState", "kLocalPositionProgress", "kLocalPositionCounts", "kChunkPositions"}
    assert set(constants) - unused <= WORDS, "no kernel uses it"


def test_the_docstring_of_size_hint_is_true() -> None:
    hint = Buffer.size_hint(8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
    assert f"{hint['total'] / 1e9:.2f} GB" in Buffer.size_hint.__doc__


@pytest.mark.parametrize("struct", structs.SHARED, ids=lambda struct: struct.name)
def test_structs(struct: structs.CStruct) -> None:
    constants = Layout(Config(4, 40, 64, 7, 20, ranks_per_node=2)).constants
    kind = struct.dtype(constants)
    assert kind.names == struct.names
    for name in kind.names:
        field = kind[name]
        assert kind.fields[name][1] % field.base.itemsize == 0, "C would put it elsewhere"
    assert f"sizeof({struct.name}) == {kind.itemsize}" in struct.text(constants)
    assert kind.itemsize % max(kind[name].base.itemsize for name in kind.names) == 0


def test_struct_of_mixed_members() -> None:
    struct = structs.CStruct("Mixed", "u8 a;\n u64 b; // the long one\n\n // a comment\n i32 c[kMany];\n f32 d[2];")
    kind = struct.dtype({"kMany": 3})
    assert [kind.fields[name][1] for name in ("a", "b", "c", "d")] == [0, 8, 16, 28]
    assert kind.itemsize == 40
    assert kind["c"] == np.dtype(("i4", (3,)))
    with pytest.raises(AssertionError, match="cannot read"):
        _ = structs.CStruct("Wrong", "double a;").names


def test_phases() -> None:
    numbers = [number for number, _ in structs.PHASES.values()]
    assert len(set(numbers)) == len(numbers)
    assert structs.phase_name(1) == "the token counts of dispatch"
    assert structs.phase_name(99) == "phase 99"


def test_low_latency_memory() -> None:
    """A decoding Buffer takes less than 100 MB for communication, and others take nothing for low latency."""
    sizes = dict(num_max_tokens_per_rank=128, hidden=7168, num_topk=8, num_experts=256)
    assert 50e6 < Buffer.size_hint(8, **sizes, low_latency=True)["low_latency"] < 60e6
    assert Buffer.size_hint(8, **sizes, low_latency=True, ranks_per_node=1)["low_latency"] < 100e6
    assert Buffer.size_hint(8, **sizes)["low_latency"] == 0
