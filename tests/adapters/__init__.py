"""Adapters for inference engines, over stand-ins for the engines."""
