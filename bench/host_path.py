"""Measure where the host spends the time of a call: `python bench/host_path.py --help`."""

from deepep_rt._install import or_exit

with or_exit("this benchmark", "bench"):
    from deepep_rt.bench.host_path import main

if __name__ == "__main__":
    main()
