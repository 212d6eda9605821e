"""Runs a module as local ranks, and collects their results.

The module's `main(directory)` reads its task from the directory; rank 0 leaves the results there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft import _native, launch
from weft.base.environment import providers as named_providers
from weft.base.environment import text
from weft.base.errors import WeftError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weft.group.communicator import Communicator

__all__ = [
    "GroupError",
    "check_provider",
    "deliver",
    "named_routes",
    "run_group",
    "run_in_launched_group",
    "task_directory",
    "under_launcher",
    "worker",
]

TASK: Final = "task.json"
RESULTS: Final = "results.json"
#: Variables with a process's rank: from `weft run`, torchrun, Open MPI, Slurm.
RANK_VARIABLES: Final = ("WEFT_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# Each rank is one among many on this machine: numeric libraries are not to fill all cores.
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class GroupError(Exception):
    """The ranks failed, with errors on stderr."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


def check_provider(provider: str | None) -> None:
    """Raise unless the ranks can use the providers on this machine: before any work, and once.

    Raises:
        ProviderError: if a provider cannot be used here.
        ConfigurationError: if WEFT_PROVIDERS names an unknown one.
    """
    named = named_providers() if provider is None else provider.split(",")
    _native.check_providers([name.strip() for name in named or () if name.strip()])


def named_routes(routes: list[str], details: dict[str, dict[str, str]]) -> str:
    """Route providers as text: "ofi (tcp;ofi_rxm of libfabric 1.17)"."""
    below = {
        name: f"{name} ({each['provider']} of libfabric {each['libfabric']})"
        for name, each in details.items()
    }
    return ", ".join(below.get(route, route) for route in routes)


@contextmanager
def task_directory(task: dict[str, Any]) -> Iterator[Path]:
    """A temporary directory that holds the task."""
    with tempfile.TemporaryDirectory(prefix="weft-") as name:
        directory = Path(name)
        (directory / TASK).write_text(json.dumps(task), encoding="utf-8")
        yield directory


def run_in_launched_group(
    work: Callable[[Path, dict[str, Any]], None], directory: Path, provider: str | None
) -> list[Any] | None:
    """Run as one of the ranks that a launcher started; all results on rank 0, else None."""
    if provider is not None:
        os.environ["WEFT_PROVIDERS"] = provider
    work(directory, json.loads((directory / TASK).read_text(encoding="utf-8")))
    results = directory / RESULTS
    return json.loads(results.read_text(encoding="utf-8")) if results.exists() else None


def under_launcher() -> bool:
    """True if a launcher has given this process a rank."""
    return any(text(name) for name in RANK_VARIABLES)


def run_group(
    module: str,
    ranks: int,
    directory: Path,
    provider: str | None,
    variables: dict[str, str] | None = None,
) -> list[Any]:
    """Run `python -m module directory` as local ranks with more variables; results by rank.

    A signal that ends the ranks also reaches this process, once they have ended.

    Raises:
        GroupError: if a rank failed, or this machine cannot have as many.
    """
    environment = ENVIRONMENT | ({} if provider is None else {"WEFT_PROVIDERS": provider})
    environment |= variables or {}
    command = [sys.executable, "-m", module, os.fspath(directory)]
    outcome = launch_ranks(command, ranks, environment, launch.GRACE_SECONDS)
    if outcome.first_failure is not None:
        raise GroupError(str(outcome.first_failure), outcome.status)
    results: list[Any] = json.loads((directory / RESULTS).read_text(encoding="utf-8"))
    return results


def launch_ranks(
    command: list[str], ranks: int, environment: dict[str, str], grace_seconds: float
) -> launch.Outcome:
    """Run a command from this package as local ranks.

    Raises:
        GroupError: if this machine cannot have as many.
    """
    try:
        outcome = launch.launch(
            launch.LaunchConfig(
                command,
                ranks,
                environment=environment,
                prefix=False,
                grace_seconds=grace_seconds,
                # Ctrl-C would end ranks that still import modules with tracebacks.
                ended_by=signal.SIGTERM,
            )
        )
    except ValueError as error:
        raise GroupError(f"--ranks: {error}", 2) from None
    except launch.LaunchError as error:
        raise GroupError(str(error), error.status) from None
    if outcome.signal is not None:
        signal.raise_signal(outcome.signal)
    return outcome


def worker(work: Callable[[Path, dict[str, Any]], None]) -> int:
    """Main function for a worker's module: runs the task, and prints errors in one line."""
    directory = Path(sys.argv[1])
    try:
        work(directory, json.loads((directory / TASK).read_text(encoding="utf-8")))
    except WeftError as error:
        rank = text("WEFT_RANK") or "?"
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        rank = text("WEFT_RANK") or "?"
        reason = str(error) or "an allocation failed"
        print(f"rank {rank}: out of memory: {reason}; choose smaller sizes", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def deliver(communicator: Communicator, directory: Path, result: Any) -> None:
    """Bring every rank's result to rank 0, which leaves them in the directory."""
    gathered = communicator.all_gather(json.dumps(result).encode())
    if communicator.rank == 0:
        results = [json.loads(payload) for payload in gathered]
        (directory / RESULTS).write_text(json.dumps(results), encoding="utf-8")
