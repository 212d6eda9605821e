"""Placements: experts on ranks, with replicas for the busiest experts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from weft.base.arguments import expect
from weft.base.errors import ConfigurationError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["MOST_REPLICAS", "Placement", "balance", "by_layer"]

#: Maximum replicas per expert; replica choice repeats with this period in tokens.
MOST_REPLICAS: Final = 64


@dataclass(frozen=True, init=False)
class Placement:
    """Placement that assigns logical experts to ranks, with one or more replicas each.

    Tokens name logical experts, from 0 on. A rank holds physical experts, numbered rank by rank in
    the given order, so each rank's numbers are consecutive. Ranks may hold different numbers of
    experts, and several ranks may hold the same expert. For example, `Placement([[0, 1], [1, 2]])`
    gives expert 1 two replicas.

    Token number `t` in a rank's batch goes to replica `(t + rank) % 64 % n` out of the expert's
    `n`, by ascending physical number.

    Args:
        ranks: logical experts that each rank holds.
        experts: logical experts; by default one more than the largest id.

    Raises:
        ConfigurationError: if an expert has no replica or more than 64, or a number is no expert.
    """

    #: Logical experts by rank.
    ranks: tuple[tuple[int, ...], ...]
    #: Logical expert count.
    experts: int

    def __init__(self, ranks: Sequence[Sequence[int]], experts: int | None = None) -> None:
        expect(ranks, (Sequence, np.ndarray), "ranks")
        held = tuple(tuple(int(expert) for expert in rank) for rank in ranks)
        object.__setattr__(self, "ranks", held)
        known = max((expert for rank in held for expert in rank), default=-1) + 1
        object.__setattr__(self, "experts", known if experts is None else int(experts))
        self._check()

    def _check(self) -> None:
        if not self.ranks or self.experts < 1:
            raise ConfigurationError(
                f"a placement of {self.experts} experts on {len(self.ranks)} ranks: "
                "both are at least 1"
            )
        for rank, held in enumerate(self.ranks):
            for expert in held:
                if not 0 <= expert < self.experts:
                    raise ConfigurationError(
                        f"rank {rank} holds expert {expert}: experts are numbered from 0 to "
                        f"{self.experts - 1}"
                    )
        for expert, count in enumerate(self.replicas.tolist()):
            if not 1 <= count <= MOST_REPLICAS:
                raise ConfigurationError(
                    f"expert {expert} has {count} replicas: 1 to {MOST_REPLICAS} are possible"
                )

    @property
    def native(self) -> list[list[int]]:
        """Native module argument."""
        return [list(held) for held in self.ranks]

    @classmethod
    def even(cls, experts: int, world_size: int) -> Placement:
        """Every expert once, on the rank that owns it without a placement."""
        ends = [rank * experts // world_size for rank in range(world_size + 1)]
        return cls([range(*block) for block in itertools.pairwise(ends)], experts)

    @property
    def slots(self) -> tuple[int, ...]:
        """Physical expert count by rank."""
        return tuple(map(len, self.ranks))

    @property
    def replicas(self) -> NDArray[np.int64]:
        """`[experts]`: replica count by logical expert."""
        return np.bincount(self.physical_to_logical, minlength=self.experts).astype(np.int64)

    @property
    def physical_to_logical(self) -> NDArray[np.int64]:
        """`[physical experts]`: logical expert by physical expert."""
        return np.array([expert for rank in self.ranks for expert in rank], dtype=np.int64)

    @property
    def logical_to_physical(self) -> NDArray[np.int64]:
        """`[experts, most replicas]`: physical experts by logical expert, ascending, then -1."""
        table = np.full((self.experts, int(self.replicas.max())), -1, dtype=np.int64)
        used = np.zeros(self.experts, dtype=np.int64)
        for physical, expert in enumerate(self.physical_to_logical.tolist()):
            table[expert, used[expert]] = physical
            used[expert] += 1
        return table

    def choose(self, ids: ArrayLike, rank: int) -> NDArray[np.int64]:
        """`[tokens, top_k]`: physical experts to which `rank` dispatches `ids`.

        Negative ids stay -1. For programs that give a dispatch physical experts, and for tests.
        """
        given = np.asarray(ids, dtype=np.int64)
        if given.ndim != 2 or (given.size and given.max() >= self.experts):
            raise ShapeError(
                f"ids has shape {given.shape}: [tokens, top_k] of experts below {self.experts} "
                "are needed"
            )
        turns = (np.arange(len(given))[:, None] + rank) % MOST_REPLICAS
        named = np.maximum(given, 0)
        chosen = self.logical_to_physical[named, turns % self.replicas[named]]
        return np.where(given < 0, -1, chosen)

    def logical_load(self, load: ArrayLike) -> NDArray[Any]:
        """`[experts]`: token count by logical expert, given the count by physical expert."""
        given = np.asarray(load)
        logical = self.physical_to_logical
        if given.shape != logical.shape:
            raise ShapeError(f"load has shape {given.shape}; {logical.shape} is needed")
        total = np.zeros(self.experts, dtype=given.dtype)
        np.add.at(total, logical, given)
        return total

    def rank_load(self, load: ArrayLike) -> NDArray[np.float64]:
        """`[ranks]`: tokens for each rank's experts, if replicas share an expert's tokens."""
        shares = _loads(load, self.experts) / self.replicas
        return np.array([shares[list(held)].sum() for held in self.ranks])

    def __repr__(self) -> str:
        physical = sum(self.slots)
        return f"<weft.moe.Placement of {self.experts} experts as {physical} on {self.slots}>"


def by_layer(
    placement: Placement | Sequence[Placement] | None, experts: int, *, first: int = 0
) -> tuple[Placement, ...]:
    """Placements by layer, counted from `first`; empty for `None`.

    Raises:
        ConfigurationError: if one is no `Placement`, or has another number of experts.
    """
    layers: tuple[Any, ...] = () if placement is None else (placement,)
    if isinstance(placement, list | tuple):
        layers = tuple(placement)
    for layer, each in enumerate(layers, first):
        if not isinstance(each, Placement):
            raise ConfigurationError(
                f"placement of layer {layer} is a {type(each).__name__}: a weft.moe.Placement is "
                "needed, or a list with one for each layer"
            )
        if each.experts != experts:
            raise ConfigurationError(
                f"the placement of layer {layer} has {each.experts} experts; this all-to-all has "
                f"{experts}: every layer places all of them"
            )
    return layers


@overload
def balance(
    load: Sequence[float] | NDArray[Any],
    slots: Sequence[int],
    *,
    hosts: int = 1,
    groups: int = 1,
) -> Placement: ...


@overload
def balance(
    load: Sequence[Sequence[float]],
    slots: Sequence[int],
    *,
    hosts: int = 1,
    groups: int = 1,
) -> list[Placement]: ...


def balance(
    load: ArrayLike, slots: Sequence[int], *, hosts: int = 1, groups: int = 1
) -> Placement | list[Placement]:
    """Balance a placement, so that ranks have about equal token counts.

    This is the greedy heuristic in DeepSeek's [EPLB](https://github.com/deepseek-ai/EPLB)
    (`rebalance_experts`): each slot in turn goes to the expert whose replicas have the most tokens
    each; then replicas, the busiest first, go to the rank that has the fewest tokens and a slot
    left. With `hosts`, groups of experts are first packed on hosts, and replicas stay within one.
    Unlike EPLB, ranks may have different slot counts; a rank takes a second replica of an expert
    only if no other can; and pairs of replicas are exchanged for as long as that lowers the maximum
    load.

    The maximum rank load (`Placement.rank_load`) never exceeds the load with `Placement.even` on
    the same slots, if the even blocks fit them and `hosts` is 1.

    Args:
        load: `[experts]` tokens that named each, measured or estimated; `[layers, experts]` makes a
            placement for each layer.
        slots: physical experts by rank.
        hosts: hosts among which ranks are divided, in rank order, equally.
        groups: groups with consecutive experts, as in the DeepSeek-V3 router; a multiple of
            `hosts`.

    Raises:
        ConfigurationError: if the slots do not suffice for all experts, or do not divide by hosts.
        ShapeError: if `load` has another shape, or is negative or not finite.
    """
    given = np.asarray(load, dtype=np.float64)
    if given.ndim == 2:
        return [balance(row, slots, hosts=hosts, groups=groups) for row in given]
    loads = _loads(given, given.size)
    room = [int(count) for count in slots]
    _check_room(len(loads), room, hosts, groups)
    members = np.arange(len(loads)).reshape(groups, -1)
    of_hosts = _pack(_group_loads(loads, members), [groups // hosts] * hosts)
    ranks: list[list[int]] = []
    per_host = len(room) // hosts
    for host, packed in enumerate(of_hosts):
        experts = np.sort(np.concatenate([members[group] for group in packed]))
        here = room[host * per_host : (host + 1) * per_host]
        ranks.extend(_place(experts, loads, here))
    placement = Placement(ranks, len(loads))
    even = _even_on(room, len(loads)) if hosts == 1 else None
    if even is not None and even.rank_load(loads).max() < placement.rank_load(loads).max():
        return even
    return placement


def _group_loads(loads: NDArray[np.float64], members: NDArray[np.int64]) -> list[tuple[float, int]]:
    """Load and number by group."""
    return [(float(loads[experts].sum()), group) for group, experts in enumerate(members)]


def _loads(load: ArrayLike, experts: int) -> NDArray[np.float64]:
    given = np.asarray(load, dtype=np.float64)
    if given.shape != (experts,) or experts == 0:
        raise ShapeError(f"load has shape {given.shape}; one number for each expert is needed")
    if not np.isfinite(given).all() or given.min() < 0:
        raise ShapeError(
            "load has a negative or infinite number or NaN: counts of tokens are needed"
        )
    return given


def _check_room(experts: int, room: list[int], hosts: int, groups: int) -> None:
    if hosts < 1 or not room or len(room) % hosts:
        raise ConfigurationError(
            f"{len(room)} ranks on {hosts} hosts: pass slots for as many ranks on each host"
        )
    if groups < 1 or experts % groups or groups % hosts:
        raise ConfigurationError(
            f"{experts} experts in {groups} groups on {hosts} hosts: experts must be a multiple of "
            "groups, and groups of hosts"
        )
    if min(room) < 0:
        raise ConfigurationError(f"slots are {room}: none is negative")
    per_host = len(room) // hosts
    for host in range(hosts):
        there = sum(room[host * per_host : (host + 1) * per_host])
        if not experts // hosts <= there <= MOST_REPLICAS * (experts // hosts):
            raise ConfigurationError(
                f"{there} slots on host {host} for {experts // hosts} experts: each takes 1 to "
                f"{MOST_REPLICAS}"
            )


def _place(
    experts: NDArray[np.int64], loads: NDArray[np.float64], room: list[int]
) -> list[list[int]]:
    """Place replicas on ranks with `room` slots."""
    counts = _replicate(loads[experts], sum(room), sum(1 for slots in room if slots))
    share = loads[experts] / counts
    items = [
        (float(each), int(expert))
        for expert, each, count in zip(experts, share, counts, strict=True)
        for _ in range(count)
    ]
    each = dict(zip(experts.tolist(), share.tolist(), strict=True))
    ranks = _pack(items, room)
    _exchange(ranks, each)
    return [sorted(held) for held in ranks]


def _replicate(loads: NDArray[np.float64], slots: int, ranks: int) -> NDArray[np.int64]:
    """Replica count by expert: each next slot goes to the expert with the busiest replicas."""
    counts = np.ones(len(loads), dtype=np.int64)
    # At most one replica on each rank, unless slots would stay free.
    most = max(min(ranks, MOST_REPLICAS), -(-slots // len(loads)))
    queue = [(-float(load), 1, expert) for expert, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(slots - len(loads)):
        _, count, expert = heapq.heappop(queue)
        counts[expert] = count + 1
        if count + 1 < most:
            heapq.heappush(queue, (-float(loads[expert]) / (count + 1), count + 1, expert))
    return counts


def _pack(items: list[tuple[float, int]], room: list[int]) -> list[list[int]]:
    """Greedy packing: items with loads, the busiest first, into bins with `room` places."""
    bins: list[list[int]] = [[] for _ in room]
    total = [0.0] * len(room)
    for load, name in sorted(items, key=lambda item: (-item[0], item[1])):
        free = [at for at, held in enumerate(bins) if len(held) < room[at]]
        fresh = [at for at in free if name not in bins[at]] or free
        to = min(fresh, key=lambda at: (total[at], len(bins[at]) - room[at]))
        bins[to].append(name)
        total[to] += load
    return bins


def _exchange(ranks: list[list[int]], each: dict[int, float]) -> None:
    """Local search: exchanges replicas on the busiest rank while the maximum load decreases."""
    total = np.array([sum(each[expert] for expert in held) for held in ranks])
    for _ in range(sum(map(len, ranks))):
        top = int(total.argmax())
        pairs = [
            (*pair, other)
            for other, held in enumerate(ranks)
            if other != top and (pair := _best_pair(ranks[top], held, each, total[[top, other]]))
        ]
        after, mine, theirs, other = min(pairs, default=(np.inf, 0, 0, 0))
        if not after < total[top] * (1 - 1e-12):
            return
        moved = each[ranks[top][mine]] - each[ranks[other][theirs]]
        ranks[top][mine], ranks[other][theirs] = ranks[other][theirs], ranks[top][mine]
        total[top] -= moved
        total[other] += moved


def _best_pair(
    mine: list[int], theirs: list[int], each: dict[int, float], total: NDArray[np.float64]
) -> tuple[float, int, int] | None:
    """Best replica exchange between two ranks: the larger load after it, and the indices."""
    ours, others = set(mine), set(theirs)
    ours_at = [at for at, expert in enumerate(mine) if expert not in others]
    others_at = [at for at, expert in enumerate(theirs) if expert not in ours]
    if not ours_at or not others_at:
        return None
    leaving = np.array([each[mine[at]] for at in ours_at])
    coming = np.array([each[theirs[at]] for at in others_at])
    moved = leaving[:, None] - coming[None, :]
    after = np.maximum(total[0] - moved, total[1] + moved)
    row, column = divmod(int(after.argmin()), len(others_at))
    return float(after[row, column]), ours_at[row], others_at[column]


def _even_on(room: list[int], experts: int) -> Placement | None:
    """`Placement.even` where it fits; spare slots repeat experts on the same rank."""
    even = Placement.even(experts, len(room))
    held = []
    for slots, block in zip(room, even.ranks, strict=True):
        if slots < len(block) or (slots and not block) or slots > MOST_REPLICAS * len(block):
            return None
        held.append([block[at % len(block)] for at in range(slots)])
    return Placement(held, experts)
