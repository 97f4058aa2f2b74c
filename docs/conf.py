"""Configure the documentation. `python -m sphinx -W docs build/docs` builds it (pip install '.[docs]')."""

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

# A mock of PyTorch or JAX would hide the functions under their decorators, so these pages need the libraries.
NEEDS = {"torch": "torch", "jax": "jax", "compat": "torch"}
left_out = [name for name, library in NEEDS.items() if find_spec(library) is None]
exclude_patterns = [f"api/{name}.md" for name in left_out]
if left_out:
    print(f"left out of the reference, because their libraries are not installed: {', '.join(left_out)}")

default_role = "code"  # docstrings put `names` between single backticks
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Buffer": "deepep_rt.Buffer"}  # in signatures; there is a compat.Buffer too
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
pygments_dark_style = "github-dark"  # the theme's own underlines modules
smartquotes = False  # or options lose one of their dashes
html_title = f"deepep_rt {release}"
html_show_sourcelink = False
html_copy_source = False


def included():
    """Find the pages of this folder that only include another file, with that file."""
    stubs = {page: re.match(r"```{include} (\S+)\n```\n$", page.read_text()) for page in (ROOT / "docs").glob("*.md")}
    return {page: (page.parent / stub[1]).resolve() for page, stub in stubs.items() if stub}


INCLUDED = included()
PAGES = {file: page for page, file in INCLUDED.items()}


class Docstring(GoogleDocstring):
    """Read the Returns section as prose, which may hold a colon; the signature has the types."""

    def _consume_returns_section(self, preprocess_types=False):
        return [("", "", self._dedent(self._consume_to_next_section()))]


def sections(app, what, name, obj, options, lines):
    """Turn Args, Returns, Raises and Example into fields. Docstrings of attributes have no sections."""
    if what not in ("attribute", "property", "data"):
        config = Config(napoleon_use_rtype=False)
        lines[:] = Docstring(lines, config, app, what, name, obj, options).lines()


def signature(app, what, name, obj, options, signature, returns):
    """Hide the constructors of results: only the library calls them."""
    return ("", None) if what == "class" and obj.__module__ == "deepep_rt.results" else None


def with_links(app, docname, source):
    """Read the file that a page of one `{include}` names, and lead its links to pages. Links to other files become downloads."""
    page = ROOT / "docs" / f"{docname}.md"
    path = INCLUDED.get(page, page)

    def link(match):
        label, target, anchor = match.groups()
        file = Path(os.path.normpath(path.parent / target))
        file = PAGES.get(file, file)
        inside = file.is_relative_to(ROOT / "docs")
        target = os.path.relpath(file, page.parent)
        # MyST takes other Markdown for a page, unless a scheme says that it is a file. A download has no anchors.
        return f"[{label}]({target}{anchor or ''})" if inside or file.suffix != ".md" else f"[{label}](path:{target})"

    app.env.note_dependency(path)  # or a change of an included file leaves its page as it was
    text = path.read_text() if path != page else source[0]
    source[0] = re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", link, text)


def setup(app):
    app.connect("source-read", with_links)
    app.connect("autodoc-process-docstring", sections)
    app.connect("autodoc-process-signature", signature)
