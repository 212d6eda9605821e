"""Communication for distributed machine learning, built on one primitive: the counted write."""

import importlib
import sys
from typing import Any

from weft import _logging as _logging
from weft import errors, float8, moe
from weft._native import BuildInfo, build_info
from weft._symmetric import symmetric_empty, symmetric_peer, symmetric_register
from weft.communicator import Communicator, init
from weft.counter import Counter
from weft.errors import WeftError
from weft.moe import check
from weft.pair import Listener, connect, connect_async, listen
from weft.peer_group import PeerGroup
from weft.region import Page, Region, RemoteRegion
from weft.request import Request
from weft.route import Route, Statistics

__all__ = [
    "BuildInfo",
    "Communicator",
    "Counter",
    "Listener",
    "Page",
    "PeerGroup",
    "Region",
    "RemoteRegion",
    "Request",
    "Route",
    "Statistics",
    "WeftError",
    "__version__",
    "build_info",
    "check",
    "connect",
    "connect_async",
    "errors",
    "float8",
    "init",
    "listen",
    "moe",
    "symmetric_empty",
    "symmetric_peer",
    "symmetric_register",
]

__version__ = build_info().version


def __getattr__(name: str) -> Any:
    if name != "monitored_barrier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It needs torch.
    return importlib.import_module("weft.torch").monitored_barrier


if "torch" in sys.modules:
    # Registers the backend `weft` of torch.distributed.
    importlib.import_module("weft.torch")
