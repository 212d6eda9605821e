#!/usr/bin/env python3
"""Lint of wording: reports words of prose that docs/glossary.md and CONTRIBUTING.md exclude.

Prose is comments, docstrings and string literals of Rust, CUDA, Python and C, comments of shell,
make and TOML, and Markdown. Text in backticks, fenced blocks and addresses is code and is left out.

    tools/words.py [--count] [PATH ...]     files or directories; default: all files that git tracks
"""

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

#: Words, and what to write instead.
INSTEAD = {
    r"says?|said|saying": "report, state, print, specify",
    r"tells?|told|telling": "report, notify, send, distinguish",
    r"hears?|heard|hearing": "receive, observe",
    r"learns|learnt|learned": "receive, derive, detect",
    r"knows?|knew|knowing": "has, holds, is known to, detects",
    r"speaks?|spoke|spoken|talks?|talked": "use the protocol, send, exchange",
    r"believes?|believed|thinks?|thought": "assume, trust, validate",
    r"remembers?|remembered": "keep, record",
    r"forgets?|forgot|forgotten": "drop, discard, omit",
    r"promises?|promised": "guarantee, contract",
    r"wishes|wished|hopes?|hoped": "request, expect",
    r"nobody|no one|no-one|nowhere": "state the positive: only X, X alone",
    r"nothing": "state the positive: empty, idle, unchanged, no N",
    r"somebody|someone|anybody|everybody|everyone": "a rank, each rank, any peer",
    r"in vain|of no use": "without success: name the outcome",
    r"whoever|whomever|whom": "name the actor: the rank, the caller",
    r"made-up": "synthetic",
    r"so many": "N",
    r"what came of": "outcome of",
    r"what became of": "outcome of",
    r"what is left of": "the rest of",
    r"gone wrong|goes wrong|went wrong": "failed, error",
}
#: Terms of this field, and a key of records.
ALLOWED = re.compile(r'learning rate|hearing loss|"(?:cold )?nothing"', re.IGNORECASE)
PATTERNS = [
    (re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in INSTEAD.items()
]
#: First words of a description that is a clause instead of a noun phrase.
CLAUSE = re.compile(r"(?:What|Whether|Who|Whom|Whose|Why|How|Where|When)\b")
CLAUSE_INSTEAD = "a noun phrase as the first line"
#: Files that quote the words.
EXCLUDED = {Path("tools/words.py"), Path("tests/test_words.py")}
CODE = re.compile(r"`[^`\n]*`|https?://\S+|\]\([^)]*\)")
RUST = re.compile(
    r'//[/!]?(?P<comment>[^\n]*)|/\*(?P<block>.*?)\*/|r(?P<hashes>#*)"(?P<raw>.*?)"(?P=hashes)'
    r'|"(?P<string>(?:[^"\\]|\\.)*)"|b?\'(?:[^\'\\\n]|\\[^\n]{1,8})\'',
    re.DOTALL,
)
HASH = re.compile(r"(?:^|\s)#(?P<comment>.*)")


def of_braces(text: str) -> Iterator[tuple[int, str]]:
    """Comments and strings of Rust, CUDA or C, with their lines."""
    for match in RUST.finditer(text):
        for group in ("comment", "block", "raw", "string"):
            if match[group] is not None:
                yield from lines_of(match[group], text.count("\n", 0, match.start(group)) + 1)


def of_python(text: str) -> Iterator[tuple[int, str]]:
    """Comments and strings of Python, with their lines."""
    middle = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, middle):
            yield from lines_of(token.string, token.start[0])


def of_hashes(text: str) -> Iterator[tuple[int, str]]:
    """Comments behind `#`, with their lines."""
    for number, line in enumerate(text.split("\n"), 1):
        if match := HASH.search(line):
            yield number, match["comment"]


def of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of fenced and indented blocks."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def openings(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """First words of the description of a file or an item, with their lines."""
    if path.suffix == ".rs":
        before = ""
        for number, line in enumerate(text.split("\n"), 1):
            match = re.match(r"\s*//[/!] (?P<first>.*)", line)
            if match and not before.lstrip().startswith(("///", "//!")):
                yield number, match["first"]
            before = line
    elif path.suffix in (".py", ".pyi"):
        opening = re.compile(r'^\s*(?:r?"""|#: )(?P<first>.*)', re.MULTILINE)
        before = -2
        for match in opening.finditer(text):
            number = text.count("\n", 0, match.start("first")) + 1
            if '"""' in match[0] or number != before + 1:
                yield number, match["first"]
            before = number


def lines_of(text: str, first: int) -> Iterator[tuple[int, str]]:
    """Lines of a text, numbered from `first` on."""
    yield from enumerate(text.split("\n"), first)


READERS = {
    ".rs": of_braces, ".cu": of_braces, ".cuh": of_braces, ".c": of_braces, ".cpp": of_braces,
    ".h": of_braces, ".hpp": of_braces,
    ".py": of_python, ".pyi": of_python, ".md": of_markdown, ".sh": of_hashes, ".toml": of_hashes,
    "Makefile": of_hashes,
}  # fmt: skip


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, word and what to write instead."""
    reader = READERS.get(path.suffix or path.name)
    if reader is None or path in EXCLUDED:
        return
    text = path.read_text()
    for number, line in openings(path, text):
        if match := CLAUSE.match(line):
            yield number, match[0], CLAUSE_INSTEAD
    for number, line in reader(text):
        plain = ALLOWED.sub("", CODE.sub("", line))
        for pattern, instead in PATTERNS:
            for match in pattern.finditer(plain):
                yield number, match[0], instead


def tracked(paths: list[str]) -> list[Path]:
    """Files that git tracks under `paths`."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--", *paths], text=True)
    return [path for name in listed.split("\0") if name and (path := Path(name)).is_file()]


def main() -> int:
    """Print each finding; exit status 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "paths", nargs="*", help="files or directories (default: all tracked files)"
    )
    parser.add_argument("--count", action="store_true", help="number of findings only")
    arguments = parser.parse_args()
    found = 0
    for path in tracked(arguments.paths):
        for number, word, instead in findings(path):
            found += 1
            if not arguments.count:
                print(f"{path}:{number}: '{word}': instead {instead}")
    if arguments.count:
        print(found)
    return int(found > 0 and not arguments.count)


if __name__ == "__main__":
    sys.exit(main())
