"""Measure calls beside a large matrix product: `mpirun -n 8 python bench/beside_matmul.py --help`."""

from deepep_rt._install import or_exit

with or_exit("this benchmark", "bench"):
    from deepep_rt.bench.beside_matmul import main

if __name__ == "__main__":
    main()
