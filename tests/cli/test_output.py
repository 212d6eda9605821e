"""Commands whose standard output is full, closed, without a reader or not UTF-8."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from weft.cli import main
from weft.launch import environment

WEFT = [sys.executable, "-m", "weft"]


def weft(*arguments: str, redirect: str = "", **variables: str) -> Any:
    command = " ".join([*WEFT, *arguments, redirect])
    return subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        timeout=50,
        check=False,
        env=os.environ | variables,
    )


COMMANDS = [("doctor",), ("--version",), ("run", "-n", "2", "--", "echo", "word")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_an_error_of_one_line(command: tuple[str, ...]) -> None:
    result = weft(*command, redirect="> /dev/full")
    assert result.returncode == 1
    last = result.stderr.decode().splitlines()[-1]
    assert last.startswith("weft: standard output: No space left on device"), result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_standard_output_is_an_error(command: tuple[str, ...]) -> None:
    result = weft(*command, redirect=">&-")
    assert result.returncode == 1
    assert (
        result.stderr == b"weft: standard output: closed; redirect it to a file or to /dev/null\n"
    )


def test_a_reader_that_leaves_ends_the_command_as_sigpipe_does() -> None:
    command = f"{{ {' '.join(WEFT)} doctor; echo $? >&2; }} | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, timeout=50, check=False)
    assert result.stderr.splitlines()[-1] in (b"141", b"0")
    assert b"Traceback" not in result.stderr


def test_units_and_bars_have_spellings_in_ascii() -> None:
    program = (
        "from weft.cli.output import standard_output\n"
        "with standard_output(): print('p50 \\u00b5s \\u2588\\u2588\\u258f \\u4e2d')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        timeout=50,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert result.stdout == b"p50 us ##  ?\n"


@pytest.mark.parametrize("grace", ["inf", "1e300"])
def test_a_grace_may_be_without_limit(grace: str) -> None:
    script = "'test $WEFT_RANK = 0 && exit 3; sleep 0.2'"
    result = weft("run", "-n", "2", "--grace", grace, "--", "sh", "-c", script)
    assert (result.returncode, result.stdout) == (3, b"")
    assert b"Traceback" not in result.stderr


def test_json_of_a_command_that_cannot_start_names_the_error() -> None:
    result = weft("run", "-n", "2", "--json", "--", "/no/such/program")
    assert result.returncode == 127
    found = json.loads(result.stdout)
    assert found["ranks"] == []
    assert found["error"].startswith("cannot start /no/such/program: No such file")


@pytest.mark.parametrize("seed", ["-1", "x", str(2**64)])
def test_a_seed_is_a_natural_number(capsys: pytest.CaptureFixture[str], seed: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", "moe", f"--seed={seed}"])
    assert refused.value.code == 2
    assert "--seed" in capsys.readouterr().err


def test_a_port_is_found_without_proc_sys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PORT_RANGE", environment.PORT_RANGE / "missing")
    assert 10_000 <= environment.free_port() < environment.FIRST_EPHEMERAL
