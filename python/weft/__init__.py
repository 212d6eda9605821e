"""Communication for distributed machine learning, built on one primitive: the counted write."""

from weft import _start as _start  # isort: split

import importlib
import sys
from typing import Any

from weft import (
    communicator,  # noqa: F401
    counter,  # noqa: F401
    errors,
    float8,
    moe,
    pair,  # noqa: F401
    peer_group,  # noqa: F401
    region,  # noqa: F401
    request,  # noqa: F401
    route,  # noqa: F401
    word,  # noqa: F401
)
from weft._native import BuildInfo, build_info
from weft.base import logging as _logging  # noqa: F401
from weft.errors import WeftError
from weft.gpu.lazy import symmetric_empty, symmetric_peer, symmetric_region, symmetric_register
from weft.group.communicator import Communicator, init
from weft.group.counter import Counter
from weft.group.pair import Listener, connect, connect_async, listen
from weft.group.peer_group import PeerGroup
from weft.group.region import Page, Region, RemoteRegion
from weft.group.request import Request
from weft.group.route import Route, Statistics
from weft.group.word import Word, WordWatch
from weft.moe import check

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
    "Word",
    "WordWatch",
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
    "symmetric_region",
    "symmetric_register",
]

__version__ = build_info().version


def __getattr__(name: str) -> Any:
    if name == "cuda":
        # As after `import weft.cuda`: programs with an all-to-all on a device expect it.
        try:
            return importlib.import_module("weft.cuda")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise AttributeError("weft.cuda needs PyTorch, which is not installed") from error
    if name != "monitored_barrier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It needs torch.
    return importlib.import_module("weft.torch").monitored_barrier


if "torch" in sys.modules:
    # Registers the torch.distributed backend `weft`.
    importlib.import_module("weft.torch")
