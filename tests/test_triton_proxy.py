"""Puts of Triton kernels by a proxy of the host, under Triton's interpreter."""

from typing import Any

import pytest

import ranks
from test_triton import wrapped
from workers.triton_proxy import FIRST

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

pytest.importorskip("triton")

ROUNDS = 4


def run(worker: str, count: int, transport: str, **arguments: Any) -> list[Any]:
    return ranks.run(
        f"triton_proxy.{worker}",
        count,
        transport,
        environment={"TRITON_INTERPRET": "1"},
        timeout=100,
        **arguments,
    )


def test_a_ring_over_two_hosts_carries_each_round() -> None:
    results = run("rings", 4, "mixed", rounds=ROUNDS)
    check_ring(results)
    assert {result["hosts"] for result in results} == {2}


def check_ring(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        before = (rank - 1) % len(results)
        for first, rounds in zip(FIRST, result["ring"], strict=True):
            for number, arrived in enumerate(rounds, 1):
                epoch = wrapped(first + number)
                # The remainder has the sign of the epoch, as in C.
                tail = abs(epoch) % 1000 * (1 if epoch >= 0 else -1)
                assert arrived == [before * 1000 + tail]


def test_waits_end_by_their_limit_and_wrong_descriptors_are_rejected() -> None:
    for rank, found in enumerate(run("failures", 2, "mixed")):
        assert found["own"] == [[0, 1, 1, 0], [1]]
        assert found["words"][0] == found["slot_bytes"][0] == "ConfigurationError"
        assert "words=0" in found["words"][2]
        assert "slot_bytes=100: expected a multiple of 64" in found["slot_bytes"][2]
        name, about, text, outputs = found["expired"]
        assert (name, about, outputs) == ("WaitTimeoutError", 1, [0])
        assert text == (
            f"rank {rank} waited for rank 1 in a kernel (word 1) and timed out: expected 7, "
            "observed 0"
        )
        assert found["again"] == [0]
        for case, wrong in {
            "rank": "rank is 9: expected 0 to 1",
            "offset": "last byte is 68: expected 0 to 64",
            "length": "number of bytes is 16388: expected 0 to 16384",
        }.items():
            name, _, text, outputs = found[case]
            assert (name, outputs) == ("OutOfRangeError", [0])
            assert text == f"put of rank {rank}: {wrong}"


def test_a_wait_ends_when_a_rank_fails() -> None:
    found, _ = run("lost", 2, "mixed")
    name, rank, text = found["error"]
    assert (name, rank, found["outputs"]) == ("GroupPoisonedError", 1, [0])
    assert "ZeroDivisionError" in text
