"""Build the documentation without a warning, and check that everything public is in it."""

import html
import importlib.util
import inspect
import os
import re
import sys

import pytest
from launch import run_command
from paths import ROOT
from without import without

pytest.importorskip("sphinx", reason="sphinx comes with deepep_rt[docs]")
pytest.importorskip("myst_parser", reason="myst_parser comes with deepep_rt[docs]")
pytest.importorskip("furo", reason="furo comes with deepep_rt[docs]")

import deepep_rt

DOCS = ROOT / "docs"


def build(folder, *options, **environment):
    """Run the documented command with other folders. It needs no network."""
    options = ["-W", "--keep-going", "-q", "-d", folder / "doctrees", *options]
    run_command(sys.executable, "-m", "sphinx", *options, "docs", folder / "html", limit_s=600, **environment)
    return folder / "html"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"))


def test_the_documented_command_needs_only_the_extra_docs(tmp_path):
    (tmp_path / "hidden").mkdir()
    others = ("cuda", "cupy", "jax", "jaxlib", "matplotlib", "nvshmem", "nvtx", "pynvml", "rich", "torch", "typer")
    build(tmp_path, "-b", "dummy", **without(tmp_path / "hidden", *others))


def described(site):
    """Return the names that the reference describes."""
    from sphinx.util.inventory import InventoryFile

    with open(site / "objects.inv", "rb") as file:
        inventory = InventoryFile.load(file, "", os.path.join)
    data = inventory.data if hasattr(inventory, "data") else inventory
    return {name for kind, names in data.items() if kind.startswith("py:") for name in names}


def test_pages_name_who_has_the_copyright(site):
    assert "Copyright &#169; The deepep_rt authors" in (site / "index.html").read_text()


def test_everything_public_is_described(site):
    names = described(site)
    assert not {f"deepep_rt.{name}" for name in deepep_rt.__all__} - names
    for kind in (deepep_rt.Buffer, deepep_rt.DispatchResult, deepep_rt.LowLatencyDispatchResult, deepep_rt.Event):
        names_of_kind = set(dir(kind)) - {"views"}  # internal, as its docstring says
        public = {f"deepep_rt.{kind.__name__}.{name}" for name in names_of_kind if not name.startswith("_")}
        assert not public - names
    assert not {name for name in names if "._" in name}
    for module, library in {"torch": "torch", "jax": "jax", "compat": "torch"}.items():
        here = all(map(importlib.util.find_spec, (library, f"deepep_rt.{module}")))
        assert here == (site / f"api/{module}.html").exists()
        assert not here or any(name.startswith(f"deepep_rt.{module}.") for name in names)
    if (site / "api/compat.html").exists():
        from deepep_rt import compat

        assert not {f"deepep_rt.compat.Buffer.{name}" for name in dir(compat.Buffer) if not name.startswith("_")} - names


def test_every_page_is_in_the_navigation(site):
    index = (site / "index.html").read_text()
    pages = [path.relative_to(site).as_posix() for path in (*site.glob("*.html"), *site.glob("api/*.html"))]
    missing = [
        page for page in pages if f'href="{page}"' not in index and page not in ("index.html", "search.html", "genindex.html")
    ]
    assert [page for page in missing if page != "py-modindex.html"] == []
    sources = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.glob("*.md")}
    assert sources <= set(pages)


def words(text):
    return " ".join(text.replace("`", "").split())


def shown(page):
    """Return the text of a built page."""
    return words(html.unescape(re.sub(r"<[^>]+>", "", page.read_text())))


def test_docstrings_are_read_as_written(site):
    """Check that sections become fields, names in backticks code, and that a colon in a result makes no type."""
    page = site / "api/buffer.html"
    returns = re.search(r"^Returns:\n(.*?)\n\n", inspect.getdoc(deepep_rt.Buffer.size_hint), re.DOTALL | re.MULTILINE)[1]
    first = inspect.getdoc(deepep_rt.Buffer).splitlines()[0]
    assert words(returns) in shown(page)
    assert words(first) in shown(page)
    assert "Raises: EPConfigError" in shown(page)
    text = re.sub(r"<[^>]+>", "", page.read_text())
    assert "`" not in text[text.index(words(first).split(" (")[0]) :]


def test_docstrings_of_attributes_are_read_as_written(site):
    from sphinx.pycode import ModuleAnalyzer

    docs = ModuleAnalyzer.for_module("deepep_rt.results").find_attr_docs()
    page = shown(site / "api/results.html")
    public = [words(" ".join(lines)) for (kind, name), lines in docs.items() if kind in deepep_rt.__all__ and name[0] != "_"]
    assert len(public) > 5
    assert not [text for text in public if text not in page]
    assert "_wait" not in page


def test_pages_load_nothing_from_elsewhere(site):
    for path in site.glob("**/*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?://[^\"]+)", path.read_text())
        assert not loaded, (path.name, loaded)


def test_links_to_other_files_lead_to_copies(site):
    """Results, examples, the lab book and the licence are no pages. Readers of the site get the files."""
    stubs = {page: re.match(r"```{include} (\S+)\n```\n$", page.read_text()) for page in DOCS.glob("*.md")}
    included = {(DOCS / stub[1]).resolve(): page.stem for page, stub in stubs.items() if stub}
    for source in (*included, *DOCS.glob("*.md")):
        linked = re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)\s]*)?\)", source.read_text())
        files = {file for link in linked if not (file := (source.parent / link).resolve()).is_relative_to(DOCS)} - included.keys()
        page = site / f"{included.get(source, source.stem)}.html"
        copies = re.findall(r'href="(_downloads/[^"]+)"', page.read_text())
        assert {(site / copy).read_bytes() for copy in copies} >= {file.read_bytes() for file in files}, source
