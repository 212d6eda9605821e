"""The demonstration: a small mixture-of-experts classifier, its experts spread over processes."""
