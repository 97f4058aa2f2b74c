"""Measure calls beside a large matrix product: `mpirun -n 8 python bench/beside_matmul.py --help`."""

import sys

try:
    from deepep_rt.bench.beside_matmul import main
except ModuleNotFoundError as error:
    if error.name not in ("rich",):
        raise
    sys.exit(f"the benchmarks need {error.name}, which is not installed; pip install 'deepep_rt[bench]'")

if __name__ == "__main__":
    main()
