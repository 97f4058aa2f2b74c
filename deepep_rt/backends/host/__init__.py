"""The backend in NumPy and MPI, the oracle of the GPU tests."""
