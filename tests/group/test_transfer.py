"""Counted writes between real processes."""

import pytest

from tests import ranks

TRANSPORTS = list(ranks.TRANSPORTS)


@pytest.mark.parametrize("length", [256, 1 << 16])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_written_arrives_before_it_is_counted(transport: str, length: int) -> None:
    rounds = 9
    for rank, result in enumerate(
        ranks.run("group.transfer.ring", 4, transport, length=length, rounds=rounds)
    ):
        assert result["right"] == rounds
        assert result["lengths"] == [[] if peer == rank else [length] for peer in range(4)]
        assert result["routes"][rank] is None
        peers = {each["peer"]: each for each in result["statistics"]}
        assert peers.keys() == set(range(4)) - {rank}
        assert peers[(rank + 1) % 4]["bytes"] >= rounds * length
        assert peers[(rank - 1) % 4]["arrivals"] >= rounds
        assert all(each["errors"] == 0 for each in peers.values())


def test_pretended_hosts_are_reached_over_tcp_and_ranks_of_one_host_over_shm() -> None:
    routes = [
        each["routes"] for each in ranks.run("group.transfer.ring", 4, "mixed", length=8, rounds=1)
    ]
    assert routes == [
        [None, "shm", "tcp", "tcp"],
        ["shm", None, "tcp", "tcp"],
        ["tcp", "tcp", None, "shm"],
        ["tcp", "tcp", "shm", None],
    ]


MIB = 1 << 20
WRITES = [[], [5 * MIB], [5 * MIB + 1], [MIB], [8] * 257, [600_000, 600_000], [3 * MIB, 0, 7]]


@pytest.mark.parametrize(
    ("transport", "route", "parts"),
    [
        ("shm", ["shm", None, None], [1, 1, 1, 1, 1, 1, 1]),
        ("tcp", ["tcp", MIB, 256], [1, 5, 6, 1, 2, 2, 4]),
        ("copy", ["copy", None, None], [1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_write_raises_its_lane_by_its_parts(
    transport: str, route: list[object], parts: list[int]
) -> None:
    first, second = ranks.run("group.transfer.long_writes", 2, transport, writes=WRITES)
    for *writes, end in (first, second):
        assert [each["parts"] for each in writes] == parts
        assert all(each["right"] for each in writes)
        assert end["route"] == route
    assert first[-1]["sent"] >= sum(parts)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wait_for_lengths_ends_when_all_bytes_are_there(transport: str) -> None:
    _, right, *_ = ranks.run("group.transfer.by_lengths", 2, transport, writes=[[3 * MIB], *WRITES])
    assert right == [True] * (len(WRITES) + 1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_timeout_names_who_is_missing_and_may_be_repeated(transport: str) -> None:
    result, *_ = ranks.run("group.transfer.signals", 4, transport)
    assert result == {
        "missing": [[2, 1, 0], [3, 1, 0]],
        "early": [[1, 1, 1]],
        "counts": [1, 1, 1],
        "credited": [0, 0, 0],
    }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_collective_calls_that_time_out_are_continued_by_a_repeat(transport: str) -> None:
    results = ranks.run("group.transfer.repeat", 3, transport)
    for result in results:
        assert result["lengths"] == [100, 100]
        assert result["gathered"] == [[round, rank] for round in range(3) for rank in range(3)]
    late = [["WaitTimeoutError", "share"]]
    differs = [["WaitTimeoutError", "all_gather"], ["StageError", "all_gather"]]
    assert [result["errors"] for result in results] == [late + differs, late, []]


def test_ranks_that_make_different_calls_get_an_error_with_both() -> None:
    share, *gathers = ranks.run("group.transfer.different", 3)
    assert share[0] == gathers[0][0] == "ConfigurationMismatchError"
    for message in (share[1], gathers[0][1], gathers[1][1]):
        assert {"share", "all_gather"} <= set(message.replace(",", "").replace(":", "").split())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_writes_that_are_not_allowed_are_refused(transport: str) -> None:
    raised, _ = ranks.run("group.transfer.refused", 2, transport)
    assert raised == {
        "beyond the source": "OutOfRangeError",
        "beyond the destination": "OutOfRangeError",
        "far beyond": "OutOfRangeError",
        "a round ahead": "CreditError",
        "no such rank": "UnknownError",
        "no credit": "WaitTimeoutError",
        "no such peer": "UnknownError",
        "in time": "NoneType",
        "the same round again": "CreditError",
    }


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_works_on_a_closed_communicator(count: int) -> None:
    assert ranks.run("group.transfer.closed", count) == [["ClosedError"] * 3] * count


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_group_that_is_poisoned_ends_everywhere(transport: str) -> None:
    for result in ranks.run("group.transfer.poisoned", 4, transport):
        assert result["error"] == "GroupPoisonedError"
        assert "the sea is rough" in result["message"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("end", "detail"),
    [
        ("an error", "ValueError: no such file"),
        ("a long error", "RuntimeError: " + "x" * 183 + "..."),
        ("no text", "KeyError"),
        ("unprintable", "UnprintableError: (it has no text)"),
        ("Ctrl-C", "KeyboardInterrupt"),
        ("exit 3", "SystemExit: 3"),
    ],
)
def test_an_exception_in_the_block_is_named_by_the_other_ranks(
    transport: str, end: str, detail: str
) -> None:
    results = ranks.run("group.transfer.raises_in_block", 3, transport, end=end)
    failed = results.pop(1)
    assert failed["raised"] == detail.partition(":")[0]
    for result in results:
        assert (result["error"], result["rank"]) == ("GroupPoisonedError", 1)
        assert result["message"] == f"rank 1 poisoned the group: {detail}"


@pytest.mark.parametrize("end", ["exit 0", "exit"])
def test_a_program_that_ends_in_the_block_with_status_0_leaves_in_peace(end: str) -> None:
    results = ranks.run("group.transfer.raises_in_block", 3, "shm", end=end)
    assert results.pop(1)["raised"] == "SystemExit"
    assert [(each["error"], each["rank"]) for each in results] == [("PeerLeftError", 1)] * 2
