"""Collectives between GPUs on one host; `weft.cuda` exports these classes."""
