"""State of one rank of the benchmark of training: groups of torch.distributed beside Weft's."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any, Final

import collectives_context

__all__ = ["Context"]

#: Limit of the formation of a group and of its waits.
GROUP_TIMEOUT: Final = timedelta(seconds=30)


class Context(collectives_context.Context):
    """A rank."""

    def group(self, backend: str, *, apart: bool = False) -> Any:
        """Group of all ranks over a backend, made by a collective call.

        Args:
            backend: of the group. The default group is Weft's.
            apart: True for one that is not the default group.
        """
        return self.once(f"group {backend} {apart}", lambda: self._group(backend, apart))

    def _group(self, backend: str, apart: bool) -> Any:
        world = self.once("world", self._form)
        distributed: Any = import_module("torch.distributed")
        if backend == "weft" and not apart:
            return world
        return distributed.new_group(backend=backend, timeout=GROUP_TIMEOUT)

    def _form(self) -> Any:
        """The default group, over Weft."""
        distributed: Any = import_module("torch.distributed")
        backend: Any = import_module("weft.torch")
        if self.device.kind == "twin":
            backend.device.kind = "twin"
        # Ranks that a launcher started have directories of their own: rank 0's counts.
        directory = self.communicator.all_gather(str(self.directory).encode())[0].decode()
        distributed.init_process_group(
            "weft",
            init_method=f"file://{directory}/store",
            rank=self.rank,
            world_size=self.ranks,
            timeout=GROUP_TIMEOUT,
        )
        self._closing.append(distributed.destroy_process_group)
        return distributed.group.WORLD
