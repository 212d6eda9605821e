#!/usr/bin/env python3
"""Slowest test files, from pytest's JUnit records.

    tools/slowest.py [--count N] RECORD.xml ...    `make slowest` reads the last runs' records

A file's time is the sum over its tests with fixtures, in seconds.
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path


def seconds(records: list[Path]) -> tuple[dict[str, float], Counter[str]]:
    """Seconds and tests by file."""
    times: defaultdict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    for record in records:
        for case in ElementTree.parse(record).iter("testcase"):
            # Packages and file with dots, then classes, which begin with capitals.
            parts = [part for part in case.get("classname", "").split(".") if part[:1].islower()]
            # An error in the collection of a file has only a name.
            file = "/".join(parts or case.get("name", "").split(".")) + ".py"
            times[file] += float(case.get("time", "0"))
            tests[file] += 1
    return times, tests


def main() -> int:
    """Print the slowest files; status 2 without a record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10, help="file count (default 10)")
    parser.add_argument("records", nargs="*", type=Path, help="JUnit records")
    arguments = parser.parse_args()
    records = [record for record in arguments.records if record.is_file()]
    if not records:
        print("no JUnit record: run `make test-python` first", file=sys.stderr)
        return 2
    times, tests = seconds(records)
    for file in sorted(times, key=times.__getitem__, reverse=True)[: arguments.count]:
        print(f"{times[file]:8.1f} s  {file}, {tests[file]} tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
