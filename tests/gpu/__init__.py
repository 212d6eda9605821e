"""Tests of the kernels on a machine with GPUs, most of them also on their CPU twin."""
