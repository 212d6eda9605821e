#!/usr/bin/env python3
"""Mutation check of memory orders and of the protocol rules beside them.

`tools/mutations.toml` lists mutations: each removes or weakens one fence, flush, release, acquire
or rule, and names a test that must fail then. The sources are copied into a scratch tree, where
each mutation is applied by itself.

    tools/mutate.py                          # all, a line for each
    tools/mutate.py --only ring-acquire      # one
    tools/mutate.py --json                   # JSON lines

Tests first pass without a mutation. Exit status 1: a mutation survived, or did not compile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tools" / "mutations.toml"
#: Seconds for a test that is compiled. A mutation that makes it hang is found as well.
LIMIT = 240
KERNELS = re.compile(r"crates/\w+/kernels/")


class Mutation(NamedTuple):
    """One row.

    Attributes:
        step: row in the memory-order table of docs/domain.md.
        rule: what is dropped.
        text: occurs once in `file`, and is replaced.
        test: kind, and what the kind needs: see `Runner.run`.
    """

    name: str
    step: str
    rule: str
    file: str
    text: str
    replacement: str
    test: str

    def apply(self, source: str) -> str:
        """The mutated source.

        Raises:
            ValueError: if the text does not occur once.
        """
        count = source.count(self.text)
        if count != 1 or self.text == self.replacement:
            raise ValueError(f"{self.name}: {self.file} has its text {count} times: expected once")
        return source.replace(self.text, self.replacement)


def mutations() -> list[Mutation]:
    """All rows."""
    with TABLE.open("rb") as file:
        return [Mutation(**row) for row in tomllib.load(file)["mutation"]]


class Outcome(NamedTuple):
    """A test's end: `passed`, `failed` or `broken`, for example without a test of that name."""

    kind: str
    output: str


class Runner:
    """Tests in a scratch tree.

    Args:
        folder: for the tree and what is built there.
    """

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._folder = folder

    def copy(self) -> None:
        """Renew the tree: equal files keep their times, so that they are not compiled again."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
        names = {name for name in done.stdout.split("\0") if (ROOT / name).is_file()}
        native = [path.relative_to(ROOT) for path in ROOT.glob("python/weft/_native*.so")]
        names |= {str(path) for path in native}
        for path in self.tree.rglob("*"):
            if path.is_file() and str(path.relative_to(self.tree)) not in names:
                path.unlink()
        for name in sorted(names):
            source, target = ROOT / name, self.tree / name
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                shutil.copymode(source, target)

    def run(self, test: str, file: str = "") -> Outcome:
        """Run a test, for a mutation in `file`.

        A test is one of

            cargo PACKAGE TARGET FILTER     # TARGET: lib, or a file in tests
            loom PACKAGE TARGET FILTER      # the same as a model
            pytest FILE FILTER              # FILTER as for -k
        """
        kind, *words = test.split(maxsplit=3 if not test.startswith("pytest") else 2)
        return self._pytest(*words, file) if kind == "pytest" else self._cargo(kind, *words)

    def _cargo(self, kind: str, package: str, target: str, name: str) -> Outcome:
        environment = {"CARGO_TARGET_DIR": str(self._folder / kind)}
        if kind == "loom":
            environment["RUSTFLAGS"] = "--cfg loom"
        chosen = ["--lib"] if target == "lib" else ["--test", target]
        command = ["cargo", "test", "--locked", "--quiet", "-p", package, *chosen]
        compiled = self._call([*command, "--no-run"], environment, None)
        if compiled.returncode != 0:
            return Outcome("broken", compiled.stdout)
        done = self._call([*command, "--", "--show-output", name], environment, LIMIT)
        ran = re.search(r"test result: ok\. [1-9]", done.stdout) or done.returncode != 0
        # For example without libfabric.
        skipped = re.search(r"^skipped: ", done.stdout, re.MULTILINE)
        return verdict(done, has_run=bool(ran) and skipped is None)

    def _pytest(self, path: str, name: str, file: str) -> Outcome:
        paths = [str(self.tree / "python"), str(self.tree)]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        if folder := KERNELS.match(file):
            # Kernels are compiled from the tree, and not from the native module.
            environment["WEFT_KERNELS"] = str(self.tree / folder[0])
        options = ["-q", "-x", "-rf", "-p", "no:cacheprovider", "-k", name]
        command = [sys.executable, "-m", "pytest", *options, path]
        done = self._call(command, environment, LIMIT)
        ran = re.search(r"^FAILED|\d passed", done.stdout, re.MULTILINE)
        return verdict(done, has_run=ran is not None)

    def _call(
        self, command: list[str], environment: dict[str, str], limit: float | None
    ) -> subprocess.CompletedProcess[str]:
        """The command's end; killed with all its processes after `limit` seconds."""
        with subprocess.Popen(
            command,
            cwd=self.tree,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                output += f"FAILED: not ended within {limit} s\n"
        return subprocess.CompletedProcess(command, process.returncode, output)


def verdict(done: subprocess.CompletedProcess[str], *, has_run: bool) -> Outcome:
    """Outcome of a test program."""
    if not has_run:
        return Outcome("broken", done.stdout)
    return Outcome("passed" if done.returncode == 0 else "failed", done.stdout)


def main() -> int:
    """Apply the mutations; 1 unless every one is found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="these mutations")
    parser.add_argument("--json", action="store_true", help="JSON lines")
    target = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
    parser.add_argument(
        "--folder", type=Path, default=Path(target) / "mutations", help="scratch folder"
    )
    arguments = parser.parse_args()
    rows = mutations()
    if unknown := set(arguments.only or []) - {row.name for row in rows}:
        parser.error(f"--only {min(unknown)}: no such mutation in {TABLE.name}")
    rows = [row for row in rows if arguments.only is None or row.name in arguments.only]
    runner = Runner(arguments.folder.resolve())
    runner.copy()
    for test in dict.fromkeys(row.test for row in rows):
        if (outcome := runner.run(test)).kind != "passed":
            print(
                f"{outcome.output}\nmutate: {test}: {outcome.kind} without a mutation",
                file=sys.stderr,
            )
            return 1
    found = [check(runner, row, as_json=arguments.json) for row in rows]
    summary = {"mutations": len(found), "failed": found.count("failed")}
    print(
        json.dumps(summary)
        if arguments.json
        else f"{summary['failed']} of {len(found)} mutations fail a test"
    )
    return int(summary["failed"] < len(found))


def check(runner: Runner, row: Mutation, *, as_json: bool) -> str:
    """Apply a mutation, run its test and restore the file; returns how the test ended."""
    began = time.monotonic()
    path = runner.tree / row.file
    source = path.read_text(encoding="utf-8")
    path.write_text(row.apply(source), encoding="utf-8")
    try:
        outcome = runner.run(row.test, row.file)
    finally:
        path.write_text(source, encoding="utf-8")
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        fields = {"name": row.name, "step": row.step, "test": row.test}
        print(json.dumps(fields | {"outcome": outcome.kind, "seconds": seconds}), flush=True)
    else:
        print(
            f"{row.step:11} {row.name:30} {outcome.kind:7} {seconds:6.1f} s  {row.rule}", flush=True
        )
    if outcome.kind != "failed":
        print(outcome.output, file=sys.stderr)
    return outcome.kind


if __name__ == "__main__":
    sys.exit(main())
