"""Settings of the reference documentation: `python -m sphinx -W docs build/docs` makes it (pip install '.[docs]')."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

import deepep_rt  # noqa: E402

project = "deepep_rt"
copyright = "The deepep_rt authors"
version = release = deepep_rt.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "myst_parser"]

# A stand-in for PyTorch or JAX would not do: it hides what their decorators are put on.
NEEDS = {"torch": "torch", "jax": "jax", "compat": "torch"}
left_out = [name for name, library in NEEDS.items() if find_spec(library) is None or not (ROOT / f"deepep_rt/{name}.py").exists()]
exclude_patterns = [f"api/{name}.md" for name in left_out]
if left_out:
    print(f"left out of the reference, as their libraries are not installed: {', '.join(left_out)}")

default_role = "code"  # docstrings put `names` between single backticks
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Buffer": "deepep_rt.Buffer"}  # in signatures; there is a compat.Buffer too
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


def with_links(app, docname, source):
    """README.md becomes a page. Links between pages lead there, also if they go over the repository; to other files there are none."""
    base = ROOT if docname == "readme" else (ROOT / "docs" / docname).parent
    pages = {ROOT / "README.md": ROOT / "docs/readme.md"}

    def link(match):
        label, target, anchor = match.groups()
        path = Path(os.path.normpath(base / target))
        path = pages.get(path, path)
        if not path.is_relative_to(ROOT / "docs"):
            return label
        return f"[{label}]({os.path.relpath(path, (ROOT / 'docs' / docname).parent)}{anchor or ''})"

    text = (ROOT / "README.md").read_text() if docname == "readme" else source[0]
    source[0] = re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", link, text)


def setup(app):
    app.connect("source-read", with_links)
    app.connect("autodoc-process-docstring", sections)
    app.connect("autodoc-process-signature", signature)
