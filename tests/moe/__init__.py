"""The CPU all-to-all."""
