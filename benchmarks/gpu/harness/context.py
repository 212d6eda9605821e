"""One rank's state: group, libraries, agreement."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from weft.bench.device.beside import Beside
from weft.bench.device.machine import visible
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import weft
    from harness.cases import Case
    from harness.side import Side
    from weft.bench.device.machine import Device

__all__ = ["UNDER_WAY", "Context", "Failure"]

#: File in the task directory: the case and the side in progress.
UNDER_WAY: Final = "under-way.json"
#: Limit for a host rendezvous, and for a device's wait for a peer; in seconds.
HOST_SECONDS: Final = 60.0
DEVICE_SECONDS: Final = 20.0
#: Limit for waits in fused kernels, in seconds.
FUSED_SECONDS: Final = 10.0
#: Limit for group formation and for waits in a group.
GROUP_TIMEOUT: Final = timedelta(seconds=30)
Made = TypeVar("Made")


class Failure(NamedTuple):
    """A side's failure."""

    text: str
    #: True if Weft does not take these arguments.
    refused: bool


class Context:
    """A rank."""

    def __init__(
        self,
        communicator: weft.Communicator,
        device: Device,
        directory: Path,
        cases: list[Case],
        task: dict[str, Any],
        about: dict[str, Any],
    ) -> None:
        self.communicator, self.device, self.directory = communicator, device, directory
        self.cases, self.task, self.about = cases, task, about
        self.rank, self.ranks = communicator.rank, communicator.world_size
        self.gpus = visible() if device.kind == "cuda" else 0
        #: Dtype for vectors in collectives; 2 bytes.
        self.dtype: Any = device.torch.bfloat16
        #: By operation or case kind.
        self.sides: dict[str, list[Side]] = {}
        #: Case whose buffers a shared arena holds.
        self.binding: str | None = None
        self._beside = Beside(communicator, device, directory)
        self._made: dict[str, Any] = {}
        self._closing: list[Callable[[], None]] = []

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """The one object for that key; a failure is kept too."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:
                self._made[key] = error
        found: Any = self._made[key]
        if isinstance(found, Exception):
            raise found
        made: Made = found
        return made

    def collectives(self, num_sms: int | None) -> Any:
        """`weft.cuda.Collectives` over all ranks with that many blocks; None: its choice."""
        return self.once(f"weft {num_sms}", lambda: self._open(num_sms))

    def _open(self, num_sms: int | None) -> Any:
        cuda: Any = import_module("weft.cuda")
        collectives = cuda.Collectives(
            self.communicator,
            device=self.device.place,
            num_sms=num_sms,
            skew_timeout=DEVICE_SECONDS,
            timeout=HOST_SECONDS,
        )
        self._closing.append(collectives.close)
        collectives.prepare("sum", self.dtype)
        return collectives

    def distributed(self) -> Any:
        """torch.distributed with a group over all ranks, and its communicator made."""
        return self.once("nccl", self._join)

    def _join(self) -> Any:
        distributed = self._beside.start()
        self._closing.append(self._beside.stop)
        # Registration needs a communicator, which the first collective makes.
        distributed.all_reduce(self.device.torch.zeros(1, device=self.device.name))
        self.device.synchronise()
        return distributed

    def group(self, backend: str, *, apart: bool = False) -> Any:
        """Group over all ranks with a backend, made by a collective call.

        Args:
            backend: the group's backend. The default group is Weft's.
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
        # Ranks that a launcher started have separate directories: rank 0's counts.
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

    @property
    def fused(self) -> Any:
        """`weft.fused`, with these benchmarks' wait limit."""
        return self.once("fused", self._import)

    def _import(self) -> Any:
        fused: Any = import_module("weft.fused")
        fused.set_timeout(FUSED_SECONDS)
        return fused

    def use_triton(self) -> None:
        """Choose float16 on the twin, where Triton's interpreter rounds bfloat16 otherwise."""
        if self.device.kind == "twin":
            self.dtype = self.device.torch.float16
            os.environ.setdefault("TRITON_INTERPRET", "1")

    def close(self) -> None:
        """Leave all groups."""
        self._made.clear()
        while self._closing:
            self._closing.pop()()

    def under_way(self, case: str, side: str) -> None:
        """Record the side in progress, for the record if this rank ends now."""
        if self.rank == 0:
            text = json.dumps({"case": case, "side": side, "origin": self.about})
            (self.directory / UNDER_WAY).write_text(text, encoding="utf-8")

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value."""
        gathered = self.communicator.all_gather(json.dumps(value).encode(), timeout=HOST_SECONDS)
        return [json.loads(each) for each in gathered]

    def attempt(self, work: Callable[[], Made]) -> tuple[Made | None, Failure | None]:
        """The result, or the failure on the first rank that has one; both the same on all ranks."""
        result, own = None, None
        try:
            result = work()
            self.device.synchronise()
        except Exception as error:
            text = f"rank {self.rank}: {type(error).__name__}: {error}".strip()[:1000]
            own = text, isinstance(error, ConfigurationError)
            # After a device fault this raises, and the ranks are started anew.
            self.device.synchronise()
        failures = [Failure(*each) for each in self.agree(own) if each is not None]
        return (None, failures[0]) if failures else (result, None)
