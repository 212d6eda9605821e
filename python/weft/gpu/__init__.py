"""GPU memory, streams and errors, for every pattern. Importing this needs no torch."""
