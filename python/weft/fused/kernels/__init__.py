"""Kernels of the fused operators, in Triton; a file for each, and `rounds`, which all use."""
