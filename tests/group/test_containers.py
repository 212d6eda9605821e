"""Ranks on one machine in separate namespaces, as containers have.

Each rank in one group has other namespaces, so its routes cover each pair of them.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT

#: More than ranks wait for each other, so that their errors are shown.
TIMEOUT_SECONDS = 100.0
PID = ["--pid", "--fork"]
AS_ROOT = ["--user", "--map-root-user"]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root: run the tests as root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(
    namespaces: list[list[str]], folder: Path, worker: str = "group.containers.everything"
) -> None:
    """A rank for each `unshare` option list; results are files in the folder."""
    port = free_port()
    command = [sys.executable, "-m", "tests.workers", worker, '{"length": 300000}']
    ranks, files = [], [folder / f"output-{rank}" for rank in range(len(namespaces))]
    for rank, options in enumerate(namespaces):
        enter = ["unshare", "--kill-child", *options, "--"] if options else []
        with files[rank].open("wb") as output:
            ranks.append(
                subprocess.Popen(
                    [*enter, *command],
                    cwd=ROOT,
                    env={key: value for key, value in os.environ.items() if key[:5] != "WEFT_"}
                    | {"RANK": str(rank), "WORLD_SIZE": str(len(namespaces))}
                    | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(namespaces))}
                    | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    | {"TEST_RESULTS": str(folder)}
                    # Across user namespaces a rank is not known to be this user's.
                    | {"WEFT_SECRET": "shared by all containers"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    late = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    for each in ranks:
        each.kill()
        each.wait()
    outputs = [file.read_text(encoding="utf-8") for file in files]
    assert not late, f"ranks {late} did not end; outputs: {outputs}"
    ended = zip(namespaces, ranks, outputs, strict=True)
    failed = [(options, text) for options, each, text in ended if each.returncode or text]
    assert not failed, "\n".join(f"{' '.join(options)}: {text}" for options, text in failed)


def test_ranks_of_one_network_namespace_reach_each_other_from_any_other_namespaces(
    tmp_path: Path,
) -> None:
    namespaces = [
        [],
        PID,
        [*PID, "--mount-proc"],
        [*PID, *AS_ROOT, "--mount", "--cgroup", "--uts"],
        ["--user", "--map-user=1000"],
        # By socket they belong to one kernel user, by number to none.
        ["--user"],
        # Another host by `WEFT_HOST_ID`.
        ["--ipc"],
    ]
    others = {5, 6}
    run(namespaces, tmp_path)
    for rank in range(len(namespaces)):
        result = json.loads((tmp_path / str(rank)).read_text("utf-8"))
        assert result["right"] == 2, f"rank {rank}: {result}"
        expected = ["tcp" if {rank, peer} & others else "shm" for peer in range(len(namespaces))]
        routes = [None if peer == rank else route for peer, route in enumerate(expected)]
        assert result["routes"] == routes, f"rank {rank}"
        pairs = {str(peer): expected[peer] for peer in range(rank)}
        assert result["pairs"] == pairs, f"rank {rank}"
