"""Messages between the ranks on the host, over MPI or a store, with time limits."""
