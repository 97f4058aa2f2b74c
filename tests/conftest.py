"""Let processes that tests start use this checkout without an installation, and run the slowest files first."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable

import hypothesis
import kept
import limits
import passed
import pytest
from paths import ROOT

from deepep_rt._env import launch

try:
    importlib.metadata.distribution("deepep_rt")
except importlib.metadata.PackageNotFoundError:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

# A busy machine is no failure: an example may take long, and so may its making.
hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")

kept.folder()  # before a test sets DEEPEP_RT_CACHE_DIR

# Workers take whole files in this order. A long file at the end would leave the others idle.
SLOWEST_FIRST = (
    "test_slots_on_cpu",
    "test_host_backend",
    "test_torch",
    "test_nodes_on_cpu",
    "test_kernels_compile",
    "test_store",
    "test_cli",
    "test_compat",
    "test_kernels_on_cpu",
    "test_jax",
    "test_examples",
    "test_doctor_gpus",
    "test_readme",
    "test_build",
    "test_relay",
    "test_package",
    "test_doctor_settings",
    "test_host_nodes",
    "test_soak",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which CI does not run tests twice."""
    parser.addoption("--passed", metavar="JUNIT_FILE", help="leave out tests that passed there; see tests/helpers/passed.py")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite on all cores, unless the command says otherwise. Under an MPI launcher, each rank runs all tests itself."""
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # a worker that started workers would do so without end
    asked = config.option.usepdb or getattr(config.option, "numprocesses", 0) is not None  # or xdist is not there
    if is_whole and not is_worker and not asked and launch() is None:
        config.option.numprocesses = 1 + len(os.sched_getaffinity(0))  # one more, because some tests wait for the end of a limit
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    """Bound the kept folder, and give PyTorch a folder of this run: a run that is killed may leave a broken library in the shared one."""
    if hasattr(config, "workerinput"):
        return  # the first process of the run has done it
    kept.delete_oldest(kept.folder())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="torchinductor_of_tests_")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture
def seconds() -> Callable[[float], float]:
    """Return the function that makes limits: `seconds(0.5)` lasts longer the busier this machine is now."""
    return functools.partial(limits.seconds, times=limits.slowness())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--passed` names, and sort the slowest files to the front. All others keep their order."""
    if report := config.getoption("passed", None):
        known = passed.tests_in(report)
        left_out = {item for item in items if passed.need_not_run_again(item.nodeid, known)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: (*SLOWEST_FIRST, item.path.stem).index(item.path.stem))
