"""The package as a whole: who imports whom, what an import does, and who reads the environment."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from without import without

import deepep_rt
from deepep_rt import errors
from deepep_rt.kernels.source import source_dir

PACKAGE = Path(deepep_rt.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# A file imports only from files before it in this list.
ORDER = [
    "errors",
    "_env",
    "checks",
    "_version",
    "dtypes",
    "dlpack",
    "handles",
    "arrays",
    "frameworks",
    "alike",
    "config",
    "tuning",
    "fp8",
    "structs",
    "layout",
    "kernels",
    "driver",
    "toolchain",
    "trusted_files",
    "cache_entry",
    "cache",
    "sources",
    "jit",
    "launch",
    "local_kernels",
    "overflow",
    "page",
    "users",
    "pool",
    "stream_memory",
    "network",
    "timed_collectives",
    "store_values",
    "store_comm",
    "mpi_comm",
    "communicator",
    "together",
    "agreement",
    "symmetric",
    "placement",
    "results",
    "calls",
    "inputs",
    "streams",
    "result_memory",
    "hooks",
    "turns",
    "mail",
    "host_arrays",
    "host",
    "host_low_latency",
    "watch",
    "transfer",
    "device",
    "device_low_latency",
    "tables",
    "buffer",
    "__init__",
    "torch_group",
    "torch_kernels",
    "torch",
    "jax_device",
    "jax_calls",
    "jax_low_latency",
    "jax",
    "compat_config",
    "compat_events",
    "compat_routing",
    "compat_handles",
    "compat_memory",
    "compat_calls",
    "compat_normal",
    "compat_low_latency",
    "compat_runtime",
    "compat_shim",
    "compat",
    "screen",
    "doctor_gpus",
    "doctor_probes",
    "doctor_run",
    "doctor_kinds",
    "doctor_facts",
    "doctor_rules",
    "doctor_rank_rules",
    "doctor_findings",
    "doctor",
    "cli_options",
    "cli_tables",
    "cli_cache",
    "cli_doctor",
    "bench_checks",
    "bench_results",
    "bench_references",
    "bench_ranks",
    "bench_report",
    "bench_machine",
    "bench_timing",
    "bench_throughput",
    "bench_low_latency",
    "bench_jitter",
    "bench_figures",
    "bench_page",
    "bench",
    "soak_buffers",
    "soak_plan",
    "soak_arrays",
    "soak_expected",
    "soak_check",
    "soak_run",
    "soak_throughput",
    "soak_low_latency",
    "soak_graph",
    "soak_report",
    "soak_watchdog",
    "soak_asked",
    "soak",
    "cli_soak",
    "cli",
    "__main__",
]
HEAVY = ("mpi4py", "cuda", "cupy", "torch", "jax", "jaxlib", "nvshmem", "pynvml", "ml_dtypes", "typer", "rich", "matplotlib")


def _imports(tree: ast.AST) -> set[str]:
    """Modules of this package that a file imports, also inside functions; but not for type checking alone."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, "the package is flat"
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.partition(".")[0] if name in ORDER else "__init__" for name in names}
        elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "deepep_rt":
            found.add(node.module.partition(".")[2] or "__init__")
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.partition(".")[2] or "__init__" for alias in node.names if alias.name.partition(".")[0] == "deepep_rt"
            }
        else:
            found |= _imports(node)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_upward(module: str) -> None:
    assert module in ORDER, f"{module}.py has no place in ORDER yet"
    allowed = set(ORDER[: ORDER.index(module)])
    below = _imports(ast.parse((PACKAGE / f"{module}.py").read_text())) - allowed
    assert not below, f"{module}.py imports {sorted(below)}, which stand below it"


def test_the_import_reader_sees_every_form() -> None:
    text = """
from . import agreement
from .host import HostBackend
import deepep_rt.device
from deepep_rt.jit.build import load
from . import __version__
def f():
    if True:
        from .pool import Pool
if TYPE_CHECKING:
    from .cli import app
"""
    assert _imports(ast.parse(text)) == {"agreement", "host", "device", "jit", "__init__", "pool"}


def _python(code: str, **environment: str) -> str:
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    code = (
        f"import sys; before = set(sys.modules); import deepep_rt; print([m for m in {HEAVY} if m in set(sys.modules) - before])"
    )
    assert _python(code) == "[]"


@pytest.mark.parametrize("wrapper", ["torch", "compat", "jax"])
def test_wrappers_do_without_cuda(wrapper: str, tmp_path: Path) -> None:
    """On laptops and in CI there is the host backend, and no cuda-python."""
    pytest.importorskip("jax" if wrapper == "jax" else "torch")
    environment = {**os.environ, **without(tmp_path, "cuda")}
    done = subprocess.run(
        [sys.executable, "-c", f"import deepep_rt.{wrapper}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_reads_no_setting() -> None:
    """Reading any `DEEPEP_RT_*` variable during the import fails in this process."""
    code = """
import os
real = type(os.environ).__getitem__
def read(self, key):
    assert not key.startswith('DEEPEP_RT_'), key
    return real(self, key)
type(os.environ).__getitem__ = read
type(os.environ).__contains__ = lambda self, key: (read(self, key), True)[1] if key.startswith('DEEPEP_RT_') else key in self._data
import deepep_rt, deepep_rt.config, deepep_rt.layout
try:
    deepep_rt.config._env.timeout_s()
except AssertionError:
    print('the trap works')
"""
    assert _python(code, DEEPEP_RT_TIMEOUT_S="nonsense", DEEPEP_RT_DEBUG="nonsense") == "the trap works"


@pytest.mark.parametrize("module", [name for name in MODULES if name != "_env"])
def test_only_env_reads_the_environment(module: str) -> None:
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        names = {getattr(node, "attr", None), getattr(node, "id", None)}
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        assert not names & {"environ", "environb", "getenv", "putenv"}, f"{module}.py, line {node.lineno}"


def test_public_names() -> None:
    assert all(hasattr(deepep_rt, name) for name in deepep_rt.__all__)
    missing = {name for name in vars(errors) if name.startswith("EP")} - set(deepep_rt.__all__)
    assert not missing
    assert (PACKAGE / "py.typed").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="comes with deepep_rt[dev]")
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(words, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


def test_everything_travels_with_the_wheel(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl"), "nothing is built before a kernel is needed"
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info" not in name.partition("/")[0]}
    package = {f"deepep_rt/{path.name}" for path in PACKAGE.iterdir() if path.is_file()}
    package |= {
        f"deepep_rt/{path.relative_to(PACKAGE)}"
        for path in (PACKAGE / "shim").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    cuda = {f"deepep_rt/cuda_src/{path.relative_to(source_dir())}" for path in source_dir().rglob("*.cu*")}
    assert names == package | cuda


def test_kernels_compile_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "DEEPEP_RT_CACHE_DIR": str(tmp_path / "cache")}
    sizes = ["--ranks", "1", "--tokens", "1", "--hidden", "512", "--topk", "1", "--experts", "1"]
    words = [sys.executable, "-m", "deepep_rt", "compile", "--arch", "sm_90", *sizes]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tree_of_exceptions_is_the_one_in_the_docstring() -> None:
    for name, kind in vars(errors).items():
        if not name.startswith("EP") or kind is errors.EPError:
            continue
        assert issubclass(kind, errors.EPError)
        line = next(line for line in errors.__doc__.splitlines() if f" {name} " in f" {line.strip('│ ')} ")
        builtin = next((b for b in kind.__mro__ if b.__module__ == "builtins"), None)
        parent = kind.__bases__[0]
        assert f"({builtin.__name__})" in line or parent is not errors.EPError


def _public_calls() -> Iterator[tuple[str, Any, Any]]:
    """(name, what has the docstring, what has the signature) of everything public that users call: not what only results have."""
    modules = [deepep_rt]
    for name in ("torch", "jax"):
        if f"{name}" in MODULES and importlib.util.find_spec(name):
            modules.append(importlib.import_module(f"deepep_rt.{name}"))
    for module in modules:
        defined = (name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__)
        for name in getattr(module, "__all__", [name for name in defined if not name.startswith("_")]):
            thing, name = getattr(module, name), f"{module.__name__}.{name}"
            made_by_users = not inspect.isclass(thing) or (module is deepep_rt and thing.__module__ != "deepep_rt.results")
            if (inspect.isclass(thing) and issubclass(thing, Exception)) or not callable(thing):
                continue
            if made_by_users:
                yield name, thing, thing
            if inspect.isclass(thing):
                for method, value in vars(thing).items():
                    function = getattr(value, "__func__", value)
                    if not method.startswith("_") and inspect.isfunction(function):
                        yield f"{name}.{method}", function, function


@pytest.mark.parametrize(("name", "thing", "called"), [pytest.param(*call, id=call[0]) for call in _public_calls()])
def test_public_docstrings_tell_args_and_show_an_example(name: str, thing: Any, called: Any) -> None:
    text, signature = inspect.getdoc(thing) or "", inspect.signature(called)
    arguments = [name for name in signature.parameters if name != "self" and not name.startswith("_")]
    missing = {
        "Args": any(f"{argument}:" not in text for argument in arguments),
        "Returns": not inspect.isclass(thing)
        and not re.match(r"None|Iterator", str(signature.return_annotation))
        and "Returns:" not in text,
        "Raises": name in ("deepep_rt.Buffer.dispatch", "deepep_rt.Buffer.combine", "deepep_rt.Buffer") and "Raises:" not in text,
        "Example": "Example:" not in text,
    }
    assert ", ".join(section for section, lacks in missing.items() if lacks) == ""


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(deepep_rt).values() if inspect.isclass(kind) and kind.__name__.endswith("Result")]
)
def test_arrays_of_results_have_a_shape_and_a_type(kind: type) -> None:
    for name, value in vars(kind).items():
        if isinstance(value, functools.cached_property):
            text = value.__doc__ or ""
            assert re.search(r"`\[.*\]`", text), f"{kind.__name__}.{name} has no shape"
            assert re.search(r"dtype of|as `|int32|float32|bfloat16", text), f"{kind.__name__}.{name} has no type"


def test_the_tests_need_neither_pytorch_nor_jax(tmp_path: Path) -> None:
    """The README's test command installs neither. (A few tests stand for those that start programs.)"""
    environment = {**os.environ, **without(tmp_path, "torch", "jax"), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    for words in (["--collect-only"], ["tests/package/test_readme.py", "-k", "options_exist"]):
        words = [sys.executable, "-m", "pytest", "-q", *words]
        done = subprocess.run(
            words, env=environment, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:]
