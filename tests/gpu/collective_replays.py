"""Many collective graph replays, delayed at random, each checked on its GPU.

    python tests/gpu/collective_replays.py [--replays 100000] [--ranks N]

prints a line of JSON: replays, and results that differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: Vector elements: by packets, by chunks, and at addresses not aligned to 16 bytes.
TINY, LONG, ODD = 256, 600_000, 4_099
#: Share of replays before which a rank sleeps, and the longest sleep in cycles.
DELAYED, LONGEST_CYCLES = 0.02, 400_000


class Rank:
    """A rank's vectors, which a graph changes, reduces and checks."""

    def __init__(self, rank: int, ranks: int, member: Any) -> None:
        import torch

        self.rank, self.ranks, self.member = rank, ranks, member

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=member.device)

        self.round, self.wrong = zeros(1), zeros(1)
        self.tiny, self.long = zeros(TINY), zeros(LONG)
        self.odd = zeros(ODD + 1)[1:]
        self.sums = [torch.zeros_like(each) for each in (self.tiny, self.long, self.odd)]
        self.part, self.whole = zeros(LONG // ranks), zeros(LONG // ranks * ranks)
        self.offsets = torch.arange(LONG, dtype=torch.int32, device=member.device)

    def step(self, symmetric: Any) -> None:
        """One round in a graph: all calls, and their checks."""
        ranks = self.ranks
        self.round.add_(1)
        total = ranks * (ranks - 1) // 2
        for vector, out in zip((self.tiny, self.long, self.odd), self.sums, strict=True):
            own = self.offsets[: len(vector)]
            vector.copy_(own + self.round * 7 + self.rank)
            self.member.all_reduce(vector, out=out)
            self.expect(out, (own + self.round * 7) * ranks + total)
        count = len(self.part)
        self.member.reduce_scatter(self.long[: count * ranks], out=self.part)
        mine = self.offsets[self.rank * count : (self.rank + 1) * count]
        self.expect(self.part, (mine + self.round * 7) * ranks + total)
        self.member.all_gather(self.part, out=self.whole)
        self.expect(self.whole, (self.offsets[: count * ranks] + self.round * 7) * ranks + total)
        symmetric.copy_(self.offsets + self.round * 5 + self.rank)
        self.member.all_reduce(symmetric, algorithm="direct")
        self.expect(symmetric, (self.offsets + self.round * 5) * ranks + total)

    def expect(self, found: Any, right: Any) -> None:
        """Count a result that differs."""
        self.wrong.add_((found != right).any().int())


def play(ranks: int, replays: int, seed: int, kind: str = "cuda") -> dict[str, Any]:
    """One graph's replays on each rank; on a twin, as many rounds."""
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group(kind, ranks, skew_timeout=20.0)
    for member in group.members:
        member.prepare("sum", torch.int32)
    symmetric = cuda.local_symmetric_empty(group.members, LONG, torch.int32)
    group.synchronise()
    each = [Rank(rank, ranks, member) for rank, member in enumerate(group.members)]
    group.synchronise()
    began = time.monotonic()
    if kind == "twin":

        def work(rank: int, _: Any) -> None:
            for _ in range(replays):
                each[rank].step(symmetric[rank])

        group.run(work)
    else:
        replay(group, capture(group, each, symmetric), replays, seed)
    took = time.monotonic() - began
    wrong = sum(int(one.wrong) for one in each)
    rounds = {int(one.round) for one in each}
    raised = group.raised()
    group.close()
    return {
        "ranks": ranks,
        "replays": replays,
        "wrong": wrong,
        "rounds": sorted(rounds),
        "errors": [error for error in raised if error],
        "seconds": round(took, 1),
    }


def capture(group: Any, each: list[Rank], symmetric: list[Any]) -> list[Callable[[], None]]:
    """A graph on each rank; its round before the capture is checked too."""
    import torch

    graphs: list[Callable[[], None]] = []
    for rank, one in enumerate(each):
        stream = group.streams[rank]
        with group.on(rank):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                one.step(symmetric[rank])
        graphs.append(graph.replay)
    group.synchronise()
    return graphs


def replay(group: Any, graphs: list[Callable[[], None]], replays: int, seed: int) -> None:
    """Replay all graphs in step, some late."""
    import torch

    chance = random.Random(seed)
    for number in range(replays):
        for rank, graph in enumerate(graphs):
            with group.on(rank):
                if chance.random() < DELAYED:
                    torch.cuda._sleep(chance.randrange(LONGEST_CYCLES))
                graph()
        if number % 500 == 499:
            group.synchronise()
    group.synchronise()


def main() -> int:
    """One run; 1 if a result differs or a wait expired."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replays", type=int, default=100_000, help="replays (default: 100000)")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: GPUs, at least 2)")
    parser.add_argument("--seed", type=int, default=1, help="of the delays (default: 1)")
    arguments = parser.parse_args()
    import torch

    ranks = arguments.ranks or max(2, torch.cuda.device_count())
    outcome = play(ranks, arguments.replays, arguments.seed)
    print(json.dumps(outcome), flush=True)
    return int(failed(outcome))


def failed(outcome: dict[str, Any]) -> bool:
    """True if a result differs, a wait expired, or a replay did not run."""
    return bool(outcome["wrong"] or outcome["errors"] or outcome["rounds"] != [outcome["replays"]])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.gpu import collective_replays

    sys.exit(collective_replays.main())
