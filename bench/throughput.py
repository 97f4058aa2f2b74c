"""`mpirun -n 8 python bench/throughput.py --help`: bandwidth and host time of dispatch and combine."""

from deepep_rt.bench_throughput import main

if __name__ == "__main__":
    main()
