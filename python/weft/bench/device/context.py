"""Arguments for GPU benchmark measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.bench.device.rig import Rig

if TYPE_CHECKING:
    import weft
    from weft.bench.device.beside import Beside
    from weft.bench.device.cases import Case
    from weft.bench.device.machine import Device

__all__ = ["Context"]


class Context:
    """Arguments for every measurement."""

    def __init__(
        self,
        communicator: weft.Communicator,
        device: Device,
        beside: Beside,
        memory: str | None = None,
    ) -> None:
        self.communicator, self.device, self.beside = communicator, device, beside
        self.memory = memory

    def rig(self, case: Case) -> Rig:
        """All-to-all for a case."""
        return Rig(self.communicator, self.device, case, self.memory)
