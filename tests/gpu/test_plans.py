"""Kept plans, counts on the host, and outputs with exactly the round's rows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weft import cuda

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("own_context"),
]

PATHS = ("packets", "latency", "bandwidth")
RANKS = 2
SMALL: dict[str, Any] = {
    "experts": 6,
    "top_k": 2,
    "hidden": 64,
    "max_tokens": 20,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("seed", range(12))
def test_a_handle_takes_other_tokens_to_the_same_places(kind: str, seed: int) -> None:
    from tests.gpu.plans import Group, batch, draw, same, see

    chance = random.Random(seed)
    group = Group(kind, RANKS, **draw(chance, PATHS[seed % 3]))
    sent = [batch(chance, member) for member in group.members]
    between = [batch(chance, member) for member in group.members]
    fresh, keeps, halves = (chance.random() < 0.5 for _ in range(3))
    channels = [chance.randrange(2) for _ in range(3)]

    def rounds(rank: int, member: cuda.AllToAll) -> tuple[Any, ...]:
        mine = sent[rank]
        right = see(member, member.dispatch(mine.others, mine.ids, mine.weights), fresh)
        if keeps:
            first = member.dispatch_send(mine.tokens, mine.ids, mine.weights, keep=True).recv()
        else:
            first = member.dispatch(
                mine.tokens, mine.ids, mine.weights, keep=True, host_counts=seed % 2 == 0
            )
        handle = first.handle
        see(member, first, halves)
        other = between[rank]
        for channel in channels[:-1]:
            round = member.dispatch(other.tokens, other.ids, other.weights, channel=channel)
            see(member, round, not halves)
        again = [
            member.dispatch(mine.others, handle=handle, channel=channels[-1]),
            member.dispatch_send(mine.others, handle=handle).recv(),
        ]
        assert again[0].handle is handle
        return right, *(see(member, each, halves) for each in again)

    for right, *again in group.run(rounds):
        assert all(same(each, right) for each in again), (seed, group.shape)
    assert group.raised() == [""] * RANKS
    group.close()


def test_a_handle_is_good_for_an_all_to_all_of_another_hidden(kind: str) -> None:
    from tests.gpu.plans import Group, batch, same, see

    chance = random.Random(1)
    one = Group(kind, RANKS, **SMALL)
    more = {"hidden": 128, "dtype": "float32", "path": "bandwidth"}
    other = Group(kind, RANKS, **SMALL | more)
    sent = [batch(chance, member) for member in other.members]

    def keep(rank: int, member: cuda.AllToAll) -> Any:
        mine = sent[rank]
        tokens = mine.tokens[:, :64].bfloat16().contiguous()
        with member.dispatch(tokens, mine.ids, mine.weights, keep=True) as received:
            return received.handle

    handles = one.run(keep)

    def rounds(rank: int, member: cuda.AllToAll) -> Any:
        mine = sent[rank]
        right = see(member, member.dispatch(mine.tokens, mine.ids, mine.weights), False)
        again = see(member, member.dispatch(mine.tokens, handle=handles[rank]), False)
        return same(again, right)

    assert other.run(rounds) == [True] * RANKS
    one.close()
    other.close()


def test_what_a_handle_cannot_do_is_refused(kind: str) -> None:
    import torch

    from tests.gpu.plans import Group, batch
    from weft.errors import ConfigurationError, ShapeError, StageError

    group = Group(kind, RANKS, **SMALL)
    others = Group(kind, RANKS, **SMALL | {"top_k": 3})
    scaled = {"wire_dtype": "float8_e4m3fn", "block": 32, "scale_layout": "column"}
    columns = Group(kind, RANKS, **SMALL | scaled)
    chance = random.Random(2)
    sent = [batch(chance, member) for member in group.members]

    def refused(rank: int, member: cuda.AllToAll) -> None:
        mine = sent[rank]
        early = member.dispatch_send(mine.tokens, mine.ids, keep=True)
        assert early._planned is not None
        handle = early._planned.handle
        with pytest.raises(StageError, match="not received yet"):
            member.dispatch(mine.tokens, handle=handle)
        with early.recv() as received:
            assert received.handle is handle
        with (
            member.dispatch(mine.tokens, mine.ids) as received,
            pytest.raises(StageError, match="keep=True"),
        ):
            received.handle  # noqa: B018
        more = torch.cat([mine.tokens, mine.tokens[:1]]) if len(mine.tokens) else None
        if more is not None and len(more) <= member.max_tokens:
            with pytest.raises(ShapeError, match="had"):
                member.dispatch(more, handle=handle)
        with pytest.raises(ShapeError, match="are the handle's"):
            member.dispatch(mine.tokens, mine.ids, handle=handle)
        with pytest.raises(ShapeError, match="handle is a int"):
            member.dispatch(mine.tokens, handle=3)  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match="ids are not given"):
            member.dispatch(mine.tokens)
        with pytest.raises(ConfigurationError, match="top_k 2; this one has 3"):
            others.members[rank].dispatch(mine.tokens, handle=handle)
        with pytest.raises(ConfigurationError, match="host_counts= with a handle"):
            member.dispatch(mine.tokens, handle=handle, host_counts=True)
        load = torch.zeros(member.experts, dtype=torch.int32, device=member.device)
        with pytest.raises(ConfigurationError, match="expert_load with a handle"):
            member.dispatch(mine.tokens, handle=handle, expert_load=load)
        with pytest.raises(ConfigurationError, match="pass scale_layout='row'"):
            columns.members[rank].dispatch(mine.tokens, mine.ids, host_counts=True)
        with pytest.raises(ConfigurationError, match="out= with keep"):
            member.dispatch(mine.tokens, mine.ids, keep=True, out=member.empty_outputs())

    group.run(refused)
    assert group.raised() == [""] * RANKS
    group.close()
    others.close()
    columns.close()


@pytest.mark.parametrize("new", [False, True], ids=["another", "none"])
@pytest.mark.parametrize("path", PATHS)
def test_ranks_that_pass_different_handles_end_the_group(kind: str, path: str, new: bool) -> None:
    from tests.gpu.plans import Group, batch, see

    group = Group(kind, RANKS, **SMALL | {"path": path, "max_tokens": 8})
    chance = random.Random(3)
    sent = [batch(chance, member) for member in group.members]

    def rounds(rank: int, member: cuda.AllToAll) -> Any:
        mine, handles = sent[rank], []
        for _ in range(2):
            received = member.dispatch(mine.tokens, mine.ids, mine.weights, keep=True)
            handles.append(received.handle)
            see(member, received, False)
        if new and rank == 1:
            return member.dispatch(mine.tokens, mine.ids, mine.weights)
        return member.dispatch(mine.tokens, handle=handles[rank])

    received = group.run(rounds)
    texts = group.raised()
    assert all(text.startswith("StageError") for text in texts), texts
    assert all("the handle of an earlier round" in text for text in texts), texts
    # Received rows are not part of the result.
    assert all(bool(each.tokens.isnan().all()) for each in received)
    group.close()


@pytest.mark.parametrize("seed", range(12))
def test_counts_on_the_host_make_tensors_of_just_that_size(kind: str, seed: int) -> None:
    from tests.gpu.plans import Group, batch, draw, same, see

    chance = random.Random(100 + seed)
    group = Group(kind, RANKS, **draw(chance, PATHS[seed % 3]))
    sent = [batch(chance, member) for member in group.members]
    halves = chance.random() < 0.5

    def rounds(rank: int, member: cuda.AllToAll) -> Any:
        mine = sent[rank]
        right = see(member, member.dispatch(mine.tokens, mine.ids, mine.weights), halves)
        dispatch = member.dispatch_send(mine.tokens, mine.ids, mine.weights)
        counts = dispatch.counts()
        assert dispatch.counts() == counts
        assert (counts.experts, counts.offsets) == (right.counts, right.offsets)
        exact = [
            dispatch.recv(),
            member.dispatch(mine.tokens, mine.ids, mine.weights, host_counts=True),
        ]
        for each in exact:
            assert each.host_counts == counts
            if member.layout != "padded":
                assert each.positions == len(each.rows) == counts.offsets[-1]
            if member.layout == "contiguous":
                assert len(each.tokens) == counts.offsets[-1]
        return right, *(see(member, each, halves) for each in exact)

    for right, *exact in group.run(rounds):
        assert all(same(each, right) for each in exact), (seed, group.shape)
    assert group.raised() == [""] * RANKS
    group.close()


@pytest.mark.parametrize("path", PATHS)
def test_outputs_have_as_many_rows_as_are_needed_and_fewer_are_noticed(
    kind: str, path: str
) -> None:
    from tests.gpu.plans import Group, batch, same, see

    group = Group(kind, RANKS, **SMALL | {"path": path, "max_tokens": 8, "pad_to": 4})
    chance = random.Random(5)
    sent = [batch(chance, member) for member in group.members]
    lacking: list[int] = []

    def rounds(rank: int, member: cuda.AllToAll, short: int) -> Any:
        mine = sent[rank]
        right = see(member, member.dispatch(mine.tokens, mine.ids, mine.weights), False)
        received = member.dispatch(mine.tokens, mine.ids, mine.weights)
        used = int(received.expert_offsets[-1])
        lacking.append(used)
        rows = used - (short if rank == 0 else 0)
        return right, see(member, received, path == "latency", rows)

    for right, seen in group.run(lambda rank, member: rounds(rank, member, 0)):
        assert same(seen, right)
    assert group.raised() == [""] * RANKS
    for _, seen in group.run(lambda rank, member: rounds(rank, member, 1)):
        assert bool(seen.combined.isnan().all())
    texts = group.raised()
    assert all(text.startswith("CapacityError: rank 0 gave combine") for text in texts), texts
    # The group continues.
    for right, seen in group.run(lambda rank, member: rounds(rank, member, 0)):
        assert same(seen, right)
    assert group.raised() == [""] * RANKS
    group.close()


def test_counts_that_do_not_come_are_not_waited_for_without_end(kind: str) -> None:
    from tests.gpu.plans import Group, batch, see
    from weft.errors import StageError, WaitTimeoutError

    if kind == "twin":
        pytest.skip("a twin waits for skew_timeout, which ends the group")
    group = Group(kind, RANKS, **SMALL)
    chance = random.Random(6)
    sent = [batch(chance, member) for member in group.members]
    first = group.members[0]
    # Without a wait at the end: the stream ends only after rank 1 has sent.
    with group.on(0, wait=False):
        late = first.dispatch_send(sent[0].tokens, sent[0].ids)
        with pytest.raises(WaitTimeoutError, match=r"did not come to the host within 0\.2 s"):
            late.counts(timeout=0.2)

    def rest(rank: int, member: cuda.AllToAll) -> Any:
        dispatch = late if rank == 0 else member.dispatch_send(sent[rank].tokens, sent[rank].ids)
        counts = dispatch.counts()
        received = dispatch.recv()
        with pytest.raises(StageError, match="received before"):
            dispatch.counts()
        see(member, received, False)
        return counts.offsets[-1] == received.positions

    assert group.run(rest) == [True] * RANKS
    assert group.raised() == [""] * RANKS
    group.close()


@pytest.mark.gpu
def test_graphs_keep_plans_and_go_by_them() -> None:
    import torch

    from tests.gpu.plans import Group, batch, same, see
    from weft.errors import StageError

    group = Group("cuda", RANKS, **SMALL)
    chance = random.Random(7)
    sent = [batch(chance, member) for member in group.members]
    graphs, received, results = [], [], []
    for rank, member in enumerate(group.members):
        mine, stream = sent[rank], group.streams[rank]
        assert stream is not None
        torch.cuda.synchronize(member.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(member.device), torch.cuda.graph(graph, stream=stream):
            with pytest.raises(StageError, match="captured"):
                member.dispatch(mine.tokens, mine.ids, host_counts=True)
            one = member.dispatch(mine.tokens, mine.ids, mine.weights, keep=True)
            one.release()
            two = member.dispatch(mine.others, handle=one.handle)
            rows = two.tokens.clone()
            two.release()
        graphs.append(graph)
        received.append((one.handle, rows))

    def fresh(rank: int, member: cuda.AllToAll) -> Any:
        mine = sent[rank]
        return see(member, member.dispatch(mine.others, mine.ids, mine.weights), False)

    for _ in range(3):
        for rank in group.ranks:
            with group.on(rank, wait=False):
                graphs[rank].replay()
        results = group.run(fresh)
        for (_, rows), right in zip(received, results, strict=True):
            real = [place for place, row in enumerate(right.rows) if row >= 0]
            assert torch.equal(rows.cpu()[real], right.tokens)

    def eager(rank: int, member: cuda.AllToAll) -> Any:
        # Calls outside a graph also use the plan that it kept.
        return see(member, member.dispatch(sent[rank].others, handle=received[rank][0]), False)

    assert all(map(same, group.run(eager), results))
    assert group.raised() == [""] * RANKS
    group.close()
