"""Test compat.install and the shim: programs import DeepEP's names without a change."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

IMPORTS = """
import importlib.metadata
import importlib.util
import deep_ep, deep_ep_cpp
from deep_ep import Buffer
from deep_ep.buffer import Buffer as Same
from deep_ep.buffers.legacy import Buffer as Legacy
from deep_ep.utils import EventHandle, EventOverlap
from deep_ep.utils.envs import check_nvlink_connections
from deep_ep.utils.event import EventOverlap as SameOverlap
from deep_ep_cpp import get_low_latency_rdma_size_hint, is_sm90_compiled
from deep_ep import utils
import deep_ep.buffer as buffer
import deep_ep.utils
from deepep_rt import EPUnavailableError, compat
assert buffer.Buffer is Buffer and deep_ep.utils.EventOverlap is utils.EventOverlap is EventOverlap is SameOverlap
assert deep_ep.Buffer is Buffer is Same is Legacy is compat.Buffer and deep_ep_cpp.Config is compat.Config
assert is_sm90_compiled() == Buffer.is_sm90_compiled() and get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 0
assert utils.check_nvlink_connections is check_nvlink_connections and check_nvlink_connections(None) is None
assert importlib.util.find_spec("deep_ep").origin == deep_ep.__file__
from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
assert deep_ep.ElasticBuffer is ElasticBuffer is compat.ElasticBuffer and deep_ep.EPHandle is EPHandle is compat.EPHandle
for module, name in ((deep_ep, "get_physical_domain_size"), (deep_ep_cpp, "HybridEPBuffer"), (utils, "init_dist"), (buffer, "FuseMode")):
    try:
        getattr(module, name)
    except EPUnavailableError as error:
        assert name in str(error) and not hasattr(module, name)
try:
    from deep_ep import HybridEPBuffer
except ImportError:
    print(deep_ep.__version__, importlib.metadata.version("deep_ep"))
"""


def test_install_serves_programs_that_import_deepep() -> None:
    code = """
from deepep_rt import compat
compat.install()
compat.install()
"""
    assert _python(code + IMPORTS) == "1.2.1 1.2.1"
    refused = """
import sys, types
sys.modules["deep_ep"] = types.ModuleType("deep_ep")
from deepep_rt import EPUnavailableError, compat
try:
    compat.install()
except EPUnavailableError as error:
    print(error)
"""
    message = "deep_ep was imported already and is not this library. Call install() before the first import of deep_ep."
    assert _python(refused) == message


def test_processes_that_programs_start(tmp_path: Path) -> None:
    """Processes of multiprocessing use their parent's path. Others, such as `vllm serve` or Ray's workers, use PYTHONPATH."""
    pytest.importorskip("typer", reason="typer comes with deepep_rt[cli]")
    (tmp_path / "imports.py").write_text(IMPORTS)
    (tmp_path / "parent.py").write_text("""
import multiprocessing
import runpy
if __name__ == "__main__":
    from deepep_rt import compat
    compat.install()
    child = multiprocessing.get_context("spawn").Process(target=runpy.run_path, args=("imports.py",))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
""")
    folder = _python("import sys; from deepep_rt.cli.app import run; run(['shim-path'])")
    (tmp_path / "link").symlink_to(folder)
    after = "from deepep_rt import compat; import deep_ep; compat.install(); print(deep_ep.__version__)"
    assert _python("import sys; sys.path.insert(0, sys.argv[1]); " + after, str(tmp_path / "link")) == "1.2.1"
    paths = {
        name: os.pathsep.join([*more, os.environ.get("PYTHONPATH", "")]) for name, more in (("parent", []), ("imports", [folder]))
    }
    for program, path in paths.items():
        words, environment = [sys.executable, f"{program}.py"], {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert (done.stdout, done.returncode) == ("1.2.1 1.2.1\n", 0), done.stderr


def test_an_installed_deepep_keeps_working(tmp_path: Path) -> None:
    """Only `install` replaces it."""
    (tmp_path / "deep_ep.py").write_text("__version__ = 'theirs'")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import deepep_rt.compat; {}import deep_ep; print(deep_ep.__version__)"
    for call, version in (("", "theirs"), ("deepep_rt.compat.install(); ", "1.2.1")):
        assert _python(code.format(call), str(tmp_path)) == version


@pytest.mark.parametrize("name", ["get_logical_domain_size", "HybridEPBuffer", "utils"])
def test_missing_names_raise_an_error_with_the_name(name: str) -> None:
    from deepep_rt import EPUnavailableError, compat

    assert not hasattr(compat, name)
    assert getattr(compat, name, None) is None
    with pytest.raises(AttributeError, match=rf"{name} is not a part of this library.*docs/coming-from-deepep\.md") as caught:
        getattr(compat, name)
    assert isinstance(caught.value, EPUnavailableError)
    page = (ROOT / "docs/coming-from-deepep.md").read_text()
    assert name in page


def _python(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout.strip()
