"""`weft.triton` between processes: on GPUs, or the interpreter on the twin's shared memory."""

from __future__ import annotations

import ctypes
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import weft
import weft.triton
from tests.workers.cuda import device_native
from tests.workers.triton import kernels
from tests.workers.triton.kernel_checks import program_of
from weft.gpu import symmetric
from weft.triton import layout

#: Epochs before the first round: at zero, and before both places where int32 wraps around.
FIRST = (0, 2**31 - 4, -4)


class Place:
    """A rank's tensors, and meetings with all ranks."""

    def __init__(self, communicator: weft.Communicator, device: str) -> None:
        self.communicator, self.device = communicator, device
        self.rank, self.ranks = communicator.rank, communicator.world_size
        if device == "cuda":
            local = int(os.environ.get("WEFT_LOCAL_RANK", "0"))
            torch.cuda.set_device(local % torch.cuda.device_count())
        self.on_gpu = device == "cuda"
        self._own = "cuda" if self.on_gpu else "cpu"

    def symmetric(self, *shape: int) -> torch.Tensor:
        return weft.symmetric_empty(shape, torch.int32, device=self.device)

    def context(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its context, with time for a peer's compiler."""
        return weft.triton.context(tensor, timeout=60.0)

    def words(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._own)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._own)

    def range(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=self._own)

    def finish(self) -> None:
        """This rank's kernels have ended.

        A copy to pageable memory that waits for a kernel, such as `tolist`, holds up the calls of a
        proxy's thread for which the kernel may wait.
        """
        if self.on_gpu:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All ranks' work has ended, without an error."""
        self.finish()
        weft.check()
        self.communicator.barrier()


def calls(rounds: int, device: str = "twin") -> dict[str, Any]:
    """Results from all kernels that need peers."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        found = {
            "ring": [ring(place, first, rounds) for first in FIRST],
            "all_to_all": [_all_to_all(place, first, rounds) for first in FIRST],
            "barrier": [_barriers(place, first) for first in FIRST],
            "slices": [_slices(place, programs) for programs in (1, 5, 32)],
            "claims": _claims(place),
            "context": _contexts(place),
        }
        if device == "cuda":
            found["graph"] = ring(place, 2**31 - 4, rounds, graph=True)
        return found


def ring(place: Place, first: int, rounds: int, *, graph: bool = False) -> list[list[int]]:
    """Arrivals in each ring round; `graph`: replays of one captured launch."""
    length, window = 4096 if place.on_gpu else 16, 2
    block = place.symmetric(4 + window * length)
    words, data = block[:4], block[4:]
    words.fill_(first)
    epoch, outputs = place.words(first), place.zeros(length)
    context = place.context(block)
    place.meet()
    found = []

    def launch() -> None:
        kernels.ring[(1,)](data, words, context, outputs, epoch, length, window)

    captured = torch.cuda.CUDAGraph() if graph else None
    for number in range(rounds):
        # The first round compiles.
        if captured is not None and number == 1:
            with torch.cuda.graph(captured):
                launch()
        if captured is not None and number > 0:
            captured.replay()
        else:
            launch()
        found.append(sorted(set(outputs.tolist())))
    place.meet()
    return found


def _all_to_all(place: Place, first: int, rounds: int) -> bool:
    rank, ranks = place.rank, place.ranks
    length, size = (2021, 2048) if place.on_gpu else (21, 32)
    block = place.symmetric(2 * ranks + ranks * length)
    words, data = block[: 2 * ranks], block[2 * ranks :]
    words.fill_(first)
    epoch, outputs = place.words(first), place.zeros(ranks, length)
    context = place.context(block)
    place.meet()
    right = True
    columns = place.range(length)
    for number in range(rounds):
        inputs = torch.stack([columns + 100 * to + 10000 * rank + number for to in range(ranks)])
        kernels.all_to_all[(1,)](data, inputs, words, context, outputs, epoch, length, size)
        for source in range(ranks):
            right &= torch.equal(outputs[source], columns + 100 * rank + 10000 * source + number)
    place.meet()
    return right


def _barriers(place: Place, first: int) -> int:
    ranks = place.ranks
    block = place.symmetric(2 * ranks)
    words, data = block[:ranks], block[ranks:]
    words.fill_(first)
    epoch, errors = place.words(first), place.words(-1)
    context = place.context(block)
    place.meet()
    kernels.barriers[(1,)](data, words, context, errors, epoch, 300 if place.on_gpu else 5)
    place.meet()
    return int(errors)


def _slices(place: Place, programs: int) -> list[Any]:
    """How many programs were last, and if arrivals were correct, in each of three rounds."""
    length = 4
    count = programs * length
    block = place.symmetric(4 + count)
    words, data = block[:4], block[4:]
    mask, last = place.words(0), place.zeros(programs)
    outputs = place.zeros(count)
    context = place.context(block)
    found = []
    for epoch in (1, 2, 3):
        kernels.slices[(programs,)](data, words, mask, context, last, epoch, length)
        kernels.receive[(1,)](data, words, context, outputs, epoch, count, 128)
        right = torch.equal(outputs, place.range(count) + epoch)
        found.append([int(last.sum()), right, int(mask)])
        place.meet()
    return found


def _claims(place: Place) -> list[int]:
    words, outputs = place.symmetric(1), place.zeros(10)
    context = place.context(words)
    place.meet()
    kernels.claims[(1,)](words, context, outputs, 10)
    place.meet()
    return _list(outputs)


def _contexts(place: Place) -> dict[str, Any]:
    """A context belongs to its allocation; its distances come from the addresses."""
    # The second is in a separate segment.
    tensor, other = place.symmetric(40), place.symmetric(3 << 20)
    context = weft.triton.context(tensor)
    distances = [
        weft.symmetric_peer(other, to).data_ptr() - other.data_ptr() for to in range(place.ranks)
    ]
    found = weft.triton.context(other).cpu()
    same = weft.triton.context(tensor[5:]) is context
    return {
        "same": same,
        "table": int(found[0]) == symmetric.table(other) == symmetric.table(tensor),
        "distances": found[layout.CONTEXT_SHIFTS // 8 :][: place.ranks].tolist() == distances,
        "refused": device_native.named(lambda: weft.triton.context(torch.zeros(3)))[0],
    }


def page(folder: str) -> list[float]:
    """`outputs` values after the docs/triton.md program, on the twin."""
    kernel, found, program = program_of("triton.md").partition("block = ")
    with weft.init() as communicator:
        # Triton reads a kernel's source from its file.
        file = Path(folder, f"shift{communicator.rank}.py")
        file.write_text(kernel, encoding="utf-8")
        names: dict[str, Any] = runpy.run_path(str(file)) | {"rank": communicator.rank}
        program = program.replace("torch.float32)", 'torch.float32, device="twin")')
        exec(found + program.replace("torch.cuda.synchronize()\n", ""), names)
        communicator.barrier()
        return sorted(set(names["outputs"].tolist()))


def table_version() -> list[int]:
    """The version in a twin's table, and the layout's."""
    with weft.init():
        tensor = weft.symmetric_empty(4, torch.int32, device="twin")
        at = symmetric.table(tensor) + layout.TABLE_VERSION
        return [
            int.from_bytes(ctypes.string_at(at, 4), sys.byteorder),
            layout.LAYOUT_VERSION,
        ]


def expired(device: str = "twin") -> dict[str, Any]:
    """Rank 0 waits for a word that rank 1 does not raise, and rank 1 for rank 0 meanwhile."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        block = place.symmetric(5)
        context = weft.triton.context(block, timeout=0.3 if communicator.rank == 0 else 40.0)
        outputs = place.words(5, 5)
        place.meet()
        # The word is two rounds behind.
        block[0] = 3
        kernels.receive[(1,)](block[4:], block[:1], context, outputs, 5, 1, 2)
        first = _list(outputs)
        error = device_native.named(weft.check)
        # Later waits end at once.
        kernels.receive[(1,)](block[4:], block[:1], context, outputs, 6, 1, 2)
        return {"outputs": first, "again": _list(outputs), "error": error}


def orders(grids: int) -> list[list[Any]]:
    """Tile orders in random grids."""
    generator, found = random.Random(1), []
    for _ in range(grids):
        rows, columns = generator.randint(1, 20), generator.randint(1, 9)
        ranks = generator.randint(1, 9)
        rank = generator.randrange(ranks)
        outputs = torch.full((256, 3), -1, dtype=torch.int32)
        kernels.tiles[(1,)](outputs, rows, columns, rank, ranks, 256)
        found.append([rows, columns, rank, ranks, outputs[: rows * columns].tolist()])
    return found


def _list(tensor: torch.Tensor) -> list[Any]:
    found: list[Any] = tensor.tolist()
    return found
