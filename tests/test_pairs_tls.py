"""Pairs and accelerator nodes with TLS, set by environment variables."""

import os
import shutil
import threading
from pathlib import Path

import pytest

import weft
from weft.errors import ConfigurationError, SecretError
from workers.pairs import End

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
