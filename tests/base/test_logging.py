"""The native module's log records, and environment variables that Weft does not read."""

import logging
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import weft
from tests import ROOT
from weft.base import environment as _environment
from weft.base import logging as _logging

#: A one-rank group, which logs at every level.
PROGRAM = "import weft\nwith weft.init(rank=0, world_size=1): pass\n"


def stderr_of(program: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name[:5] != "WEFT_"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
        env=environment | variables,
    )
    assert result.stdout == ""
    return result.stderr


def test_a_warning_of_the_native_module_reaches_pythons_logging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with weft.listen() as listener:
        host, _, port = listener.address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(4096))
            deadline = time.monotonic() + 20
            while not caplog.records and time.monotonic() < deadline:
                assert listener.try_accept() is None
                time.sleep(0.01)
    (record, *_) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name.startswith("weft.")
    assert record.filename.endswith(".rs")


def test_a_handler_may_form_a_pair() -> None:
    formed: list[int] = []

    class Pairing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with weft.listen() as listener, ThreadPoolExecutor(1) as pool:
                dialled = pool.submit(weft.connect, listener.address)
                with listener.accept() as here, dialled.result() as there:
                    formed.append(here.world_size + there.rank)

    handler = Pairing()
    logger = logging.getLogger("weft")
    logger.addHandler(handler)
    try:
        with weft.listen() as listener:
            host, _, port = listener.address.rpartition(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(4096))
                deadline = time.monotonic() + 20
                while not formed and time.monotonic() < deadline:
                    assert listener.try_accept() is None
                    time.sleep(0.01)
    finally:
        logger.removeHandler(handler)
    assert formed == [3]


def test_a_group_without_a_warning_prints_nothing() -> None:
    assert stderr_of(PROGRAM) == ""


def test_weft_log_prints_what_it_requests_without_a_handler_of_the_program() -> None:
    lines = stderr_of(PROGRAM, WEFT_LOG="info").splitlines()
    assert any("INFO weft.fabric.communicator: " in line for line in lines), lines
    program = "import logging\nlogging.basicConfig(format='%(levelname)s|%(name)s')\n" + PROGRAM
    lines = stderr_of(program, WEFT_LOG="info").splitlines()
    assert "INFO|weft.fabric.communicator" in lines
    assert all("|" in line for line in lines)


def test_a_filter_that_cannot_be_read_is_a_warning() -> None:
    assert 'WEFT_LOG "weft=loud"' in stderr_of(PROGRAM, WEFT_LOG="weft=loud")


def test_loggers_are_named_by_modules() -> None:
    assert _logging.logger_name("weft_fabric::providers::tcp") == "weft.fabric.providers.tcp"


def test_a_variable_that_is_not_read_is_a_warning_with_the_closest_name() -> None:
    said = stderr_of(PROGRAM, WEFT_PROVIDER="tcp", WEFT_TEST_OWN="1", WEFT_TRALALA="1")
    assert said.splitlines() == [
        "environment variable WEFT_PROVIDER: not read by Weft; did you mean WEFT_PROVIDERS?",
        "environment variable WEFT_TRALALA: not read by Weft; see docs/environment.md",
    ]


def test_the_list_of_variables_is_the_documented_one() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`WEFT_[^|]*) \|", page, re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"WEFT_[A-Z_]+", row)]
    assert sorted(documented) == sorted(_environment.VARIABLES)
