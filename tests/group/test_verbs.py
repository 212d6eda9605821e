"""The provider verbs between real processes, on hosts with an active RDMA port."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import ranks
from weft import _native, errors
from weft.diagnosis import verbs as diagnosis

REPORT = diagnosis.report()


def obstacle() -> str | None:
    """Reason that this host cannot use the provider; `None` if it can."""
    try:
        _native.check_providers(["verbs"])
    except errors.ProviderError as error:
        return str(error)
    return None


OBSTACLE = obstacle()
active = pytest.mark.skipif(OBSTACLE is not None, reason=f"needs an RDMA port: {OBSTACLE}")


def weft(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@active
@pytest.mark.parametrize("length", [256, 1 << 20])
def test_what_is_written_arrives_before_it_is_counted(length: int) -> None:
    for rank, result in enumerate(
        ranks.run("group.transfer.ring", 3, "verbs", length=length, rounds=9)
    ):
        assert result["right"] == 9
        assert [route for route in result["routes"] if route] == ["verbs", "verbs"]
        assert result["routes"][rank] is None
        assert all(each["errors"] == 0 for each in result["statistics"])


@active
def test_waits_barriers_and_calls_that_time_out() -> None:
    result, *_ = ranks.run("group.transfer.signals", 3, "verbs")
    assert result["counts"] == [1, 1]
    assert [each[0] for each in result["missing"]] == [2]


@active
def test_a_group_that_is_poisoned_ends_everywhere() -> None:
    for result in ranks.run("group.transfer.poisoned", 3, "verbs"):
        assert result["error"] == "GroupPoisonedError"


@active
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "transfer", "--sizes=8,64K,1M", "--rounds=5"),
        ("bench", "moe", "--ranks=3", "--tokens=8", "--hidden=16", "--rounds=3"),
        ("demo", "--ranks=2", "--passes=1"),
    ],
)
def test_records_name_the_library_and_the_nics(arguments: tuple[str, ...], tmp_path: Any) -> None:
    more = (f"--output={tmp_path}",) if arguments[0] == "demo" else ()
    result = weft("-m", "weft", *arguments, *more, "--provider=verbs", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    details = found["provider_details"]["verbs"]
    assert details["library"] == REPORT["library"]
    usable = {port["name"] for port in REPORT["ports"] if port["unusable"] is None}
    assert set(details["nics"].split(",")) <= usable
    assert "verbs" in (found.get("route") or found["routes"])


INIT = (
    "import weft\n"
    "try: weft.init(rank=0, world_size=2, timeout=90, providers=['verbs'])\n"
    "except weft.errors.ProviderError as error: print(error)"
)
FAULTS: list[Any] = [
    (
        {"WEFT_LIBIBVERBS": "/absent/libibverbs.so.1"},
        "name a file of libibverbs, or unset WEFT_LIBIBVERBS",
    ),
    ({"WEFT_VERBS_ACK_TIMEOUT": "99"}, "WEFT_VERBS_ACK_TIMEOUT=99: expected 0 to 31"),
    ({"WEFT_VERBS_SERVICE_LEVEL": "high"}, "WEFT_VERBS_SERVICE_LEVEL=high: expected 0 to 15"),
    ({"WEFT_VERBS_GID_INDEX": "256"}, "WEFT_VERBS_GID_INDEX=256: expected 0 to 255"),
    (
        {"WEFT_VERBS_ON_DEMAND_PAGING": "yes"},
        "WEFT_VERBS_ON_DEMAND_PAGING=yes: expected never, auto or always",
    ),
    ({"WEFT_VERBS_TRAFFIC_CLASS": "-1"}, "WEFT_VERBS_TRAFFIC_CLASS=-1: expected 0 to 255"),
    pytest.param(
        {},
        "this host has no RDMA device; `rdma link` of iproute2 lists them",
        marks=pytest.mark.skipif(
            REPORT["error"] is not None or bool(REPORT["ports"]),
            reason=f"needs libibverbs without a device: {REPORT['error'] or 'there are some'}",
        ),
        id="no-device",
    ),
    pytest.param(
        {"WEFT_VERBS_DEVICES": "gold0"},
        "name one of these in WEFT_VERBS_DEVICES",
        marks=active,
        id="unknown-device",
    ),
]


@pytest.mark.parametrize(("environment", "message"), FAULTS)
def test_what_is_missing_is_named_before_ranks_are_waited_for(
    environment: dict[str, str], message: str
) -> None:
    result = weft("-c", INIT, **environment)
    assert result.stdout.startswith("the verbs provider cannot be used here: "), result.stderr
    assert message in result.stdout


@pytest.mark.parametrize("command", [("bench", "transfer"), ("bench", "moe"), ("demo",)])
def test_what_is_missing_is_named_before_any_work(command: tuple[str, ...]) -> None:
    result = weft("-m", "weft", *command, "--provider=verbs", WEFT_VERBS_ACK_TIMEOUT="99")
    assert result.returncode == 1
    assert result.stdout == ""
    start = f"weft {' '.join(command)}: the verbs provider cannot be used here: "
    assert result.stderr == f"{start}WEFT_VERBS_ACK_TIMEOUT=99: expected 0 to 31\n"
