"""Front end and accelerator NUMA nodes: the choice, and threads that run there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.topology.test_topo import make_sysfs, write
from weft.errors import ConfigurationError
from weft.qdl import Accelerator, Tensor, accelerator, ask, description, placement
from weft.qdl.placement import cores_of, place

VECTOR = Tensor("vector", "float32", (3,))
CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two NUMA nodes, this one's cores on both, and a NIC on each."""
    for number in (0, 1):
        write(tmp_path / f"devices/system/node/node{number}/cpulist", f"{CORES[0]},{CORES[-1]}")
        device = tmp_path / f"devices/pci0000:0{number}/0000:0{number}:00.0"
        write(device / "numa_node", str(number))
        write(device / "class", "0x020000")
        write(device / "vendor", "0x15b3")
        write(device / f"net/eth{number}/speed", "100000")
    monkeypatch.setattr(description, "interface", lambda address: address.partition(":")[0])
    return tmp_path


def test_lists_of_cores_are_read() -> None:
    assert cores_of("0-3,8\n") == {0, 1, 2, 3, 8}
    assert cores_of("") == frozenset()


def test_the_node_is_that_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(20, 30)))
    root = make_sysfs(tmp_path, "eflops")
    near = place("auto", gpu="0000:1a:00.0", addresses=["127.0.0.1:0"], root=root)
    assert near is not None
    assert (near.numa_node, near.cores) == (0, frozenset(range(20, 24)))
    assert near.reason == "GPU 0000:1a:00.0"
    assert place("auto", gpu="0000:77:00.0", root=root) is None
    assert place(None, gpu="0000:1a:00.0", root=root) is None


def test_without_a_core_there_the_choice_is_open_and_a_demand_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {47})
    root = make_sysfs(tmp_path, "eflops")
    assert place("auto", gpu="0000:1a:00.0", root=root) is None
    with pytest.raises(ConfigurationError, match="placement=0: this process may run on no core"):
        place(0, root=root)
    chosen = place(1, root=root)
    assert chosen is not None
    assert chosen.cores == {47}


def test_the_node_is_that_of_the_interfaces_of_addresses(two_nodes: Path) -> None:
    def node_of(*addresses: str) -> int | None:
        found = place("auto", addresses=addresses, root=two_nodes)
        return None if found is None else found.numa_node

    assert node_of("eth0:5000") == 0
    assert node_of("eth1:5000", "eth1:5001") == 1
    # NICs on two nodes, and interfaces that are no devices.
    for addresses in (["eth0:5000", "eth1:5000"], ["lo:5000"], ["eth0:1", "lo:1"], []):
        assert node_of(*addresses) is None
    assert node_of("0.0.0.0:5000") is None
    write(two_nodes / "devices/pci0000:01/0000:01:00.0/numa_node", "0")
    assert node_of("0.0.0.0:5000") == node_of("[::]:5000") == 0


def test_a_machine_of_one_node_places_nothing_unless_a_number_demands_it(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/node/node0/cpulist", f"{CORES[0]}")
    assert place("auto", addresses=["0.0.0.0:0"], root=tmp_path) is None
    assert place(0, root=tmp_path) is not None
    with pytest.raises(ConfigurationError, match=r"placement=1: expected .* \(here: 0\)"):
        place(1, root=tmp_path)
    wrong: Any = "near"
    with pytest.raises(ConfigurationError, match="placement='near': expected a NUMA node"):
        place(wrong, root=tmp_path)


def cores_of_threads() -> dict[str, set[frozenset[int]]]:
    """This process's thread cores, by name."""
    found: dict[str, set[frozenset[int]]] = {}
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text(encoding="utf-8").strip()
            found.setdefault(name, set()).add(frozenset(os.sched_getaffinity(int(task.name))))
    return found


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("how", ["auto", 0])
def test_threads_run_on_the_cores_of_the_node(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    write(two_nodes / "devices/system/node/node0/cpulist", str(CORES[0]))
    monkeypatch.setattr(placement, "SYSFS", two_nodes)
    monkeypatch.setattr(description, "interface", lambda _: "eth0")
    models = []

    def model(batch: Any) -> Any:
        models.append(frozenset(os.sched_getaffinity(0)))
        return batch

    one, all_cores = frozenset(CORES[:1]), frozenset(CORES)
    with Accelerator(model, inputs=[VECTOR], outputs=[VECTOR], placement=how) as node:
        found = ask([node.address], [[np.zeros(3, np.float32)]] * 5)
        threads = cores_of_threads()
    assert found.answered == 5
    assert threads["weft-accelerator"[:15]] == {one}
    # An explicit choice does not take cores from a model on the CPU.
    assert set(models) == {all_cores if how == "auto" else one}
    assert os.sched_getaffinity(0) == all_cores


def test_a_refused_choice_of_cores_is_logged_and_a_refused_demand_an_error(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "SYSFS", two_nodes)
    monkeypatch.setattr(description, "interface", lambda _: "eth0")

    def refuse(*_: Any) -> None:
        raise PermissionError("refused")

    def node(how: Any) -> Accelerator:
        return Accelerator(lambda x: x, inputs=[VECTOR], outputs=[VECTOR], placement=how)

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with node("auto") as served:
        assert ask([served.address], [[np.zeros(3, np.float32)]] * 5).answered == 5
    assert "threads cannot run on cores" in caplog.text
    with pytest.raises(ConfigurationError, match="placement=0: the system refuses"):
        node(0)


def test_cores_are_set_once_for_each_thread_of_a_model(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "SYSFS", two_nodes)
    monkeypatch.setattr(description, "interface", lambda _: "eth0")
    threads = []

    def record(*_: Any) -> bool:
        threads.append(threading.get_native_id())
        return True

    monkeypatch.setattr(accelerator, "try_cores", record)
    with Accelerator(lambda x: x, inputs=[VECTOR], outputs=[VECTOR], max_batch=1) as served:
        assert ask([served.address], [[np.zeros(3, np.float32)]] * 5).answered == 5
    assert len(threads) == 1


def test_a_node_on_this_machine_serves_wherever_it_is_placed() -> None:
    numbers = json.loads(
        subprocess.run(
            [sys.executable, "-m", "weft", "topo", "--json"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )["numa_nodes"]
    choices: list[Any] = ["auto", None, *(number for number, _ in numbers[:1])]
    for choice in choices:
        with Accelerator(
            lambda batch: batch, inputs=[VECTOR], outputs=[VECTOR], placement=choice
        ) as node:
            found = ask([node.address], [[np.zeros(3, np.float32)]] * 5)
        assert found.answered == 5


@pytest.mark.parametrize("text", ["auto", "none", "0"])
def test_the_command_line_takes_a_placement(text: str) -> None:
    command = [sys.executable, "-m", "weft", "qdl", "accelerator", "--bytes", "64", "--json"]
    node = subprocess.Popen([*command, "--placement", text], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    address = json.loads(node.stdout.readline())["address"]
    found = ask([address], [[bytes(64)]])
    node.terminate()
    node.communicate(timeout=30)
    assert found.answered == 1
    refused = subprocess.run(
        [*command, "--placement", "near"], capture_output=True, text=True, check=False
    )
    assert "'near': expected a NUMA node, auto or none" in refused.stderr


def test_a_placement_of_a_test_without_a_network_is_refused() -> None:
    for part in (["frontend"], ["audit", "TEST01"]):
        command = [sys.executable, "-m", "weft", "qdl", *part, "--in-process", "--bytes", "64"]
        done = subprocess.run(
            [*command, "--scenario", "Offline", "--placement", "auto"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "--placement is of a front end: pass --node, or leave it out" in done.stderr


@pytest.mark.parametrize("text", ["", ",", "127.0.0.1:1,", "127.0.0.1:1, 127.0.0.1:1"])
def test_empty_and_repeated_addresses_of_a_node_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected host:port, or several distinct ones"):
        ask([text], [[b""]])


def test_queries_go_over_a_connection_to_each_address_of_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_SECRET", "a secret of at least sixteen bytes")
    sizes = []

    def model(batch: Any) -> Any:
        sizes.append(len(batch))
        return batch

    node = Accelerator(
        model,
        inputs=[VECTOR],
        outputs=[VECTOR],
        address="0.0.0.0:0",
        provider="tcp",
        max_batch=2,
        window=5,
    )
    port = node.address.rpartition(":")[2]
    with node:
        both = f"127.0.0.1:{port}, 127.0.0.2:{port}"
        found = ask([both], [[np.full(3, at, np.float32)] for at in range(40)], slots=1)
    for at, answer in enumerate(found.answers):
        assert answer is not None
        assert np.frombuffer(answer[0], np.float32).tolist() == [at] * 3
    # A connection has one query in flight.
    assert sizes == [2] * 20


def test_the_rate_of_a_node_is_that_of_all_interfaces_that_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(description, "interface", lambda address: address.partition(":")[0])
    rates = {"eth0": 1e9, "eth1": 2e9}
    monkeypatch.setattr(description, "interface_rate", rates.get)
    assert description.link_rate("eth0:1, eth1:1") == 3e9
    assert description.link_rate("eth0:1,eth0:2") == 1e9
    assert description.link_rate("eth0:1,eth7:1") is None


def test_the_interface_of_an_address_is_that_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert description.interfaces()["127.0.0.1"] == "lo"
    known = {"10.0.0.1": "eth0", "10.0.0.3": "eth1", "fd00::2": "eth2"}
    monkeypatch.setattr(description, "interfaces", lambda: known)
    for source, expected in [
        ("10.0.0.1", "eth0"),
        ("10.0.0.3", "eth1"),
        ("[fd00::2]", "eth2"),
        ("127.0.0.2", "lo"),
        ("10.0.0.9", None),
        ("eth0", None),
    ]:
        assert description.interface(f"192.0.2.9:1@{source}") == expected
    assert description.interface("127.0.0.1:1") == "lo"
