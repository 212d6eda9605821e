"""What proves the kernels, on a machine with GPUs; as far as it goes, on their CPU twin."""
