"""Measure how long a process takes until it has its first Buffer: `python bench/start.py --help`."""

import sys

try:
    from deepep_rt.bench.start import main
except ModuleNotFoundError as error:
    if error.name not in ("rich",):
        raise
    sys.exit(f"the benchmarks need {error.name}, which is not installed; pip install 'deepep_rt[bench]'")

if __name__ == "__main__":
    main()
