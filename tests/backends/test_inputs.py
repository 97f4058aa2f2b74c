"""A wrong argument raises EPInputError with the value and the expectation. The call sends nothing, and the Buffer stays usable."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16 and float8)
import numpy as np
import pytest

from deepep_rt import Buffer, DispatchResult, EPInputError
from deepep_rt.arrays.frameworks import framework_of
from deepep_rt.arrays.view import View
from deepep_rt.results import DispatchHandle

MPI = pytest.importorskip("mpi4py.MPI", reason="the host backend needs MPI")
TOKENS, HIDDEN, TOPK, EXPERTS = 6, 256, 4, 16


@pytest.fixture(scope="module")
def buffer() -> Iterator[Buffer]:
    sizes = dict(num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS)
    with Buffer(MPI.COMM_SELF, dtype="bfloat16", backend="host", **sizes) as made:
        yield made


@pytest.fixture(scope="module")
def sent(buffer: Buffer) -> DispatchResult:
    return buffer.dispatch(_x(), _idx())


def _x(tokens: int = TOKENS, hidden: int = HIDDEN, dtype: str = "bfloat16") -> np.ndarray:
    return np.arange(tokens * hidden).reshape(tokens, hidden).astype(dtype)


def _idx(tokens: int = TOKENS, topk: int = TOPK, dtype: str = "int64") -> np.ndarray:
    return (np.arange(tokens * topk).reshape(tokens, topk) % EXPERTS).astype(dtype)


def _weights(tokens: int = TOKENS, topk: int = TOPK, dtype: str = "float32") -> np.ndarray:
    return np.ones((tokens, topk), dtype)


def _on_gpu(array: np.ndarray) -> View:
    return View(4096, array.shape, array.dtype.name, 0, None, framework_of(array, "x"))


def _by_expert(buffer: Buffer, alignment: int = 64) -> DispatchResult:
    return buffer.dispatch(_x(), _idx(), layout="expert", expert_alignment=alignment)


def _words(sent: DispatchResult, value: int = 1) -> np.ndarray:
    return np.full(len(sent.recv_x) // 64, value, np.int32)


def test_combine_of_tiles(buffer: Buffer) -> None:
    """The host backend waits for no product. It takes set words, and gives the sums of a combine without them."""
    sent = _by_expert(buffer)
    want = buffer.combine(sent.recv_x, sent.handle).x
    assert (buffer.combine(sent.recv_x, sent.handle, y_ready=_words(sent)).x == want).all()


BAD_TILES = {
    "rows by token": (
        lambda buffer: buffer.dispatch(_x(), _idx()),
        {},
        ["y_ready", "layout='token'", "layout='expert'", "Dispatch"],
    ),
    "no tiles": (lambda buffer: _by_expert(buffer, 1), {}, ["y_ready", "multiple of 64"]),
    "too few words": (_by_expert, {"y_ready": np.ones(2, np.int32)}, ["y_ready.shape=[2]", "expected ["]),
    "words of another dtype": (_by_expert, {"dtype": "int64"}, ["y_ready.dtype=int64", "int32"]),
    "not written": (_by_expert, {"value": 0}, ["y_ready has words other than 1", "Write the rows"]),
    "words on a GPU": (_by_expert, {"on_gpu": True}, ["y_ready is on GPU 0", "Move"]),
}


@pytest.mark.parametrize("name", BAD_TILES)
def test_words_of_tiles(buffer: Buffer, name: str) -> None:
    make, options, texts = BAD_TILES[name]
    sent, options = make(buffer), dict(options)
    words = _words(sent, options.pop("value", 1)).astype(options.pop("dtype", "int32"))
    words = _on_gpu(words) if options.pop("on_gpu", False) else words
    with pytest.raises(EPInputError) as caught:
        buffer.combine(sent.recv_x, sent.handle, **{"y_ready": words, **options})
    assert all(text in str(caught.value) for text in texts), caught.value
    _check_usable(buffer)


def _check_usable(buffer: Buffer) -> None:
    x = _x()
    result = buffer.dispatch(x, _idx(), _weights())
    assert (result.recv_x == x).all()
    assert (buffer.combine(result.recv_x, result.handle).x == x).all()


BAD_DISPATCHES = {
    "no array": (lambda: ([1], _idx()), {}, ["x=[1]; expected a NumPy"]),
    "one dimension": (lambda: (_x()[0], _idx()), {}, ["x.shape=[256]", "[num_tokens, 256]"]),
    "another hidden": (lambda: (_x(hidden=128), _idx()), {}, ["x.shape=[6, 128]", "[num_tokens, 256]"]),
    "too many tokens": (lambda: (_x(9), _idx(9)), {}, ["x.shape=[9, 256]", "at most 8 tokens", "Split"]),
    "too wide": (lambda: (_x(dtype="float32"), _idx()), {}, ["float32", "bfloat16", "dtype='float32'"]),
    "strange dtype": (lambda: (_x(dtype="complex64"), _idx()), {}, ["x: dtype complex64", "expected one of"]),
    "other byte order": (
        lambda: (_x(), _idx(dtype=">i8")),
        {},
        ["topk_idx: dtype >i8", "this machine's byte order", "astype('int64')"],
    ),
    "not contiguous": (lambda: (_x(hidden=512)[:, ::2], _idx()), {}, ["x: rows must be contiguous"]),
    "on a GPU": (lambda: (_on_gpu(_x()), _idx()), {}, ["x is on GPU 0", "host memory", "Move"]),
    "indices on a GPU": (lambda: (_x(), _on_gpu(_idx())), {}, ["topk_idx is on GPU 0"]),
    "no routing": (lambda: (_x(),), {}, ["topk_idx=None", "handle"]),
    "rows of indices": (lambda: (_x(), _idx(5)), {}, ["topk_idx.shape=[5, 4]", "[6, 4]"]),
    "another topk": (lambda: (_x(), _idx(topk=3)), {}, ["topk_idx.shape=[6, 3]", "[6, 4]"]),
    "dtype of indices": (lambda: (_x(), _idx(dtype="int16")), {}, ["topk_idx.dtype=int16", "int32 or int64"]),
    "float indices": (lambda: (_x(), _idx(dtype="float32")), {}, ["topk_idx.dtype=float32", "int32 or int64"]),
    "shape of weights": (lambda: (_x(), _idx(), _weights(topk=3)), {}, ["topk_weights.shape=[6, 3]", "[6, 4]"]),
    "dtype of weights": (lambda: (_x(), _idx(), _weights(dtype="float16")), {}, ["topk_weights.dtype=float16", "float32"]),
    "weights alone": (lambda: (_x(), None, _weights()), {"handle": "good"}, ["topk_idx=None", "topk_weights"]),
    "rows of scales": (lambda: (_x(), _idx()), {"x_scales": np.ones((5, 2), np.float32)}, ["x_scales", "[5, 2]", "[6, "]),
    "too many scales": (lambda: (_x(), _idx()), {"x_scales": np.ones((6, 3), np.float32)}, ["12 bytes", "up to 8"]),
    "odd scales": (lambda: (_x(), _idx()), {"x_scales": np.ones((6, 3), np.uint8)}, ["3 bytes", "multiple of 4"]),
    "flat scales": (lambda: (_x(), _idx()), {"x_scales": np.ones(6, np.float32)}, ["x_scales.shape=[6]"]),
    "negative worst": (lambda: (_x(), _idx()), {"num_worst_tokens": -1}, ["num_worst_tokens=-1", "0 to 8"]),
    "large worst": (lambda: (_x(), _idx()), {"num_worst_tokens": 9}, ["num_worst_tokens=9", "0 to 8"]),
    "alignment": (lambda: (_x(), _idx()), {"expert_alignment": 0}, ["expert_alignment=0", "from 1"]),
    "alignment 1.5": (lambda: (_x(), _idx()), {"expert_alignment": 1.5}, ["expert_alignment=1.5", "whole"]),
    "alignment with a handle": (
        lambda: (_x(),),
        {"handle": "good", "expert_alignment": 128},
        ["expert_alignment=128", "handle", "first dispatch"],
    ),
    "a class": (lambda: (np.ndarray, _idx()), {}, ["x=<class ndarray>"]),
    "a class of indices": (lambda: (_x(), np.ndarray), {}, ["topk_idx=<class ndarray>"]),
    "no handle": (lambda: (_x(),), {"handle": 3}, ["handle=3", ".handle"]),
    "handle of other size": (lambda: (_x(5),), {"handle": "good"}, ["x.shape=[5, 256]", "6 tokens"]),
    "worst of handle": (lambda: (_x(),), {"handle": "good", "num_worst_tokens": 1}, ["num_worst_tokens=1", "expected 6"]),
    "worsts": (lambda: (_x(),), {"handle": "good", "num_worst_tokens": np.array([3, 4])}, ["num_worst_tokens=<ndarray>"]),
    "expert too large": (lambda: (_x(), _idx() + 13), {}, ["token 0", "expert 16", "0 to 15"]),
    "layout of scales": (lambda: (_x(), _idx()), {"scales_layout": "word"}, ["scales_layout='word'", "'row' or 'column'"]),
    "expert below -1": (lambda: (_x(), _idx() - 2), {}, ["token 0", "expert -2", "-1 for none"]),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_bad_dispatch(buffer: Buffer, sent: DispatchResult, name: str) -> None:
    make, options, words = BAD_DISPATCHES[name]
    if options.get("handle") == "good":
        options = {**options, "handle": sent.handle}
    with pytest.raises(EPInputError) as caught:
        buffer.dispatch(*make(), **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    _check_usable(buffer)


BAD_COMBINES = {
    "no array": (lambda: None, {}, ["x=None; expected a NumPy"]),
    "too few rows": (lambda: _x(5), {}, ["x.shape=[5, 256]", "[6, 256]"]),
    "another hidden": (lambda: _x(hidden=128), {}, ["x.shape=[6, 128]", "[6, 256]"]),
    "cannot be added": (lambda: _x(dtype="uint8"), {}, ["x.dtype=uint8", "bfloat16 or float16 or float32"]),
    "too wide": (lambda: _x(dtype="float32"), {}, ["float32", "dtype='float32'"]),
    "on a GPU": (lambda: _on_gpu(_x()), {}, ["x is on GPU 0"]),
    "shape of weights": (_x, {"topk_weights": _weights(5)}, ["topk_weights.shape=[5, 4]", "[6, 4]"]),
    "dtype of weights": (_x, {"topk_weights": _weights(dtype="float64")}, ["topk_weights.dtype=float64"]),
    "three biases": (_x, {"bias": (_x(), _x(), _x())}, ["len(bias)=3", "at most 2"]),
    "shape of bias": (_x, {"bias": _x(5)}, ["bias[0].shape=[5, 256]", "[6, 256]"]),
    "weighted": (_x, {"weighted": "yes"}, ["weighted='yes'; expected"]),
    "reduce": (_x, {"reduce": "expert"}, ["reduce='expert'", "'rank' or 'topk'"]),
    "dtype of bias": (_x, {"bias": [_x(), _x(dtype="float16")]}, ["bias[1].dtype=float16", "bfloat16"]),
}


@pytest.mark.parametrize("name", BAD_COMBINES)
def test_bad_combine(buffer: Buffer, sent: DispatchResult, name: str) -> None:
    make, options, words = BAD_COMBINES[name]
    with pytest.raises(EPInputError) as caught:
        buffer.combine(make(), sent.handle, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    _check_usable(buffer)


def test_expert_numbers_of_another_routing(buffer: Buffer, sent: DispatchResult) -> None:
    """With a handle, they must name the same ranks. The order of a token's choices may differ."""
    again = buffer.dispatch(_x(), _idx()[:, ::-1].copy(), _weights(), handle=sent.handle)
    assert (again.recv_topk_idx == _idx()[:, ::-1]).all()
    nowhere = _idx()
    nowhere[2] = -1
    with pytest.raises(EPInputError, match="topk_idx chooses other ranks than the routing of the handle"):
        buffer.dispatch(_x(), nowhere, handle=sent.handle)
    _check_usable(buffer)


def test_handle_of_another_buffer(buffer: Buffer, sent: DispatchResult) -> None:
    foreign = DispatchHandle(TOKENS, TOKENS, None, sent.handle.buffer_serial + 1000, None, {})
    with pytest.raises(EPInputError, match="handle is of another Buffer"):
        buffer.combine(_x(), foreign)
    with pytest.raises(EPInputError, match=r"handle=<DispatchResult>; expected the \.handle"):
        buffer.combine(_x(), sent)
    _check_usable(buffer)


def test_memory_for_combine_needs_a_handle_of_this_buffer(buffer: Buffer, sent: DispatchResult) -> None:
    sizes = dict(num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS, backend="host", low_latency=True)
    with Buffer(MPI.COMM_SELF, **sizes) as low, Buffer(MPI.COMM_SELF, **sizes) as other:
        mine, foreign = (made.low_latency_dispatch(_x(), _idx(), use_fp8=False).handle for made in (low, other))
        for wrong, words in (
            (None, r"handle=None; expected the \.handle"),
            (sent.handle, "handle=<DispatchHandle>"),
            (foreign, "handle is of another Buffer"),
        ):
            with pytest.raises(EPInputError, match=words):
                low.get_low_latency_combine_buffer(wrong)
        assert low.get_low_latency_combine_buffer(mine).shape == (EXPERTS, 8, HIDDEN)


@pytest.mark.parametrize("name", ["row_bytes", "num_rows", "iterations"])
@pytest.mark.parametrize("value", ["x", 0, -16, 32.0, True, [16]])
def test_bad_copy_ceiling(buffer: Buffer, name: str, value: object) -> None:
    with pytest.raises(EPInputError) as caught:
        buffer.copy_ceiling(**{name: value})
    assert f"{name}={value!r}; expected a whole number from" in str(caught.value)
    _check_usable(buffer)


def test_copy_ceiling_of_numpy_numbers(buffer: Buffer) -> None:
    assert buffer.copy_ceiling(row_bytes=np.int64(16), num_rows=np.int64(4), iterations=np.int64(1)) > 0


@pytest.mark.filterwarnings("ignore")  # PyTorch warns that nested tensors are a prototype
def test_tensors_without_rows(buffer: Buffer) -> None:
    torch = pytest.importorskip("torch")
    dense = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    for x in (dense.to_sparse(), torch.nested.nested_tensor([dense, dense])):
        with pytest.raises(EPInputError, match=r"x is a .* tensor; expected a dense"):
            buffer.dispatch(x, torch.from_numpy(_idx()))
    _check_usable(buffer)


def test_rows_have_a_multiple_of_16_bytes() -> None:
    with Buffer(
        MPI.COMM_SELF, num_max_tokens_per_rank=8, hidden=24, num_topk=1, num_experts=1, dtype="bfloat16", backend="host"
    ) as narrow:
        with pytest.raises(EPInputError, match="x has 24 bytes a row; expected a multiple of 16"):
            narrow.dispatch(np.zeros((2, 24), np.uint8), np.zeros((2, 1), np.int32))
        assert narrow.dispatch(np.zeros((2, 24), np.float16), np.zeros((2, 1), np.int32)).recv_x.shape == (2, 24)


@pytest.mark.parametrize("idx_dtype", ["int32", "int64"])
@pytest.mark.parametrize("scales", [np.ones((6, 2), np.float32), np.ones((6, 4), np.uint8), np.ones((6, 1), np.int32)])
def test_valid_arguments(buffer: Buffer, scales: np.ndarray, idx_dtype: str) -> None:
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"):
        result = buffer.dispatch(_x(dtype=dtype), _idx(dtype=idx_dtype), x_scales=scales)
        assert result.recv_x.dtype == np.dtype(dtype)
        assert result.recv_x_scales.dtype == scales.dtype
        assert result.recv_x_scales.shape == scales.shape
        assert result.recv_topk_idx.dtype == np.dtype(idx_dtype)


def test_host_memory_may_start_anywhere(buffer: Buffer) -> None:
    """Parts of files start anywhere. Only kernels need aligned rows and numbers."""

    def odd(array: np.ndarray) -> np.ndarray:
        moved = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        moved[...] = array
        return moved

    scales = np.arange(12, dtype=np.float32).reshape(6, 2)
    result = buffer.dispatch(odd(_x()), odd(_idx()), odd(_weights()), x_scales=odd(scales))
    assert (result.recv_x == _x()).all()
    assert (result.recv_topk_idx == _idx()).all()
    assert (result.recv_x_scales == scales).all()
    assert (buffer.combine(odd(result.recv_x), result.handle, bias=odd(_x())).x == 2 * _x()).all()


def test_numpy_whole_numbers_are_whole_numbers(buffer: Buffer) -> None:
    """NumPy arithmetic often gives sizes."""
    result = buffer.dispatch(_x(), _idx(), num_worst_tokens=np.int64(8))
    assert result.handle.num_recv_rows == 8
    assert result.recv_x.shape == (8, HIDDEN)
