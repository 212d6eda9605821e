"""Pairs and accelerator nodes with TLS, set by environment variables."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import weft
from tests import ROOT
from tests.workers.group.pairs import End
from weft.errors import ConfigurationError, SecretError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def test_a_pair_forms_by_tls_and_an_end_without_it_is_refused(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TLS_CERT", str(certificate / "node.pem"))
    monkeypatch.setenv("WEFT_TLS_KEY", str(certificate / "node.key"))
    with weft.listen(providers=["tcp"]) as listener:
        formed: list[tuple[int, int]] = []

        def accept() -> None:
            with listener.accept(timeout=40) as pair:
                formed.append((pair.rank, pair.world_size))

        accepting = threading.Thread(target=accept)
        accepting.start()
        with pytest.raises(SecretError, match="WEFT_TLS_CA"):
            weft.connect(listener.address, providers=["tcp"], timeout=20)
        monkeypatch.setenv("WEFT_TLS_CA", str(certificate / "ca.pem"))
        with weft.connect(listener.address, providers=["tcp"], timeout=20) as pair:
            assert pair.rank == 1
            accepting.join(40)
        assert formed == [(0, 2)]


def test_payloads_have_tls_if_both_ends_ask_for_it(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TLS_CERT", str(certificate / "node.pem"))
    monkeypatch.setenv("WEFT_TLS_KEY", str(certificate / "node.key"))
    monkeypatch.setenv("WEFT_TLS_PAYLOADS", "1")
    with weft.listen(providers=["tcp"]) as listener:
        answered: list[int] = []

        def accept() -> None:
            with listener.accept(timeout=60) as pair:
                end = End(pair)
                for number in range(10):
                    end.answer()
                    answered.append(number)

        accepting = threading.Thread(target=accept)
        accepting.start()
        monkeypatch.setenv("WEFT_TLS_CA", str(certificate / "ca.pem"))
        monkeypatch.delenv("WEFT_TLS_PAYLOADS")
        with pytest.raises(SecretError, match="WEFT_TLS_PAYLOADS=1"):
            weft.connect(listener.address, providers=["tcp"], timeout=20)
        monkeypatch.setenv("WEFT_TLS_PAYLOADS", "1")
        with weft.connect(listener.address, providers=["tcp"], timeout=20) as pair:
            end = End(pair)
            for number in range(10):
                end.send(number)
                assert end.receive() == 2 * number
        accepting.join(60)
        assert answered == list(range(10))


@pytest.mark.parametrize(
    ("value", "message"), [("1", "WEFT_TLS_CERT and WEFT_TLS_KEY"), ("yes", "neither 0 nor 1")]
)
def test_tls_of_payloads_without_certificates_is_refused_by_name(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TLS_PAYLOADS", value)
    with pytest.raises(ConfigurationError, match=message):
        weft.listen()


def test_a_certificate_without_its_key_is_refused_by_name(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TLS_CERT", str(certificate / "node.pem"))
    with pytest.raises(ConfigurationError, match="WEFT_TLS_KEY"):
        weft.listen()
    monkeypatch.setenv("WEFT_TLS_KEY", os.devnull)
    with pytest.raises(SecretError, match=os.devnull):
        weft.listen()


def test_writes_to_an_end_that_was_killed_raise_no_signal(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "WEFT_TLS_CERT": "node.pem",
        "WEFT_TLS_KEY": "node.key",
        "WEFT_TLS_CA": "ca.pem",
    }.items():
        monkeypatch.setenv(name, str(certificate / value))
    monkeypatch.setenv("WEFT_TLS_PAYLOADS", "1")
    # Command line programs often restore the signal, which ends the process.
    code = (
        "import signal, sys, weft\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "with weft.connect(sys.argv[1], providers=['tcp']) as pair:\n"
        "    memory, counter = pair.alloc(64 << 20), pair.counter()\n"
        "    (theirs,) = pair.share([memory], [counter])[0]\n"
        "    page = weft.Page(memory, 0, theirs, 0, 64 << 20)\n"
        "    try:\n"
        "        request = pair.write(0, counter, 0, [page])\n"
        "        print('writing', flush=True)\n"
        "        request.wait()\n"
        "        counter.wait({0: 1})\n"
        "    except weft.WeftError as error:\n"
        "        print(type(error).__name__)\n"
    )
    listen = (
        "import time, weft\n"
        "with weft.listen(providers=['tcp']) as listener:\n"
        "    print(listener.address, flush=True)\n"
        "    with listener.accept() as pair:\n"
        "        pair.share([pair.alloc(64 << 20)], [pair.counter()])\n"
        "        time.sleep(60)\n"
    )
    folder = ROOT
    start = [sys.executable, "-c"]
    with subprocess.Popen([*start, listen], cwd=folder, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        address = node.stdout.readline().strip()
        command = [*start, code, address]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            time.sleep(0.2)
            node.kill()
            assert writer.communicate(timeout=60)[0] == "PeerLostError\n"
            assert writer.returncode == 0
