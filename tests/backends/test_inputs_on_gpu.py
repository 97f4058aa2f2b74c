"""Checks of arguments on a GPU: alignment, overlap, and the stream that each library learns. They need no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

from deepep_rt import EPInputError
from deepep_rt.arrays import frameworks
from deepep_rt.arrays.dtypes import DTYPES
from deepep_rt.arrays.view import HOST, Framework, View
from deepep_rt.backends import inputs
from deepep_rt.backends.base import BufferInfo
from deepep_rt.comm.call_signature import pack
from deepep_rt.config import Config
from deepep_rt.results import DispatchHandle, LowLatencyHandle

TOKENS, HIDDEN, TOPK, EXPERTS, RANKS, STREAM = 6, 256, 4, 8, 2, 77
CONFIG = Config(RANKS, num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS, dtype="float32")
SITE, CAPACITY = BufferInfo(5, CONFIG, 0), CONFIG.worst_recv_tokens
PLACE = 1 << 20


@dataclass(frozen=True)
class Array:
    """An array with an address and a device."""

    dtype: str
    shape: tuple[int, ...]
    ptr: int = PLACE
    device: int = 0
    writable: bool = True

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class Library(Framework):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int | None]] = []

    def view(self, array: Array, what: str, stream: int | None) -> View:
        self.seen.append((what, stream))
        return View(array.ptr, array.shape, array.dtype, array.device, array, self)

    def is_writable(self, array: Array) -> bool:
        return array.writable


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(frameworks.FRAMEWORK_OF_CLASS, Array, made)
    return made


ARGUMENTS: dict[str, dict[str, Array]] = {
    "dispatch": dict(
        x=Array("bfloat16", (TOKENS, HIDDEN)),
        topk_idx=Array("int64", (TOKENS, TOPK)),
        topk_weights=Array("float32", (TOKENS, TOPK)),
        x_scales=Array("float32", (TOKENS, 2)),
    ),
    "combine": {
        "x": Array("bfloat16", (20, HIDDEN)),
        "topk_weights": Array("float32", (20, TOPK)),
        "bias[0]": Array("bfloat16", (TOKENS, HIDDEN)),
        "bias[1]": Array("bfloat16", (TOKENS, HIDDEN)),
    },
    "low_latency_dispatch": dict(
        x=Array("bfloat16", (TOKENS, HIDDEN)),
        topk_idx=Array("int64", (TOKENS, TOPK)),
        topk_weights=Array("float32", (TOKENS, TOPK)),
        cumulative_local_expert_recv_stats=Array("int32", (EXPERTS // RANKS,)),
        wait_recv_cost_stats=Array("int64", (RANKS,)),
    ),
    "low_latency_combine": dict(
        y=Array("bfloat16", (EXPERTS // RANKS, 8 * RANKS, HIDDEN)),
        topk_idx=Array("int64", (TOKENS, TOPK)),
        topk_weights=Array("float32", (TOKENS, TOPK)),
        out=Array("bfloat16", (TOKENS, HIDDEN), PLACE << 4),
    ),
}
EACH = [(call, name) for call, given in ARGUMENTS.items() for name in given]
ROWS = [(call, name) for call, name in EACH if name in ("x", "bias[0]", "bias[1]", "y", "out")]


def check(call: str, info: BufferInfo = SITE, **changed: Any) -> Any:
    """Check the arguments of a call."""
    given = {**ARGUMENTS[call], **changed}
    handle = DispatchHandle(TOKENS, 20, None, info.serial, None, {})
    if call == "dispatch":
        return inputs.dispatch_inputs(info, STREAM, *given.values(), None, None, 1)
    if call == "combine":
        x, weights, *biases = given.values()
        return inputs.combine_inputs(info, STREAM, x, handle, weights, biases)
    if call == "low_latency_dispatch":
        x, idx, weights, *stats = given.values()
        return inputs.low_latency_dispatch_inputs(info, STREAM, x, idx, weights, False, False, False, *stats)
    y, idx, weights, out = given.values()
    own = LowLatencyHandle(TOKENS, info.serial, None, True, Framework(), CAPACITY)
    return inputs.low_latency_combine_inputs(info, STREAM, y, idx, weights, own, True, out)


def moved(array: Array, **changed: Any) -> Array:
    return Array(**{**vars(array), **changed})


@pytest.mark.parametrize("call", ARGUMENTS)
def test_each_library_learns_the_stream_that_reads_its_array(library: Library, call: str) -> None:
    """JAX and others need it. Each array is converted once."""
    assert check(call)
    assert sorted(library.seen) == sorted((name, STREAM) for name in ARGUMENTS[call])


@pytest.mark.parametrize(("call", "name"), ROWS)
@pytest.mark.parametrize("offset", [2, 8])
def test_rows_start_at_multiples_of_16_bytes(call: str, name: str, offset: int) -> None:
    array = ARGUMENTS[call][name]
    pattern = rf"^{name.replace('[', '.').replace(']', '.')} starts at address .*; expected a multiple of 16 bytes. Pass a copy$"
    with pytest.raises(EPInputError, match=pattern):
        check(call, **{name: moved(array, ptr=array.ptr + offset)})
    assert check(call, **{name: moved(array, ptr=array.ptr + 16)})


@pytest.mark.parametrize(("call", "name"), [each for each in EACH if each not in ROWS and each != ("dispatch", "x_scales")])
def test_numbers_start_at_multiples_of_their_size(call: str, name: str) -> None:
    array = ARGUMENTS[call][name]
    itemsize = DTYPES[array.dtype].itemsize
    with pytest.raises(EPInputError, match=f"^{name} starts at address .*; expected a multiple of {itemsize} bytes"):
        check(call, **{name: moved(array, ptr=PLACE + itemsize // 2)})
    assert check(call, **{name: moved(array, ptr=PLACE + itemsize)})


def test_scales_start_at_multiples_of_4_bytes() -> None:
    for dtype, width in (("uint8", 8), ("float32", 2)):
        scales = Array(dtype, (TOKENS, width), PLACE + 4)
        assert check("dispatch", x_scales=scales).scales.ptr == scales.ptr
        with pytest.raises(EPInputError, match=r"x_scales starts at address .*; expected a multiple of 4 bytes"):
            check("dispatch", x_scales=moved(scales, ptr=PLACE + 6))


@pytest.mark.parametrize(("call", "name"), [each for each in EACH if each[1] not in ("out",) and "stats" not in each[1]])
def test_host_memory_may_start_anywhere(call: str, name: str) -> None:
    assert check(call, **{name: moved(ARGUMENTS[call][name], ptr=PLACE + 1, device=HOST)})


@pytest.mark.parametrize(("call", "name"), EACH)
def test_arrays_are_on_the_gpu_of_the_buffer_or_in_host_memory(call: str, name: str) -> None:
    there = moved(ARGUMENTS[call][name], device=1)
    with pytest.raises(EPInputError) as caught:
        check(call, **{name: there})
    assert str(caught.value).startswith(f"{name} is on GPU 1; expected GPU 0")
    with pytest.raises(EPInputError) as caught:
        check(call, BufferInfo(5, CONFIG, HOST), **{name: there})
    assert "GPU 1" in str(caught.value) or "GPU 0" in str(caught.value)


@pytest.mark.parametrize(("call", "name"), [each for each in EACH if each[1] == "out" or "stats" in each[1]])
def test_output_arguments(call: str, name: str) -> None:
    array = ARGUMENTS[call][name]
    with pytest.raises(EPInputError, match=f"^{name} is read-only"):
        check(call, **{name: moved(array, writable=False)})
    with pytest.raises(EPInputError, match=f"^{name} is in host memory; expected GPU 0, which writes to it"):
        check(call, **{name: moved(array, device=HOST)})


Y, OUT = ARGUMENTS["low_latency_combine"]["y"], ARGUMENTS["low_latency_combine"]["out"]


@pytest.mark.parametrize(
    "place",
    [Y.ptr, Y.ptr + 512, Y.ptr - OUT.nbytes + 16, Y.ptr + Y.nbytes - 16],
    ids=["where y starts", "within y", "its end in y", "its start in y"],
)
def test_out_does_not_overlap_y(place: int) -> None:
    with pytest.raises(EPInputError, match=r"^out overlaps y; expected separate memory"):
        check("low_latency_combine", out=moved(OUT, ptr=place))


@pytest.mark.parametrize("place", [Y.ptr - OUT.nbytes, Y.ptr + Y.nbytes], ids=["before", "after"])
def test_out_may_touch_y(place: int) -> None:
    assert check("low_latency_combine", out=moved(OUT, ptr=place)).out.ptr == place


ANY_BYTES = [("dispatch", "x"), ("dispatch", "x_scales"), ("low_latency_dispatch", "x")]


@pytest.mark.parametrize(
    ("call", "name", "what"),
    [(*each, what) for each in EACH for what in ("shape", "dtype") if what == "shape" or each not in ANY_BYTES],
)
def test_shapes_and_dtypes(call: str, name: str, what: str) -> None:
    array = ARGUMENTS[call][name]
    wrong = moved(array, shape=(*array.shape[:-1], 301)) if what == "shape" else moved(array, dtype="int8", shape=array.shape)
    with pytest.raises(EPInputError) as caught:
        check(call, **{name: wrong})
    assert str(caught.value).startswith((f"{name} ", f"{name}.")), str(caught.value)


def test_both_widths_of_expert_numbers() -> None:
    for call in ("dispatch", "low_latency_dispatch", "low_latency_combine"):
        assert check(call, topk_idx=Array("int32", (TOKENS, TOPK), PLACE + 4))


@pytest.mark.parametrize("call", ["dispatch", "low_latency_dispatch"])
@pytest.mark.parametrize("tokens", [8, 9])
def test_the_maximum_of_tokens(call: str, tokens: int) -> None:
    given = {
        name: moved(array, shape=(tokens, *array.shape[1:])) for name, array in ARGUMENTS[call].items() if "stats" not in name
    }
    if tokens == 8:
        assert check(call, **given).x.shape == (8, HIDDEN)
    else:
        with pytest.raises(EPInputError, match=r"^x\.shape=\[9, \d+\]; expected at most 8 tokens"):
            check(call, **given)


def test_the_widest_rows() -> None:
    assert check("dispatch", x=Array("float32", (TOKENS, HIDDEN))).x.row_bytes == CONFIG.row_bytes
    with pytest.raises(EPInputError, match=r"^x\.dtype=float64; expected at most the width of float32"):
        check("dispatch", x=Array("float64", (TOKENS, HIDDEN)))


def test_the_maximum_of_scales() -> None:
    for x in (Array(CONFIG.dtype, (TOKENS, CONFIG.hidden)), Array("uint8", (TOKENS, CONFIG.hidden // 2))):
        most = CONFIG.scale_bytes if x.dtype != "uint8" else CONFIG.hidden // 16
        assert check("dispatch", x=x, x_scales=Array("uint8", (TOKENS, most))).scales.row_bytes == most
        with pytest.raises(EPInputError, match=f"^x_scales has {most + 4} bytes a row"):
            check("dispatch", x=x, x_scales=Array("uint8", (TOKENS, most + 4)))


@pytest.mark.parametrize("call", ["combine", "low_latency_combine"])
def test_optional_arguments(call: str) -> None:
    if call == "combine":
        handle = DispatchHandle(TOKENS, 20, None, SITE.serial, None, {})
        for bias, count in ((None, 0), (ARGUMENTS[call]["bias[0]"], 1), ([ARGUMENTS[call]["bias[0]"]], 1)):
            made = inputs.combine_inputs(SITE, STREAM, ARGUMENTS[call]["x"], handle, None, bias)
            assert (made.topk_weights, len(made.biases), made.handle) == (None, count, handle)
    else:
        assert check(call, out=None).out is None


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ((False, False, False), (False, False, False)),
        ((True, False, False), (True, False, False)),
        ((True, True, False), (True, True, False)),
        ((True, False, True), (True, True, True)),
    ],
)
def test_formats_of_low_latency(flags: tuple[bool, bool, bool], kept: tuple[bool, bool, bool]) -> None:
    """UE8M0 scales are powers of two, so use_ue8m0 implies round_scale."""
    given = ARGUMENTS["low_latency_dispatch"]
    made = inputs.low_latency_dispatch_inputs(SITE, STREAM, given["x"], given["topk_idx"], None, *flags, None, None)
    assert (made.use_fp8, made.round_scale, made.use_ue8m0) == kept
    assert (made.topk_weights, made.recv_stats, made.wait_stats) == (None, None, None)


def test_formats_that_exclude_each_other() -> None:
    given = ARGUMENTS["low_latency_dispatch"]
    with pytest.raises(EPInputError, match=r"use_ue8m0=True; expected use_fp8=True with it"):
        inputs.low_latency_dispatch_inputs(SITE, STREAM, given["x"], given["topk_idx"], None, False, False, True, None, None)
    odd = BufferInfo(5, Config(RANKS, num_max_tokens_per_rank=8, hidden=64, num_topk=TOPK, num_experts=EXPERTS), 0)
    x = Array("bfloat16", (TOKENS, 64))
    with pytest.raises(EPInputError, match=r"hidden=64; expected a multiple of 128 for FP8 scales. Pass use_fp8=False"):
        inputs.low_latency_dispatch_inputs(odd, STREAM, x, given["topk_idx"], None, True, False, False, None, None)
    assert inputs.low_latency_dispatch_inputs(odd, STREAM, x, given["topk_idx"], None, False, False, False, None, None)


QUANTISED = {  # x, x_scales, use_fp8, and words of the error
    "FP8": ("float8_e4m3fn", HIDDEN, ("float32", 2), False, ""),
    "MXFP4": ("uint8", HIDDEN // 2, ("uint8", 8), False, ""),
    "bytes of any width": ("uint8", 48, None, False, ""),
    "the most bytes": ("int8", 496, None, False, ""),
    "too many bytes": ("uint8", 512, None, False, "x has 512 bytes a row and x_scales 0; expected at most 512 together"),
    "too many scales": ("uint8", HIDDEN, ("float32", 64), False, "x has 256 bytes a row and x_scales 256; expected at most 512"),
    "no whole vectors": ("uint8", 40, None, False, "x has 40 bytes a row; expected a multiple of 16. Pad the rows"),
    "no bytes": ("uint8", 0, None, False, "x has 0 bytes a row; expected a multiple of 16"),
    "FP8 of another width": ("float8_e4m3fn", 128, None, False, "quantised rows: [num_tokens, 256] of a type of 1 byte, or"),
    "numbers of 4 bytes": ("float32", HIDDEN, None, True, "expected [num_tokens, 256] of bfloat16, or quantised rows"),
    "numbers of 2 bytes": ("float16", HIDDEN, ("float32", 2), False, "expected [num_tokens, 256] of bfloat16, or quantised rows"),
    "scales of bfloat16": ("bfloat16", HIDDEN, ("float32", 2), False, "expected [num_tokens, 256] of bfloat16 without x_scales"),
    "quantised twice": (
        "float8_e4m3fn",
        HIDDEN,
        ("float32", 2),
        True,
        "with use_fp8=True; expected bfloat16, which the call converts",
    ),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_rows_that_the_program_has_quantised(kind: str) -> None:
    dtype, width, scales, use_fp8, wrong = QUANTISED[kind]
    given = dict(x=Array(dtype, (TOKENS, width)), topk_idx=ARGUMENTS["low_latency_dispatch"]["topk_idx"])
    more = None if scales is None else Array(scales[0], (TOKENS, scales[1]), PLACE + 4)

    def checked() -> Any:
        form = (use_fp8, False, False)
        return inputs.low_latency_dispatch_inputs(SITE, STREAM, *given.values(), None, *form, None, None, more)

    if wrong:
        with pytest.raises(EPInputError) as found:
            checked()
        assert wrong in str(found.value)
        return
    made = checked()
    assert made.is_opaque
    assert (made.x.dtype, made.x_scales and made.x_scales.dtype) == (dtype, scales and scales[0])


def test_scales_that_no_signature_holds() -> None:
    """A message has room for them."""
    wide = BufferInfo(5, Config(RANKS, num_max_tokens_per_rank=8, hidden=7168, num_topk=TOPK, num_experts=EXPERTS), 0)
    x, idx, flags = Array("uint8", (TOKENS, 7168)), ARGUMENTS["low_latency_dispatch"]["topk_idx"], (False, False, False)
    for num_scales, wrong in ((1536, ""), (1537, "x has 7168 bytes a row and x_scales 6148; expected at most 98304 and 6144")):
        scales = Array("float32", (TOKENS, num_scales))
        if wrong:
            with pytest.raises(EPInputError, match=f"^{wrong}"):
                inputs.low_latency_dispatch_inputs(wide, STREAM, x, idx, None, *flags, None, None, scales)
            continue
        made = inputs.low_latency_dispatch_inputs(wide, STREAM, x, idx, None, *flags, None, None, scales)
        assert pack(made.signature("uint8", "float32"))


@pytest.mark.parametrize("shape", [(TOKENS + 1, 2), (TOKENS,), (2, TOKENS, 1)])
def test_each_token_has_scales(shape: tuple[int, ...]) -> None:
    x, idx = Array("uint8", (TOKENS, HIDDEN)), ARGUMENTS["low_latency_dispatch"]["topk_idx"]
    flags = (False, False, False)
    with pytest.raises(
        EPInputError, match=rf"^x_scales.shape={re.escape(str(list(shape)))}; expected \[{TOKENS}, scales of a row\]"
    ):
        inputs.low_latency_dispatch_inputs(SITE, STREAM, x, idx, None, *flags, None, None, Array("float32", shape))


def test_num_max_tokens_holds_the_tokens() -> None:
    given = ARGUMENTS["low_latency_dispatch"]

    def checked(most: Any) -> Any:
        arrays, flags = (given["x"], given["topk_idx"], None), (False, False, False)
        return inputs.low_latency_dispatch_inputs(SITE, STREAM, *arrays, *flags, None, None, None, most)

    assert [checked(most).num_max_tokens for most in (None, TOKENS, 8)] == [8, TOKENS, 8]
    with pytest.raises(EPInputError, match=r"^num_max_tokens=5; expected at least 6, the tokens of this rank"):
        checked(5)
    with pytest.raises(EPInputError, match=r"^num_max_tokens=9; expected .* 1 to 8"):
        checked(9)


@pytest.mark.parametrize("multiple", [True, False])
def test_checked_arguments_keep_their_names(multiple: bool) -> None:
    """No argument takes the place of another."""
    arrays = {name: moved(array, ptr=PLACE + 4096 * i) for i, (name, array) in enumerate(ARGUMENTS["dispatch"].items())}
    made = check("dispatch", **arrays)
    assert [view.owner for view in (made.x, made.topk_idx, made.topk_weights, made.scales)] == list(arrays.values())
    arrays = {name: moved(array, ptr=PLACE + 4096 * i) for i, (name, array) in enumerate(ARGUMENTS["combine"].items())}
    combined = check("combine", **arrays)
    assert [view.owner for view in (combined.x, combined.topk_weights, *combined.biases)] == list(arrays.values())
    given = ARGUMENTS["low_latency_dispatch"]
    quick = check("low_latency_dispatch")
    found = quick.x, quick.topk_idx, quick.topk_weights, quick.recv_stats, quick.wait_stats
    assert [view.owner for view in found] == list(given.values())
    own = LowLatencyHandle(TOKENS, SITE.serial, None, True, Framework(), CAPACITY)
    y, idx, weights, out = ARGUMENTS["low_latency_combine"].values()
    back = inputs.low_latency_combine_inputs(SITE, STREAM, y, idx, weights, own, multiple, out)
    assert [view.owner for view in (back.y, back.topk_idx, back.topk_weights, back.out)] == [y, idx, weights, out]  # type: ignore[union-attr]
    assert (back.handle, back.reduce_early) == (own, multiple)


def test_handles_are_of_the_right_kind_and_buffer() -> None:
    check_any: Callable[..., Any] = inputs.combine_inputs
    x, plain = ARGUMENTS["combine"]["x"], DispatchHandle(TOKENS, 20, None, SITE.serial + 1, None, {})
    quick = LowLatencyHandle(TOKENS, SITE.serial + 1, None, True, Framework(), CAPACITY)
    with pytest.raises(EPInputError, match=r"handle=<LowLatencyHandle>; expected the \.handle of a DispatchResult"):
        check_any(SITE, STREAM, x, quick, None, None)
    with pytest.raises(EPInputError, match="handle is of another Buffer; expected one of this Buffer's dispatch"):
        check_any(SITE, STREAM, x, plain, None, None)
    with pytest.raises(EPInputError, match=r"handle=<DispatchHandle>; expected the \.handle of a LowLatencyDispatchResult"):
        inputs.check_low_latency_handle(SITE, plain)
    with pytest.raises(EPInputError, match="handle is of another Buffer; expected one of this Buffer's low_latency_dispatch"):
        inputs.check_low_latency_handle(SITE, quick)


def test_flags_are_named() -> None:
    given, quick = ARGUMENTS["low_latency_dispatch"], ARGUMENTS["low_latency_combine"]
    for number, name in enumerate(("use_fp8", "round_scale", "use_ue8m0")):
        flags: list[Any] = [True, False, False]
        flags[number] = "yes"
        with pytest.raises(EPInputError, match=rf"^{name}='yes'; expected"):
            inputs.low_latency_dispatch_inputs(SITE, STREAM, given["x"], given["topk_idx"], None, *flags, None, None)
    own = LowLatencyHandle(TOKENS, SITE.serial, None, True, Framework(), CAPACITY)
    arrays = quick["y"], quick["topk_idx"], quick["topk_weights"]
    forms: dict[str, Any] = {"allow_multiple_reduction": True, "out": None, "reduce": None, "compress": None}
    for name in ("allow_multiple_reduction", "reduce", "compress"):
        with pytest.raises(EPInputError, match=rf"^{name}='yes'; expected"):
            inputs.low_latency_combine_inputs(SITE, STREAM, *arrays, own, **{**forms, name: "yes"})


def test_errors_of_a_library_are_quoted(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def view(array: Array, what: str, stream: int | None) -> View:
        raise BufferError("it was donated")

    monkeypatch.setattr(library, "view", view)
    with pytest.raises(EPInputError, match=r"^x=.*it was donated") as caught:
        check("combine")
    assert isinstance(caught.value.__cause__, BufferError)


def test_the_rule_of_num_worst_tokens() -> None:
    given = ARGUMENTS["dispatch"]
    for wrong in (-1, 17):
        with pytest.raises(EPInputError, match=rf"^num_worst_tokens={wrong}; expected .* 16.* The largest is num_ranks"):
            inputs.dispatch_inputs(SITE, STREAM, given["x"], given["topk_idx"], None, None, None, wrong, 1)
    for right in (0, 16):
        made = inputs.dispatch_inputs(SITE, STREAM, given["x"], given["topk_idx"], None, None, None, right, 1)
        assert made.num_worst_tokens == right
