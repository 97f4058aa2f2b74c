"""Translate a kernel to C++. Shared memory and PTX become calls of the headers in this folder; all other lines stay."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from deepep_rt.kernels import source as sources
from deepep_rt.kernels.table import Kernel

_SETUP = ("setp", "selp", "mov.b32", ".reg")  # helpers around the main instruction of a piece of PTX
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\((\d+)\) )?(\w+) (\w+)\[\];")
_STATIC = re.compile(r"__shared__ (\w+) (\w+)((?:\[[^\]]+\])*);")
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")


def write_sources(kernel: Kernel, constants: Mapping[str, int], folder: Path, cuda_src: Path | None = None) -> Path:
    """Write a kernel and its headers to `folder` as C++. Return the file to compile."""
    numbers = itertools.count()
    for name, text in sources.sources_of(kernel, cuda_src).items():
        if not name.endswith(".cu"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(translate(text, numbers))
    own = sources.sources_of(kernel, cuda_src)[kernel.source]
    prelude = sources.prelude(kernel, constants, cuda_src)
    start = f'\nextern "C" void start(const void* params) {{ {kernel.name}(*static_cast<const Params*>(params)); }}\n'
    target = folder / f"{kernel.name}.cpp"
    target.write_text(f'#include "ptx.h"\n{prelude}#line 1 "{kernel.source}"\n{translate(own, numbers)}{start}')
    return target


def translate(text: str, numbers: itertools.count) -> str:
    """Translate a source. `numbers` yields a number for each variable in shared memory."""
    text = _DYNAMIC.sub(_dynamic, text)
    text = _STATIC.sub(lambda m: f"auto& {m[2]} = cpu_gpu::shared_variable<{m[1]}{m[3]}>({next(numbers)});", text)
    parts, at = [], 0
    while match := _ASM.search(text, at):
        end = _closing(text, match.end() - 1)
        call = _call(text[match.end() : end])
        parts += [text[at : match.start()], call, "\n" * text.count("\n", match.start(), end)]
        at = end + 1
    return "".join([*parts, text[at:]])


def _dynamic(match: re.Match) -> str:
    """Translate the declaration of dynamic shared memory. It begins at no better address than the declaration asks for."""
    start = 0 if match[1] is None else int(match[1]) % 128
    return f"{match[2]}* {match[3]} = reinterpret_cast<{match[2]}*>(cpu_gpu::dynamic_shared_memory() + {start});"


def _closing(text: str, opening: int) -> int:
    """Find the parenthesis that closes the one at `opening`."""
    depth, quoted = 0, False
    for at in range(opening, len(text)):
        if text[at] == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            if depth == 0:
                return at
    raise AssertionError(f"no end of {text[opening : opening + 80]!r}")


def _call(asm: str) -> str:
    """Translate the inside of an asm statement (template, outputs, inputs) to a call."""
    parts = re.match(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', asm)
    assert parts is not None, asm
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', parts[1])).replace("\\n", "\n")
    operands = _operands(asm[parts.end() :])
    lines = [line.strip() for line in re.split(r"[;\n]", re.sub(r"^\{|\}$", "", template.strip())) if line.strip()]
    main = next(line for line in lines if not line.startswith(_SETUP)).removeprefix("@p ")
    words = [main.split()[0], *re.findall(r"%%(\w+)", main)]
    return f"ptx::{re.sub(r'[^0-9A-Za-z]', '_', '_'.join(words))}({', '.join(operands)})"


def _operands(text: str) -> list[str]:
    """List the expressions of `: "=r"(a) : "r"(b), "n"(c) : "memory"`, in order."""
    found, at = [], 0
    while match := re.compile(r'"[=+]?\w"\s*\(').search(text, at):
        end = _closing(text, match.end() - 1)
        found.append(text[match.end() : end])
        at = end + 1
    return found
