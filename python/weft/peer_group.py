"""Peer groups by the public path."""

from weft.group.peer_group import PeerGroup

__all__ = ["PeerGroup"]
