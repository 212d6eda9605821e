"""Real process groups: `weft run` with a `workers` function, and the ranks' results."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import ROOT, fork_server, stacks

#: Transports by name: variables for all ranks, options of `weft run`.
TRANSPORTS: dict[str, tuple[dict[str, str], list[str]]] = {
    "shm": ({"WEFT_PROVIDERS": "shm"}, []),
    "tcp": ({"WEFT_PROVIDERS": "tcp"}, []),
    "copy": ({"WEFT_PROVIDERS": "copy-twin"}, []),
    "mixed": ({}, ["--pretend-hosts", "2"]),
    "default": ({}, []),
}
#: Transports that need a library and, for verbs, a NIC.
RDMA: dict[str, tuple[dict[str, str], list[str]]] = {
    name: ({"WEFT_PROVIDERS": name}, []) for name in ("ofi", "verbs")
}


def run(
    worker: str,
    ranks: int = 4,
    transport: str = "shm",
    *,
    timeout: float = 100,
    environment: dict[str, str] | None = None,
    quiet: bool = True,
    options: Sequence[str] = (),
    execute: bool = False,
    with_torch: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Run `FOLDER.MODULE.FUNCTION` in `workers` on every rank; results in rank order.

    Ranks are forked by `fork_server`, which saves two thirds of their start, unless there are
    `options` for `weft run`, or with `execute`. `with_torch`: the server has imported torch.
    """
    variables, own = (TRANSPORTS | RDMA)[transport]
    options = [*(own if ranks > 1 else []), *options]
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "tests.workers", worker, json.dumps(arguments)]
        directory = ROOT
        environment = os.environ | variables | {"TEST_RESULTS": results} | (environment or {})
        if options or execute:
            launched = [
                *(sys.executable, "-m", "weft", "run", "-n", str(ranks), *options),
                *("--grace", "5", "--", *command),
            ]
            process = completed(launched, directory, environment, timeout)
        else:
            process = fork_server.launch(
                command, ranks, directory, environment, timeout, with_torch=with_torch
            )
        message = process.stdout + process.stderr
        assert process.returncode == 0, message
        if quiet:
            assert message == "", message
        files = [Path(results, str(rank)) for rank in range(ranks)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def completed(
    command: list[str], directory: Path, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a rank command; if it does not end in time, the error has the ranks' stacks."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as late:
        late.add_note(stacks.shared(environment["TEST_RESULTS"]))
        raise
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
