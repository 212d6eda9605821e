"""Symmetric GPU memory under its public path."""

from weft.gpu.symmetric import (
    TABLE,
    Field,
    Owner,
    empty,
    only_open,
    owner,
    peer,
    shown,
    size_of,
    table,
)

__all__ = [
    "TABLE",
    "Field",
    "Owner",
    "empty",
    "only_open",
    "owner",
    "peer",
    "shown",
    "size_of",
    "table",
]
