"""Wording in prose: counts and findings for genitives, stilted words, examples and links.

For example, "length of the rows of a tile" is one finding of the kind `of-of`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prose import Passage


class Kind(NamedTuple):
    """What a count counts, and its target per 10,000 words in the whole tree."""

    title: str
    #: None: reported and budgeted, without a target.
    target: float | None
    #: True if more is better, such as for examples.
    is_floor: bool = False


KINDS = {
    "of": Kind("the word 'of'", 250),
    "of-of": Kind("a second 'of' in a noun phrase", 6),
    "those-of": Kind("'those of', 'that of'", 1),
    "as-of": Kind("'as of'", 0),
    "its": Kind("'its', 'their'", None),
    "banned": Kind("words that docs/glossary.md replaces", 0),
    "examples": Kind("'for example', 'e.g.', 'such as', code examples", 8, is_floor=True),
    "links": Kind("Markdown links, [`X`], addresses", 8, is_floor=True),
    "sources": Kind("addresses and papers", 8, is_floor=True),
}


class Finding(NamedTuple):
    """Phrase to rewrite; the kind is a key in `KINDS`."""

    line: int
    kind: str
    phrase: str


#: Fixed expressions without a compound noun; they count, but are not listed.
IDIOM = re.compile(
    r"\b(?:(?:out|instead|because|regardless|one|each|any|all|some|none|both|most|either|neither|two"
    r"|number|ahead) of|of (?:course|its own|their own))\b",
    re.IGNORECASE,
)
#: Words that end a noun phrase: verbs, conjunctions, prepositions.
BREAKS = frozenset(
    word
    for words in (
        "is are was were be been being has have had do does did can could may might must should",
        "shall will would and or than that which who if when where while but nor because since",
        "unless until so as not in on at by with from to for into over under between through",
        "before after without within per via behind",
    )
    for word in words.split()
)
#: Longest distance in words between two 'of' in a noun phrase.
REACH = 5
WORD = re.compile(r"[A-Za-z][\w'-]*|[^\w\s'-]|\n[ \t]*\n")
CODE = re.compile(r"``[^`\n]*``|`[^`\n]*`|https?://[^\s)>]+")
TARGET = re.compile(r"\]\([^)\n]*\)")
SHORT = {
    "those-of": re.compile(r"\b(?:those|that)\s+of\b(?:\s+\S+){0,3}", re.IGNORECASE),
    "as-of": re.compile(r"\bas\s+of\b(?:\s+\S+){0,3}", re.IGNORECASE),
    "its": re.compile(r"\b(?:its|their)\b(?:\s+\S+){0,2}", re.IGNORECASE),
}
EXAMPLE = re.compile(
    r"\bfor (?:example|instance)\b|\be\.g\.|\bsuch as\b|\bexamples?:", re.IGNORECASE
)
LINK = re.compile(r"\]\([^)\s]+\)|\[`[^`\n]+`\](?!\()|(?<!\()https?://")
SOURCE = re.compile(r"https?://|\barXiv[: ]?\d|\bdoi:", re.IGNORECASE)
#: First words of a description that is a clause instead of a noun phrase.
CLAUSE = re.compile(r"\s*(?P<word>What|Whether|Who|Whom|Whose|Why|How|Where|When)\b")


class Replaced(NamedTuple):
    """Glossary row: a pattern whose group is a word to avoid, and the words to write."""

    pattern: re.Pattern[str]
    instead: str


def replaced_words(glossary: str) -> list[Replaced]:
    """Rows below the glossary's heading "Words to avoid".

    Words are in backticks: first column those to avoid, third column expressions that are right.
    """
    rows = []
    section = glossary.partition("\n## Words to avoid\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        words = re.findall(r"`([^`]+)`", cells[0])
        if len(cells) == 3 and words:
            rights = re.findall(r"`([^`]+)`", cells[2])
            # An expression that is right comes first, and has no group.
            either = "|".join([*map(spaced, rights), f"({'|'.join(map(spaced, words))})"])
            pattern = rf"(?<![\w-])(?:{either})(?![\w-])"
            rows.append(Replaced(re.compile(pattern, re.IGNORECASE), cells[1]))
    return rows


def spaced(words: str) -> str:
    """Pattern of words that may be on two lines."""
    return r"\s+".join(map(re.escape, words.split()))


def plain(text: str) -> str:
    """Text with the noun X in place of code and addresses."""
    return CODE.sub("X", TARGET.sub("]", text))


def count(passage: Passage, replaced: list[Replaced]) -> Counter[str]:
    """Word count of a passage, and a count for each kind."""
    text = plain(passage.text)
    counts: Counter[str] = Counter()
    words = [match[0].lower() for match in WORD.finditer(text) if match[0][0].isalpha()]
    counts["words"] = len(words)
    counts["of"] = words.count("of")
    if counts["of"]:
        counts["of-of"] = sum(phrase.ofs - 1 for phrase in phrases(text))
    for kind, pattern in SHORT.items():
        counts[kind] = len(pattern.findall(text))
    counts["banned"] = sum(1 for _ in banned(passage, text, replaced))
    counts["examples"] = passage.code_blocks + len(EXAMPLE.findall(text))
    counts["links"] = len(LINK.findall(passage.text))
    counts["sources"] = len(SOURCE.findall(passage.text))
    return counts


class Phrase(NamedTuple):
    """Noun phrase with at least one 'of', and up to three words before and after."""

    offset: int
    text: str
    ofs: int


def phrases(text: str) -> Iterator[Phrase]:
    """Noun phrases with 'of' in a plain text.

    There is no parser: a phrase ends at punctuation, and at a verb, conjunction or preposition in
    `BREAKS`. About one in ten is wrong.
    """
    run: list[re.Match[str]] = []
    for match in WORD.finditer(text):
        if match[0][0].isalpha() and match[0].lower() not in BREAKS:
            run.append(match)
        else:
            yield from chains(text, run)
            run = []
    yield from chains(text, run)


def chains(text: str, run: list[re.Match[str]]) -> Iterator[Phrase]:
    """Noun phrases in words without a break."""
    places = [index for index, match in enumerate(run) if match[0].lower() == "of"]
    while places:
        length = 1
        while length < len(places) and places[length] - places[length - 1] <= REACH:
            length += 1
        begin, end = max(0, places[0] - 3), min(len(run), places[length - 1] + 4)
        words = text[run[begin].start() : run[end - 1].end()]
        yield Phrase(run[places[0]].start(), " ".join(words.split()), length)
        del places[:length]


def banned(passage: Passage, text: str, replaced: list[Replaced]) -> Iterator[tuple[int, str, str]]:
    """Offset, word and remedy."""
    if passage.is_description and (match := CLAUSE.match(text)):
        yield match.start("word"), match["word"], "a noun phrase as the first line"
    for row in replaced:
        for match in row.pattern.finditer(text):
            if match[1]:
                yield match.start(), " ".join(match[1].split()), row.instead


def findings(passage: Passage, replaced: list[Replaced]) -> Iterator[Finding]:
    """All phrases to rewrite, without idioms such as "instead of"."""
    text = plain(passage.text)

    def line(offset: int) -> int:
        return passage.line + text.count("\n", 0, offset)

    for kind, pattern in SHORT.items():
        for match in pattern.finditer(text):
            yield Finding(line(match.start()), kind, " ".join(match[0].split()))
    for phrase in phrases(text):
        kind = "of" if phrase.ofs == 1 else "of-of"
        is_as_of = re.search(r"\bas\s+$", text[: phrase.offset], re.IGNORECASE)
        is_other_kind = is_as_of or SHORT["those-of"].search(phrase.text)
        if kind == "of-of" or not (is_other_kind or IDIOM.search(phrase.text)):
            yield Finding(line(phrase.offset), kind, phrase.text)
    for offset, word, instead in banned(passage, text, replaced):
        yield Finding(line(offset), "banned", f"'{word}': write {instead}")


def area_of(path: Path) -> str:
    """Area with a budget: a crate, `docs/adr`, or a folder in the root.

    For example, README.md is in `docs`, and pyproject.toml in `root`.
    """
    first, *rest = path.parts
    if first == "crates" and len(rest) > 1:
        return f"crates/{rest[0]}"
    if path.parts[:2] == ("docs", "adr"):
        return "docs/adr"
    if not rest or (len(rest) == 1 and first == "crates"):
        return "docs" if path.suffix == ".md" else "root"
    return first
