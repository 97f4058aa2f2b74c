"""The current CUDA context, and the architecture of its GPU."""

from __future__ import annotations

import functools

from .. import _env
from ..errors import EPUnavailableError


def target_arch() -> str:
    """Return the target to compile for: `DEEPEP_RT_ARCH`, or the current GPU's architecture.

    Raises:
        EPUnavailableError: if there is no GPU, or none is current.
    """
    return _env.arch() or arch()


def arch() -> str:
    """Return the current GPU's architecture, such as "sm_90"."""
    return _arch_of(context())


@functools.cache
def _arch_of(current: int) -> str:
    from cuda.bindings import driver  # programs without a GPU may lack the bindings

    from ..cuda.driver import ok

    device, name = ok(driver.cuCtxGetDevice()), "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"
    parts = (
        ok(driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, name + part), device)) for part in ("MAJOR", "MINOR")
    )
    return "sm_" + "".join(map(str, parts))


def context() -> int:
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
