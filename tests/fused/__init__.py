"""Fused operators under Triton's interpreter, and their compiled kernels."""
