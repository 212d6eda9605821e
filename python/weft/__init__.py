"""Communication for distributed machine learning, built on one primitive: the counted write."""

from weft import errors, float8, moe
from weft._native import BuildInfo, build_info
from weft.communicator import (
    Communicator,
    Counter,
    Page,
    Region,
    RemoteRegion,
    Request,
    Route,
    Statistics,
    init,
)
from weft.errors import WeftError
from weft.moe import check

__all__ = [
    "BuildInfo",
    "Communicator",
    "Counter",
    "Page",
    "Region",
    "RemoteRegion",
    "Request",
    "Route",
    "Statistics",
    "WeftError",
    "__version__",
    "build_info",
    "check",
    "errors",
    "float8",
    "init",
    "moe",
]

__version__ = build_info().version
