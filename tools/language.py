#!/usr/bin/env python3
"""Language check: wording in comments, docstrings, error and help texts and pages, against budgets.

    tools/language.py                   table: counts per 10,000 words by area, targets
    tools/language.py PATH ...          phrases to rewrite, as FILE:LINE: KIND: PHRASE
    tools/language.py --files [PATH ...]    counts by file, the worst first, with its worst phrases
    tools/language.py --since REV [PATH ...]    phrases on lines that changed since a commit
    tools/language.py --check           areas over budget; exit status 1 if there are any
    tools/language.py --lower           lower budgets in tools/language.toml to present counts

docs/glossary.md has the words to avoid, CONTRIBUTING.md the targets.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgets import (
    Areas,
    Budgets,
    is_over,
    lowered,
    over_budget,
    rate,
    read_budgets,
    write_budgets,
)
from prose import Passage, passages
from wording import KINDS, Finding, area_of, count, findings, replaced_words

if TYPE_CHECKING:
    from collections.abc import Iterable

GLOSSARY = Path("docs/glossary.md")
#: History, and files that quote the phrases.
EXCLUDED = {Path("CHANGELOG.md"), Path("tests/sources/test_language.py"), Path("tools/wording.py")}
#: Phrases for each file with `--files`.
WORST = 5
#: Kinds to list by default, the worst first.
LISTED = ("banned", "as-of", "those-of", "of-of", "of")


class Tree:
    """Files with prose that git tracks below `root`."""

    def __init__(self, root: Path, paths: Iterable[str] = ()) -> None:
        self.root = root
        glossary = root / GLOSSARY
        self.replaced = replaced_words(glossary.read_text("utf-8") if glossary.exists() else "")
        names = git(root, "ls-files", "-z", "--", *paths).split("\0")
        self.files = {
            path: self.read(path)
            for path in map(Path, filter(None, names))
            if path not in EXCLUDED and (root / path).is_file()
        }
        self.counts = {path: self.count(found) for path, found in self.files.items()}

    def read(self, path: Path) -> list[Passage]:
        """Passages in a file; none in a binary one."""
        try:
            return passages(path, (self.root / path).read_text("utf-8"))
        except UnicodeDecodeError:
            return []

    def count(self, found: list[Passage]) -> Counter[str]:
        """Sum over passages."""
        total: Counter[str] = Counter()
        for passage in found:
            total.update(count(passage, self.replaced))
        return total

    def areas(self) -> Areas:
        """Counts by area, sorted by name."""
        found: Areas = {}
        for path, counts in self.counts.items():
            if counts["words"]:
                found.setdefault(area_of(path), Counter()).update(counts)
        return dict(sorted(found.items()))

    def findings(self, path: Path, kinds: Iterable[str]) -> list[Finding]:
        """Phrases to rewrite in a file, by line."""
        every = (each for part in self.files[path] for each in findings(part, self.replaced))
        return sorted(each for each in every if each.kind in kinds)

    def changed(self, path: Path, revision: str) -> set[int]:
        """Line numbers in a file that changed since a commit."""
        lines: set[int] = set()
        diff = git(self.root, "diff", "-U0", revision, "--", str(path))
        for first, length in re.findall(r"^@@ \S+ \+(\d+)(?:,(\d+))? @@", diff, re.MULTILINE):
            lines.update(range(int(first), int(first) + int(length or 1)))
        return lines


def git(root: Path, *arguments: str) -> str:
    """Git command output."""
    return subprocess.check_output(["git", *arguments], text=True, cwd=root)


def table(areas: Areas, budgets: Budgets) -> str:
    """Rates by area, `!` over budget; below them the targets, and the distance to them."""
    every: Counter[str] = Counter()
    for counts in areas.values():
        every.update(counts)
    rows = [["per 10,000 words", "words", *KINDS]]
    for area, counts in [*areas.items(), ("whole tree", every)]:
        row = [area, str(counts["words"])]
        for kind in KINDS:
            budget = budgets.get(area, {}).get(kind)
            mark = "!" if budget and is_over(kind, counts, budget) else ""
            row.append(f"{rate(counts, kind):.1f}{mark}")
        rows.append(row)
    targets, distances = ["target", ""], ["occurrences to go", ""]
    for kind, (_, target, is_floor) in KINDS.items():
        if target is None:
            targets.append("")
            distances.append("")
            continue
        targets.append(f"{'>=' if is_floor else '<='} {target:g}")
        excess = every[kind] - target * every["words"] / 1e4
        distance = math.ceil(-excess if is_floor else excess)
        distances.append(f"{'+' if is_floor else '-'}{distance}" if distance > 0 else "met")
    rows += [targets, distances]
    width = max(len(row[0]) for row in rows)
    lines = [f"{row[0]:<{width}}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def listing(tree: Tree, kinds: Iterable[str], revision: str | None) -> Iterable[str]:
    """A line for each finding."""
    for path in tree.files:
        changed = tree.changed(path, revision) if revision else None
        for line, kind, phrase in tree.findings(path, kinds):
            if changed is None or line in changed:
                yield f"{path}:{line}: {kind}: {phrase}"


def by_file(tree: Tree, kinds: Iterable[str]) -> Iterable[str]:
    """Rates and worst phrases for each file; most findings first."""
    found = {path: tree.findings(path, kinds) for path in tree.files if tree.counts[path]["words"]}
    for path in sorted(found, key=lambda path: -len(found[path])):
        counts = tree.counts[path]
        rates = ", ".join(
            f"{kind} {rate(counts, kind):.0f}" for kind in KINDS if counts[kind] or kind == "of"
        )
        yield f"{path}: {len(found[path])} findings, {counts['words']} words; per 10,000: {rates}"
        for each in sorted(found[path], key=badness)[:WORST]:
            yield f"    {each.line}: {each.kind}: {each.phrase}"


def badness(finding: Finding) -> tuple[int, int]:
    """Sort key: how often the phrase has 'of', then kind."""
    return -len(re.findall(r"\bof\b", finding.phrase)), list(KINDS).index(finding.kind)


def as_json(tree: Tree, areas: Areas, budgets: Budgets, kinds: Iterable[str]) -> dict[str, Any]:
    """All counts, budgets and findings as values for JSON."""
    return {
        "targets": {kind: each.target for kind, each in KINDS.items()},
        "areas": {area: dict(counts) for area, counts in areas.items()},
        "budgets": budgets,
        "files": {
            str(path): dict(counts) | {"findings": tree.findings(path, kinds)}
            for path, counts in tree.counts.items()
            if counts["words"]
        },
    }


def main() -> int:
    """Print what the options select; exit status 1 with `--check` over budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or directories")
    parser.add_argument("--files", action="store_true", help="counts by file, with worst phrases")
    parser.add_argument("--since", metavar="REV", help="only lines that changed since this commit")
    parser.add_argument("--json", action="store_true", help="counts, budgets and findings as JSON")
    parser.add_argument("--check", action="store_true", help="areas over budget, exit status 1")
    parser.add_argument("--lower", action="store_true", help="budgets lowered to present counts")
    parser.add_argument(
        "--kind",
        type=lambda text: text.split(","),
        default=LISTED,
        help=f"kinds to list, for example of-of,those-of (default {','.join(LISTED)}; also: its)",
    )
    arguments = parser.parse_args()
    root = Path(git(Path.cwd(), "rev-parse", "--show-toplevel").strip())
    if arguments.paths and (arguments.check or arguments.lower):
        parser.error("PATH: expected none with --check and --lower, which read the whole tree")
    prefix = Path.cwd().resolve().relative_to(root.resolve())
    tree = Tree(root, [str(prefix / path) for path in arguments.paths])
    budgets = read_budgets(root)
    if arguments.lower:
        write_budgets(root, lowered(tree.areas(), budgets))
        return 0
    status = 0
    lines: Iterable[str]
    if arguments.json:
        lines = [json.dumps(as_json(tree, tree.areas(), budgets, arguments.kind), indent=1)]
    elif arguments.check:
        lines = over_budget(tree.areas(), budgets)
        status = int(bool(lines))
    elif arguments.files:
        lines = by_file(tree, arguments.kind)
    elif arguments.since or arguments.paths:
        lines = listing(tree, arguments.kind, arguments.since)
    else:
        lines = [table(tree.areas(), budgets)]
    for line in lines:
        print(line)
    return status


if __name__ == "__main__":
    # A listing may go to `head`.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
