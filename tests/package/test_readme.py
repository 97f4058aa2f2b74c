"""Run the Python blocks of all pages, and check their commands, options, tables, links and file names."""

import functools
import re
import shlex
import sys

import pytest
from launch import python_on, run_command
from paths import ROOT
from ports import free_port
from without import without

from deepep_rt import errors

README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
OTHERS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")]
BENCH = sorted((ROOT / "bench").glob("*.md"))
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (*OTHERS, *DOCS, *BENCH)}
DOES_NOT_WORK = ROOT / "docs/when-it-does-not-work.md"
WITHOUT_EXTRAS = [ROOT / "docs/dispatch-and-combine.md"]
LANGUAGES = {"python", "bash", "console", "dockerfile", "yaml", "toml", "json", "text", "{toctree}", "{eval-rst}", "{include}"}
VARIABLES = set(re.findall(r"DEEPEP_RT_[A-Z_]+[A-Z]", (ROOT / "deepep_rt/_env.py").read_text()))
SHELL = ("bash", "dockerfile", "yaml")


def blocks(text):
    """Return (language, content) of each fenced code block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prose(text):
    """Return a page without its fenced code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def commands(text):
    """Yield the words of each command that a page shows, in blocks and in the text."""
    shown = [content for language, content in blocks(text) if language in SHELL]
    shown += [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]*)`", prose(text)) if "python" in code]
    for content in shown:
        for line in content.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
            lexer.whitespace_split, words = True, []
            for word in [*lexer, ";"]:
                if set(word) <= set(";&|<>"):
                    if words:
                        yield words
                    words = []
                else:
                    words.append(word)


def check_commands(text):
    for words in commands(text):
        try:
            check_command(words)
        except Exception as error:  # typer raises exceptions of its own
            raise AssertionError(f"{shlex.join(words)}: {error}") from error


def check_command(words):
    """Fail if a command of the package, a program of this repository, or an option of either does not exist."""
    if words[-1] == "..." or not any("python" in word for word in words):
        return
    if "deepep_rt" in words and words[words.index("deepep_rt") - 1] == "-m":
        check_cli(words[words.index("deepep_rt") + 1 :])
    for i, word in enumerate(words):
        if re.fullmatch(r"(?:examples|bench|tests)/\S*", word):
            assert (ROOT / word).exists(), f"{word} does not exist"
            if word.endswith(".py") and not word.startswith("tests/"):
                options = {option.partition("=")[0] for option in words[i + 1 :] if option.startswith("--")}
                if (text := help_of(word)) is not None:
                    assert options <= set(re.findall(r"--[a-z0-9-]+", text)), f"{word} has no {options}"


def check_cli(words):
    """Parse the words after `python -m deepep_rt` without running anything."""
    typer = pytest.importorskip("typer")
    from deepep_rt.cli import app as cli

    command = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    words = [word for word in words if word not in ("--help", "--version")]
    if hasattr(command, "commands"):
        assert not words, f"there is no option {words}"
    else:
        command.make_context("deepep_rt", list(words))


@functools.cache
def help_of(program):
    shown, errors = run_command(sys.executable, program, "--help", status=None)
    if re.search(r"needs (torch|jax): pip install", errors):
        return None  # without the library, the program does not print its options
    assert shown, errors
    return shown


def command(name):
    """Return the command of the code block under `<!-- name -->`."""
    return re.search(rf"<!-- {name} -->\n```bash\n(.+)\n```", README)[1]


def documentation_commands():
    """Return the commands with which CONTRIBUTING.md builds the documentation."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Documentation\n")[2]
    _, block = blocks(section)[0]
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def test_ci_runs_the_commands_of_users_first():
    """Each runs in a clone of its own, before anything else is installed."""
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    wanted = [command("example"), *documentation_commands(), command("tests")]
    assert [line for line in lines if line in wanted] == wanted
    first_extra = next(i for i, line in enumerate(lines) if "torch==" in line)
    assert max(map(lines.index, wanted)) < first_extra
    assert [line.split()[1] for line in lines if line.startswith("clone ")] == ["example", "docs", "tests"]


def junit(path, *cases):
    """Write a file of results: (class name, name, reason of a skip or None)."""
    path.write_text(
        "<testsuites><testsuite>"
        + "".join(
            f'<testcase classname="{module}" name="{name}">' + (f'<skipped message="{skip}"/>' if skip else "") + "</testcase>"
            for module, name, skip in cases
        )
        + "</testsuite></testsuites>"
    )
    return str(path)


def test_ci_notices_tests_that_run_nowhere(tmp_path):
    quick = junit(
        tmp_path / "quick.xml",
        ("tests.a", "test_one", "could not import torch"),
        ("tests.a", "test_two", "could not import jax"),
        ("", "tests.b", "could not import matplotlib"),
        ("", "tests.c", "could not import sphinx"),
        ("tests.d", "test_gives_away", "only root can give files away"),
    )
    full = junit(
        tmp_path / "full.xml",
        ("tests.a", "test_one", None),
        ("tests.a", "test_two", "could not import jax"),
        ("tests.b", "test_three", None),
        ("", "tests.c", "could not import sphinx"),
        ("tests.d", "test_gives_away", "only root can give files away"),
    )
    shown, _ = run_command(sys.executable, ".ci/skipped.py", quick, full, status=1)
    assert shown.splitlines() == [
        "skipped in every environment: tests.a::test_two: could not import jax",
        "skipped in every environment: tests.c: could not import sphinx",
        "skipped in every environment: tests.d::test_gives_away: only root can give files away",
        "error: 2 tests ran in no environment; expected each in one. Install what they need in .ci/run.",
    ]
    good = junit(tmp_path / "good.xml", ("tests.a", "test_two", None), ("tests.c", "test_four", None))
    run_command(sys.executable, ".ci/skipped.py", quick, full, good)


def test_example_command_installs_and_runs_the_example():
    setup, install, run = command("example").split(" && ")
    assert setup == "python3 -m venv .venv"
    assert install.startswith(".venv/bin/pip install")
    assert (ROOT / run.split()[-1]).is_file()


def run_python_blocks(text, tmp_path, check="", **environment):
    """Run all Python blocks of a document as one program on two ranks, and return its output."""
    program = "\n".join(content for language, content in blocks(text) if language == "python") + check
    for library in re.findall(r"^\s*(?:import|from) (torch|jax|cupy|ml_dtypes)\b", program, re.MULTILINE):
        pytest.importorskip(library)
    script = tmp_path / "blocks.py"
    script.write_text(program)
    environment = {"MASTER_PORT": str(free_port()), **environment}  # for blocks with torch.distributed
    return " ".join(" ".join(run_command(*python_on(2, script), **environment)).split())


def test_python_blocks_run_without_extras(tmp_path):
    """Hide what an installation without any extra lacks."""
    dependencies = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    installed = {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', dependencies)}
    extras = {"cuda", "cupy", "jax", "matplotlib", "ml_dtypes", "nvshmem", "pynvml", "rich", "torch", "typer"}
    (tmp_path / "hidden").mkdir()
    environment = without(tmp_path / "hidden", *sorted(extras - installed))
    text = "\n".join(path.read_text() for path in WITHOUT_EXTRAS)
    check = "\nassert np.isfinite(out).all() and (again.recv_x == sent.recv_x).all() and decoded.shape == (16, 512)\n"
    run_python_blocks(text, tmp_path, check, **environment)


def test_the_readmes_program_prints_what_the_readme_shows(tmp_path):
    """The numbers may differ between versions of PyTorch, and launchers may mix the ends of lines."""
    printed = run_python_blocks(README, tmp_path, "\nassert x.grad.isfinite().all() and x.grad.any() and out.shape == x.shape\n")
    (shown,) = [content for language, content in blocks(README) if language == "text"]
    for line in shown.splitlines():
        assert re.search(re.sub(r"\d\d+", r"\\d+", line.rpartition(" ")[0]) + r" \d", printed), printed


def test_the_readmes_program_has_what_it_needs():
    """Its command installs PyTorch, and starts the file that the text names."""
    setup, install, start = command("program").split(" && ")
    environment = setup.removeprefix("python3 -m venv ")
    assert install.startswith(f"{environment}/bin/pip install")
    assert install.endswith(" torch")
    assert start == f"{environment}/bin/mpirun -n 2 {environment}/bin/python program.py"
    assert "`program.py`" in README
    assert environment not in command("example"), "PyTorch's wheels replace packages of CUDA 12"


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [path for path in DOCS if "```python\n" in path.read_text() and path not in (*WITHOUT_EXTRAS, DOES_NOT_WORK)],
    ids=lambda path: path.name,
)
def test_python_blocks_of_the_documents_run(path, tmp_path):
    if "import jax" in path.read_text():
        pytest.importorskip("jax")
    run_python_blocks(path.read_text(), tmp_path)


def test_a_buffer_after_a_time_out(tmp_path):
    """Run the page with one silent rank. It raises the error and writes the line of the log that the page shows."""
    silent = """
import deepep_rt
from mpi4py import MPI
real = deepep_rt.Buffer.dispatch
if MPI.COMM_WORLD.rank == 1:
    deepep_rt.Buffer.dispatch = lambda *_: None
"""
    check = """
assert ok == (comm.rank == 1)
Buffer.dispatch = real
assert len(buffer.dispatch(x, topk_idx).recv_x) == 16
buffer.destroy()
"""
    page = DOES_NOT_WORK.read_text()
    output = run_python_blocks(f"```python\n{silent}```\n{page}", tmp_path, check)
    error = re.search(r"^EPTimeoutError: (rank 0 waited.*?)```", page, re.DOTALL | re.MULTILINE)[1]
    log = re.search(r"# (INFO:deepep_rt:.*)", page)[1]
    assert " ".join(error.split()) in output
    assert log in output


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page):
    """Refuse blocks in other languages or spellings: the tests above and below would not see them."""
    text = PAGES[page].read_text()
    assert {language.partition(" ")[0] for language, _ in blocks(text)} <= LANGUAGES
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) == 2 * len(blocks(text)), (
        "fences begin a line and come in pairs"
    )
    assert ">>> " not in text, "Python stands in blocks that can be run"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/cli.md"])  # that one is made from the commands
def test_commands_and_options_exist(page):
    check_commands(PAGES[page].read_text())


@pytest.mark.parametrize(
    "text",
    [
        "```bash\npython -m deepep_rt compile --nonsense\n```",
        "```bash\nmkdir x && mpirun -n 8 \\\n  python -m deepep_rt nonsense --json # why\n```",
        "```dockerfile\nRUN python -m deepep_rt compile --ranks many\n```",
        "Say `python -m deepep_rt cache list\n--nonsense` for it.",
        "```bash\nmpirun -n 8 python bench/throughput.py --nonsense 3 > file\n```",
        "```bash\nmpirun -n 8 python examples/nonsense.py\n```",
    ],
)
def test_wrong_commands_would_be_found(text):
    with pytest.raises(AssertionError, match=r"nonsense|many"):
        check_commands(text)


@pytest.mark.parametrize("page", PAGES)
def test_extras_variables_and_links_exist(page):
    text = PAGES[page].read_text()
    extras = re.search(
        r"^\[project.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE
    )[1]
    known = set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))
    named = {name for group in re.findall(r"(?:deepep_rt|'\.|\s\.)\[([a-z0-9_,]+)\]", text) for name in group.split(",")}
    assert named <= known, named - known
    assert set(re.findall(r"DEEPEP_RT_[A-Z_]+[A-Z]", text)) <= VARIABLES
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert link.startswith("https://") or (PAGES[page].parent / link).exists(), f"{link} leads nowhere"


@pytest.mark.parametrize("page", PAGES)
def test_anchors_of_links_exist(page):
    for target, anchor in re.findall(r"\]\(((?!https://)[^)#\s]+\.md)?#([\w-]+)\)", PAGES[page].read_text()):
        other = PAGES[page].parent / target if target else PAGES[page]
        headings = re.findall(r"^#+ (.*)$", prose(other.read_text()), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{target}#{anchor}"


def test_the_models_figures_are_those_of_its_page():
    """Compare docs/performance.md with the tables of bench/model.md, which a test holds to the model."""
    model = (ROOT / "bench/model.md").read_text().partition("## 1 to 256 nodes")[2]
    throughput, _, low_latency = model.partition("\nLow latency, ")
    row = r"^\| {} \| \d+ \| {} \| (\d+) \|(?: \S+ \|){{3}} (\d+) \|"
    page = PAGES["docs/performance.md"].read_text().partition("## Calls over several nodes")[2]
    shown = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(shown) == 6
    for nodes, *cells in shown:
        both = re.search(row.format(nodes, r"(?:near|hierarchical \\\*)"), throughput, re.MULTILINE)
        low = re.search(row.format(nodes, r"(?:near|direct)"), low_latency, re.MULTILINE)
        assert cells == [*both.groups(), *low.groups()]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "bench/measured.md"])
def test_pages_for_users_name_no_commit(page):
    numbers = re.findall(r"\b[0-9a-f]{7}\b", prose(PAGES[page].read_text()))
    assert not [word for word in numbers if re.search("[a-f]", word)], "move it to bench/measured.md"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:bench|cuda_src|deepep_rt|docs|examples|tests)/[\w./-]+)`", PAGES[page].read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


def test_every_variable_is_in_the_table():
    page = PAGES["docs/running.md"].read_text()
    assert set(re.findall(r"^\| `(DEEPEP_RT_[A-Z_]+)` \|", page, re.MULTILINE)) == VARIABLES


def test_every_error_is_in_the_table():
    page = PAGES["docs/api/errors.md"].read_text()
    assert not [name for name in dir(errors) if name.startswith("EP") and name != "EPError" and f"`{name}`" not in page]


def test_the_readme_is_short():
    assert len(README.encode()) < 7 * 1024, "move what only some readers need to a page in docs/"


STALE = "docs/cli.md is stale; run the command in CONTRIBUTING.md that makes it"


def leaf_commands(command, *words):
    """Yield (words, command) of each command that runs something."""
    for name, child in getattr(command, "commands", {}).items():
        yield from leaf_commands(child, *words, name)
    if not hasattr(command, "commands"):
        yield " ".join(words), command


def test_the_command_line_reference_is_up_to_date():
    """Compare docs/cli.md with the commands, and not with typer's layout, which differs between versions."""
    typer = pytest.importorskip("typer")
    from deepep_rt.cli import app as cli

    page = PAGES["docs/cli.md"].read_text()
    assert "..." not in page.replace("COMMAND [ARGS]...", ""), "a first sentence of more than 45 characters is cut off"
    sections = dict(re.findall(r"^#+ `python -m deepep_rt ([^`]+)`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    commands = dict(leaf_commands(typer.main.get_command(cli.app)))
    assert {name for name in sections if "**Commands**" not in sections[name]} == set(commands)
    for name, command in commands.items():
        assert " ".join(command.help.split()) in sections[name], STALE
        shown = dict(re.findall(r"^\* `(--[\w-]+)[^`]*`: (.*)$", sections[name], re.MULTILINE))
        options = {option.opts[0]: option.help for option in command.params if option.opts[0].startswith("--")}
        assert set(shown) - {"--help"} == set(options), STALE
        assert not [option for option, text in options.items() if " ".join(text.split()) not in shown[option]], STALE
