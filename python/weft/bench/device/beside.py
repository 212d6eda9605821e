"""NCCL baseline: as many bytes to the same ranks by `all_to_all_single` only.

It has all sizes beforehand, moves no metadata and arranges no rows, so it bounds the transfer time
and is no dispatch. On the twin it is gloo.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import weft
    from weft.bench.device.machine import Device
    from weft.bench.device.rounds import Times

__all__ = ["Beside"]

#: Exchanges per graph, there and back.
EXCHANGES = 8


class Beside:
    """torch.distributed over a communicator's ranks, set up at first use."""

    def __init__(self, communicator: weft.Communicator, device: Device, directory: Path) -> None:
        self.communicator, self.device, self.directory = communicator, device, directory
        self.group: Any = None

    def unable(self) -> str | None:
        """The reason that it cannot run here; `None` if it can."""
        distributed = import_module("torch.distributed")
        if not distributed.is_available():
            return "this PyTorch has no torch.distributed"
        ranks = self.communicator.world_size
        if self.device.kind == "cuda":
            gpus = self.device.torch.cuda.device_count()
            if ranks > gpus:
                return f"NCCL does not take {ranks} ranks on {gpus} GPUs"
        return None

    def start(self) -> Any:
        """torch.distributed, with a group that has all ranks."""
        if self.group is None:
            # Ranks that a launcher started have separate directories: rank 0's counts.
            directories = self.communicator.all_gather(str(self.directory).encode())
            distributed = import_module("torch.distributed")
            distributed.init_process_group(
                self.device.backend,
                init_method=f"file://{directories[0].decode()}/store",
                rank=self.communicator.rank,
                world_size=self.communicator.world_size,
            )
            self.group = distributed
        return self.group

    def stop(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.destroy_process_group()
            self.group = None

    def measure(self, there: list[list[int]], back: list[list[int]], samples: int) -> Measured:
        """Move bytes there and back.

        Args:
            there: by rank, the bytes that it sends to each rank in dispatch.
            back: in combine.
            samples: replays.
        """
        distributed, device = self.start(), self.device
        rank = self.communicator.rank
        first = Exchange(distributed, device, there, rank)
        second = Exchange(distributed, device, back, rank)
        marks = [[device.mark() for _ in range(3)] for _ in range(EXCHANGES)]

        def run() -> None:
            for begin, middle, end in marks:
                device.set_mark(begin)
                first.run()
                device.set_mark(middle)
                second.run()
                device.set_mark(end)

        for _ in range(3):
            run()
        device.synchronise()
        try:
            replay, captured = device.capture(run), True
        except RuntimeError:
            # Launches one by one: these times have what the host takes in them.
            replay, captured = run, False
        agreed = self.communicator.all_gather(bytes([captured]))
        if not all(each[0] for each in agreed):
            replay, captured = run, False
        times: Times = {"dispatch": [], "combine": [], "round": []}
        for _ in range(samples):
            first.fill()
            replay()
            device.synchronise()
            # The first exchange in a replay also waits for ranks that begin it later.
            for begin, middle, end in marks[1:]:
                times["dispatch"].append(device.elapsed_us(begin, middle))
                times["combine"].append(device.elapsed_us(middle, end))
                times["round"].append(device.elapsed_us(begin, end))
        return times, captured, first.arrived() and second.arrived()


#: Times, true if from a graph, true if all received bytes were right.
Measured = tuple["Times", bool, bool]


class Exchange:
    """One all-to-all: all bytes from rank s equal s, until `fill` changes them."""

    def __init__(
        self, distributed: Any, device: Device, matrix: list[list[int]], rank: int
    ) -> None:
        torch = device.torch
        self.distributed, self.torch = distributed, torch
        self.outgoing = matrix[rank]
        self.incoming = [row[rank] for row in matrix]
        where = device.name
        self.source = torch.full((sum(self.outgoing),), rank, dtype=torch.uint8, device=where)
        self.target = torch.empty(sum(self.incoming), dtype=torch.uint8, device=where)

    def fill(self) -> None:
        """Change what will be sent: every rank's bytes by the same."""
        self.source += len(self.incoming)

    def run(self) -> None:
        """Exchange."""
        self.distributed.all_to_all_single(self.target, self.source, self.incoming, self.outgoing)

    def arrived(self) -> bool:
        """True if each rank's bytes have arrived, those sent last."""
        at = 0
        ranks = len(self.incoming)
        for sender, count in enumerate(self.incoming):
            part = self.target[at : at + count].cpu()
            if count and not bool((part == part[0]).all()):
                return False
            # Bytes wrap at 256, and only where ranks divide that is the remainder kept.
            if count and 256 % ranks == 0 and int(part[0]) % ranks != sender % ranks:
                return False
            at += count
        return True
