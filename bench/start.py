"""Measure how long a process takes until it has its first Buffer: `python bench/start.py --help`."""

from deepep_rt._install import or_exit

with or_exit("this benchmark", "bench"):
    from deepep_rt.bench.start import main

if __name__ == "__main__":
    main()
