"""Embedding bags fused with all-to-all, and gradients for them."""
