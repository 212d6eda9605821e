"""Sizes and times as text by their public path."""

from weft.base.units import (
    format_bytes,
    format_seconds,
    parse_count,
    parse_range,
    parse_size,
)

__all__ = [
    "format_bytes",
    "format_seconds",
    "parse_count",
    "parse_range",
    "parse_size",
]
