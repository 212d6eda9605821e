"""Collectives on hosts, between GPUs on one host, and between GPUs on several hosts."""
