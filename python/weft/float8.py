"""Quantisation by block by its public path."""

from weft.base.float8 import (
    dequantise,
    quantise,
    scale_count,
)

__all__ = [
    "dequantise",
    "quantise",
    "scale_count",
]
