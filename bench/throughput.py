"""Measure bandwidth and host time of dispatch and combine: `mpirun -n 8 python bench/throughput.py --help`."""

from deepep_rt._install import or_exit

with or_exit("this benchmark", "bench"):
    from deepep_rt.bench.throughput import main

if __name__ == "__main__":
    main()
