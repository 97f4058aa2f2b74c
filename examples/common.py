"""Options, the choice of NumPy or CuPy, and conversions of bfloat16 and FP8, for all examples."""

import argparse
import functools
import importlib
import platform
import sys
import warnings

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD


def parse(doc, sizes=None, **options):
    """Parse the command line. `sizes` maps names to (meaning, default on GPUs, default without)."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    for name, (meaning, on_gpu, without) in (sizes or {}).items():
        default = f"{on_gpu} on GPUs, {without} without" if on_gpu != without else on_gpu
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}; default {default}")
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    args.on_gpu = args.backend != "host" and has_gpu()  # for "cuda" without a GPU, the Buffer raises the error
    for name, (_, *defaults) in (sizes or {}).items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[not args.on_gpu])
    return args


def has_gpu():
    """Tell whether CuPy finds a GPU."""
    try:
        warnings.filterwarnings("ignore", message="CUDA path could not be detected")
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # CuPy, the driver or a GPU is missing; the host backend needs none of them
        return False


def array_library(on_gpu):
    """Return NumPy, or CuPy on the GPU of this rank's Buffer."""
    if not on_gpu:
        return np
    import cupy

    cupy.cuda.Device(rank_on_host() % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy


def rank_on_host():
    """Return the number of this rank among the ranks of its host, as Buffers count them."""
    hosts = comm.allgather(platform.node())
    return hosts[: comm.rank].count(platform.node())


def need(module):
    """Import a library that deepep_rt does not install, or exit with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        sys.exit(f"{sys.argv[0]} needs {library}: pip install {library}" if comm.rank == 0 else 1)


def cast(array, dtype):
    """Convert to `dtype`, also from and to bfloat16 and FP8, which some versions of CuPy cannot convert."""
    if isinstance(array, np.ndarray):
        return array.astype(dtype)
    if array.dtype == np.float32:  # to bfloat16: keep the upper half, rounded to the nearest
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(dtype)
    return _by_bits(array.dtype, dtype)[array.view(np.dtype(f"uint{8 * array.itemsize}"))].view(dtype)


@functools.cache
def _by_bits(source, target):
    """Make a table of all numbers of a short type by their bits, as unsigned integers: some versions of CuPy cannot copy bfloat16."""
    import cupy

    source, target = np.dtype(source), np.dtype(target)
    numbers = np.arange(256**source.itemsize).astype(f"u{source.itemsize}").view(source)
    with np.errstate(over="ignore", invalid="ignore"):  # bfloat16 has larger numbers than float16
        return cupy.asarray(numbers.astype(target).view(f"u{target.itemsize}"))


def say(*words, **options):
    """Print on rank 0."""
    if comm.rank == 0:
        print(*words, **options, flush=True)


def compare(losses, alone):
    """Print the losses of a training over all ranks and on one rank. Check that they fall and agree.

    Rounding differs, and a near tie of the router amplifies the difference. The limit is therefore relative to the first loss.
    """
    for step in range(0, len(losses), max(1, len(losses) // 8)):
        say(f"step {step:3}: loss {losses[step]:.6f}, on one rank {alone[step]:.6f}")
    error = max(abs(a - b) for a, b in zip(losses, alone, strict=True)) / alone[0]
    assert losses[-1] < 0.8 * losses[0], f"the loss fell from {losses[0]} to {losses[-1]} only"
    assert error < 1e-4, f"the losses differ by up to {error:.1e} of the first one"
    comm.Barrier()
    say(f"largest difference: {error:.1e} of the first loss\nOK")
