"""Settings of the reference documentation: `python -m sphinx -W docs build/docs` makes it (pip install '.[docs]')."""

import sys
from importlib.util import find_spec
from pathlib import Path

from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

import deepep_rt  # noqa: E402

project = "deepep_rt"
version = release = deepep_rt.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "myst_parser"]
exclude_patterns = [f"api/{name}.md" for name in ("torch", "jax", "compat") if not (ROOT / f"deepep_rt/{name}.py").exists()]

default_role = "code"  # docstrings put `names` between single backticks
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_mock_imports = [name for name in ("mpi4py", "torch", "jax") if find_spec(name) is None]
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"deepep_rt {release}"
html_show_sourcelink = False
html_copy_source = False


class Docstring(GoogleDocstring):
    """What is returned is prose that may hold a colon, and no type; types stand in the signature."""

    def _consume_returns_section(self, preprocess_types=False):
        return [("", "", self._dedent(self._consume_to_next_section()))]


def sections(app, what, name, obj, options, lines):
    """Args, Returns, Raises and Example. The docstrings of attributes have no sections."""
    if what not in ("attribute", "property", "data"):
        config = Config(napoleon_use_rtype=False)
        lines[:] = Docstring(lines, config, app, what, name, obj, options).lines()


def signature(app, what, name, obj, options, signature, returns):
    """Nobody makes results: how is not shown."""
    return ("", None) if what == "class" and obj.__module__ == "deepep_rt.results" else None


def setup(app):
    app.connect("autodoc-process-docstring", sections)
    app.connect("autodoc-process-signature", signature)
