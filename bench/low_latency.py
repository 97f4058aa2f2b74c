"""`mpirun -n 8 python bench/low_latency.py --help`: times of low-latency dispatch and combine."""

from deepep_rt.bench_low_latency import main

if __name__ == "__main__":
    main()
