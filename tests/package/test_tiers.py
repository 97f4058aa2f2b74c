"""The quick tier: each program of tests/programs and each error class has a quick test. For kernels: test_kernels_compile.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import passed
import pytest
from paths import PROGRAMS, ROOT

from deepep_rt import errors

OF_GPUS = {"gpu_faults"}
STARTERS = {"run_checks", "launch", "PROGRAMS", "run_without_mpirun"}
"""Names in tests that start programs."""


def is_full(node: ast.AST) -> bool:
    """Return whether a function, or a case of a parameter, has the mark `full`."""
    marks = getattr(node, "decorator_list", None) or [word.value for word in getattr(node, "keywords", ()) if word.arg == "marks"]
    return any(isinstance(mark, ast.Attribute) and mark.attr == "full" for mark in marks)


def words(node: ast.AST) -> Iterator[str]:
    """Yield the names and strings in a definition, without the cases that are not quick."""
    if is_full(node):
        return
    if isinstance(node, ast.Name | ast.arg | ast.Attribute | ast.alias):
        yield getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None) or node.name
    if isinstance(node, ast.ImportFrom):
        yield node.module or ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.removesuffix(".py")
    for child in ast.iter_child_nodes(node):
        yield from words(child)


def definitions(tree: ast.Module) -> dict[str, ast.AST]:
    """Return the functions, classes and constants of a module, by name."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def words_of_quick_tests(path: Path) -> Iterator[set[str]]:
    """Yield the words of each quick test of a file, with those of all in this file that it uses."""
    known = definitions(ast.parse(path.read_text()))
    for name in known:
        if name.startswith("test_"):
            found, waiting, done = set(), {name}, set()
            while waiting:
                done.add(one := waiting.pop())
                found |= (new := set(words(known[one])))
                waiting |= new & set(known) - done
            yield found


@pytest.fixture(scope="module")
def quick_tests() -> list[set[str]]:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if not {"gpu", "gpu_jax"} & set(path.parts)]
    return [found for path in files for found in words_of_quick_tests(path)]


def test_each_error_class_has_a_quick_test(quick_tests: list[set[str]]) -> None:
    missing = {name for name in vars(errors) if name.startswith("EP")}.difference(*quick_tests)
    assert not missing


def test_each_program_has_a_quick_test(quick_tests: list[set[str]]) -> None:
    programs = {path.stem: set(words(ast.parse(path.read_text()))) for path in PROGRAMS.glob("*.py")}
    named = set().union(*(found for found in quick_tests if found & STARTERS))
    if "run_without_mpirun" in named:
        named.add("spawned")
    reached = set(programs) & named
    while new := {other for name in reached for other in programs[name] & set(programs)} - reached:
        reached |= new  # programs run others too
    missing = set(programs) - reached - OF_GPUS
    assert not missing, f"{missing}; expected a quick test for each. Give one of its tests no mark full, or few ranks."


def test_ci_leaves_out_only_what_has_passed_and_needs_no_library(tmp_path: Path) -> None:
    cases = {
        "kernels.test_layout": "",
        "kernels.test_slots_on_cpu": "<failure/>",
        "jit.test_build": "<skipped/>",
        "torch.test_torch": "",
    }
    report = tmp_path / "quick.xml"
    elements = (f'<testcase classname="tests.{module}" name="test_a[b/c]">{end}</testcase>' for module, end in cases.items())
    report.write_text(f"<testsuite>{''.join(elements)}</testsuite>")
    known = passed.tests_in(report)
    names = {module: f"tests/{module.replace('.', '/')}.py::test_a[b/c]" for module in cases}
    assert [module for module in cases if passed.need_not_run_again(names[module], known)] == ["kernels.test_layout"]
    assert not passed.need_not_run_again(names["kernels.test_layout"].replace("test_a", "test_b"), known)


def test_tests_that_start_programs_run_with_all_libraries() -> None:
    """So do tests whose files name a library. The files of `passed.FILES` start only programs that name none."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    alone = {file for file in files if passed.uses_no_libraries(file)}
    assert {"tests/kernels/test_kernels_on_cpu.py", "tests/jit/test_kernels_compile.py", *passed.FILES} < alone
    assert not alone & {"tests/cuda/test_heap.py", "tests/backends/cuda/test_start.py", "tests/backends/test_host_backend.py"}
    programs = {path.stem: path.read_text() for path in PROGRAMS.glob("*.py")}
    imports = {
        name: set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)) & set(programs) for name, text in programs.items()
    }
    for file in passed.FILES:
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        named = {
            node.value.removesuffix(".py") for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        reached = named & set(programs)
        while new := {name for one in reached for name in imports[one]} - reached:
            reached |= new
        reached -= {"spmd", "buffers"}  # the first imports PyTorch without mpirun only, the second names it in a text
        assert not {name for name in reached if passed.LIBRARIES.search(programs[name])}, file
