"""Measurements, and what they share with the demonstration: phases, workers, percentiles."""
