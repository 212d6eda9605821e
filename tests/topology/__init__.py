"""Hosts and networks as values, and rank placement on them."""
