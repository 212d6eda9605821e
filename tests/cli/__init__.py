"""Commands: output, signals and sizes."""
