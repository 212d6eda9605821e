"""The native all-to-all on a device, tested by its CPU twin with the kernels' protocol."""

import gc
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import weft
from tests import ranks
from tests.group.test_loss import BUSY_SECONDS, RANKS, SOON_SECONDS, group, receive
from tests.workers.cuda import device_native
from tests.workers.cuda.device_native import Rank, address, local_group, named
from weft import _native

SHAPES: list[dict[str, Any]] = [
    {},
    {"path": "packets", "max_tokens": 8},
    {"path": "bandwidth"},
    {"layout": "indexed"},
    {"layout": "padded", "expert_capacity": 128},
    {"pad_to": 8, "experts": 7, "top_k": 3},
    {"experts": 3, "hidden": 4, "channels": 3},
]


def together(members: list[Rank], work: Callable[[int, Rank], Any]) -> list[Any]:
    """Every rank on a thread, in place of several GPUs."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, range(len(members)), members))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounds_of_ranks_in_one_process(shape: dict[str, Any], count: int) -> None:
    members = local_group(count, **shape)

    def work(number: int, rank: Rank) -> list[str | None]:
        random = np.random.default_rng(number)
        return [rank.round(n % 2, rank.batch(random), fused=n % 3 == 0) for n in range(6)]

    assert together(members, work) == [[None] * 6] * count
    for rank in members:
        rank.native.close(1.0)


def test_rounds_of_ranks_that_are_processes() -> None:
    assert ranks.run("cuda.device_native.rounds", 4, shapes=SHAPES, rounds=12) == [[], [], [], []]


def test_what_it_is_can_be_asked_for() -> None:
    rank = local_group(2, experts=7, max_tokens=8)[1]
    assert rank.native.local_experts == (3, 7)
    assert rank.native.positions == 2 * 8 * 2
    assert (rank.native.path, rank.native.num_sms) == ("packets", 0)
    assert rank.native.build == {"seconds": 0.0, "cached": False}
    table, total = rank.native.sizes()
    assert str(total) in table
    assert "reply flags" in table


def test_dropped_in_any_order_it_takes_nothing_from_the_others() -> None:
    for order in ([0, 1], [1, 0]):
        members: list[Rank | None] = [*local_group(2)]
        members[order[0]] = None
        gc.collect()
        rank = members[order[1]]
        assert rank is not None
        # Writes to the lost rank's memory.
        rank.native.dispatch_send(0, 0, *rank.inputs(rank.batch(np.random.default_rng(0), 8)))
        rank.native.check()


def test_what_cannot_be_given_to_a_kernel_is_refused_and_ends_nothing() -> None:
    rank = local_group(1)[0]
    native, sent = rank.native, rank.batch(np.random.default_rng(0), 8)
    tokens, scales, ids, weights, count, given = rank.inputs(sent)
    outputs = rank.received()
    reports = {
        "channel": lambda: native.dispatch_send(0, 2, *rank.inputs(sent)),
        "given": lambda: native.dispatch_send(0, 0, tokens, scales, ids, weights, count, 33),
        "tokens": lambda: native.dispatch_send(0, 0, 0, scales, ids, weights, count, given),
        "ids": lambda: native.dispatch_send(0, 0, tokens, scales, 0, weights, count, given),
        "odd": lambda: native.dispatch_send(0, 0, tokens + 4, scales, ids, weights, count, given),
        "rows": lambda: native.dispatch_recv(0, 0, *outputs[:4], 0, outputs[5]),
        "odd outputs": lambda: native.combine_send(0, 0, address(rank.outputs) + 8, False),
        "combined": lambda: native.combine_recv(0, 0, 0, 0, given, False),
    }
    assert {what: named(call)[0] for what, call in reports.items()} == {
        "channel": "UnknownError",
        "given": "ShapeError",
        "tokens": "ShapeError",
        "ids": "ShapeError",
        "odd": "ShapeError",
        "rows": "ShapeError",
        "odd outputs": "ShapeError",
        "combined": "ShapeError",
    }
    assert rank.round(0, sent, fused=False) is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"experts": 0}, "ConfigurationError"),
        ({"hidden": 3}, "ConfigurationError"),
        ({"token_dtype": "float64"}, "ConfigurationError"),
        ({"wire_dtype": "float8_e5m2", "scales": ("float32", 128)}, "ConfigurationError"),
        (
            {"wire_dtype": "float8_e4m3fn", "scales": ("float32", 100), "hidden": 128},
            "ConfigurationError",
        ),
        ({"layout": "sideways"}, "ConfigurationError"),
        ({"expert_capacity": 8}, "ConfigurationError"),
        ({"path": "packets", "layout": "indexed"}, "ConfigurationError"),
        ({"layout": "dense", "weighting": "combine"}, "ConfigurationError"),
        ({"path": "scenic"}, "ConfigurationError"),
        ({"ids_dtype": "int16"}, "ConfigurationError"),
        ({"memory": "paper"}, "ConfigurationError"),
        ({"skew_timeout": -1.0}, "ConfigurationError"),
        ({"skew_timeout": float("nan")}, "ConfigurationError"),
        ({"max_bytes": 1000}, "SizeError"),
    ],
)
def test_arguments_without_meaning_are_refused(options: dict[str, Any], error: str) -> None:
    assert named(lambda: local_group(2, **options))[0] == error


def test_devices_that_there_are_not_are_refused() -> None:
    def group_of(*devices: str) -> Callable[[], object]:
        options = device_native.OPTIONS
        return lambda: _native.DeviceAllToAll.local_group(2, list(devices), **options)

    assert named(group_of("twin", "abacus:0"))[0] == "ConfigurationError"
    assert named(group_of("twin"))[0] == "ConfigurationError"
    # Without CUDA, and with it.
    assert named(group_of("cuda:99", "cuda:99"))[0] == "ProviderError"


@pytest.mark.parametrize(
    "differing",
    [{"hidden": 32}, {"layout": "indexed"}, {"path": "bandwidth"}, {"ids_dtype": "int32"}],
)
def test_ranks_that_were_told_different_things_are_refused(differing: dict[str, Any]) -> None:
    [first, last] = ranks.run("cuda.device_native.constructed", 2, differing=differing)
    assert first[:2] == ["ConfigurationMismatchError", 1]
    assert last[:2] == ["ConfigurationMismatchError", 0]
    assert next(iter(differing)) in first[2]


def test_a_shape_that_cannot_be_is_refused_on_every_rank() -> None:
    reports = ranks.run("cuda.device_native.constructed", 2, differing={}, max_bytes=1000)
    assert [error for error, _, _ in reports] == ["SizeError", "SizeError"]


def test_a_wait_that_expires_is_raised_by_the_next_call_of_every_rank() -> None:
    first, second, third = ranks.run("cuda.device_native.late", 3, skew=0.3)
    assert 0.3 <= first["waited"] < SOON_SECONDS
    assert first["poisoned"]
    late, again, group = first["reports"]
    assert late[:2] == again[:2]
    assert late[0] == "WaitTimeoutError"
    assert late[1] in (1, 2)
    assert "dispatch_recv" in late[2]
    assert group[0] == "GroupPoisonedError"
    for other in (second, third):
        for error, rank, message in other["reports"]:
            assert (error, rank) == ("GroupPoisonedError", 0)
            assert "rank 0 waited for rank" in message


def test_calls_out_of_order_end_the_group() -> None:
    members = local_group(2, skew_timeout=1.0)
    first, second = members
    first.native.dispatch_recv(0, 0, *first.received())
    error, _, message = named(first.native.check)
    assert error == "StageError"
    assert "dispatch_recv" in message
    assert named(second.native.check)[:2] == ("GroupPoisonedError", 0)


def test_an_expert_that_there_is_not_is_raised_once_and_the_group_lives_on() -> None:
    rank = local_group(1)[0]
    sent = rank.batch(np.random.default_rng(0), 8)
    sent.ids[3, 1] = 99
    rank.native.dispatch(0, 0, *rank.inputs(sent), *rank.received())
    # Launches do not raise a single batch's errors.
    rank.native.combine(0, 0, address(rank.outputs), address(rank.combined), 0, 8, False)
    error, at, message = named(rank.native.check)
    assert (error, at) == ("ExpertError", 0)
    assert "token 3" in message
    assert "99" in message
    rank.native.check()
    sent.ids[3, 1] = -1
    assert rank.round(0, sent, fused=True) is None


def test_a_round_beyond_the_capacity_is_raised_everywhere_and_the_next_one_works() -> None:
    members = local_group(2, max_positions=20)

    def work(number: int, rank: Rank) -> tuple[list[Any], bool, str | None]:
        sent = rank.batch(np.random.default_rng(number), 16)
        sent.ids[:] = [0, 1]
        rank.native.dispatch(0, 0, *rank.inputs(sent), *rank.received())
        outputs, combined = address(rank.outputs), address(rank.combined)
        rank.native.combine(0, 0, outputs, combined, 0, 16, False)
        reports = [named(rank.native.check)[:2] for _ in range(2)]
        spoilt = bool(np.isnan(rank.combined[:16]).all())
        return reports, spoilt, rank.round(0, rank.batch(np.random.default_rng(9), 4), fused=True)

    for reports, spoilt, wrong in together(members, work):
        assert reports == [("CapacityError", 0), ("None", None)]
        assert spoilt
        assert wrong is None


def test_a_round_may_be_released_in_place_of_combine() -> None:
    def work(number: int, rank: Rank) -> list[str | None]:
        random, wrong = np.random.default_rng(number), []
        for fused in (True, False):
            rank.native.dispatch(0, 0, *rank.inputs(rank.batch(random)), *rank.received())
            if fused:
                rank.native.combine(0, 0, 0, 0, 0, 0, True)
            else:
                rank.native.combine_send(0, 0, 0, True)
                rank.native.combine_recv(0, 0, 0, 0, 0, True)
            wrong.append(rank.round(0, rank.batch(random), fused=fused))
        return wrong

    assert together(local_group(2), work) == [[None, None]] * 2


@pytest.mark.parametrize("fused", [True, False])
def test_a_killed_rank_is_named_by_all_others(fused: bool) -> None:
    victim = 2
    with group(device_native.survive, "shm", fused) as (processes, pipes):
        assert [receive(pipe) for pipe in pipes] == [None] * RANKS
        time.sleep(0.05)
        killed_at = time.monotonic()
        processes[victim].kill()
        survivors = [rank for rank in range(RANKS) if rank != victim]
        found = [receive(pipes[rank]) for rank in survivors]
        for process in processes:
            process.join(SOON_SECONDS)
        exits = [process.exitcode for process in processes]
    for each in found:
        assert (each["error"], each["rank"]) == ("PeerLostError", victim), found
        assert each["at"] - killed_at < BUSY_SECONDS, found
    assert exits == [-signal.SIGKILL if rank == victim else 0 for rank in range(RANKS)]


def test_a_rank_that_leaves_is_named_by_whoever_begins_a_round() -> None:
    with group(device_native.leave, "shm", None) as (processes, pipes):
        found = [receive(pipe) for pipe in pipes]
        for rank in (0, 2, 3):
            pipes[rank].send("all have reported")
        for process in processes:
            process.join(SOON_SECONDS)
    for rank in (0, 2, 3):
        assert found[rank] == {"wrong": None, "error": "PeerLeftError", "rank": 1}


def test_it_is_closed_by_all_ranks_or_abandoned_by_one() -> None:
    results = ranks.run("cuda.device_native.closing", 3)
    assert [result["reports"] for result in results] == [
        "None",
        "WaitTimeoutError",
        "WaitTimeoutError",
    ]
    for result in results:
        assert result["wrong"] == [None, None]
        assert result["closed"] == ["ClosedError"] * 3
        assert result["sizes"][2] == "latency"


def test_a_closed_communicator_closes_nothing_under_it() -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        rank = device_native.make(communicator)
    assert rank.round(0, rank.batch(np.random.default_rng(0), 4), fused=True) is None
    assert named(lambda: rank.native.close(1.0))[0] == "ClosedError"
    assert named(rank.native.check)[0] == "ClosedError"


def test_a_forked_child_may_call_nothing_but_close() -> None:
    for result in ranks.run("cuda.device_native.fork", 2):
        assert result == {"reports": ["ForkError"] * 2 + ["None"] * 2, "wrong": None}
