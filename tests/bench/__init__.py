"""`weft bench` and the GPU benchmark programs: checks and records, never times."""
