"""All-to-alls with expert replicas on uneven ranks, compared with ones without replicas."""

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import weft
from tests import ranks
from weft.moe import Placement, balance

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")

EXPERTS, TOP_K, HIDDEN, RANKS = 12, 3, 32, 3
SHAPE: dict[str, Any] = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN}
#: The first expert is on every rank, the others on one or two; ranks have 8, 6 and 3.
FIRST = Placement([[0, 1, 2, 3, 4, 5, 6, 7], [0, 8, 9, 10, 11, 1], [0, 2, 11]])
SECOND = Placement([[11, 10, 9, 8, 7, 6, 5, 4], [3, 2, 1, 0, 11, 10], [11, 7, 7]])
#: A batch's tokens, by path.
TOKENS = {"packets": 8, "latency": 90, "bandwidth": 150}


def group(**more: Any) -> list[Any]:
    options = SHAPE | {"placement": FIRST, "max_tokens": 90, "path": "latency"} | more
    return list(cuda.local_group(RANKS, ["twin"] * RANKS, **options))


@pytest.fixture
def twins() -> Iterator[list[Any]]:
    made = group()
    yield made
    for each in made:
        each.close()


def batch(rank: int, tokens: int) -> tuple[Any, Any, Any]:
    """Small integers, so that every sum is exact in any order."""
    random = np.random.default_rng(rank)
    rows = random.integers(-8, 9, (tokens, HIDDEN))
    ids = np.array([random.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    ids[random.random(ids.shape) < 0.2] = -1
    weights = random.integers(1, 5, (tokens, TOP_K))
    return torch.tensor(rows).float(), torch.tensor(ids), torch.tensor(weights).float()


def on_all(work: Callable[[int], Any]) -> list[Any]:
    """Each rank on a thread, since a twin's calls block."""
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(work, range(RANKS)))


def right(rank: int, tokens: int) -> Any:
    """Expert e multiplies by e + 1."""
    rows, ids, weights = batch(rank, tokens)
    return rows * (weights * torch.where(ids >= 0, ids + 1, 0)).sum(1, keepdim=True)


def play(twins: list[Any], placement: Placement, layer: int = 0, tokens: int = 90) -> None:
    """A round with checks on every count and sum."""

    def one(rank: int) -> None:
        twin, held = twins[rank], placement.ranks[rank]
        with twin.dispatch(*batch(rank, tokens), layer=layer) as received:
            chosen = [placement.choose(batch(at, tokens)[1], at) for at in range(RANKS)]
            counts = [int((np.concatenate(chosen) == at).sum()) for at in twin.local_experts]
            assert received.expert_counts.tolist() == counts
            outputs = torch.zeros(twin.positions, HIDDEN)
            for local, expert in enumerate(held):
                first = int(received.expert_offsets[local])
                rows = slice(first, first + counts[local])
                if twin.layout == "indexed":
                    outputs[rows] = received.tokens[received.rows[rows].long()] * (expert + 1)
                else:
                    outputs[rows] = received.tokens[rows] * (expert + 1)
            combined = twin.combine(received, outputs)
        assert torch.equal(combined, right(rank, tokens))
        twin.check()

    on_all(one)


@pytest.mark.parametrize("layout", ["contiguous", "indexed", "padded"])
@pytest.mark.parametrize("path", TOKENS)
def test_replicas_take_turns_and_the_result_is_the_same(path: str, layout: str) -> None:
    if (path, layout) == ("packets", "indexed"):
        pytest.skip("packets are no rows to be read where they land")
    tokens = TOKENS[path]
    twins = group(path=path, layout=layout, max_tokens=tokens, placement=[FIRST, SECOND])
    assert [len(twin.local_experts) for twin in twins] == [8, 6, 3]
    assert twins[0].placements == (FIRST, SECOND)
    for layer, placement in ((0, FIRST), (1, SECOND), (0, FIRST)):
        play(twins, placement, layer, tokens)
    for twin in twins:
        twin.close()


def test_loads_are_of_physical_experts(twins: list[Any]) -> None:
    loads = [torch.zeros(sum(FIRST.slots), dtype=torch.int32) for _ in twins]

    def one(rank: int) -> None:
        with twins[rank].dispatch(*batch(rank, 90), expert_load=loads[rank]):
            pass

    on_all(one)
    named = np.concatenate([batch(at, 90)[1] for at in range(RANKS)]).ravel()
    expected = np.bincount(named[named >= 0], minlength=EXPERTS)
    assert FIRST.logical_load(sum(loads).numpy()).tolist() == expected.tolist()
    for rank, twin in enumerate(twins):
        own = twin.local_experts
        assert loads[rank].sum() == loads[rank][own.start : own.stop].sum() > 0
    with pytest.raises(weft.errors.ShapeError, match="expert_load has shape"):
        twins[0].dispatch(*batch(0, 2), expert_load=loads[0][:EXPERTS])


def test_a_placement_is_changed_between_rounds(twins: list[Any]) -> None:
    play(twins, FIRST)
    loads = np.bincount(np.concatenate([batch(at, 90)[1] for at in range(RANKS)]).ravel() + 1)
    balanced = balance(loads[1:], FIRST.slots)
    for placement in (SECOND, balanced, FIRST):
        for twin in twins:
            twin.set_placement(placement)
            assert twin.placements == (placement,)
        play(twins, placement)


def test_a_change_in_the_middle_of_a_round_is_refused(twins: list[Any]) -> None:
    rounds = [twin.dispatch_send(*batch(at, 5)) for at, twin in enumerate(twins)]
    for twin in twins:
        with pytest.raises(weft.errors.StageError, match="channel 0 has a round in flight"):
            twin.set_placement(SECOND)
        assert twin.placements == (FIRST,)
    for received in on_all(lambda rank: rounds[rank].recv()):
        with pytest.raises(weft.errors.StageError, match="in flight"):
            received._all_to_all.set_placement(SECOND)
    for each in twins:
        for received in list(each._received):
            received.release()


def test_ranks_that_dispatch_by_different_layers_are_found() -> None:
    twins = group(placement=[FIRST, SECOND])
    on_all(lambda rank: twins[rank].dispatch(*batch(rank, 9), layer=rank % 2))
    with pytest.raises(weft.errors.StageError) as error:
        twins[0].check()
    assert "rank 1 dispatched by change 2 of the placement, rank 0 by change 1" in str(error.value)
    for twin in twins:
        twin.close()


def test_half_a_change_is_found(twins: list[Any]) -> None:
    twins[2].set_placement(FIRST)
    on_all(lambda rank: twins[rank].dispatch(*batch(rank, 9)))
    with pytest.raises(weft.errors.StageError, match="rank 2 dispatched by change 2"):
        twins[0].check()


@pytest.mark.parametrize(
    ("placement", "more", "words"),
    [
        (Placement([[*range(12)], [0], [1]]), {}, "has physical experts by rank"),
        (Placement([*SECOND.ranks, []]), {}, "has ranks 4"),
        (Placement.even(13, 3), {}, "has 13 experts; this all-to-all has 12"),
        (SECOND, {"layer": 1}, "there is no layer 1"),
        ([SECOND, FIRST], {}, "2 placements are given for 1 layers"),
        ([SECOND, FIRST], {"layer": 0}, "there is no layer 1"),
        ([[0, 1]], {}, "placement of layer 0 is a list"),
    ],
)
def test_a_change_to_what_was_not_made_is_refused(
    twins: list[Any], placement: Any, more: dict[str, int], words: str
) -> None:
    with pytest.raises(weft.errors.ConfigurationError, match=words):
        twins[0].set_placement(placement, **more)
    assert twins[0].placements == (FIRST,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"placement": Placement.even(11, 3)}, "has 11 experts; this all-to-all has 12"),
        ({"placement": Placement.even(12, 2)}, "has ranks 2"),
        ({"placement": [FIRST, Placement.even(12, 3)]}, "the placement of layer 1 has physical"),
        ({"gradients": True}, "gradients=True with a placement"),
        ({"placement": 3}, "placement of layer 0 is a int"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(weft.errors.ConfigurationError, match=words):
        group(**arguments)


def test_a_layer_without_a_placement_is_refused() -> None:
    twins = group(placement=None)
    with pytest.raises(weft.errors.ConfigurationError, match="there is no layer 1"):
        twins[0].dispatch_send(*batch(0, 2), layer=1)
    with pytest.raises(weft.errors.ConfigurationError, match="1 placements are given for 0"):
        twins[0].set_placement(FIRST)
    play(twins, Placement.even(EXPERTS, RANKS))
    for twin in twins:
        twin.close()


@pytest.mark.timeout(120)
def test_processes_change_a_placement_together() -> None:
    assert ranks.run("moe.replicas.change", 2, timeout=100, with_torch=True) == [
        [
            [3.0, 6.0, 9.0, 12.0],
            "rank 1 has placement's digest",
            "channel 0 has a round in flight",
            [3.0, 6.0, 9.0, 12.0],
        ],
        [
            [3.0, 6.0, 9.0, 12.0],
            "rank 0 has placement's digest",
            "rank 0 could not change the placement, so no rank did: "
            "channel 0 has a round in flight",
            [3.0, 6.0, 9.0, 12.0],
        ],
    ]
