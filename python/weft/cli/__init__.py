"""The command `weft`: one module of this package for each subcommand.

A subcommand's module has `add_parser(subparsers)`, which declares its arguments and sets `run`, the
function that takes the parsed arguments and returns the exit status. What is slow to import is
imported there, so that every other subcommand starts quickly.
"""

import argparse
import signal
from collections.abc import Callable, Sequence

import weft
from weft.cli import bench, demo, doctor, qdl, run, sim, topo, tune
from weft.cli.output import OutputError, standard_output

__all__ = ["main"]

SUBCOMMANDS = (run, demo, bench, qdl, tune, sim, topo, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `weft` with `arguments`, by default the process's own."""
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
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
