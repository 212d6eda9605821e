"""Groups whose calls each rank launches in another order do not starve each other.

Kernels on one GPU that wait for peers need two things (docs/domain.md, Occupancy budget): room for
all at once, and streams with a higher priority than kernels that fill the GPU.
"""

from __future__ import annotations

import itertools
import random
import time

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(120)]

ROUNDS = 1000
#: The groups' stream priority, above the default for GEMMs on another stream.
ABOVE_DEFAULT = -1


def share_of(blocks: str, groups: int) -> int | None:
    """SMs in a launch: the default, or few enough for all groups on one GPU."""
    import torch

    if blocks == "usual" and torch.cuda.device_count() < 2:
        pytest.skip(
            "needs 2 GPUs: kernels that fill the whole GPU cannot share it with their peers"
        )
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return None if blocks == "usual" else processors // 2 // (2 * groups)


@pytest.mark.parametrize("path", ["packets", "latency", "bandwidth"])
@pytest.mark.parametrize("blocks", ["few", "usual"])
@pytest.mark.parametrize("gemms", [False, True], ids=["alone", "gemms"])
@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_groups_in_different_orders_do_not_starve_each_other(
    path: str, blocks: str, count: int, how: str, gemms: bool
) -> None:
    import torch

    from tests.gpu.case import Chance, Shape
    from tests.gpu.compare import differences
    from tests.gpu.reference import Reference
    from tests.gpu.side import Side, fused, raised

    if blocks == "usual" and count > 3:
        # Two usual launches fit at once. Among three groups, any two pairs share one, which
        # runs on both GPUs; four groups have pairs without one.
        pytest.skip("needs a GPU with room for three usual launches at once")
    share = share_of(blocks, count)
    shape = Shape(ranks=2, hidden=1024, max_tokens=8 if path == "packets" else 128, path=path)
    # Default launches do not fit on the GPU at once, which `concurrent` would reject.
    options = {"num_sms": share, "concurrent": share is not None}
    groups = [Side(shape, "cuda", **options) for _ in range(count)]
    for rank in itertools.chain.from_iterable(group.ranks for group in groups):
        rank.stream = torch.cuda.Stream(rank.device, priority=ABOVE_DEFAULT)
    chance = Chance(3)
    batches = [chance.batches(shape, group.positions) for group in groups]
    for group, given in zip(groups, batches, strict=True):
        # Torch kernels on first use wait for running ones: none may depend on the other rank.
        group.run(given, mode="apart")
        group.run(given, mode="graph" if how == "captured" else "fused")
        for rank, batch in zip(group.ranks, given, strict=True):
            rank.load(batch)
            rank.count.fill_(batch.tokens_that_exist)
    aside = Aside([rank.device for rank in groups[0].ranks]) if gemms else None
    orders, drawn = list(itertools.permutations(range(count))), random.Random(count)
    groups[0].synchronise()
    began = time.monotonic()
    for _ in range(ROUNDS):
        # Each rank launches the groups' rounds in its own order, on a stream for each; GEMMs
        # that take a whole GPU come before them at one rank and after them at the other.
        for place in (0, 1):
            order = drawn.choice(orders)
            if aside is not None and place == 0:
                aside.launch(place)
            for number in order:
                each = groups[number].ranks[place]
                with torch.cuda.stream(each.stream):
                    if how == "captured":
                        each.graphs[0].replay()
                    else:
                        fused(each, batches[number][place], 0)
            if aside is not None and place == 1:
                aside.launch(place)
    groups[0].synchronise()
    took = time.monotonic() - began
    for group, given in zip(groups, batches, strict=True):
        assert [raised(rank.native) for rank in group.ranks] == [None, None]
        expected = Reference(shape, group.positions).run(given)
        for rank, batch, right in zip(group.ranks, given, expected, strict=True):
            seen = rank.result(0, batch.tokens_that_exist, None)
            assert list(differences(seen, right)) == []
        group.close()
    # No wait reached its timeout.
    assert took < 5


class Aside:
    """GEMMs that fill a GPU, on a default-priority stream at each rank."""

    def __init__(self, devices: list[str]) -> None:
        import torch

        self.torch = torch
        self.streams = [torch.cuda.Stream(device) for device in devices]
        self.matrices = [torch.randn(4096, 4096, device=device).bfloat16() for device in devices]
        self.outs = [torch.empty_like(matrix) for matrix in self.matrices]
        for place in range(len(devices)):
            self.launch(place)

    def launch(self, place: int) -> None:
        matrix = self.matrices[place]
        with self.torch.cuda.stream(self.streams[place]):
            self.torch.mm(matrix, matrix, out=self.outs[place])
