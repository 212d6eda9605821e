"""Triton kernels of GEMMs fused with collectives."""
