"""Arrays of every framework become Views and return to their framework, without a copy and without a leak."""

from __future__ import annotations

import gc
import importlib
import warnings
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from deepep_rt import EPInputError, EPUnavailableError
from deepep_rt.arrays import dlpack, frameworks
from deepep_rt.arrays.dtypes import DTYPES
from deepep_rt.arrays.view import HOST, View, host_bytes

NUMPY_DTYPES = [name for name in DTYPES if name != "float8_e8m0fnu" or hasattr(ml_dtypes, name)]


class Producer:
    """An array library that is known only through DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def _view(array: object, name: str, stream: int | None = None) -> View:
    return frameworks.framework_of(array, name).view(array, name, stream)


def _values(dtype: str, shape: tuple[int, ...] = (3, 4)) -> np.ndarray:
    raw = np.random.default_rng(1).integers(0, 2, (*shape[:-1], shape[-1] * np.dtype(dtype).itemsize), np.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy(dtype: str) -> None:
    given = _values(dtype)
    view = _view(given, "x")
    assert (view.ptr, view.shape, view.dtype, view.device) == (given.ctypes.data, (3, 4), dtype, HOST)
    assert view.itemsize == given.itemsize
    assert view.row_bytes == 4 * given.itemsize
    assert view.nbytes == given.nbytes
    back = view.to_framework()
    assert isinstance(back, np.ndarray)
    assert back.dtype == given.dtype
    assert back.shape == given.shape
    assert np.shares_memory(back, given)
    assert (host_bytes(view) == given.view(np.uint8).reshape(-1)).all()


def test_views_are_not_converted() -> None:
    view = _view(np.zeros((2, 2)), "x")
    assert _view(view, "again") is view


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1), (2, 3, 4), (5,), ()])
def test_shapes(shape: tuple[int, ...]) -> None:
    given = np.ones(shape, np.float32)
    for array in (given, Producer(given)):
        view = _view(array, "x")
        assert view.shape == shape
        assert view.nbytes == given.nbytes
        assert len(host_bytes(view)) == given.nbytes
    assert _view(given, "x").to_framework().shape == shape


@pytest.mark.parametrize("array", [np.zeros((4, 6))[:, :3], np.zeros((4, 6)).T, np.zeros((4, 6))[::2], np.zeros((4, 6))[:, ::-1]])
def test_arrays_with_gaps_raise(array: np.ndarray) -> None:
    for given in (array, Producer(array)):
        with pytest.raises(EPInputError, match="topk_idx: rows must be contiguous"):
            _view(given, "topk_idx")


def test_objects_and_dtypes_that_are_not_supported_raise() -> None:
    for given, words in (([{}], "<list>"), (None, "None"), (3, "3"), ("x", "'x'")):
        with pytest.raises(EPInputError, match=f"x={words}; expected a NumPy, CuPy, PyTorch, JAX or DLPack array"):
            _view(given, "x")
    with pytest.raises(EPInputError, match="x: dtype complex128; expected one of bfloat16"):
        _view(np.zeros(3, complex), "x")
    with pytest.raises(EPInputError, match=r"x: DLPack type code 5 with 128 bits; expected .*Pass a uint8 view"):
        _view(Producer(np.zeros(3, complex)), "x")


@pytest.mark.parametrize("number", [7, 10])  # Vulkan, ROCm
def test_memory_of_other_devices_raises(number: int) -> None:
    with pytest.raises(EPInputError, match=f"x: DLPack device type {number}; expected host memory or"):
        _view(_on_device_type(number), "x")


def test_pinned_memory_is_host_memory() -> None:
    assert _view(_on_device_type(dlpack.CUDA_HOST), "x").device == HOST


def _on_device_type(number: int) -> Producer:
    class Library(Producer):
        def __dlpack_device__(self) -> tuple[int, int]:
            return number, 0

    return Library(np.zeros(3))


def test_subclasses_belong_to_their_framework() -> None:
    class Mine(np.ndarray):
        pass

    assert frameworks.framework_of(np.zeros(3).view(Mine), "x").name == "numpy"
    assert frameworks.framework_of(np.zeros(3), "x") is frameworks.framework_of(np.zeros(3).view(Mine), "x")


def test_dlpack_producers_get_dlpack_arrays_back() -> None:
    given = np.arange(12, dtype=np.float32).reshape(3, 4)
    view = _view(Producer(given), "x")
    assert (view.ptr, view.shape, view.dtype, view.device) == (given.ctypes.data, (3, 4), "float32", HOST)
    back = view.to_framework()
    assert back.__dlpack_device__() == (dlpack.CPU, 0)
    taken = np.from_dlpack(back)
    assert np.shares_memory(taken, given)
    assert (taken == given).all()


def test_part_of_one_row_has_no_gaps() -> None:
    given = np.arange(12, dtype=np.float32).reshape(3, 4)[:1, :2]
    for array in (given, Producer(given)):
        assert _view(array, "x").shape == (1, 2)


@pytest.mark.parametrize("kind", [dlpack.CUDA, dlpack.CUDA_MANAGED])
def test_gpu_producers_receive_the_reading_stream(kind: int) -> None:
    """DLPack numbers the legacy default stream 1, and forbids 0."""
    asked = []

    class Library(Producer):
        def __dlpack__(self, *, stream: int | None = None, **options: object) -> object:
            asked.append(stream)
            return self.array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, 3

    for stream in (7, 0):
        assert _view(Library(np.zeros((2, 2))), "x", stream).device == 3
    assert asked == [7, 1]


def test_consumers_of_results_wait_on_their_stream() -> None:
    """For DLPack, None and 1 are the legacy default stream, and -1 asks for no order."""
    make_wait, used = [], []
    dependency, owner = SimpleNamespace(stream=7, make_wait=make_wait.append), SimpleNamespace(add_stream=used.append)
    view = View(4096, (2, 2), "float32", 0, owner, frameworks.framework_of(np.zeros(1), "x"), dependency)
    for stream in (None, 1, 7, -1, 9):
        view.__dlpack__(stream=stream)
    assert make_wait == used == [0, 0, 9]


def test_an_offset_into_an_array_is_kept() -> None:
    given = np.arange(12, dtype=np.int32).reshape(3, 4)[1:]
    assert _view(Producer(given), "x").ptr == given.ctypes.data


def _view_of(owner: object) -> View:
    return View(owner.ctypes.data, owner.shape, owner.dtype.name, HOST, owner, frameworks.framework_of(owner, "x"))


@pytest.mark.parametrize("take", [lambda view: view.to_framework(), np.from_dlpack], ids=["numpy", "dlpack"])
def test_results_keep_their_memory_until_the_last_array_dies(take) -> None:
    owner = np.arange(6.0)
    alive = weakref.ref(owner)
    array = take(_view_of(owner))
    del owner
    gc.collect()
    assert alive() is not None, "the array was dropped before its last reference"
    part = array[2:4]
    del array
    gc.collect()
    assert (part == [2.0, 3.0]).all()
    del part
    gc.collect()
    assert alive() is None, "memory leaked"


def test_unused_capsules_free_their_memory() -> None:
    owner = np.arange(6.0)
    alive = weakref.ref(owner)
    capsule = _view_of(owner).capsule()
    del owner
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_gpu_memory_has_no_host_bytes() -> None:
    view = View(4096, (2, 2), "float32", 0, None, frameworks.framework_of(np.zeros(1), "x"))
    with pytest.raises(EPUnavailableError, match="GPU memory"):
        host_bytes(view)
    assert view.__dlpack_device__() == (dlpack.CUDA, 0)


TORCH_DTYPES = ["bfloat16", "float16", "float32", "int32", "int64", "uint8", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    given = torch.arange(12).reshape(3, 4).to(kind)
    view = _view(given, "x")
    assert (view.ptr, view.shape, view.dtype, view.device) == (given.data_ptr(), (3, 4), dtype, HOST)
    back = view.to_framework()
    assert isinstance(back, torch.Tensor)
    assert back.dtype == kind
    assert back.data_ptr() == given.data_ptr()
    assert torch.equal(back.view(torch.uint8), given.view(torch.uint8))
    with pytest.raises(EPInputError, match="x: rows must be contiguous"):
        _view(given.T, "x")


def test_torch_without_cuda_has_no_streams() -> None:
    """A Buffer on GPUs accepts such tensors, as it accepts arrays of NumPy."""
    torch = pytest.importorskip("torch")
    if not torch.backends.cuda.is_built():
        assert frameworks.framework_of(torch.ones(1), "x").current_stream(0) is None


def test_torch_parameters_and_empty_tensors() -> None:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        assert _view(torch.nn.Parameter(torch.zeros(2, 4)), "x").framework.name == "torch"
    assert _view(torch.zeros(0, 4), "x").to_framework().shape == (0, 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "uint8"])
def test_jax(dtype: str) -> None:
    pytest.importorskip("jax")
    jnp = importlib.import_module("jax.numpy")
    given = jnp.arange(12).reshape(3, 4).astype(dtype)
    view = _view(given, "x")
    assert (view.shape, view.dtype, view.device) == ((3, 4), dtype, HOST)
    assert (host_bytes(view) == np.asarray(given).view(np.uint8).reshape(-1)).all()
    back = view.to_framework()
    assert type(back) is type(given)
    assert (back == given).all()


def test_read_only_arrays() -> None:
    given = np.zeros((2, 4), np.float32)
    assert _view(given, "out").framework.is_writable(given)
    given.flags.writeable = False
    assert not _view(given, "out").framework.is_writable(given)
    jax = pytest.importorskip("jax")
    assert not frameworks.framework_of(jax.numpy.zeros(3), "out").is_writable(jax.numpy.zeros(3))


def test_other_byte_orders_raise() -> None:
    with pytest.raises(EPInputError, match=r"x: dtype >f4; expected this machine's byte order. Pass x.astype\('float32'\)"):
        _view(np.ones((2, 4), ">f4"), "x")


def test_torch_tensors_that_require_a_gradient_warn() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones((2, 4), requires_grad=True)
    with pytest.warns(UserWarning, match="x requires a gradient.*deepep_rt.torch"):
        _view(x, "x")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        _view(x, "x")


def test_torch_meta_tensors_raise() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(EPInputError, match="x is a meta tensor"):
        _view(torch.ones((2, 4), device="meta"), "x")


@pytest.mark.parametrize(
    ("layout", "words"),
    {
        "sparse_coo": "x is a torch.sparse_coo tensor.*to_dense",
        "sparse_csr": "x is a torch.sparse_csr tensor.*to_dense",
        "sparse_csc": "x is a torch.sparse_csc tensor.*to_dense",
        "_mkldnn": "x is a torch._mkldnn tensor.*to_dense",
        "strided": "x is a nested tensor.*to_padded_tensor",
        "jagged": "x is a nested tensor.*to_padded_tensor",
    }.items(),
)
@pytest.mark.filterwarnings("ignore")  # PyTorch warns that these layouts are beta
def test_torch_tensors_of_other_layouts_raise(layout: str, words: str) -> None:
    torch = pytest.importorskip("torch")
    x, kind = torch.ones((2, 4)), getattr(torch, layout)
    if layout in ("strided", "jagged"):
        given = torch.nested.nested_tensor([x, x], layout=kind)
    else:
        given = x.to_mkldnn() if layout == "_mkldnn" else x.to_sparse(layout=kind)
    with pytest.raises(EPInputError, match=words):
        _view(given, "x")


def test_torch_tensors_inside_of_vmap_raise() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(EPInputError, match=r"x is a tensor whose memory PyTorch does not show.*vmap"):
        torch.func.vmap(lambda row: _view(row, "x"))(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore")  # PyTorch warns when its address is read
def test_torch_fake_tensors_raise() -> None:
    torch = pytest.importorskip("torch")
    with importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode():
        fake, empty = torch.ones(2, 4), torch.ones(0, 4)
    with pytest.raises(EPInputError, match=r"x is a (fake tensor|tensor whose memory)"):
        _view(fake, "x")
    assert _view(empty, "x").shape == (0, 4)


def test_classes_and_other_objects_of_array_libraries_raise() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    for kind in (np.ndarray, np.float32, Producer, torch.Tensor, jax.Array):
        with pytest.raises(EPInputError, match=f"x=<class {kind.__name__}>; expected an array. Pass"):
            _view(kind, "x")
    for other in (np.float32(1), np.dtype("float32"), torch.float32, torch.Size([2]), torch.nn.Identity()):
        with pytest.raises(EPInputError, match=r"x=\S.*; expected a NumPy.* array"):
            _view(other, "x")


def test_traced_jax_arrays_raise() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(EPInputError, match=r"x is traced by JAX.*deepep_rt\.jax\.dispatch"):
        jax.jit(lambda x: _view(x, "x"))(jax.numpy.ones((2, 4)))
