"""The communicator by the public path."""

from weft.group.communicator import Communicator, init

__all__ = ["Communicator", "init"]
