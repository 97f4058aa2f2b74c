"""Measure where the host spends the time of a call: `python bench/host_path.py --help`."""

import sys

try:
    from deepep_rt.bench.host_path import main
except ModuleNotFoundError as error:
    if error.name not in ("rich",):
        raise
    sys.exit(f"the benchmarks need {error.name}, which is not installed; pip install 'deepep_rt[bench]'")

if __name__ == "__main__":
    main()
