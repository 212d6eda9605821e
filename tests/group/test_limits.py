"""A rank's resources: group descriptors, local ports, and the errors when they run out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.ranks import run

#: Descriptors in a group with eight ranks on one host; gloo takes 11.
MOST_DESCRIPTORS = 18
#: Limit of an error that is documented to take 2 s, on a busy machine.
BUSY_SECONDS = 10.0


def test_a_group_of_one_host_takes_one_connection_for_each_peer() -> None:
    for found in run("group.limits.groups", 8, "default", count=2):
        assert found["total"] <= MOST_DESCRIPTORS, found


@pytest.mark.parametrize("descriptors", [12, 64])
def test_a_group_forms_or_names_the_limit_of_descriptors(descriptors: int) -> None:
    found = run(
        "group.limits.limited", 3, "default", quiet=False, descriptors=descriptors, execute=True
    )
    if descriptors == 64:
        assert found == [{"right": 2}] * 3
        return
    for each in found:
        # A rank that reaches no limit itself has the error of another one.
        assert each["error"].startswith(("LimitError: ", "GroupPoisonedError: ")), found
        assert f"{descriptors} file descriptors (RLIMIT_NOFILE)" in each["error"], found
        assert "ulimit -n" in each["error"], found
        assert each["after"] < BUSY_SECONDS, found
    assert any(each["error"].startswith("LimitError: ") for each in found), found


@pytest.mark.parametrize(("ranks", "descriptors", "groups"), [(8, 64, 1), (3, 500, 60)])
def test_every_rank_names_the_limit_that_one_has_reached(
    ranks: int, descriptors: int, groups: int
) -> None:
    found = run(
        "group.limits.until_full",
        ranks,
        "default",
        quiet=False,
        descriptors=descriptors,
        execute=True,
    )
    assert len({each["groups"] for each in found}) == 1
    for each in found:
        assert each["groups"] >= groups, each
        assert f"{descriptors} file descriptors (RLIMIT_NOFILE)" in each["error"], each
        assert "ulimit -n" in each["error"], each


@pytest.mark.parametrize("more", [64 << 10, 64 << 20])
def test_a_rank_without_address_space_names_the_limit(more: int) -> None:
    """Neither a thread fits into the first, nor the region into the second."""
    for found in run("group.limits.address_space", 2, "default", quiet=False, more=more):
        assert "of address space (RLIMIT_AS): raise `ulimit -v`" in found["error"], found


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")
def test_ranks_of_one_host_need_no_port_for_tcp(tmp_path: Path) -> None:
    """Ten ports: five connections to rank 0, and listeners on rank 0 and four others."""
    run_ranks = [sys.executable, "-m", "weft", "run", "-n", "6", "--", sys.executable]
    worker = ["-m", "tests.workers", "group.transfer.ring", '{"length": 1000, "rounds": 2}']
    script = (
        "ip link set lo up && echo 40001 40010 > /proc/sys/net/ipv4/ip_local_port_range"
        ' && exec "$@"'
    )
    ended = subprocess.run(
        ["unshare", "--net", "sh", "-c", script, "sh", *run_ranks, *worker],
        cwd=ROOT,
        env=os.environ | {"TEST_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
