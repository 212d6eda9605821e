"""Routes and statistics by the public path."""

from weft.group.route import Route, Statistics

__all__ = ["Route", "Statistics"]
