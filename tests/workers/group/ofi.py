"""Ranks over libfabric."""

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import weft
from tests.workers.group import loss


def details() -> dict[str, Any]:
    """Provider details on this rank."""
    with weft.init() as communicator:
        routes = [route for route in communicator.routes() if route is not None]
        communicator.barrier()
        return {"routes": routes, "details": communicator.provider_details()}


def different() -> str:
    """Rank 1 uses another libfabric provider: the error on each rank."""
    if os.environ["WEFT_RANK"] == "1":
        os.environ["WEFT_OFI_PROVIDER"] = "shm"
    try:
        weft.init()
    except weft.errors.NoRouteError as error:
        return str(error)
    return "no error"


def survive(pipe: Connection, options: Mapping[str, Any], argument: tuple[str, bool]) -> None:
    """`loss.survive` over one of libfabric's providers."""
    os.environ["WEFT_OFI_PROVIDER"], reform = argument
    loss.survive(pipe, options, reform)
