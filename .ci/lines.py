"""Print files and lines of each folder, and the difference to a commit: python .ci/lines.py [BASE].

Code is lines without blank lines, comments and docstrings. The number fails nothing: a change that adds lines may be right. Reviewers see
how many.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ("deepep_rt", "cuda_src", "bench", "tests")
_SOURCE = re.compile(r"\.(py|cuh?)$")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Counts = dict[str, list[int]]  # files, lines and code of a folder


def code_lines(name: str, text: str) -> int:
    """Count the lines of a file without blank lines, comments and docstrings."""
    if not name.endswith(".py"):
        # A text in quotes may hold the beginning of a comment.
        bare = re.sub(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', lambda found: found[1] or "\n", text, flags=re.S)
        return sum(bool(line.strip()) for line in bare.splitlines())
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):  # a text that stands alone is a docstring, of an attribute too
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def count(files: Iterable[tuple[str, str]]) -> Counts:
    """Count each tree, and each folder without the folders in it. The files at the top of a tree are those of "tree/"."""
    made: Counts = {}
    for name, text in files:
        folder = name.rpartition("/")[0]
        tree = folder.partition("/")[0]
        counts = 1, len(text.splitlines()), code_lines(name, text)
        for each in (tree, f"{tree}/" if folder == tree else folder):
            made[each] = [sum(pair) for pair in zip(made.get(each, (0, 0, 0)), counts, strict=True)]
    return made


def read_files(base: str | None) -> Iterator[tuple[str, str]]:
    """Read the names and texts of all files of a commit, or of the working tree."""
    if base is None:
        names = _git("ls-files", "-co", "--exclude-standard", "--", *TREES).decode().splitlines()
        yield from ((name, (ROOT / name).read_text()) for name in names if _SOURCE.search(name) and (ROOT / name).is_file())
        return
    trees = [tree for tree in TREES if _git("ls-tree", base, tree)]
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", base, *trees))) as archive:
        for member in archive:
            if member.isfile() and _SOURCE.search(member.name) and (file := archive.extractfile(member)):
                yield member.name, file.read().decode()


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def main(base: str | None) -> None:
    """Print the table."""
    ours, theirs = count(read_files(None)), count(read_files(base)) if base else {}
    print(f"{'folder':<28}" + "".join(f"{head:>8}{'+/-' if base else '':>8}" for head in ("files", "lines", "code")))
    for folder in sorted(ours.keys() | theirs.keys()):
        line = f"{folder:<28}"
        for here, there in zip(ours.get(folder, [0, 0, 0]), theirs.get(folder, [0, 0, 0]), strict=True):
            line += f"{here:>8}{f'{here - there:+}' if base and here != there else '':>8}"
        print(line.rstrip())


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
