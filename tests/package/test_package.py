"""The package as a whole: its layers, the effects of an import, and reads of the environment."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import importlib.util
import inspect
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import run_command
from without import without

import deepep_rt
from deepep_rt import errors
from deepep_rt.kernels.source import source_dir

PACKAGE = Path(deepep_rt.__file__).parent
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")
}
"""Each file by its module's name in `deepep_rt`: "jit.build", "jit" for a folder's __init__.py, "__init__" for the package."""

# A file imports only from files of its own layer and of those before it. A layer is a folder with all files in it. Only the top of the
# package has files of several layers, and `backends.factory` comes after the backends.
LAYERS = [
    "errors _version _shim _env _checks _console _documents _finalizers _install",
    "arrays",
    "config network description statistics tuned",
    "results",
    "comm",
    "kernels",
    "cuda",
    "jit",
    "backends",
    "backends.host",
    "backends.cuda",
    "backends.factory",
    "buffer _statistics_files prepared",
    "__init__",
    "torch",
    "jax",
    "compat",
    "shim",
    "doctor",
    "bench",
    "soak",
    "cli",
    "__main__",
]
HEAVY = ("mpi4py", "cuda", "cupy", "torch", "jax", "jaxlib", "nvshmem", "pynvml", "ml_dtypes", "typer", "rich", "matplotlib")


def _imports(tree: ast.AST, folder: str) -> set[str]:
    """Return the modules of this package that a file in `folder` imports, in functions and for type checking too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if node.level:
                above = f"deepep_rt.{folder}".rstrip(".").split(".")
                module = ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
            else:
                module = node.module or ""
            found |= {f"{module}.{name}" if f"{module}.{name}".removeprefix("deepep_rt.") in FILES else module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.partition(".")[2] or "__init__" for name in found if name.partition(".")[0] == "deepep_rt"}


@functools.cache
def _arrows() -> dict[str, set[str]]:
    """Return the imports of each module."""
    found = {}
    for name, path in FILES.items():
        folder = ".".join(path.relative_to(PACKAGE).parts[:-1])
        found[name] = _imports(ast.parse(path.read_text()), folder)
    return found


def _layer_of(module: str) -> str:
    """Return the layer of a module: that of its file, or of its innermost folder."""
    places = {place: layer for layer in LAYERS for place in layer.split()}
    while module not in places:
        module, _, _ = module.rpartition(".")
        assert module, "the module is in no layer"
    return places[module]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_to_layers_before(layer: str) -> None:
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    modules = [module for module in FILES if _layer_of(module) == layer]
    assert modules
    for module in modules:
        above = {name for name in _arrows()[module] if _layer_of(name) not in allowed}
        assert not above, f"deepep_rt.{module} imports {sorted(above)}, of later layers"


def test_layers_name_what_there_is() -> None:
    """A name that is left after its file has moved would give its layer to the next file of that name."""
    folders = {name.rpartition(".")[0] for name in FILES}
    assert not {place for layer in LAYERS for place in layer.split()} - FILES.keys() - folders


def test_imports_point_in_no_circle() -> None:
    graphlib.TopologicalSorter(_arrows()).prepare()


def test_the_import_reader_sees_every_form() -> None:
    text = """
from . import call_order, view
from .backend import HostBackend
import deepep_rt.jit.build
from deepep_rt.jit.store import KernelCache
from ... import __version__
from ...arrays import view
from .. import hooks
def f():
    if True:
        from ...cuda.pool import Pool
if TYPE_CHECKING:
    from ...cli.app import app
"""
    found = _imports(ast.parse(text), "backends.host")
    expected = "__init__ arrays.view backends.hooks backends.host backends.host.backend cli.app cuda.pool jit.build jit.store"
    assert found == set(expected.split())


def test_folders_load_nothing() -> None:
    """Importing one module must not load the others of its folder. Only public folders export names."""
    public = ("__init__", "torch", "jax", "compat", "soak")
    for name, path in FILES.items():
        if path.name == "__init__.py" and name not in public and not name.startswith("shim."):
            assert len(ast.parse(path.read_text()).body) == 1, f"deepep_rt.{name} holds more than a docstring"


PUBLIC = {
    "deepep_rt": "Buffer BufferDescription LinkRates NetworkOptions Event DispatchHandle DispatchResult CombineResult LowLatencyHandle "
    "LowLatencyDispatchResult LowLatencyCombineResult EPError EPCacheError EPCompileError EPConfigError EPDestroyedError EPInputError "
    "EPOutOfMemoryError EPPeerError EPTimeoutError EPUnavailableError __version__",
    "deepep_rt.buffer": "Buffer",
    "deepep_rt.config": "Config",
    "deepep_rt.errors": "EPError EPTimeoutError",
    "deepep_rt.network": "NetworkOptions",
    "deepep_rt.results": "DispatchResult",
    "deepep_rt.torch": "dispatch combine low_latency_dispatch low_latency_combine communicator Dispatched Handle TracedHandle "
    "LowLatencyDispatched LowLatencyHandle",
    "deepep_rt.jax": "dispatch combine low_latency_dispatch low_latency_combine checkpoint errors use_gpu_of_rank Combined Dispatched "
    "Handle LowLatencyDispatched LowLatencyHandle",
    "deepep_rt.compat": "Buffer Config EventHandle EventOverlap check_nvlink_connections install shim_path topk_idx_t "
    "get_low_latency_rdma_size_hint is_sm90_compiled __version__",
    "deepep_rt.compat.buffer": "Buffer Config EventOverlap",
    "deepep_rt.soak": "Asked lines run",
    "deepep_rt.doctor.report": "examine show",
    "deepep_rt.bench.run": "measure draw",
    "deepep_rt.cli.app": "run",
    "deepep_rt.__main__": "",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_paths_stay(module: str) -> None:
    library = {"torch": "torch", "jax": "jax", "compat": "torch"}.get(f"{module}.".split(".")[1])
    if library:
        pytest.importorskip(library)
    found = importlib.import_module(module)
    assert not [name for name in PUBLIC[module].split() if not hasattr(found, name)]
    if module.startswith("deepep_rt.compat."):
        compat = importlib.import_module("deepep_rt.compat")
        assert all(getattr(found, name) is getattr(compat, name) for name in PUBLIC[module].split())


def _python(code: str, **environment: str) -> str:
    return run_command(sys.executable, "-c", code, **environment)[0].strip()


def test_importing_loads_nothing_heavy() -> None:
    code = (
        f"import sys; before = set(sys.modules); import deepep_rt; print([m for m in {HEAVY} if m in set(sys.modules) - before])"
    )
    assert _python(code) == "[]"


@pytest.mark.parametrize("wrapper", ["torch", "compat", "jax"])
def test_wrappers_do_without_cuda(wrapper: str, tmp_path: Path) -> None:
    """Laptops and CI use the host backend, without cuda-python."""
    pytest.importorskip("jax" if wrapper == "jax" else "torch")
    assert run_command(sys.executable, "-c", f"import deepep_rt.{wrapper}", **without(tmp_path, "cuda"))[1] == ""


def test_importing_reads_no_setting() -> None:
    """In this process, a read of any `DEEPEP_RT_*` variable during the import fails."""
    code = """
import os
real = type(os.environ).__getitem__
def read(self, key):
    assert not key.startswith('DEEPEP_RT_'), key
    return real(self, key)
type(os.environ).__getitem__ = read
type(os.environ).__contains__ = lambda self, key: (read(self, key), True)[1] if key.startswith('DEEPEP_RT_') else key in self._data
import deepep_rt, deepep_rt.config, deepep_rt.kernels.layout
try:
    deepep_rt.config._env.timeout_s()
except AssertionError:
    print('the trap works')
"""
    assert _python(code, DEEPEP_RT_TIMEOUT_S="nonsense", DEEPEP_RT_DEBUG="nonsense") == "the trap works"


def test_only_env_reads_the_environment() -> None:
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())) if module != "_env" else ():
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            if isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
            assert not names & {"environ", "environb", "getenv", "putenv"}, f"{path.name}, line {node.lineno}"


def test_public_names() -> None:
    assert all(hasattr(deepep_rt, name) for name in deepep_rt.__all__)
    missing = {name for name in vars(errors) if name.startswith("EP")} - set(deepep_rt.__all__)
    assert not missing
    assert (PACKAGE / "py.typed").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling comes with deepep_rt[dev]")
    folder = tmp_path_factory.mktemp("wheel")
    run_command(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (path,) = folder.iterdir()
    return path


def test_everything_travels_with_the_wheel(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl"), "nothing is built before a kernel is needed"
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info" not in name.partition("/")[0]}
    package = {
        f"deepep_rt/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    cuda = {f"deepep_rt/cuda_src/{path.relative_to(source_dir())}" for path in source_dir().rglob("*.cu*")}
    assert names == package | cuda


@pytest.mark.full
def test_kernels_compile_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    environment = dict(PYTHONPATH=str(tmp_path), DEEPEP_RT_CACHE_DIR=str(tmp_path / "cache"))
    sizes = ["--ranks", "1", "--tokens", "1", "--hidden", "512", "--topk", "1", "--experts", "1"]
    words = [sys.executable, "-m", "deepep_rt", "compile", "--arch", "sm_90", *sizes]
    run_command(*words, limit_s=300, folder=tmp_path, **environment)


def test_the_tree_of_exceptions_is_the_one_in_the_docstring() -> None:
    for name, kind in vars(errors).items():
        if not name.startswith("EP") or kind is errors.EPError:
            continue
        assert issubclass(kind, errors.EPError)
        line = next(line for line in errors.__doc__.splitlines() if f" {name} " in f" {line.strip('│ ')} ")
        builtin = next((b for b in kind.__mro__ if b.__module__ == "builtins"), None)
        parent = kind.__bases__[0]
        assert f"({builtin.__name__})" in line or parent is not errors.EPError


def _methods(kind: type) -> dict[str, Any]:
    """Return what a class and its bases in this package define."""
    bases = [base for base in reversed(kind.__mro__) if base.__module__.startswith("deepep_rt")]
    return {name: value for base in bases for name, value in vars(base).items()}


def _public_calls() -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, object with the docstring, object with the signature) for each public callable, but for methods of results."""
    modules = [deepep_rt]
    for name in ("torch", "jax"):
        if importlib.util.find_spec(name):
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
                for method, value in _methods(thing).items():
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


@pytest.mark.full
def test_the_tests_need_neither_pytorch_nor_jax(tmp_path: Path) -> None:
    """The README's test command installs neither. (A few tests represent those that start programs.)"""
    environment = {**without(tmp_path, "torch", "jax"), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    for words in (["--collect-only"], ["tests/package/test_readme.py", "-k", "options_exist"]):
        run_command(sys.executable, "-m", "pytest", "-q", *words, limit_s=300, **environment)
