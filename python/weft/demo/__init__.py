"""Demonstration: a small mixture-of-experts classifier with experts spread over processes."""
