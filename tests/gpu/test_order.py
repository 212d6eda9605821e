"""Groups that the ranks launch in different orders wait for each other, and not forever."""

from __future__ import annotations

import time

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(120)]

ROUNDS = 100


@pytest.mark.parametrize("path", ["packets", "latency", "bandwidth"])
@pytest.mark.parametrize("blocks", ["few", "usual"])
def test_two_groups_in_opposite_order_do_not_starve_each_other(path: str, blocks: str) -> None:
    import torch

    from gpu.case import Chance, Shape
    from gpu.compare import differences
    from gpu.reference import Reference
    from gpu.side import Side, fused, raised

    if blocks == "usual" and torch.cuda.device_count() < 2:
        pytest.skip(
            "needs 2 GPUs: kernels that fill the whole GPU cannot share it with their peers"
        )
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    share = None if blocks == "usual" else processors // 2 // 4
    shape = Shape(ranks=2, hidden=1024, max_tokens=8 if path == "packets" else 128, path=path)
    groups = [Side(shape, "cuda", num_sms=share) for _ in range(2)]
    chance = Chance(3)
    batches = [chance.batches(shape, group.positions) for group in groups]
    for group, given in zip(groups, batches, strict=True):
        group.run(given, mode="fused")
        for rank, batch in zip(group.ranks, given, strict=True):
            rank.load(batch)
    groups[0].synchronise()
    began = time.monotonic()
    for _ in range(ROUNDS):
        # Rank 0 launches one group's round first, rank 1 the other's: each has a stream for each.
        for place, order in ((0, (0, 1)), (1, (1, 0))):
            for number in order:
                each = groups[number].ranks[place]
                with torch.cuda.stream(each.stream):
                    fused(each, batches[number][place], 0)
    groups[0].synchronise()
    took = time.monotonic() - began
    for group, given in zip(groups, batches, strict=True):
        assert [raised(rank.native) for rank in group.ranks] == [None, None]
        expected = Reference(shape, group.positions).run(given)
        for rank, batch, right in zip(group.ranks, given, expected, strict=True):
            seen = rank.result(0, batch.tokens_that_exist, None)
            assert list(differences(seen, right)) == []
        group.close()
    # Not one of them was waited for until its time was up.
    assert took < 5
