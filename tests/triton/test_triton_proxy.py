"""Triton kernels' puts by a proxy on the host, under Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest

from tests import gdrapi, ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

pytest.importorskip("triton")

ROUNDS = 4


def run(
    worker: str,
    count: int,
    transport: str,
    settings: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    return ranks.run(
        f"triton.proxy.{worker}",
        count,
        transport,
        environment={"TRITON_INTERPRET": "1"} | (settings or {}),
        timeout=100,
        **arguments,
    )


def test_a_ring_over_two_hosts_carries_each_round() -> None:
    results = run("rings", 4, "mixed", rounds=ROUNDS)
    check_ring(results)
    assert {result["hosts"] for result in results} == {2}


def test_words_in_the_gpus_memory_count_each_round() -> None:
    check_ring(run("rings", 2, "mixed", rounds=ROUNDS, words_home="gpu"))


def test_words_that_gdrcopy_maps_count_each_round(tmp_path: Path) -> None:
    settings, log = gdrapi.stand_in(tmp_path)
    results = run("rings", 2, "mixed", settings, rounds=ROUNDS)
    check_ring(results)
    assert [found["home"] for found in results] == ["gdrcopy"] * 2
    calls = log.read_text().splitlines()
    assert len(calls) == 2 * 7
    assert calls.count("gdr_close") == 2


@pytest.mark.parametrize("words_home", ["auto", "gdrcopy"])
def test_words_that_gdrcopy_maps_stay_where_a_process_forks(
    words_home: str, tmp_path: Path
) -> None:
    settings, log = gdrapi.stand_in(tmp_path)
    for found in run("homes", 2, "shm", settings, words_home=words_home):
        assert found["error"] == ["None", None, ""]
        assert (found["home"], found["child"], found["arrived"]) == ("gdrcopy", 0, 1)
        assert found["logged"] == []
    assert log.read_text().splitlines().count("gdr_unmap") == 2


def test_words_are_pinned_where_gdrcopy_cannot_map_them(tmp_path: Path) -> None:
    settings, log = gdrapi.stand_in(tmp_path, "gdr_pin_buffer")
    for found in run("homes", 2, "shm", settings, words_home="auto"):
        assert (found["home"], found["arrived"]) == ("pinned", 1)
        (message,) = found["logged"]
        assert message.startswith(
            "the proxy's words are in pinned host memory: gdr_pin_buffer failed: "
        )
    assert log.read_text().splitlines().count("gdr_close") == 2
    for found in run("homes", 2, "shm", settings, words_home="gdrcopy"):
        kind, _, text = found["error"]
        assert (kind, text.split(":")[0]) == ("DeviceError", "gdr_pin_buffer failed")
    absent = "/absent/libgdrapi.so.2"
    for found in run("homes", 2, "shm", {"WEFT_LIBGDRAPI": absent}, words_home="gdrcopy"):
        kind, _, text = found["error"]
        assert kind == "ProviderError"
        assert f"cannot be loaded ({absent}: No such file" in text


def check_ring(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        before = (rank - 1) % len(results)
        for number, arrived in enumerate(result["ring"], 1):
            assert arrived == [before * 1000 + number % 1000]


@pytest.mark.parametrize("fences", [True, False])
def test_a_nic_reads_what_a_put_has_released(fences: bool) -> None:
    """Stores to the window reach memory by a release at system scope, behind a block barrier."""
    calls: dict[str, Any] = {"programs": 2, "rounds": 3, "fences": fences}
    found = ranks.run(
        "triton.released.puts", 2, "mixed",
        environment={"TRITON_INTERPRET": "1"}, timeout=100, **calls,
    )  # fmt: skip
    for rank, rounds in enumerate(found):
        first = 1000 * (1 - rank) + 1
        right = [[first + 100 * round, first + 100 * round + 1] for round in range(3)]
        assert rounds == (right if fences else [[0, 0]] * 3)


@pytest.mark.parametrize("transport", ["shm", "mixed"])
def test_a_proxy_serves_contexts_of_its_hosts_tensors_until_it_is_closed(transport: str) -> None:
    for rank, (arrived, inbox, within, later) in enumerate(run("local_context", 2, transport)):
        assert (arrived, later) == ([1], [0])
        assert inbox == [0] * 16 + [7 + 1 - rank] * 8 + [0] * 40
        assert within == (2 if transport == "shm" else 1)


def test_tensors_are_windows_and_a_closed_communicator_ends_waits() -> None:
    environment = {"WEFT_PROXY_IDLE": "spin", "WEFT_PROXY_CORE": "0"}
    for rank, found in enumerate(run("lifetimes", 2, "tcp", settings=environment)):
        assert found["arrived"] == [1, [100 * (1 - rank) + number for number in range(16)]]
        assert found["outside"] == [0, 0, 0]
        shape, none, core = found["wrong"]
        assert (shape[0], none[0], core[0]) == ("ShapeError", *["ConfigurationError"] * 2)
        assert core[2] == 'core=\'near\': expected a core\'s number, "auto" or "any"'
        assert found["cores"] == [0]
        assert found["after"] == 0
        for name, (kind, _, text) in found["variables"].items():
            assert kind == "ConfigurationError"
            assert text.startswith(f"{name} is 'off'")


def test_held_rounds_stay_until_kernels_give_them_back() -> None:
    for rank, found in enumerate(run("holds", 2, "mixed")):
        theirs = 100 * (1 - rank)
        assert found["first"] == [[1], [theirs + number for number in range(16)]]
        assert found["kept"] == theirs
        assert found["second"] == [[1], theirs + 50]
        # The CPU has no GPU whose NUMA node would be known.
        thread, process = found["cores"]
        assert thread == process


def test_waits_end_by_their_limit_and_wrong_commands_are_rejected() -> None:
    check_failures(run("failures", 2, "mixed"))


def check_failures(results: list[dict[str, Any]]) -> None:
    for case in ("expired", "full"):
        assert "WaitTimeoutError" in [found[case][0] for found in results]
    for rank, found in enumerate(results):
        for name, text in {
            "words": "words=0: expected 1 to 64",
            "slots": "slots=100: expected a power of two",
            "hold": "hold=2: expected 0 to 1",
            "windows": "0 windows: expected 1 to 65536",
            "idle": "idle='off': expected",
            "core": "core 9999 for the proxy's thread",
            "words_home": "words_home='disk': expected",
        }.items():
            assert found[name][0] == "ConfigurationError", found[name]
            assert text in found[name][2]
        assert found["differs"][0] == "ConfigurationMismatchError"
        assert f"rank {1 - rank}" in found["differs"][2]
        name, about, text, outputs = found["expired"]
        assert (about, outputs) == (1 - rank, [0])
        # The other rank learns it as the group's poison, unless its wait expires first.
        waiting, other = (rank, 1 - rank) if name == "WaitTimeoutError" else (1 - rank, rank)
        assert name in ("WaitTimeoutError", "GroupPoisonedError")
        assert (
            f"rank {waiting} waited for rank {other} (proxy word 1) in a kernel and timed out: "
            "expected 7, observed 0"
        ) in text
        assert found["again"][2] == text
        name, _, text, outputs = found["full"]
        # 16 rounds, 8 parts in the proxy, 2 slots; fewer if the other rank's expires first.
        assert outputs[0] <= 26
        assert "of the proxy's ring in a kernel and timed out" in text
        for case, wrong in {
            "rank": "peer 9: expected 0 to 1",
            "word": "word 2: expected 0 to 1",
            "window": "destination window 2: expected 0 to 1",
            "offset": "destination offset 61: expected 0 to 60",
            "length": f"length 2097152: expected 1 to {found['longest']}",
        }.items():
            name, about, text, _ = found[case]
            assert wrong in text, text
            if rank == 0:
                assert (name, about) == ("OutOfRangeError", None)
                assert text.startswith("command 0 (PUT with flags 0, peer ")
            else:
                assert (name, about) == ("GroupPoisonedError", 0)


def test_a_wait_ends_when_a_rank_fails() -> None:
    found, _ = run("lost", 2, "mixed")
    name, rank, text = found["error"]
    assert (name, rank, found["outputs"]) == ("GroupPoisonedError", 1, [0])
    assert "ZeroDivisionError" in text


@pytest.mark.parametrize("count", [2, 4])
def test_a_scatter_writes_to_each_rank_in_a_template(count: int) -> None:
    results = run("scatters", count, "mixed", rounds=6)
    cell = 64
    for rank, result in enumerate(results):
        for number, (fine, _, _, inbox) in enumerate(result["rounds"]):
            assert fine == [1] * (1 + count)
            expected = [0] * (2 * count * cell)
            for source in range(count):
                _, destinations, lengths, _ = results[source]["rounds"][number]
                step = (rank - source - 1) % count
                if source != rank and step < destinations:
                    length = lengths[step]
                    expected[source * cell : source * cell + length] = [
                        10 * source + number + 1
                    ] * length
            assert inbox == expected, number
        wrong = result["wrong"]
        assert "template 2: expected 0 to 1" in wrong["template"]
        assert "count 3: expected 1;" in wrong["count"]
        most = 15 * (count - 1)
        assert f"list {2**32 - 1}: expected 0 to {most}" in wrong["list"]
        assert "an empty one" in wrong["[[]]"]
        assert "this rank" in wrong[f"[[({rank}, 0, 0)]]"]
        assert f"expected 0 to {count - 1}" in wrong[f"[[({count}, 0, 0)]]"]
        other = (rank + 1) % count
        assert "expected (rank, source_offset, offset)" in wrong[f"[[({other}, 0)]]"]
        assert "a rank twice" in wrong["twice"]
