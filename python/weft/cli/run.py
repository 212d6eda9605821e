"""`weft run`: start a command as N local ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weft import launch
from weft.cli.arguments import ranks
from weft.topology import placement

if TYPE_CHECKING:
    from weft.cli.arguments import Subparsers

EPILOG = """\
Environment of each rank: WEFT_RANK, WEFT_WORLD_SIZE, WEFT_LOCAL_RANK, WEFT_LOCAL_WORLD_SIZE,
WEFT_ADDR, WEFT_PORT and WEFT_SECRET; with --network also WEFT_HOST_ID and WEFT_NETWORK. After a
rank has failed, the others have the grace to end by their own error; then they are killed. Exit
status: that of the first rank that failed.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft run`."""
    parser = subparsers.add_parser(
        "run",
        help="launcher: a command as N local ranks",
        description="Start COMMAND as N ranks on this machine and wait for them.",
        usage="weft run -n N [options] -- COMMAND [ARGUMENT ...]",
        epilog=EPILOG,
    )
    parser.add_argument(
        "-n", "--ranks", type=ranks, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--pretend-hosts",
        type=ranks,
        metavar="K",
        help="pretended hosts, among which ranks are divided; they share no memory",
    )
    parser.add_argument(
        "--network",
        metavar="NETWORK",
        help="BiGraph whose hosts are pretended, a short form or a JSON file;"
        " ranks are placed as HDRM needs",
    )
    parser.add_argument(
        "--env",
        type=assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable set in every rank (repeatable)",
    )
    parser.add_argument(
        "--no-prefix", action="store_true", help="output without the rank before each line"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=launch.GRACE_SECONDS,
        metavar="SECONDS",
        help="time for the other ranks to end after one failed, or inf (default %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="each rank's exit status as a last line, in JSON"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, wait for them, and return the first failing rank's status."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        hosts = arguments.network and placement.hdrm_hosts(arguments.network, arguments.ranks)
        config = launch.LaunchConfig(
            command,
            arguments.ranks,
            pretended_hosts=arguments.pretend_hosts,
            hosts=hosts,
            environment=network_variable(arguments.network) | dict(arguments.env),
            prefix=not arguments.no_prefix,
            grace_seconds=arguments.grace,
        )
    except ValueError as error:
        arguments.usage_error(str(error))
    try:
        outcome = launch.launch(config)
    except launch.LaunchError as error:
        print(f"weft run: {error}", file=sys.stderr)
        if arguments.json:
            print(json.dumps({"ranks": [], "error": str(error)}))
        return error.status
    if arguments.json:
        print(json.dumps({"ranks": [dataclasses.asdict(rank) for rank in outcome.ranks]}))
    return outcome.status


def network_variable(network: str | None) -> dict[str, str]:
    """`WEFT_NETWORK` for the ranks: a short form, or a file's absolute path."""
    if network is None:
        return {}
    file = Path(network)
    return {placement.VARIABLE: str(file.absolute()) if file.exists() else network}


def assignment(text: str) -> tuple[str, str]:
    """Split NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value
