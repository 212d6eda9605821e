"""Device functions for Triton (`weft.triton`): interpreted, compiled and linted."""
