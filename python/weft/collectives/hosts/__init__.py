"""Collectives between GPUs on several hosts, in two levels."""
