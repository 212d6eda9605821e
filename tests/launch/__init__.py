"""`weft run`, and stacks from late ranks."""
