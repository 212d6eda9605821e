"""Kernel tests on a machine with GPUs, most also on their CPU twin."""
