"""Regions by the public path."""

from weft.group.region import Page, Region, RemoteRegion

__all__ = ["Page", "Region", "RemoteRegion"]
