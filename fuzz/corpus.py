#!/usr/bin/env python3
"""Fuzz corpora: one text file a target, unpacked into an input folder and extended from one.

    fuzz/corpus.py unpack TARGET FOLDER      write each input as a file in FOLDER
    fuzz/corpus.py add TARGET FILE ...       append new inputs from these files

Each line of `fuzz/corpus/TARGET.txt` is a name, a space and the input in hexadecimal digits. Lines
are sorted by name, since the tests' replay draws inputs by position; `#` begins a comment.
"""

import argparse
import hashlib
import sys
from pathlib import Path

HEADER = """\
# Fuzz corpus of {target}: a name and an input in hexadecimal digits a line.
# seed-*: written by hand; found-*: from the fuzzer, named by SHA-1; see fuzz/corpus.py.
"""


def path_of(target: str) -> Path:
    """Text file with a target's corpus."""
    return Path(__file__).parent / "corpus" / f"{target}.txt"


def read(target: str) -> dict[str, bytes]:
    """Inputs by name; empty for a new target."""
    path = path_of(target)
    lines = path.read_text().splitlines() if path.exists() else []
    entries = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return {name: bytes.fromhex(digits) for name, _, digits in entries}


def write(target: str, inputs: dict[str, bytes]) -> None:
    """Replace a target's corpus."""
    lines = [f"{name} {data.hex()}".rstrip() for name, data in sorted(inputs.items())]
    path_of(target).write_text(HEADER.format(target=target) + "\n".join(lines) + "\n")


def unpack(target: str, folder: Path) -> int:
    """Write each input to a file with its name; returns the count."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = read(target)
    for name, data in inputs.items():
        (folder / name).write_bytes(data)
    return len(inputs)


def add(target: str, files: list[Path]) -> int:
    """Append the inputs that the corpus lacks; returns the count."""
    inputs = read(target)
    present = set(inputs.values())
    new = {path.read_bytes() for path in files} - present
    if new:
        named = {f"found-{hashlib.sha1(data).hexdigest()[:10]}": data for data in new}
        write(target, inputs | named)
    return len(new)


def main() -> int:
    """Run the command and print the input count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    unpacking = commands.add_parser("unpack", help="write each input as a file")
    unpacking.add_argument("target")
    unpacking.add_argument("folder", type=Path)
    adding = commands.add_parser("add", help="append the inputs of files that are new")
    adding.add_argument("target")
    adding.add_argument("files", type=Path, nargs="*")
    arguments = parser.parse_args()
    if arguments.command == "unpack":
        count = unpack(arguments.target, arguments.folder)
    else:
        count = add(arguments.target, arguments.files)
    print(f"{arguments.target}: {count} inputs {arguments.command}ed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
