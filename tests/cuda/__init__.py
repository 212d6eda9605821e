"""Device all-to-alls and symmetric memory (`weft.cuda`) on the kernels' CPU twin."""
