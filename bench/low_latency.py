"""Measure low-latency dispatch and combine: `mpirun -n 8 python bench/low_latency.py --help`."""

from deepep_rt._install import or_exit

with or_exit("this benchmark", "bench"):
    from deepep_rt.bench.low_latency import main

if __name__ == "__main__":
    main()
