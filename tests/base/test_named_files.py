"""Files that variables and options name: regular ones, read up to a limit and without a wait."""

import os
from pathlib import Path

import pytest

import weft
from weft.base import files
from weft.cli import main
from weft.collectives import tuning
from weft.errors import SecretError
from weft.topology import placement


@pytest.fixture(params=["fifo", "device", "folder", "endless"])
def strange(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A pipe without a writer, an endless device or file, or a folder: none is to be read."""
    if request.param == "fifo":
        os.mkfifo(tmp_path / "fifo")
        return tmp_path / "fifo"
    if request.param == "endless":
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(1 << 40)
        return tmp_path / "sparse"
    return Path("/dev/zero") if request.param == "device" else tmp_path


@pytest.mark.parametrize("name", ["WEFT_SECRET_FILE", "WEFT_TLS_CA"])
def test_a_listener_reads_regular_files_only(
    name: str, strange: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(strange))
    with pytest.raises(SecretError, match=f"{strange}: it .*check.*{name}"):
        weft.listen()


def test_files_of_the_library_are_regular_and_bounded(
    strange: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="expected"):
        files.read_bytes(strange)
    monkeypatch.setenv("WEFT_TUNING", str(strange))
    assert tuning.source() is None
    assert "WEFT_TUNING" in caplog.text
    # The native module refuses it by name, at all ranks.
    assert placement.network_source(str(strange)) == (str(strange), str(strange))


@pytest.mark.parametrize(
    "command",
    [
        ["topo", "bigraph", "--switches", "4", "--endpoints", "2", "--hosts"],
        ["topo", "--xml"],
        ["topo", "network"],
        ["sim", "run"],
        ["sim", "allreduce", "--ranks", "2", "--topology"],
    ],
    ids=" ".join,
)
def test_files_of_commands_are_regular_and_bounded(
    command: list[str], strange: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([*command, str(strange)])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    assert status != 0
    assert str(strange) in capsys.readouterr().err
