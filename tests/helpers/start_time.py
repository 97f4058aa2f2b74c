"""Run `bench/start.py` with a CUDA driver and an NVSHMEM that do nothing, on a machine without a GPU.

    PYTHONPATH=.:tests/helpers python tests/helpers/start_time.py --launcher "mpirun -n 2" --low-latency

It prints what Python, its imports, the exchanges between ranks and the kernel cache cost a start. The driver, NVSHMEM and the memory of a
real GPU add their own time. It needs gcc and cuda-python. EMPTY_DRIVER_START_MS=100,200 lets the driver and the context take time to start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from host_time import build_empty_driver
from paths import HELPERS, ROOT


def main() -> None:
    """Build the driver, and run the benchmark with it."""
    with tempfile.TemporaryDirectory() as folder:
        build_empty_driver(folder)
        paths = [str(HELPERS / "empty_nvshmem"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": folder,
            "PYTHONPATH": os.pathsep.join(paths),
            "DEEPEP_RT_SHARE_GPUS": "1",  # all ranks have the same GPU, which is none
        }
        words = [sys.executable, str(ROOT / "bench/start.py"), *sys.argv[1:]]
        sys.exit(subprocess.run(words, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
