"""The command `weft`: one module in this package for each subcommand.

A subcommand's module has `add_parser(subparsers)`, which declares its arguments and sets `run`, the
function that takes the parsed arguments and returns the exit status. What is slow to import is
imported there, so that every other subcommand starts quickly.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

import weft
from weft.cli import bench, demo, doctor, qdl, run, sim, topo, tune
from weft.cli.interrupts import Interrupted, ended_by_signals
from weft.cli.output import OutputError, standard_output

__all__ = ["main"]

SUBCOMMANDS = (run, demo, bench, qdl, tune, sim, topo, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `weft` with `arguments`, by default the process's own."""
    try:
        with ended_by_signals():
            return run_command(arguments)
    except Interrupted as error:
        say(str(error))
        return error.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run_command(arguments: Sequence[str] | None) -> int:
    """Parse the arguments and run the subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="weft", description=weft.__doc__)
    parser.add_argument("--version", action="version", version=f"weft {weft.__version__}")
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for module in SUBCOMMANDS:
        module.add_parser(subparsers)
    try:
        with standard_output():
            parsed = parser.parse_args(arguments)
            subcommand: Callable[[argparse.Namespace], int] = parsed.run
            return subcommand(parsed)
    except OutputError as error:
        return error.status
    except MemoryError as error:
        say(f"out of memory: {error or 'an allocation failed'}; choose smaller sizes")
        return 1
    except OSError as error:
        # A full disk, a folder without permission, no process left: for temporary files and ranks.
        place = f"{error.filename}: " if error.filename else ""
        say(f"{place}{error.strerror or error}")
        return 1


def say(message: str) -> None:
    """Print a message on standard error, if there is one."""
    if sys.stderr is not None:
        print(f"weft: {message}", file=sys.stderr)
