"""The provider ofi between real processes, over two libfabric providers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests import ranks
from tests.group.test_loss import BUSY_SECONDS, RANKS, SOON_SECONDS, group, receive
from tests.moe.test_moe import CASES
from tests.workers.group import ofi
from weft.diagnosis import ofi as diagnosis

#: Limit until Ctrl-C ends a wait, on a busy machine.
PROMPT_SECONDS = 20.0
PROVIDERS = ["tcp;ofi_rxm", "shm"]
REPORT = diagnosis.report()


def over(provider: str) -> Any:
    """A provider's parameter, skipped if libfabric does not offer it."""
    found = REPORT["providers"][provider]
    why = f"needs libfabric with {provider} (Debian: libfabric1): {found['error']}"
    return pytest.param(provider, marks=pytest.mark.skipif(not found["offers"], reason=why))


both = pytest.mark.parametrize("provider", [over(provider) for provider in PROVIDERS])
tcp = pytest.mark.parametrize("provider", [over("tcp;ofi_rxm")])


def run(worker: str, count: int, provider: str, **arguments: Any) -> list[Any]:
    environment = {"WEFT_OFI_PROVIDER": provider}
    return ranks.run(worker, count, "ofi", environment=environment, **arguments)


@both
@pytest.mark.parametrize("length", [256, 1 << 20])
def test_what_is_written_arrives_before_it_is_counted(provider: str, length: int) -> None:
    for rank, result in enumerate(run("group.transfer.ring", 3, provider, length=length, rounds=9)):
        assert result["right"] == 9
        assert [route for route in result["routes"] if route] == ["ofi", "ofi"]
        assert result["routes"][rank] is None
        assert all(each["errors"] == 0 for each in result["statistics"])


@both
def test_ranks_name_the_provider_of_libfabric_and_its_version(provider: str) -> None:
    for result in run("group.ofi.details", 3, provider):
        assert result["routes"] == ["ofi", "ofi"]
        details = result["details"]["ofi"]
        assert details["provider"] == provider
        assert REPORT["version"] is not None
        assert details["libfabric"] == diagnosis.version(REPORT["version"])
        assert details["library"] == REPORT["library"]
        assert details["domains"]


@both
def test_waits_barriers_and_calls_that_time_out(provider: str) -> None:
    result, *_ = run("group.transfer.signals", 3, provider)
    assert result["counts"] == [1, 1]
    assert [each[0] for each in result["missing"]] == [2]


@both
def test_a_group_that_is_poisoned_ends_everywhere(provider: str) -> None:
    for result in run("group.transfer.poisoned", 3, provider):
        assert result["error"] == "GroupPoisonedError"
        assert "the sea is rough" in result["message"]


# libfabric's shm has spin locks in shared memory: a rank killed with a held lock blocks the others
# in libfabric forever.
@tcp
@pytest.mark.parametrize("reform", [False, True])
def test_a_killed_rank_is_named_by_all_others(provider: str, reform: bool) -> None:
    victim = random.randrange(RANKS)
    with group(ofi.survive, "ofi", (provider, reform)) as (processes, pipes):
        for pipe in pipes:
            receive(pipe)
        time.sleep(random.uniform(0, 0.05))
        killed_at = time.monotonic()
        processes[victim].kill()
        survivors = [rank for rank in range(RANKS) if rank != victim]
        results = [receive(pipes[rank]) for rank in survivors]
        for process in processes:
            process.join(SOON_SECONDS)
        exits = [process.exitcode for process in processes]
    for result in results:
        assert (result["error"], result["rank"]) == ("PeerLostError", victim), results
        assert result["at"] - killed_at < BUSY_SECONDS, results
        if reform:
            assert result["wrong"] == [None] * 3, results
    assert exits == [-signal.SIGKILL if rank == victim else 0 for rank in range(RANKS)]


@both
@pytest.mark.parametrize("wait", ["dispatch", "signal", "all_gather"])
def test_control_c_ends_a_wait(provider: str, wait: str) -> None:
    took, _ = run("group.process.interrupt", 2, provider, wait=wait)
    assert len(took) == 1, "no KeyboardInterrupt came"
    assert took[0] < PROMPT_SECONDS


@both
def test_a_fork_after_init_is_refused_and_the_parent_goes_on(provider: str) -> None:
    assert run("group.process.fork", 3, provider) == [{"reports": ["ForkError"] * 3}] * 3


@both
def test_dispatch_and_combine_equal_a_dense_reference(provider: str) -> None:
    assert run("moe.rounds.cases", 3, provider, cases=CASES, seed=1) == [[], [], []]


@tcp
def test_rounds_of_dispatch_and_combine_overlap_and_buffers_are_used_again(provider: str) -> None:
    assert run("moe.rounds.many_rounds", 3, provider, rounds=200, seed=3) == [[], [], []]
    assert run("moe.rounds.overlap", 3, provider, rounds=20) == [[], [], []]


@tcp
def test_ranks_with_different_providers_of_libfabric_are_told_both(provider: str) -> None:
    first, second = run("group.ofi.different", 2, provider)
    assert "this rank has ofi (tcp;ofi_rxm), the peer has ofi (shm)" in first
    assert "this rank has ofi (shm), the peer has ofi (tcp;ofi_rxm)" in second


def weft(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@tcp
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "transfer", "--sizes=8,64K", "--rounds=5"),
        ("bench", "moe", "--ranks=3", "--tokens=8", "--hidden=16", "--rounds=3"),
        ("demo", "--ranks=2", "--passes=1"),
    ],
)
def test_records_name_the_provider_of_libfabric(
    provider: str, arguments: tuple[str, ...], tmp_path: Any
) -> None:
    more = (f"--output={tmp_path}",) if arguments[0] == "demo" else ()
    command = ("-m", "weft", *arguments, *more, "--provider=ofi", "--json")
    result = weft(*command, WEFT_OFI_PROVIDER=provider)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    details = found["provider_details"]["ofi"]
    assert (details["provider"], details["library"]) == (provider, REPORT["library"])
    assert "ofi" in (found.get("route") or found["routes"])


INIT = (
    "import weft\n"
    "try: weft.init(rank=0, world_size=2, timeout=90, providers=['ofi'])\n"
    "except weft.errors.ProviderError as error: print(error)"
)
ABSENT = {"WEFT_LIBFABRIC": "/absent/libfabric.so.1"}
FAULTS: list[Any] = [
    (ABSENT, "name a file of libfabric, or unset WEFT_LIBFABRIC"),
    pytest.param(
        {"WEFT_OFI_PROVIDER": "efa"},
        "provider efa",
        marks=pytest.mark.skipif(
            REPORT["library"] is None or bool(REPORT["providers"]["efa"]["offers"]),
            reason="needs libfabric and no EFA",
        ),
    ),
    pytest.param(
        {"WEFT_OFI_PROVIDER": "gold"},
        "by provider gold; `weft doctor` lists its offers",
        marks=over("shm").marks,
    ),
    pytest.param(
        {"WEFT_OFI_PROVIDER": "tcp;ofi_rxm", "WEFT_OFI_DOMAINS": "gold0"},
        "name one of these in WEFT_OFI_DOMAINS",
        marks=over("tcp;ofi_rxm").marks,
    ),
]


@pytest.mark.parametrize(("environment", "message"), FAULTS)
def test_what_is_missing_is_named_before_ranks_are_waited_for(
    environment: dict[str, str], message: str
) -> None:
    result = weft("-c", INIT, **environment)
    assert result.stdout.startswith("the ofi provider cannot be used here: "), result.stderr
    assert message in result.stdout


@pytest.mark.parametrize("command", [("bench", "transfer"), ("bench", "moe"), ("demo",)])
@pytest.mark.parametrize(("environment", "message"), FAULTS)
def test_what_is_missing_is_named_before_any_work(
    command: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    result = weft("-m", "weft", *command, "--provider=ofi", **environment)
    assert result.returncode == 1
    assert result.stdout == ""
    start = f"weft {' '.join(command)}: the ofi provider cannot be used here: "
    assert result.stderr.startswith(start)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_provider_in_the_environment_is_refused() -> None:
    result = weft("-m", "weft", "bench", "transfer", WEFT_PROVIDERS="gold")
    assert (result.returncode, result.stdout) == (1, "")
    assert "WEFT_PROVIDERS is 'gold': " in result.stderr
    assert "shm, verbs, ofi, tcp" in result.stderr
