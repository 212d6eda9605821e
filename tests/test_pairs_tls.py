"""Pairs and accelerator nodes with TLS, set by environment variables."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import weft
from weft.errors import ConfigurationError, SecretError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A folder with a self-signed certificate for 127.0.0.1, its own authority."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=node", "-keyout", "key.pem", "-out", "ca.pem"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    subprocess.run(
        [
            *("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=node", "-keyout", "node.key", "-out", "node.csr"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    subprocess.run(
        [
            *("openssl", "x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "key.pem"),
            *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "node.pem"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    return tmp_path


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


def test_a_certificate_without_its_key_is_refused_by_name(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TLS_CERT", str(certificate / "node.pem"))
    with pytest.raises(ConfigurationError, match="WEFT_TLS_KEY"):
        weft.listen()
    monkeypatch.setenv("WEFT_TLS_KEY", os.devnull)
    with pytest.raises(SecretError, match=os.devnull):
        weft.listen()
