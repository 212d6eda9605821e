"""Expert placements with replicas, and `weft.moe.balance` for measured loads."""

import re
from typing import Any

import numpy as np
import pytest

import weft
from tests import ROOT
from weft.moe import Placement, balance


def drawn(seed: int) -> tuple[Any, list[int]]:
    """Random expert loads, and sufficient slots."""
    random = np.random.default_rng(seed)
    experts, ranks = int(random.integers(1, 40)), int(random.integers(1, 9))
    kinds: list[Any] = [
        random.integers(0, 3, experts),
        random.random(experts),
        random.pareto(0.7, experts),
        np.zeros(experts),
        np.eye(experts)[0] * 1e9,
    ]
    slots = random.multinomial(experts + int(random.integers(0, 20)), np.ones(ranks) / ranks)
    if random.integers(2):
        # Room for an even placement's blocks.
        slots = np.maximum(slots, [len(held) for held in Placement.even(experts, ranks).ranks])
    load: Any = random.permutation(kinds[int(random.integers(len(kinds)))])
    return load, slots.tolist()


@pytest.mark.parametrize("seed", range(300))
def test_every_expert_has_its_place_and_no_rank_more_than_its_slots(seed: int) -> None:
    load, slots = drawn(seed)
    placement = balance(load, slots)
    assert placement.slots == tuple(slots)
    assert placement.experts == len(load)
    assert placement.replicas.min() >= 1
    assert set(placement.physical_to_logical.tolist()) == set(range(len(load)))
    even = Placement.even(len(load), len(slots))
    fits = all(len(held) <= room for held, room in zip(even.ranks, slots, strict=True))
    if fits and all(held or not room for held, room in zip(even.ranks, slots, strict=True)):
        greatest = even.rank_load(load).max()
        assert placement.rank_load(load).max() <= greatest * (1 + 1e-12)
    # All tokens are assigned.
    assert placement.rank_load(load).sum() == pytest.approx(np.sum(load))


def test_a_hot_expert_gets_replicas_on_ranks_of_their_own() -> None:
    load = [90, 10, 10, 10]
    placement = balance(load, [2, 2, 2])
    assert placement.replicas.tolist() == [3, 1, 1, 1]
    assert all(0 in held for held in placement.ranks)
    assert placement.rank_load(load).tolist() == [40, 40, 40]
    assert Placement.even(4, 3).rank_load(load).max() == 90


def test_ranks_may_have_different_numbers_of_slots() -> None:
    placement = balance([4, 3, 2, 1], [3, 1, 0])
    assert placement.slots == (3, 1, 0)
    assert placement.ranks == ((1, 2, 3), (0,), ())


def test_pairs_are_exchanged_where_the_greedy_order_is_caught() -> None:
    # Busiest first: 5 and 4 on different ranks, then 3, 3 and 3 make 9 and 9, or 8 and 10.
    load = [5, 4, 3, 3, 3]
    assert balance(load, [2, 3]).rank_load(load).tolist() == [9, 9]


def test_groups_stay_on_a_host_and_so_do_replicas() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        load = random.pareto(1.0, 32)
        placement = balance(load, [5, 6, 5, 5, 6, 5], hosts=2, groups=8)
        of_host = [set(np.concatenate(placement.ranks[at : at + 3])) for at in (0, 3)]
        assert not of_host[0] & of_host[1]
        for host in of_host:
            groups = {expert // 4 for expert in host}
            assert len(groups) == 4
            assert host == {expert for expert in range(32) if expert // 4 in groups}


def test_the_page_has_what_balancing_does_to_loads_by_zipf() -> None:
    slots = [[32] * 8, [33] * 8, [36] * 8, [40] * 4 + [32] * 4]
    page = ROOT / "docs" / "moe.md"
    rows = re.findall(r"^\| ([\d. |]+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    tables = {row.split(" | ")[0]: row.split(" | ")[1:] for row in rows}
    for exponent in (0.5, 0.8, 1.0, 1.2):
        popular = 1e6 * np.arange(1, 257) ** -exponent
        load = np.random.default_rng(0).permutation(popular)
        made = [Placement.even(256, 8), *(balance(load, each) for each in slots)]
        loads = [placement.rank_load(load) for placement in made]
        assert tables[str(exponent)] == [f"{each.max() / each.mean():.2f}" for each in loads]


def test_layers_are_balanced_each_by_itself() -> None:
    loads = [[1, 2, 3, 40], [40, 3, 2, 1]]
    layers = balance(loads, [3, 3])
    assert layers == [balance(load, [3, 3]) for load in loads]
    assert layers[0] != layers[1]


def test_maps_between_logical_and_physical_are_each_others_inverse() -> None:
    placement = Placement([[2, 0], [], [1, 2, 2]])
    assert placement.experts == 3
    assert placement.physical_to_logical.tolist() == [2, 0, 1, 2, 2]
    assert placement.logical_to_physical.tolist() == [[1, -1, -1], [2, -1, -1], [0, 3, 4]]
    assert placement.logical_load([5, 1, 2, 6, 7]).tolist() == [1, 2, 18]
    assert placement.rank_load([1, 2, 18]).tolist() == [7, 0, 14]
    assert placement == Placement([(2, 0), (), (1, 2, 2)], 3)
    assert placement != Placement([[2, 0], [], [1, 2, 2]], 3).even(3, 3)


def test_replicas_take_turns_by_token_and_rank() -> None:
    placement = Placement([[2, 0], [], [1, 2, 2]])
    ids = [[2, 0], [2, 1], [2, -1], [2, 0]]
    assert placement.choose(ids, 0).tolist() == [[0, 1], [3, 2], [4, -1], [0, 1]]
    assert placement.choose(ids, 1)[:, 0].tolist() == [3, 4, 0, 3]
    # The round robin restarts after 64 tokens.
    many = np.full((130, 1), 2)
    assert placement.choose(many, 0)[[63, 64, 128], 0].tolist() == [0, 0, 0]
    shares = np.bincount(placement.choose(many[:64], 5)[:, 0], minlength=5)
    assert shares.tolist() == [22, 0, 0, 21, 21]


@pytest.mark.parametrize(
    ("ranks", "experts", "words"),
    [
        ([[0, 2]], None, "expert 1 has 0 replicas"),
        ([[0] * 65], None, "expert 0 has 65 replicas"),
        ([[0], [3]], 2, "rank 1 holds expert 3"),
        ([[0, -1]], None, "rank 0 holds expert -1"),
        ([], None, "a placement of 0 experts on 0 ranks"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    ranks: list[list[int]], experts: int | None, words: str
) -> None:
    with pytest.raises(weft.errors.ConfigurationError, match=words):
        Placement(ranks, experts)


@pytest.mark.parametrize(
    ("load", "slots", "more", "words"),
    [
        ([1, 2, 3], [1, 1], {}, "2 slots on host 0 for 3 experts"),
        ([1], [40, 40], {}, "80 slots on host 0 for 1 experts"),
        ([1, 2, 3], [2, 2, 2], {"hosts": 2}, "3 ranks on 2 hosts"),
        ([1, 2, 3], [2, 2], {"groups": 2}, "3 experts in 2 groups"),
        ([1, 2], [-1, 4], {}, "none is negative"),
        ([1, -2], [2, 2], {}, "negative"),
        ([1, float("nan")], [2, 2], {}, "NaN"),
        ([], [2, 2], {}, "load has shape"),
    ],
)
def test_loads_that_cannot_be_balanced_are_refused(
    load: list[float], slots: list[int], more: dict[str, int], words: str
) -> None:
    with pytest.raises((weft.errors.ConfigurationError, weft.errors.ShapeError), match=words):
        balance(load, slots, **more)


def test_choices_beyond_the_experts_are_refused() -> None:
    with pytest.raises(weft.errors.ShapeError, match="experts below 3"):
        Placement([[2, 0], [1]]).choose([[3]], 0)
    with pytest.raises(weft.errors.ShapeError, match="load has shape"):
        Placement([[2, 0], [1]]).logical_load([1, 2])
