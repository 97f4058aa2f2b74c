"""Compile with NVRTC, and link with nvJitLink. No GPU and no driver is needed, but to find out the GPU that a program compiles for.

NVRTC is called through its bindings, not through cuda.core's Program. Program asks the driver for its version when it makes PTX, so
`compute_80` targets would need a machine with a GPU.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from .. import _env
from ..errors import EPCompileError, EPConfigError, EPUnavailableError
from ..kernels.tuning import MIN_ARCH, arch_number
from .libraries import nvjitlink_version, nvrtc_version, nvshmem

_importing = Lock()  # the import of cuda.core fails in threads that import it at the same time


@dataclass(frozen=True)
class Usage:
    """The resources of a kernel that ptxas reports; None for PTX, for which ptxas runs when the kernel is loaded."""

    registers: int | None = None
    static_shared_bytes: int | None = None
    stack_bytes: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None


@functools.cache
def known_archs() -> tuple[str, ...]:
    """Return the GPU architectures that this NVRTC compiles for."""
    nvrtc_version()
    from cuda.bindings import nvrtc

    return tuple(f"sm_{number}" for number in nvrtc.nvrtcGetSupportedArchs()[1])


def check_arch(arch: str) -> None:
    """Check a target. Raise EPConfigError if it is no architecture or too old, and EPCompileError if NVRTC does not know it."""
    if arch_number(arch) < arch_number(MIN_ARCH):
        raise EPConfigError(f"arch={arch!r}; expected {MIN_ARCH} or newer")
    if f"sm_{arch_number(arch)}" not in known_archs():
        raise EPCompileError(
            f"arch={arch!r}; expected one that NVRTC {nvrtc_version()} knows: {', '.join(known_archs())}. Use another NVRTC."
        )


def compile_unit(unit: str, name: str, arch: str, options: list[str], include: list[Path]) -> tuple[bytes, str]:
    """Compile one translation unit with NVRTC. Return the code and NVRTC's log. "sm_XX" gives a cubin, "compute_XX" PTX.

    `options` are NVRTC's, without the architecture and the `include` folders.

    Raises:
        EPCompileError: with NVRTC's log.
        EPUnavailableError: if NVRTC is not installed.
    """
    check_arch(arch)
    from cuda.bindings import nvrtc

    def ok(result: tuple, log: str = "") -> tuple:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise EPCompileError(f"{name} did not compile for {arch}: {result[0].name} (NVRTC {nvrtc_version()})\n{log.strip()}")
        return result[1:]

    (program,) = ok(nvrtc.nvrtcCreateProgram(unit.encode(), f"{name}.generated".encode(), 0, [], []))
    try:
        flags = [f"--gpu-architecture={arch}", *options, *(f"--include-path={folder}" for folder in include)]
        result = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        (log_bytes,) = ok(nvrtc.nvrtcGetProgramLogSize(program))
        buffer = bytearray(log_bytes)
        ok(nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.rstrip(b"\0").decode(errors="replace")
        ok(result, log)
        kind = "PTX" if arch.startswith("compute_") else "CUBIN"
        (num_bytes,) = ok(getattr(nvrtc, f"nvrtcGet{kind}Size")(program))
        code = bytearray(num_bytes)
        ok(getattr(nvrtc, f"nvrtcGet{kind}")(program, code))
        return bytes(code), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def link_nvshmem(code: bytes, calls: bytes, name: str, arch: str) -> tuple[bytes, str]:
    """Link a kernel (a cubin, or PTX) with the calls of NVSHMEM and its device library. Return a cubin for `arch`, and nvJitLink's log.

    `code` is relocatable. `calls` is the code of `common/nvshmem_calls.cu` for `arch`, a relocatable cubin.

    Raises:
        EPCompileError: with nvJitLink's log.
        EPUnavailableError: if nvJitLink or NVSHMEM is not installed.
    """
    library = nvshmem()
    nvjitlink_version()  # raises if nvJitLink is missing; cuda.core would use the driver's linker instead
    with _importing:
        from cuda.core import Linker, LinkerOptions, ObjectCode

    make = ObjectCode.from_cubin if code.startswith(b"\x7fELF") else ObjectCode.from_ptx
    parts = (
        make(code, name=name),
        ObjectCode.from_cubin(calls, name="nvshmem_calls"),
        ObjectCode.from_library(library.device_library.read_bytes(), name=library.device_library.name),
    )
    try:
        linker = Linker(*parts, options=LinkerOptions(name=name, arch=arch, verbose=True, ptxas_options=["-v"]))
        return bytes(linker.link("cubin").code), str(linker.get_info_log())
    except Exception as error:  # the class depends on the version; the text holds the log
        raise EPCompileError(
            f"{name} did not link for {arch} with {library.device_library} (NVSHMEM {library.version}, "
            f"nvJitLink {nvjitlink_version()})\n{error}"
        ) from error


def usage(log: str, name: str, link_log: str = "") -> Usage:
    """Read the figures of ptxas for the entry point `name`.

    Stack frame and spills come from the relocatable compile, which reports each function separately. Sections of NVSHMEM's functions are
    skipped. Linking raises the registers to the need of the called functions, so the linker's number of registers is used.
    """
    entry = re.search(
        rf"Function properties for {re.escape(name)}\n(.*?)(?=Function properties for|Compiling entry|\Z)", log, re.S
    )
    text = entry[1] if entry else ""
    linked = re.search(rf"Function properties for '{re.escape(name)}':\n(.*)", link_log)
    used = re.search(r"[Uu]sed (\d+) registers", linked[1] if linked else text)
    shared = re.search(r"(\d+) bytes smem", linked[1] if linked else text)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if used is None:
        return Usage()
    stack, stores, loads = (int(group) for group in frame.groups()) if frame else (None, None, None)
    return Usage(int(used[1]), int(shared[1]) if shared else 0, stack, stores, loads)


def target_arch(ordinal: int | None = None) -> str:
    """Return the target to compile for: `DEEPEP_RT_ARCH`, or the architecture of a GPU. Default: the current one.

    Raise EPUnavailableError if there is no GPU, or none is current.
    """
    return _env.arch() or (gpu_arch() if ordinal is None else _arch_of_device(ordinal))


def gpu_arch() -> str:
    """Return the current GPU's architecture, such as "sm_90"."""
    return _arch_of(gpu_context())


@functools.cache
def _arch_of(current: int) -> str:
    from ..cuda.driver import current_device  # programs without a GPU may lack the bindings

    return _arch_of_device(current_device())


def _arch_of_device(ordinal: int) -> str:
    from cuda.bindings import driver

    from ..cuda.driver import ok

    device, name = ok(driver.cuDeviceGet(ordinal)), "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"
    parts = (
        ok(driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, name + part), device)) for part in ("MAJOR", "MINOR")
    )
    return "sm_" + "".join(map(str, parts))


def gpu_context() -> int:
    """Return the current CUDA context."""
    try:
        from cuda.bindings import driver

        status, current = driver.cuCtxGetCurrent()
    except (ImportError, RuntimeError, OSError) as error:
        raise EPUnavailableError(
            f"no CUDA driver ({error}). Without a driver, kernels can be compiled but not loaded."
        ) from error
    if status or not int(current):
        reason = f" ({status.name})" if status else ""
        raise EPUnavailableError(
            f"no CUDA context is current in this thread{reason}. Choose a GPU first, for example with torch.cuda.set_device(0)."
        )
    return int(current)
