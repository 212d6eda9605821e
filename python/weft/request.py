"""Requests by the public path."""

from weft.group.request import Done, Request

__all__ = ["Done", "Request"]
