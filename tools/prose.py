"""Prose in source files: comments, docstrings, texts for users and pages, with line numbers.

Code is left out: fenced and indented blocks, generated tables, and string literals other than
sentences.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Passage:
    """Text without code blocks, which keeps line breaks.

    For example, three adjacent `///` lines are one passage with three lines.
    """

    #: First line in the file, from 1.
    line: int
    text: str
    #: True if the first line names a file or an item.
    is_description: bool = False
    #: Number of code blocks that were left out.
    code_blocks: int = 0

    def line_of(self, offset: int) -> int:
        """File line with the character at `offset`."""
        return self.line + self.text.count("\n", 0, offset)


def passages(path: Path, text: str) -> list[Passage]:
    """All passages in a file; an empty list for a file type without a reader, such as JSON."""
    reader = READERS.get(path.suffix or path.name)
    return list(reader(text)) if reader else []


#: Comments and literals in Rust, CUDA and C++; a character literal may hold a quote.
BRACES = re.compile(
    r"(?P<mark>//[/!:]?)(?P<comment>[^\n]*)|/\*+(?P<block>.*?)\*/"
    r'|b?r(?P<hashes>#*)"(?P<raw>.*?)"(?P=hashes)'
    r'|(?P<bytes>b?)"(?P<string>(?:[^"\\]|\\.)*)"'
    r"|b?'(?:[^'\\\n]|\\[^\n]{1,8})'",
    re.DOTALL,
)
PYTHON = re.compile(
    r"(?P<mark>#:?)(?P<comment>[^\n]*)|(?P<prefix>\b[bBrRfFuU]{1,2})?"
    r'(?:"""(?P<block>.*?)"""|\'\'\'(?P<other>.*?)\'\'\''
    r'|"(?P<double>(?:[^"\\\n]|\\.)*)"|\'(?P<single>(?:[^\'\\\n]|\\.)*)\')',
    re.DOTALL,
)
HASHES = re.compile(r"(?:(?<=\s)|^)(?P<mark>##?)(?P<comment>[^\n]*)", re.MULTILINE)
DESCRIPTIONS = ("///", "//!", "#:")


def of_braces(text: str) -> Iterator[Passage]:
    """Comments and sentences in Rust, CUDA and C++."""
    lines = Lines(text)
    comments = Comments(lines)
    for match in BRACES.finditer(text):
        if match["mark"]:
            yield from comments.add(match)
        elif match["block"] is not None:
            block = re.sub(r"(?m)^[ \t]*\*(?!/)", "", match["block"])
            yield without_code(block, lines.number(match.start("block")))
        elif match["string"] and not match["bytes"]:
            joined = re.sub(r"\\\n[ \t]*", "\n", match["string"])
            yield from sentences(joined, lines.number(match.start("string")))
    yield from comments.flush()


def of_python(text: str) -> Iterator[Passage]:
    """Comments, docstrings and sentences in Python; adjacent literals are joined."""
    lines = Lines(text)
    comments = Comments(lines)
    literal = ""
    first = end = 0
    for match in PYTHON.finditer(text):
        if match["mark"]:
            yield from comments.add(match)
            continue
        block = match["block"] if match["block"] is not None else match["other"]
        if block is not None:
            if lines.is_first(match.start()):
                yield without_code(block, lines.number(match.start()), is_description=True)
            continue
        gap = text[end : match.start()]
        if literal and not gap.strip():
            literal += "\n" * gap.count("\n")
        else:
            yield from sentences(literal, first)
            literal, first = "", lines.number(match.start())
        end = match.end()
        is_bytes = "b" in (match["prefix"] or "").lower()
        literal += "" if is_bytes else match["double"] or match["single"] or ""
    yield from sentences(literal, first)
    yield from comments.flush()


def of_hashes(text: str) -> Iterator[Passage]:
    """Comments in shell, TOML and make, where `##` begins a help text."""
    comments = Comments(Lines(text))
    for match in HASHES.finditer(text):
        yield from comments.add(match)
    yield from comments.flush()


def of_markdown(text: str) -> Iterator[Passage]:
    """A page without generated tables."""
    kept = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), text)
    yield without_code(kept, 1, is_page=True)


GENERATED = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)


class Lines:
    """Line numbers in a text, found by bisection."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def number(self, offset: int) -> int:
        """Line number at an offset, from 1."""
        return bisect_right(self.starts, offset)

    def is_first(self, offset: int) -> bool:
        """True if only blanks precede the offset in the same line."""
        return not self.text[self.starts[self.number(offset) - 1] : offset].strip()


class Comments:
    """Comments up to the line end; adjacent lines with the same mark become one passage."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.rows: list[str] = []
        self.first = self.next = 0
        self.mark = ""

    def add(self, match: re.Match[str]) -> Iterator[Passage]:
        """Passage that ended before this comment, if any."""
        number = self.lines.number(match.start())
        is_whole_line = self.lines.is_first(match.start())
        if not (is_whole_line and number == self.next and match["mark"] == self.mark):
            yield from self.flush()
            self.first, self.mark = number, match["mark"]
        self.rows.append(match["comment"])
        self.next = number + 1 if is_whole_line else 0

    def flush(self) -> Iterator[Passage]:
        """Last passage, if any; a `#!` line is none."""
        if self.rows and not (self.mark == "#" and self.rows[0].startswith("!")):
            is_description = self.mark in DESCRIPTIONS
            yield without_code("\n".join(self.rows), self.first, is_description=is_description)
        self.rows = []


def without_code(
    text: str, line: int, *, is_description: bool = False, is_page: bool = False
) -> Passage:
    """Passage with empty lines where code blocks were.

    Code is fenced, begins with `>>>`, is indented after `::`, or, on a page, by four columns after
    an empty line. A fence with the language `text` is left out too, but not counted: a diagram.
    """
    kept: list[str] = []
    blocks = 0
    is_fenced = was_code = False
    after_blank, after_colons, indent = True, False, 0
    for row in text.split("\n"):
        bare = row.strip()
        depth = len(row) - len(row.lstrip())
        if bare.startswith("```"):
            blocks += not is_fenced and bare[3:] not in ("text", "mermaid")
            is_fenced = not is_fenced
            kept.append("")
        elif not bare:
            after_blank = True
            kept.append("")
        elif is_fenced:
            kept.append("")
        else:
            is_indented = is_page and depth >= 4 and (after_blank or was_code)
            is_code = (
                bare.startswith((">>>", "... "))
                or (is_indented and not LIST_ITEM.match(bare))
                or (after_colons and depth > indent)
            )
            blocks += is_code and not was_code
            kept.append("" if is_code else row)
            was_code, after_blank = is_code, False
            if not is_code:
                after_colons, indent = not is_page and bare.endswith("::"), depth
    return Passage(line, "\n".join(kept), is_description, blocks)


LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def sentences(literal: str, line: int) -> Iterator[Passage]:
    """A literal that users read: three words or more, that does not look like code."""
    text = PLACEHOLDER.sub("`x`", literal).replace("\\n", "  ").replace('\\"', '"')
    if len(PLAIN_WORD.findall(text)) >= 3 and not LOOKS_LIKE_CODE.search(text):
        yield Passage(line, text)


PLACEHOLDER = re.compile(r"\{[^{}\n]*\}")
PLAIN_WORD = re.compile(r"(?<![\w`./-])[A-Za-z][a-z]+(?![\w(=/])")
LOOKS_LIKE_CODE = re.compile(r"[{}]|;\s*$|==|->|::|\\[a-z0-9]|</|\w\(\)|^\s*[-<]")

READERS: dict[str, Callable[[str], Iterator[Passage]]] = {
    **dict.fromkeys((".rs", ".cu", ".cuh", ".c", ".cpp", ".h", ".hpp"), of_braces),
    **dict.fromkeys((".py", ".pyi"), of_python),
    **dict.fromkeys((".sh", ".toml", "Makefile"), of_hashes),
    ".md": of_markdown,
}
