"""What the examples share: options, the library of arrays, and types of numbers that NumPy or CuPy do not know."""

import argparse
import functools
import importlib
import sys
import warnings

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD


def parse(doc, sizes=None, **options):
    """The command line; `sizes` are named numbers as (meaning, default on GPUs, default without)."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    for name, (meaning, on_gpu, without) in (sizes or {}).items():
        default = f"{on_gpu} on GPUs, {without} without" if on_gpu != without else on_gpu
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}; default {default}")
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    args.on_gpu = args.backend != "host" and has_gpu()  # with "cuda" and without a GPU, the Buffer says what is missing
    for name, (_, *defaults) in (sizes or {}).items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[not args.on_gpu])
    return args


def has_gpu():
    try:
        warnings.filterwarnings("ignore", message="CUDA path could not be detected")
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, no driver or no GPU; the host backend needs none of them
        return False


def array_library(on_gpu):
    """NumPy, or CuPy on the GPU that the Buffer of this rank takes."""
    if not on_gpu:
        return np
    import cupy

    cupy.cuda.Device(comm.Split_type(MPI.COMM_TYPE_SHARED).rank % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy


def need(module):
    """Import what the package does without."""
    try:
        return importlib.import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        sys.exit(f"{sys.argv[0]} needs {library}: pip install {library}" if comm.rank == 0 else 1)


def cast(array, dtype):
    """`array.astype(dtype)`, also from and to bfloat16 and FP8, which not every CuPy computes with."""
    if isinstance(array, np.ndarray):
        return array.astype(dtype)
    if array.dtype == np.float32:  # to bfloat16: keep the upper half, rounded to the nearest
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(dtype)
    return _by_bits(array.dtype, dtype)[array.view(np.dtype(f"uint{8 * array.itemsize}"))].view(dtype)


@functools.cache
def _by_bits(source, target):
    """All numbers of a short type, by their bits. As unsigned integers, because not every CuPy copies bfloat16 to the GPU."""
    import cupy

    source, target = np.dtype(source), np.dtype(target)
    numbers = np.arange(256**source.itemsize).astype(f"u{source.itemsize}").view(source)
    with np.errstate(over="ignore", invalid="ignore"):  # bfloat16 reaches further than float16
        return cupy.asarray(numbers.astype(target).view(f"u{target.itemsize}"))


def say(*words, **options):
    if comm.rank == 0:
        print(*words, **options, flush=True)


def compare(losses, alone):
    """Show the losses of a training over all ranks and on one rank, and check that they fall, and fall alike.

    Rounding differs; near ties of the router amplify that, so differences are measured against the first loss.
    """
    for step in range(0, len(losses), max(1, len(losses) // 8)):
        say(f"step {step:3}: loss {losses[step]:.6f}, on one rank {alone[step]:.6f}")
    error = max(abs(a - b) for a, b in zip(losses, alone, strict=True)) / alone[0]
    assert losses[-1] < 0.8 * losses[0], f"the loss fell from {losses[0]} to {losses[-1]} only"
    assert error < 1e-4, f"the losses differ by up to {error:.1e} of the first one"
    comm.Barrier()
    say(f"largest difference: {error:.1e} of the first loss\nOK")
