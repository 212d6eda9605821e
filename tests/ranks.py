"""Groups of real processes: `weft run` with a function of `workers`, and the ranks' results."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fork_server

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
    fork: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Run `MODULE.FUNCTION` of `workers` on every rank; results in rank order.

    `options` are of `weft run`. `fork`: ranks that have imported torch, by `fork_server`.
    """
    variables, own = (TRANSPORTS | RDMA)[transport]
    options = [*(own if ranks > 1 else []), *options]
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "workers", worker, json.dumps(arguments)]
        directory = Path(__file__).parent
        environment = os.environ | variables | {"TEST_RESULTS": results} | (environment or {})
        if fork:
            assert not options, "options of `weft run` need executed ranks"
            process = fork_server.launch(command, ranks, directory, environment, timeout)
        else:
            process = subprocess.run(
                [
                    *(sys.executable, "-m", "weft", "run", "-n", str(ranks), *options),
                    *("--grace", "5", "--", *command),
                ],
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        message = process.stdout + process.stderr
        assert process.returncode == 0, message
        if quiet:
            assert message == "", message
        files = [Path(results, str(rank)) for rank in range(ranks)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]
