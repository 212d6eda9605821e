"""Connections over loopback without a secret: another user's processes are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

import weft
from weft.errors import SecretError
from weft.qdl import Accelerator, Tensor

#: A user that is neither root nor this one.
OTHER = 65_534
SECRET = b"a secret of both users"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

#: Program in another user's process, which becomes that user after all imports.
PROGRAM = """
import os, sys, weft, weft.qdl
address, what = sys.argv[1:]
secret = os.environ.pop("TEST_SECRET", "").encode() or None
os.setgroups([])
os.setgid({other})
os.setuid({other})
try:
    if what == "connect":
        with weft.connect(address, secret=secret, timeout=20) as pair:
            print("paired", pair.rank)
    elif what == "join":
        weft.init(rank=1, world_size=2, address=address, timeout=20)
    elif what == "ask":
        weft.qdl.ask([address], [(b"12345678",)])
    elif what == "listen":
        listener = weft.listen(secret=secret)
        print(listener.address, flush=True)
        try:
            listener.accept(timeout=20)
        except weft.errors.WaitTimeoutError:
            pass
except weft.errors.WeftError as error:
    print(type(error).__name__, error)
"""


def start(address: str, what: str, secret: bytes = b"") -> subprocess.Popen[str]:
    """Start another user's process."""
    program = PROGRAM.format(other=OTHER)
    variables = {name: value for name, value in os.environ.items() if "SECRET" not in name}
    return subprocess.Popen(
        [sys.executable, "-c", program, address, what],
        env=variables | {"TEST_SECRET": secret.decode()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    """All that it printed."""
    try:
        return process.communicate(timeout=50)[0]
    finally:
        process.kill()


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEFT_SECRET", "WEFT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def refused(text: str) -> None:
    assert text.startswith("SecretError "), text
    assert "rank 0 at 127.0.0.1:" in text
    assert f"it is a process of user 0, and this one of user {OTHER}" in text
    assert "set WEFT_SECRET" in text


@pytest.mark.timeout(90)
def test_a_pair_is_formed_with_another_user_by_a_secret_only() -> None:
    ends: list[Any] = []

    def accept(listener: weft.Listener) -> None:
        ends.append(listener.accept(timeout=40))

    with weft.listen() as open_listener, weft.listen(secret=SECRET) as listener:
        strangers = start(open_listener.address, "connect")
        friends = start(listener.address, "connect", SECRET)
        threads = [
            threading.Thread(target=accept, args=(each,), daemon=True)
            for each in (open_listener, listener)
        ]
        for thread in threads:
            thread.start()
        refused(output(strangers))
        assert output(friends) == "paired 1\n"
        threads[1].join(40)
        # The listener continues, and takes its user's process.
        with weft.connect(open_listener.address) as pair:
            assert pair.rank == 1
        threads[0].join(40)
    assert len(ends) == 2


@pytest.mark.timeout(90)
def test_a_listener_of_another_user_is_not_trusted_either() -> None:
    process = start("", "listen")
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        with pytest.raises(SecretError, match=f"is a process of user {OTHER}; .*WEFT_SECRET"):
            weft.connect(address, timeout=20)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(90)
def test_groups_and_accelerator_nodes_refuse_other_users() -> None:
    tensor = Tensor("x", "uint8", (8,))
    with Accelerator(lambda x: x, inputs=[tensor], outputs=[tensor]) as node:
        process = start(node.address, "ask")
        with weft.listen() as listener:
            port = int(listener.address.rpartition(":")[2])
        address = f"127.0.0.1:{port}"
        joining = start(address, "join")
        joined: list[int] = []

        def join(rank: int) -> None:
            with weft.init(rank=rank, world_size=2, address=address, timeout=40) as group:
                group.barrier()
                joined.append(rank)

        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
        threads[0].start()
        refused(output(process))
        refused(output(joining))
        # Rank 0 still waits for its user's process.
        threads[1].start()
        for thread in threads:
            thread.join(40)
    assert sorted(joined) == [0, 1]
