"""`weft doctor`: what this machine has, what it lacks, and what that costs."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from weft.cli.table import format_table

if TYPE_CHECKING:
    import argparse

    from weft import diagnosis
    from weft.cli.arguments import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="diagnosis of this machine: devices, libraries, limits and what follows from them",
        description="Diagnosis of this machine: devices, libraries, limits and what follows from"
        " them. The exit status is 1 if a requirement of Weft is missing, else 0.",
    )
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if something required is missing."""
    from weft import diagnosis

    findings = diagnosis.examine()
    missing = [finding for finding in findings if finding.required and not finding.found]
    if arguments.json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": not missing, "findings": listed}, indent=2))
    else:
        rows = [(f.name, verdict(f), f.detail, f.follows) for f in findings]
        print(format_table(("what", "found", "detail", "what follows"), rows))
        names = ", ".join(finding.name for finding in missing)
        print(f"\nWeft cannot work here without: {names}" if missing else "\nWeft works here.")
    return 1 if missing else 0


def verdict(finding: diagnosis.Finding) -> str:
    """A finding's verdict in the table."""
    if finding.found:
        return "yes"
    return "MISSING" if finding.required else "no"
