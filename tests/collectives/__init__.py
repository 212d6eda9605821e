"""GPU collectives: compiled kernels and algorithm selection."""
