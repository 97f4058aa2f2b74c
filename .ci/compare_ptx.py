"""Compare the PTX of every kernel between two checkouts; names may differ, code may not.

    python .ci/compare_ptx.py OLD_CHECKOUT NEW_CHECKOUT

Each checkout runs its own `python -m deepep_rt compile` in a process of its own, for sm_80 and sm_90 and each configuration below. The
script takes the PTX from NVRTC, before ptxas and the linker, so it needs no GPU. It replaces every name that a kernel's source defines by a
number, then compares. Exit status: 0 if all kernels are identical, 1 if one differs, 2 if a checkout does not compile.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ARCHS = ("sm_80", "sm_90")
CONFIGURATIONS = {
    "throughput": "--tokens 4096 --combine-dtype bfloat16 --combine-dtype float16 --combine-dtype float32",
    "throughput, FP8 rows": "--tokens 1024 --dtype float8_e4m3fn --combine-dtype bfloat16",
    "low latency, small": "--tokens 32 --ranks 4 --hidden 2048 --topk 4 --experts 64",
    "low latency, large": "--tokens 256 --ranks 32",
    "low latency, masks": "--tokens 128 --on-timeout mask",
    "network": "--tokens 128 --ranks-per-node 1",
    "network, masks": "--tokens 128 --ranks 16 --ranks-per-node 8 --on-timeout mask",
}
EXCERPT_LINES = 12

Variant = tuple[str, str, str]
"""The configuration, the architecture, and the kernel with the number of its element type."""


# --- one checkout, in its own process ----------------------------------------------------------------------------------------------


def record(checkout: Path, result: Path) -> None:
    """Run the compile command for each configuration, and write the PTX of each variant to `result`."""
    from cuda.bindings import nvrtc

    compile_program, create_program = nvrtc.nvrtcCompileProgram, nvrtc.nvrtcCreateProgram
    known: dict[tuple, str] = {}  # a kernel may have the same text in several configurations
    created: tuple[bytes, str] = (b"", "")
    found: list[tuple[str, str, str]] = []

    def create(source: bytes, name: bytes, *headers: object) -> tuple:
        nonlocal created
        created = source, name.decode().removesuffix(".generated")
        return create_program(source, name, *headers)

    def compile_to_ptx(program: object, count: int, flags: list[bytes]) -> tuple:
        (real,) = (flag for flag in flags if flag.startswith(b"--gpu-architecture="))
        virtual = [flag.replace(b"=sm_", b"=compute_") if flag == real else flag for flag in flags]
        key = (created[0], *virtual)
        if key not in known:
            status = compile_program(program, count, virtual)
            if status[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise SystemExit(f"{created[1]} does not compile:\n{text_of(program, 'ProgramLog')}")
            known[key] = text_of(program, "PTX")
        found.append((real.decode().partition("=")[2], created[1], known[key]))
        # The command goes on with the next kernel, without ptxas or the linker.
        return (nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION,)

    def text_of(program: object, what: str) -> str:
        text = bytearray(getattr(nvrtc, f"nvrtcGet{what}Size")(program)[1])
        getattr(nvrtc, f"nvrtcGet{what}")(program, text)
        return text.rstrip(b"\0").decode()

    nvrtc.nvrtcCreateProgram, nvrtc.nvrtcCompileProgram = create, compile_to_ptx
    os.sched_getaffinity = lambda process: {
        0
    }  # kernels are then compiled in turns, so their variants have the same numbers each time
    rows = []
    for configuration, options in CONFIGURATIONS.items():
        found.clear()
        archs = [part for arch in ARCHS for part in ("--arch", arch)]
        sys.argv = ["deepep_rt", "compile", *archs, *options.split()]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                runpy.run_module("deepep_rt", run_name="__main__", alter_sys=True)
            except SystemExit as exit_:
                if isinstance(exit_.code, str):
                    raise
        if not found:
            raise SystemExit(f"the command compiled no kernel: {' '.join(sys.argv[1:])}\n{output.getvalue()}")
        times = Counter[tuple[str, str]]()
        for arch, kernel, ptx in found:
            rows.append((configuration, arch, kernel, times[arch, kernel], ptx))
            times[arch, kernel] += 1
    package = Path(sys.modules["deepep_rt"].__file__ or "").resolve()
    if not package.is_relative_to(checkout):
        raise SystemExit(f"the compile command came from {package}; expected a package in {checkout}")
    result.write_text(json.dumps(rows))


def start(checkout: Path, folder: Path) -> subprocess.Popen:
    """Start `record` in a process that imports the package of `checkout`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEPEP_RT_")}
    environment |= {"PYTHONPATH": str(checkout), "DEEPEP_RT_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, __file__, "--record", str(checkout), str(folder / "ptx.json")]
    return subprocess.Popen(command, cwd=checkout, env=environment)


# --- the comparison ----------------------------------------------------------------------------------------------------------------


def without_names(ptx: str) -> list[str]:
    """Return the lines of PTX without comments, positions and unread constants.

    Names that the text defines become numbers, in the order in which they appear.
    """
    ptx = re.sub(r"//[^\n]*", "", ptx)
    lines = [line.strip() for line in ptx.splitlines()]
    lines = [line for line in lines if line and not re.match(r"\.(file|loc|section)\b", line)]
    words = Counter(re.findall(r"[\w$]+", "\n".join(lines)))
    # Headers name constants of other kernels too. Those that no instruction reads do not count.
    constants = [re.match(r"\.global \.align \d+ \.u\d+ ([\w$]+)( = -?\d+)?;", line) for line in lines]
    lines = [line for line, constant in zip(lines, constants, strict=True) if not constant or words[constant[1]] > 1]
    text = "\n".join(lines)
    external = set(re.findall(r"\.extern\s+\.func\s+(?:\([^)]*\)\s*)?([\w$]+)", text))
    defined = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text)  # functions
    defined += re.findall(r"^([\w$]+):", text, re.M)  # labels
    declaration = r"\.(?:global|shared|const|local|param)\s+(?:\.(?:align\s+\d+|ptr|global|[a-z]\d+|v\d)\s*)*([A-Za-z_$][\w$]*)"
    defined += re.findall(declaration, text)  # variables and parameters
    names = set(defined) - external
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = match[0]
        return numbers.setdefault(name, f"name_{len(numbers)}") if name in names else name

    return re.sub(r"(?<![\w$.%])[A-Za-z_$][\w$]*", number, text).splitlines()


def read(result: Path) -> dict[Variant, str]:
    return {
        (configuration, arch, f"{kernel}#{time}" if time else kernel): ptx
        for configuration, arch, kernel, time, ptx in json.loads(result.read_text())
    }


def pairs(old: dict[Variant, str], new: dict[Variant, str]) -> list[tuple[Variant, Variant]]:
    """Match the variants. If as many kernels of a configuration have no namesake on both sides, the table's order matches them.

    Otherwise a configuration has gained or lost kernels. The script prints them, and compares the others.
    """
    matched = []
    for configuration, arch in dict.fromkeys(key[:2] for key in [*old, *new]):
        ours = [key for key in old if key[:2] == (configuration, arch)]
        theirs = [key for key in new if key[:2] == (configuration, arch)]
        old_only, new_only = [key for key in ours if key not in new], [key for key in theirs if key not in old]
        renamed = dict(zip(old_only, new_only, strict=False)) if len(old_only) == len(new_only) else {}
        for what, keys in (("only old", old_only), ("only new", new_only)):
            if keys and not renamed:
                print(f"{what}   {arch}  {configuration:22}  {', '.join(key[2] for key in keys)}")
        matched += [(key, renamed.get(key, key)) for key in ours if key in new or key in renamed]
    return matched


def compare(old: dict[Variant, str], new: dict[Variant, str]) -> int:
    """Print a line for each variant, an excerpt where it differs, and the totals. Return the number of differences."""
    count = {"identical": 0, "differs": 0}
    for before, after in pairs(old, new):
        left, right = without_names(old[before]), without_names(new[after])
        status = "identical" if left == right else "differs"
        count[status] += 1
        name = before[2] if before == after else f"{before[2]} -> {after[2]}"
        print(f"{status:9}  {before[1]}  {before[0]:22}  {name}  ({len(left)} lines)")
        if left != right:
            difference = difflib.unified_diff(left, right, "old", "new", lineterm="", n=1)
            print("".join(f"    {line}\n" for _, line in zip(range(EXCERPT_LINES), difference, strict=False)), end="")
    kernels = len({key[2].partition("#")[0] for key in old})
    print(
        f"{kernels} kernels, {len(ARCHS)} architectures, {len(CONFIGURATIONS)} configurations: "
        f"{count['identical']} identical, {count['differs']} differ"
    )
    return count["differs"]


def main() -> int:
    if sys.argv[1:2] == ["--record"]:
        record(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("new", type=Path, metavar="NEW_CHECKOUT")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, side) for side in ("old", "new")]
        for folder in folders:
            folder.mkdir()
        checkouts = [asked.old.resolve(), asked.new.resolve()]
        running = [start(checkout, folder) for checkout, folder in zip(checkouts, folders, strict=True)]
        ended = [process.wait() for process in running]
        if any(ended):
            return 2
        old, new = (read(folder / "ptx.json") for folder in folders)
    return 1 if compare(old, new) else 0


if __name__ == "__main__":
    sys.exit(main())
