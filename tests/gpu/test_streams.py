"""Calls behind an event, and on a separate stream."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weft import cuda

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

RANKS = 2
SHAPE: dict[str, Any] = {
    "experts": 6,
    "top_k": 2,
    "hidden": 256,
    "max_tokens": 40,
    "dtype": "bfloat16",
}


@pytest.mark.usefixtures("own_context")
@pytest.mark.parametrize("keep", [False, True], ids=["plain", "kept"])
@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
def test_calls_on_a_stream_of_their_own_give_the_same_bits(
    kind: str, layout: str, keep: bool
) -> None:
    import torch

    from tests.gpu.plans import Group, batch, outputs, same, see

    group = Group(kind, RANKS, **SHAPE | {"layout": layout})
    chance = random.Random(1)
    sent = [batch(chance, member) for member in group.members]

    def rounds(rank: int, member: cuda.AllToAll) -> bool:
        mine = sent[rank]
        right = see(member, member.dispatch(mine.tokens, mine.ids, mine.weights), False)
        for _ in range(20):
            # Unreferenced tensors: the allocator reuses their memory as soon as permitted.
            tokens = mine.tokens.clone()
            ids, weights = mine.ids.clone(), mine.weights.clone()
            received = member.dispatch(tokens, ids, weights, keep=keep, async_finish=True)
            del tokens, ids, weights
            junk = torch.full((40, 256), 7.0, dtype=torch.bfloat16, device=member.device)
            assert received.event is not None
            received.event.wait()
            end = int(received.expert_offsets[-1])
            at = received.rows[:end].long() if layout == "indexed" else slice(end)
            rows = received.tokens[at].cpu()
            made = outputs(member, received, received.positions)
            combined, event = member.combine(received, made, async_finish=True)
            del made
            junk += 1
            event.wait()
            assert torch.equal(combined.cpu(), right.combined)
            assert torch.equal(rows, right.tokens)
            received.release()
            event.synchronize()
            assert event.query()
        # The next call is ordered behind them.
        again = member.dispatch(mine.tokens, mine.ids, mine.weights, async_finish=True)
        assert again.event is not None
        combined = member.combine(
            again, outputs(member, again, again.positions), previous_event=again.event
        )
        again.release()
        return same(right, right._replace(combined=combined.cpu()))

    assert group.run(rounds) == [True] * RANKS
    assert group.raised() == [""] * RANKS
    group.close()


@pytest.mark.gpu
def test_what_is_behind_an_event_does_not_wait_for_the_rest_of_its_stream() -> None:
    import torch

    from tests.gpu.plans import Group, batch

    group = Group("cuda", RANKS, **SHAPE)
    chance = random.Random(2)
    sent = [batch(chance, member) for member in group.members]
    begun = [torch.cuda.Event() for _ in group.ranks]
    slept = [torch.cuda.Event() for _ in group.ranks]
    ends = []
    for rank, member in enumerate(group.members):
        mine = sent[rank]
        with group.on(rank, wait=False):
            begun[rank].record()
            torch.cuda._sleep(1_000_000_000)  # half a second
            slept[rank].record()
            received = member.dispatch(
                mine.tokens, mine.ids, mine.weights, previous_event=begun[rank], async_finish=True
            )
            ends.append(received)
    for received in ends:
        assert received.event is not None
        received.event.synchronize()
    assert not any(event.query() for event in slept)
    for rank, received in enumerate(ends):
        with group.on(rank, wait=False):
            received.release()
    for event in slept:
        event.synchronize()
    group.run(lambda rank, member: None)
    assert group.raised() == [""] * RANKS
    group.close()


@pytest.mark.usefixtures("own_context")
def test_the_layer_of_a_call_goes_with_it(kind: str) -> None:
    from tests.gpu.plans import Group, batch, same, see
    from weft.moe import Placement

    one, other = ((0, 1, 2), (3, 4, 5)), ((5, 3, 1), (4, 2, 0))
    layers = [Placement(held) for held in (one, other)]
    group = Group(kind, RANKS, **SHAPE, placement=layers)
    chance = random.Random(4)
    sent = [batch(chance, member) for member in group.members]

    def rounds(rank: int, member: cuda.AllToAll) -> bool:
        mine = sent[rank]
        right = see(member, member.dispatch(mine.tokens, mine.ids, mine.weights, layer=1), False)
        again = member.dispatch(mine.tokens, mine.ids, mine.weights, layer=1, async_finish=True)
        assert again.event is not None
        again.event.wait()
        return same(see(member, again, False), right)

    assert group.run(rounds) == [True] * RANKS
    assert group.raised() == [""] * RANKS
    group.close()


def test_what_cannot_run_apart_is_refused(kind: str) -> None:
    from tests.gpu.plans import Group, batch
    from weft.errors import ConfigurationError

    group = Group(kind, RANKS, **SHAPE | {"gradients": True})
    chance = random.Random(3)
    sent = [batch(chance, member) for member in group.members]

    def refused(rank: int, member: cuda.AllToAll) -> None:
        mine = sent[rank]
        with pytest.raises(ConfigurationError, match="async_finish= in a differentiable round"):
            member.dispatch(mine.tokens, mine.ids, mine.weights, async_finish=True)
        with pytest.raises(ConfigurationError, match="previous_event is a int"):
            member.dispatch(mine.tokens, mine.ids, previous_event=3)

    group.run(refused)
    group.close()
