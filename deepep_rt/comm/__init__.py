"""What the ranks say to each other on the host: MPI or a store, with time limits."""
