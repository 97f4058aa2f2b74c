"""Arguments of a wrong kind: the error shows the value and says what to pass. Nothing reaches a backend."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)
import numpy as np
import pytest
from paths import ROOT

from deepep_rt import Buffer, EPConfigError, EPError, EPInputError, EPUnavailableError
from deepep_rt import _checks as checks
from deepep_rt.arrays import frameworks
from deepep_rt.arrays.view import View

MPI = pytest.importorskip("mpi4py.MPI", reason="the host backend needs MPI")
SIZES = dict(num_max_tokens_per_rank=8, hidden=256, num_topk=2, num_experts=8)
X = np.ones((5, 256), "bfloat16")
IDX = np.arange(10).reshape(5, 2) % 8
WEIGHTS = np.ones((5, 2), np.float32)
FORM = re.compile(r"\S+=\S.*; expected .*\. [A-Z]")


@pytest.fixture(scope="module")
def buffer() -> Iterator[Buffer]:
    with Buffer(MPI.COMM_SELF, backend="host", low_latency=True, **SIZES) as made:
        yield made
        assert (made.dispatch(X, IDX).recv_x == X).all(), "it is usable after all of them"


def _refused(call: Callable[[], Any], *words: str, error: type[EPError] = EPInputError) -> str:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert FORM.match(message), message
    assert all(word in message for word in words), message
    assert len(message) < 600
    return message


class Producer:
    """An array of another library. A test decides what its DLPack methods do."""

    def __init__(self, **does: Any) -> None:
        self.does = does

    def __dlpack_device__(self) -> Any:
        return self.answer("device", (1, 0))

    def __dlpack__(self, **_: Any) -> Any:
        return self.answer("capsule", None)

    def answer(self, name: str, usual: Any) -> Any:
        found = self.does.get(name, usual)
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) else found


def _readonly() -> Any:
    array = X.view(np.uint16).copy()
    array.flags.writeable = False
    return array.__dlpack__()


def _used() -> Any:
    capsule = np.ones((5, 256), np.float16).__dlpack__()

    class Once:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: Any) -> Any:
            return capsule

    np.from_dlpack(Once())
    return capsule


PRODUCERS = {
    "read-only": Producer(capsule=_readonly),
    "raises": Producer(capsule=RuntimeError("the file is closed")),
    "raises of device": Producer(device=OSError("gone")),
    "device of a strange kind": Producer(device="cpu"),
    "nothing": Producer(),
    "no capsule": Producer(capsule=b"dltensor"),
    "a used capsule": Producer(capsule=_used),
    "words without an end": Producer(capsule=ValueError("x" * 10**6)),
}


def test_autotune_on_the_host(buffer: Buffer) -> None:
    """It refuses, because messages have nothing to tune. Wrong arguments come first, as on GPUs."""
    with pytest.raises(EPUnavailableError, match="autotune on backend='host'; expected GPUs"):
        buffer.autotune()
    _refused(lambda: buffer.autotune(num_tokens=9), "num_tokens=9", "1 to 8")
    _refused(lambda: buffer.autotune(dtype="float32"), "dtype='float32'", "bfloat16")
    _refused(lambda: buffer.autotune(max_seconds="1"), "max_seconds='1'")


@pytest.mark.parametrize("name", PRODUCERS)
def test_dlpack_producers_that_refuse(buffer: Buffer, name: str) -> None:
    array = PRODUCERS[name]
    _refused(lambda: buffer.dispatch(array, IDX), "x=<Producer>", "Pass a copy")
    _refused(lambda: buffer.dispatch(X, array), "topk_idx=<Producer>")
    _refused(lambda: buffer.low_latency_dispatch(array, IDX), "x=<Producer>")


def test_masked_arrays(buffer: Buffer) -> None:
    """The call would lose their mask."""
    masked = np.ma.masked_array(WEIGHTS, WEIGHTS < 0)
    _refused(lambda: buffer.dispatch(X, IDX, masked), "topk_weights=<MaskedArray>", "without a mask")
    torch = pytest.importorskip("torch")
    tensor = torch.masked.masked_tensor(torch.ones(5, 2), torch.ones(5, 2).bool())
    _refused(lambda: buffer.dispatch(X, IDX, tensor), "topk_weights=<MaskedTensor>", "without a mask")


def test_arrays_of_jax_that_cannot_be_read(buffer: Buffer) -> None:
    jnp = pytest.importorskip("jax.numpy")
    deleted = jnp.ones((5, 256), jnp.bfloat16)
    deleted.delete()
    _refused(lambda: buffer.dispatch(deleted, IDX), "x=<ArrayImpl>", "deleted")
    _refused(lambda: buffer.dispatch(jnp.ones((5, 256), jnp.int4), IDX), "x=<ArrayImpl>", "S4")


def test_memory_that_xla_shows_to_callbacks(buffer: Buffer) -> None:
    """It has DLPack, but it is no array of JAX and cannot be deleted."""

    class Shown(Producer):
        __module__ = "jaxlib.ffi"

    shown = Shown(capsule=lambda: X.view(np.int16).__dlpack__())
    assert buffer.dispatch(shown, IDX).handle.num_recv_rows == 5


def test_arrays_of_jax_on_several_devices(tmp_path: Path) -> None:
    """Outside of compiled functions, and in deepep_rt.jax."""
    pytest.importorskip("jax")
    program = tmp_path / "sharded.py"
    program.write_text(
        "import jax, jax.numpy as jnp, numpy as np\n"
        "from mpi4py import MPI\n"
        "from deepep_rt import Buffer, EPInputError\n"
        "from deepep_rt.jax import dispatch\n"
        "mesh = jax.sharding.Mesh(np.array(jax.devices()), ('i',))\n"
        "where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('i'))\n"
        "x = jax.device_put(jnp.ones((4, 256), jnp.bfloat16), where)\n"
        "idx = jnp.zeros((4, 2), jnp.int32)\n"
        f"with Buffer(MPI.COMM_SELF, backend='host', **{SIZES}) as buffer:\n"
        "    for call in (buffer.dispatch, lambda *given: dispatch(buffer, *given)):\n"
        "        try:\n"
        "            call(x, idx)\n"
        "        except EPInputError as error:\n"
        "            print(error)\n"
    )
    import os

    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, **settings}, check=False)
    said = done.stdout.splitlines()
    assert len(said) == 2, done
    assert all(FORM.match(line) for line in said), said
    assert all("x=<ArrayImpl>" in line and "on one device" in line for line in said), said


NO_FLAGS = ["yes", "False", "", None, 2, -1, 0.0, np.array([True, False]), np.array(True), [], object()]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("dispatch", "async_finish"),
        *(("low_latency_dispatch", name) for name in ("use_fp8", "round_scale", "use_ue8m0", "async_finish", "return_recv_hook")),
        *(
            ("low_latency_combine", name)
            for name in ("allow_multiple_reduction", "zero_copy", "async_finish", "return_recv_hook")
        ),
        ("destroy", "in_touch"),
    ],
)
def test_flags(buffer: Buffer, method: str, name: str) -> None:
    """Strings are no flags, because "False" would be true. Arrays are no flags either. 0 and 1 are."""
    sent = buffer.low_latency_dispatch(X, IDX, use_fp8=False)
    y = np.asarray(sent.recv_x)
    given = {"low_latency_combine": (y, IDX, WEIGHTS, sent.handle), "destroy": ()}.get(method, (X, IDX))
    for wrong in NO_FLAGS:
        _refused(lambda wrong=wrong: getattr(buffer, method)(*given, **{name: wrong}), f"{name}=", "True or False")


def test_flags_of_numpy(buffer: Buffer) -> None:
    for no in (False, np.False_, 0, np.int8(0)):
        assert buffer.low_latency_dispatch(X, IDX, use_fp8=no).recv_x.dtype == X.dtype
    assert buffer.low_latency_dispatch(X, IDX, use_fp8=np.True_).recv_x.dtype != X.dtype


@pytest.mark.parametrize("name", ["stream", "previous_event"])
def test_streams_and_events_of_a_host_backend(buffer: Buffer, name: str) -> None:
    """They have no effect there, but the same program runs on GPUs."""
    for wrong in ("main", True, 7.5, [7], X):
        _refused(lambda wrong=wrong: buffer.dispatch(X, IDX, **{name: wrong}), f"{name}=")
    event = buffer.dispatch(X, IDX, **{name: 7}).event
    assert buffer.dispatch(X, IDX, previous_event=event).recv_x.shape == X.shape
    _refused(lambda: event.wait("main"), "stream='main'")


@pytest.mark.parametrize("name", ["backend", "on_timeout", "on_exhausted", "dtype", "timeout_s", "network", "check_inputs"])
def test_settings_of_a_wrong_kind(name: str) -> None:
    for wrong in (np.array(["host", "cuda"]), X, ["host"], 7j, object(), "no such word", True, b"host"):
        if name == "check_inputs" and wrong is True:
            continue
        _refused(lambda wrong=wrong: Buffer(MPI.COMM_SELF, **{**SIZES, name: wrong}), f"{name}=", error=EPConfigError)


def test_classes_that_answer_with_errors(buffer: Buffer) -> None:
    """The message too reads only the class of an argument."""

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name} today")

        __repr__ = __str__ = __bool__ = __index__ = __int__ = __len__ = lambda self: 1 / 0  # type: ignore[assignment]

    odd = Odd()
    _refused(lambda: buffer.dispatch(odd, IDX), "x=<Odd>")
    for name in ("stream", "previous_event", "num_worst_tokens", "expert_alignment", "async_finish"):
        _refused(lambda name=name: buffer.dispatch(X, IDX, **{name: odd}), f"{name}=<Odd>")
    for name in ("hidden", "dtype", "timeout_s", "backend", "on_timeout"):
        _refused(lambda name=name: Buffer(MPI.COMM_SELF, **{**SIZES, name: odd}), f"{name}=<Odd>", error=EPConfigError)


def test_wrong_arguments_of_the_torch_wrapper(buffer: Buffer) -> None:
    torch = pytest.importorskip("torch")
    from deepep_rt.torch import combine, dispatch

    x, idx = torch.ones(5, 256).bfloat16(), torch.from_numpy(IDX)
    sent = dispatch(buffer, x, idx)
    for wrong in (None, "buffer", x, Buffer, buffer.config):
        _refused(lambda wrong=wrong: dispatch(wrong, x, idx), "buffer=", "deepep_rt.Buffer")
        _refused(lambda wrong=wrong: combine(wrong, x, sent.handle), "buffer=", "deepep_rt.Buffer")
    for wrong in NO_FLAGS:
        _refused(lambda wrong=wrong: dispatch(buffer, x, idx, fp8=wrong), "fp8=")
        _refused(lambda wrong=wrong: combine(buffer, x, sent.handle, fp8_grad=wrong), "fp8_grad=")


def test_wrong_arguments_of_the_jax_wrapper(buffer: Buffer) -> None:
    jnp = pytest.importorskip("jax.numpy")
    from deepep_rt import jax as ep

    x, idx, weights = jnp.ones((5, 256), jnp.bfloat16), jnp.asarray(IDX), jnp.asarray(WEIGHTS)
    sent, low = ep.dispatch(buffer, x, idx), ep.low_latency_dispatch(buffer, x, idx, use_fp8=False)
    deleted = x + 1
    deleted.delete()
    for wrong in (None, "buffer", x, Buffer):
        _refused(lambda wrong=wrong: ep.dispatch(wrong, x, idx), "buffer=")
        _refused(lambda wrong=wrong: ep.combine(wrong, sent.recv_x, sent.handle), "buffer=")
        _refused(lambda wrong=wrong: ep.low_latency_dispatch(wrong, x, idx), "buffer=")
        _refused(lambda wrong=wrong: ep.low_latency_combine(wrong, low.recv_x, idx, weights, low.handle), "buffer=")
    for wrong in ("rows", object(), [{}], deleted, None, np.ma.masked_array(X)):
        _refused(lambda wrong=wrong: ep.dispatch(buffer, wrong, idx), "x=")
        _refused(lambda wrong=wrong: ep.low_latency_dispatch(buffer, wrong, idx), "x=")
        _refused(lambda wrong=wrong: ep.combine(buffer, wrong, sent.handle), "x=")
        _refused(lambda wrong=wrong: ep.low_latency_combine(buffer, low.recv_x, idx, wrong, low.handle), "topk_weights=")
    for wrong in ("yes", None, jnp.ones(2)):
        _refused(lambda wrong=wrong: ep.low_latency_dispatch(buffer, x, idx, use_fp8=wrong), "use_fp8=")
    for wrong in ("token", 3, jnp.ones(2), object()):
        with pytest.raises(EPInputError, match="after"):
            ep.dispatch(buffer, x, idx, after=wrong)


def test_wrong_arguments_of_compat() -> None:
    torch = pytest.importorskip("torch")
    from deepep_rt import compat

    for name in (
        "num_nvl_bytes",
        "num_rdma_bytes",
        "num_qps_per_rank",
        "low_latency_mode",
        "enable_shrink",
        "explicitly_destroy",
    ):
        for wrong in ("x", None, np.array([1, 2]), 1.5):
            _refused(
                lambda name=name, wrong=wrong: compat.Buffer(MPI.COMM_SELF, **{name: wrong}), f"{name}=", error=EPConfigError
            )
    buffer = compat.Buffer(MPI.COMM_SELF, num_nvl_bytes=1 << 20, low_latency_mode=True)
    x, idx = torch.ones(5, 256).bfloat16(), torch.from_numpy(IDX)
    per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(idx, 8)
    layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=goes, num_tokens_per_expert=per_expert, topk_idx=idx)
    recv_x, *_, handle, _ = buffer.dispatch(x, **layout)
    for name, wrongs in {
        "config": (24, "c", buffer),
        "num_tokens_per_expert": ([1, 2], 8, "n", per_expert.numpy()),
        "is_token_in_rank": ([True], 1, goes.numpy()),
        "previous_event": ("e", 7, torch.ones(2)),
        "async_finish": ("yes", None, goes),
        "expert_alignment": ("x", 0, None),
        "num_worst_tokens": ("x", -1),
    }.items():
        for wrong in wrongs:
            _refused(lambda name=name, wrong=wrong: buffer.dispatch(x, **{**layout, name: wrong}), f"{name}=")
            if name in ("config", "previous_event", "async_finish"):
                _refused(lambda name=name, wrong=wrong: buffer.combine(recv_x, handle, **{name: wrong}), f"{name}=")
    for wrong in ((x,), (x, x, x), "x", None):
        _refused(lambda wrong=wrong: buffer.dispatch(wrong, **layout), "x=")
    for wrong in ((x, None), (x, "scales")):
        _refused(lambda wrong=wrong: buffer.dispatch(wrong, **layout), "x[1]=")
    for name in ("use_fp8", "round_scale", "use_ue8m0", "async_finish", "return_recv_hook"):
        for wrong in ("yes", None, goes):
            _refused(lambda name=name, wrong=wrong: buffer.low_latency_dispatch(x, idx, 8, 8, **{name: wrong}), f"{name}=")
    y, _, low, _, _ = buffer.low_latency_dispatch(x, idx, 8, 8, use_fp8=False)
    weights = torch.from_numpy(WEIGHTS)
    for name in ("zero_copy", "use_logfmt", "async_finish", "return_recv_hook"):
        _refused(lambda name=name: buffer.low_latency_combine(y, idx, weights, low, **{name: "yes"}), f"{name}='yes'")
    assert torch.equal(buffer.combine(recv_x, handle)[0], x)
    buffer.destroy()


def test_arrays_of_unknown_libraries_are_short_in_words(buffer: Buffer) -> None:
    """The message shows large objects by their shape."""
    view = View(4096, (1000, 1000), "uint8", -1, np.zeros(10**6, np.uint8).tolist(), frameworks.framework_of(X, "x"))
    assert repr(view) == "View(uint8 [1000, 1000] in host memory)"
    result = buffer.dispatch(X.tobytes and Producer(capsule=lambda: X.view(np.uint16).view(np.int16).__dlpack__()), IDX)
    assert repr(result.recv_x) == "View(int16 [5, 256] in host memory)"
    assert len(repr(result)) < 1000


def test_values_in_messages() -> None:
    assert checks.format_value("a" * 1000).endswith("...")
    assert len(checks.format_value("a" * 1000)) < 100
    assert checks.format_value(10**5000) == "<int of 16610 bits>"
    assert checks.format_value(np.uint16(7)) == "np.uint16(7)" or checks.format_value(np.uint16(7)) == "7"
    assert checks.format_value([1, "a"]) == "[1, 'a']"
    assert checks.format_value(list(range(1000))) == "<list>"
    assert checks.format_value(np.ones(3)) == "<ndarray>"
