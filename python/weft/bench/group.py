"""Runs a module as local ranks, and brings back what they found.

The module's `main(directory)` reads its task from the directory; rank 0 leaves the results there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft import _native, launch
from weft.errors import WeftError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weft.communicator import Communicator

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
#: Variables with a process's rank: of `weft run`, torchrun, Open MPI, Slurm.
RANK_VARIABLES: Final = ("WEFT_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# Each rank is one of many on this machine: its numeric libraries are not to fill all cores.
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class GroupError(Exception):
    """The ranks failed; their errors are on stderr."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


def check_provider(provider: str | None) -> None:
    """Raise unless the ranks can use their providers on this machine: before any work, and once.

    Raises:
        ProviderError: if a provider cannot be used here.
        ConfigurationError: if WEFT_PROVIDERS names an unknown one.
    """
    named = provider or os.environ.get("WEFT_PROVIDERS", "")
    _native.check_providers([name.strip() for name in named.split(",") if name.strip()])


def named_routes(routes: list[str], details: dict[str, dict[str, str]]) -> str:
    """Providers of routes as text: "ofi (tcp;ofi_rxm of libfabric 1.17)"."""
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
    """Be one rank of the group that a launcher started; each rank's result on rank 0, else None."""
    if provider is not None:
        os.environ["WEFT_PROVIDERS"] = provider
    work(directory, json.loads((directory / TASK).read_text(encoding="utf-8")))
    results = directory / RESULTS
    return json.loads(results.read_text(encoding="utf-8")) if results.exists() else None


def under_launcher() -> bool:
    """True if a launcher has given this process a rank."""
    return any(os.environ.get(name, "").strip() for name in RANK_VARIABLES)


def run_group(module: str, ranks: int, directory: Path, provider: str | None) -> list[Any]:
    """Run `python -m module directory` as local ranks; results by rank.

    Raises:
        GroupError: if a rank failed.
    """
    environment = ENVIRONMENT | ({} if provider is None else {"WEFT_PROVIDERS": provider})
    command = [sys.executable, "-m", module, os.fspath(directory)]
    config = launch.LaunchConfig(command, ranks, environment=environment, prefix=False)
    outcome = launch.launch(config)
    if outcome.first_failure is not None:
        raise GroupError(str(outcome.first_failure), outcome.status)
    results: list[Any] = json.loads((directory / RESULTS).read_text(encoding="utf-8"))
    return results


def worker(work: Callable[[Path, dict[str, Any]], None]) -> int:
    """Main function of a worker's module: its task, and errors in one line."""
    directory = Path(sys.argv[1])
    try:
        work(directory, json.loads((directory / TASK).read_text(encoding="utf-8")))
    except WeftError as error:
        rank = os.environ.get("WEFT_RANK", "?")
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
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
