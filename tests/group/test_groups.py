"""Communicators over groups in torch.distributed, and over subsets of another's ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from tests import ROOT, ranks
from weft import _native
from weft.errors import AddressError, ListenError, RendezvousError
from weft.group import rendezvous

SECONDS = 100


def alone(
    worker: str, count: int, folder: Path, *, killed: int | None = None, **arguments: Any
) -> list[Any]:
    """Run `group.groups.WORKER` on ranks without a launcher; their results, `None` if killed."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WEFT_", "MASTER_", "LOCAL_", "WORLD_"))
    }
    command = [sys.executable, "-m", "tests.workers", f"group.groups.{worker}"]
    processes = []
    for rank in range(count):
        given = {"rank": rank, "ranks": count} | arguments
        processes.append(
            subprocess.Popen(
                [*command, json.dumps(given)],
                cwd=ROOT,
                # The result file name; the group ignores it.
                env=clean | {"TEST_RESULTS": str(folder), "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=SECONDS)
            assert (process.returncode == 0) == (rank != killed), output
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    files = [folder / str(rank) for rank in range(count)]
    return [json.loads(each.read_text("utf-8")) if each.exists() else None for each in files]


@pytest.mark.torch
@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_group_of_torch_becomes_a_communicator(tmp_path: Path, hosts: int) -> None:
    reports = alone("over_torch", 4, tmp_path, rendezvous=str(tmp_path / "store"), hosts=hosts)
    for rank, each in enumerate(reports):
        before = (rank - 1) % 4
        assert each["whole"] == [rank, 4, before, before]
        assert len(set(each["hosts"])) == hosts
        if rank % 2:
            assert each["odd"] == [rank // 2, 2, 1 - rank // 2, 1 - rank // 2]
            assert not each["refused"]
        else:
            assert each["odd"] is None
            assert "no member of the process group" in each["refused"]
    if hosts == 2:
        assert reports[0]["routes"] == [None, "tcp", "shm", "tcp"]


@pytest.mark.torch
@pytest.mark.timeout(SECONDS + 10)
def test_a_rank_that_cannot_join_is_named_at_all_others_at_once(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    first, second, third = alone("refused_by_one", 3, tmp_path, rendezvous=store)
    assert second[0] == "ConfigurationError"
    assert "pigeon" in second[2]
    for name, rank, text, seconds in (first, third):
        assert (name, rank) == ("RendezvousError", 1)
        assert "rank 1 cannot join: ConfigurationError" in text
        assert "pigeon" in text
        assert seconds < 20


@pytest.mark.torch
def test_without_a_process_group_the_error_names_the_remedy() -> None:
    pytest.importorskip("torch")
    with pytest.raises(weft.errors.ConfigurationError, match="init_process_group"):
        weft.Communicator.from_group()


@pytest.mark.parametrize("transport", ["shm", "tcp", "mixed"])
def test_ranks_split_into_groups(transport: str) -> None:
    reports = ranks.run("group.groups.splits", transport=transport)
    for rank, each in enumerate(reports):
        here = rank % 2
        assert each["half"] == [here, 2, 1 - here, 1 - here]
        assert each["turned"] == {3: [0, 2, 1, 1], 0: [1, 2, 0, 0]}.get(rank)
        assert each["one"] == ([0, 1, 0, 0] if rank == 2 else None)
        assert each["of a half"] == [1 - here, 2, here, here]
        before = (rank - 1) % 4
        assert each["whole"] == each["after the whole was closed"] == [rank, 4, before, before]


def test_lists_that_contradict_each_other_are_refused_on_every_rank() -> None:
    for rank, (contradiction, twice, none, beyond, after) in enumerate(
        ranks.run("group.groups.refusals")
    ):
        assert contradiction[0] == "ConfigurationMismatchError"
        assert "rank 0 passed ranks=[0, 2], rank 2 passed ranks=[0, 1]" in contradiction[1]
        assert twice[0] == none[0] == "ConfigurationError"
        assert beyond == ["UnknownError", "ranks=[0, 4]: rank 4 is none of 0 to 3"]
        assert after == [rank, 4, (rank - 1) % 4, (rank - 1) % 4]


def test_an_all_to_all_on_each_half() -> None:
    reports = ranks.run("group.groups.moe_in_halves")
    assert reports == [[4.0 * (1 + rank), rank // 2, 2] for rank in range(4)]


def test_a_loss_names_the_rank_of_the_group_that_lost_it(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    reports = alone("loss", 4, tmp_path, killed=3, address=address)
    assert reports == [
        [3, [0, 2, 1, 1]],
        [3, ["lost", 1]],
        [3, [1, 2, 0, 0]],
        None,
    ]


def test_rank_0_listens_where_it_is_told_to() -> None:
    listener, names = rendezvous.listen("127.0.0.1", alone=False)
    with listener:
        port = listener.getsockname()[1]
        assert names == ["127.0.0.1"]
        assert rendezvous.reaches("127.0.0.1", port)
        with pytest.raises(ListenError, match=f"127.0.0.1, port {port}"):
            rendezvous.listen(f"127.0.0.1:{port}", alone=False)
    assert not rendezvous.reaches("127.0.0.1", port)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("alpha", ("alpha", 0)),
        ("alpha:7", ("alpha", 7)),
        ("10.0.0.1:7", ("10.0.0.1", 7)),
        ("fd00::2", ("fd00::2", 0)),
        ("[fd00::2]", ("fd00::2", 0)),
        ("[fd00::2]:7", ("fd00::2", 7)),
    ],
)
def test_addresses_of_rank_0(address: str, parts: tuple[str, int]) -> None:
    assert rendezvous.host_and_port(address) == parts


@pytest.mark.parametrize("address", ["", ":7", "alpha:", "alpha:x", "alpha:65536"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="expected HOST"):
        rendezvous.host_and_port(address)


def test_the_first_address_that_all_reach_is_taken() -> None:
    names = ["10.0.0.1", "10.0.0.2", "127.0.0.1"]
    reached = [[True, True, False], [False, True, True]]
    assert rendezvous.common_name(names, reached, [4, 5, 6]) == "10.0.0.2"
    assert rendezvous.common_name(names, [], [4]) == "10.0.0.1"
    with pytest.raises(RendezvousError, match=r"rank 2 \(rank 6 of those that met\)") as raised:
        rendezvous.common_name(names[:1], [[True], [False]], [4, 5, 6])
    assert raised.value.rank == 2
    assert "pass address=" in str(raised.value)
    # init_process_group callers have no address to pass.
    with pytest.raises(RendezvousError, match="set WEFT_ADVERTISE") as raised:
        rendezvous.common_name(names[:1], [[False]], [0, 1], takes_address=False)
    assert "address=" not in str(raised.value)


def test_rank_0_is_told_which_address_to_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_BIND", "2001:db8::7")
    with pytest.raises(ListenError, match=r"2001:db8::7, port 0: .*; set WEFT_BIND to an address"):
        rendezvous.listen(None, alone=True)
    with pytest.raises(ListenError, match="; pass address= of this host"):
        rendezvous.listen("2001:db8::7", alone=True)


def test_the_key_of_the_environment_depends_on_secret_and_purpose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WEFT_SECRET", "WEFT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert _native.environment_key("a") is None
    file = tmp_path / "secret"
    file.write_text("apple\n", encoding="ascii")
    monkeypatch.setenv("WEFT_SECRET_FILE", str(file))
    key = _native.environment_key("a")
    assert key is not None
    assert _native.environment_key("b") != key
    monkeypatch.setenv("WEFT_SECRET", "apple")
    assert _native.environment_key("a") == key
    monkeypatch.setenv("WEFT_SECRET", "pear")
    assert _native.environment_key("a") not in (key, None)
