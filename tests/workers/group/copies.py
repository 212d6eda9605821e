"""Device memory."""

from typing import Any

import weft
from tests.workers.group.transfer import raised_by


def name_of(error: object) -> str:
    """An error's class."""
    return type(error).__name__


def memory() -> dict[str, Any]:
    """Region properties on a device, and rejected calls."""
    with weft.init() as communicator:
        refused = raised_by(lambda: communicator.alloc(1000, device="cuda:3"))
        if refused is not None:
            return {"refused": str(refused)}
        region, host = communicator.alloc(1000, device="cuda:3"), communicator.alloc(1000)
        interface = region.cuda.__cuda_array_interface__
        address, read_only = interface["data"]
        return {
            "refused": "",
            "device": region.device,
            "length": len(region),
            "interface": [
                list(interface["shape"]),
                interface["typestr"],
                read_only,
                interface["version"],
            ],
            "same": address == region.address and host.device is None,
            "bytes": name_of(raised_by(lambda: region.bytes)),
            "cuda": name_of(raised_by(lambda: host.cuda)),
            "strange": name_of(raised_by(lambda: communicator.alloc(1, device="xpu:0"))),
            "no such": name_of(raised_by(lambda: communicator.alloc(1, device="cuda:9"))),
        }
