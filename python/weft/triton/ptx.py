"""PTX text as functions with instructions, successors and loops."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Function", "Instruction", "functions"]

_LABEL = re.compile(r"\s*([$\w]+):(?!:)")
_HEAD = re.compile(r"\.(?:entry|func)\b[^;{]*?([$\w]+)\s*\(")
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_GUARD = re.compile(r"@!?(%\w+)\s+")
#: Control flow does not pass these.
_ENDS = ("ret", "exit", "trap", "bra.uni", "brx")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        line: text line, from 1.
        text: without a guard.
        guard: predicate register, or an empty string.
    """

    line: int
    text: str
    guard: str

    @cached_property
    def opcode(self) -> str:
        """Name with all modifiers, for example `st.release.sys.global.u32`."""
        return self.text.partition(" ")[0].partition("\t")[0]

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        """Opcode parts, the name first."""
        return tuple(self.opcode.split("."))

    @cached_property
    def operands(self) -> str:
        """Text behind the opcode."""
        return self.text[len(self.opcode) :].strip()

    def has(self, *modifiers: str) -> bool:
        """True if the opcode has one of them."""
        return any(modifier in self.modifiers for modifier in modifiers)


@dataclass
class Function:
    """A function: instructions in text order, and edges between them by index.

    Attributes:
        threads: block size, as the entry requires or limits it; 0 if the text has no number.
    """

    name: str
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """Edges backward."""
        found: list[list[int]] = [[] for _ in self.instructions]
        for index, after in enumerate(self.successors):
            for each in after:
                found[each].append(index)
        return found

    def before(self, index: int, ends: Callable[[Instruction], bool]) -> Iterator[int]:
        """Instructions on paths to `index`, up to the last one on each path for which `ends` holds.

        Yields -1 if a path begins at the entry.
        """
        seen: set[int] = set()
        waiting = [index]
        while waiting:
            at = waiting.pop()
            if at == 0:
                yield -1
            for each in self.predecessors[at]:
                if each not in seen:
                    seen.add(each)
                    if not ends(self.instructions[each]):
                        yield each
                        waiting.append(each)

    @cached_property
    def loops(self) -> list[set[int]]:
        """Natural loops as instruction sets, one for each header, in any text order."""
        bodies: dict[int, set[int]] = {}
        for index, after in enumerate(self.successors):
            for header in after:
                if len(self.predecessors[header]) > 1 and self._dominates(header, index):
                    body = bodies.setdefault(header, {header})
                    waiting = [index]
                    while waiting:
                        at = waiting.pop()
                        if at not in body:
                            body.add(at)
                            waiting += self.predecessors[at]
        return list(bodies.values())

    def parted(self, branch: int) -> set[int]:
        """Instructions between a branch and the first that all paths behind it have in common."""
        found: set[int] = set()
        waiting = list(self.successors[branch])
        while waiting:
            at = waiting.pop()
            if at not in found and not self._postdominates(at, branch):
                found.add(at)
                waiting += self.successors[at]
        return found

    def _postdominates(self, index: int, branch: int) -> bool:
        """True if all paths from `branch` to an end pass `index`."""
        seen, waiting = {index}, list(self.successors[branch])
        while waiting:
            at = waiting.pop()
            if at not in seen:
                if not self.successors[at]:
                    return False
                seen.add(at)
                waiting += self.successors[at]
        return True

    def _dominates(self, header: int, index: int) -> bool:
        """True if all paths from the entry to `index` pass `header`."""
        if header in (0, index):
            return True
        seen, waiting = {0}, [0]
        while waiting:
            for each in self.successors[waiting.pop()]:
                if each == index:
                    return False
                if each != header and each not in seen:
                    seen.add(each)
                    waiting.append(each)
        return True


def functions(text: str) -> Iterator[Function]:
    """Functions with a body in a PTX text."""
    plain = re.sub(r"/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.S)
    plain = re.sub(r"//[^\n]*|^[ \t]*\.(?:loc|file)\b[^\n]*", "", plain, flags=re.M)
    for head in _HEAD.finditer(plain):
        begin = plain.find("{", head.end())
        declared = plain.find(";", head.end())
        if begin < 0 or 0 <= declared < begin:
            continue
        limit = _THREADS.search(plain, head.end(), begin)
        threads = 1 if limit else 0
        for size in limit.groups(default="1") if limit else ():
            threads *= int(size)
        yield _function(head[1], threads, plain, begin)


def _function(name: str, threads: int, text: str, begin: int) -> Function:
    made = Function(name, threads)
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    for at, statement in _statements(text, begin):
        line = text.count("\n", 0, at) + 1
        while match := _LABEL.match(statement):
            labels[match[1]] = len(made.instructions)
            last, statement = match[1], statement[match.end() :].strip().lstrip("{ ")
        if statement.startswith(".branchtargets"):
            tables[last] = re.findall(r"[$\w]+", statement.partition("targets")[2])
        if not statement or statement.startswith("."):
            continue
        guard = _GUARD.match(statement)
        plain = statement[guard.end() :] if guard else statement
        made.instructions.append(
            Instruction(line, " ".join(plain.split()), guard[1] if guard else "")
        )
    # Labels at the end of the body.
    made.instructions.append(Instruction(text.count("\n", 0, begin) + 1, "ret", ""))
    for index, each in enumerate(made.instructions):
        named = re.findall(r"[$\w]+", each.operands) if each.opcode.startswith("br") else []
        targets = [target for name in named for target in tables.get(name, [name])]
        after = [labels[target] for target in targets if target in labels]
        ends = each.opcode.startswith(_ENDS) or each.opcode == "bra"
        if (each.guard or not ends) and index + 1 < len(made.instructions):
            after.append(index + 1)
        made.successors.append(after)
    return made


def _statements(text: str, begin: int) -> Iterator[tuple[int, str]]:
    """Statements in the body that begins with a brace, and where they begin."""
    depth, start = 0, begin
    for at in range(begin, len(text)):
        letter = text[at]
        # A brace where a statement begins opens a scope, another one opens an operand vector.
        opens = not text[start:at].rpartition(":")[2].strip()
        if letter == ";":
            statement = text[start:at]
            yield start + len(statement) - len(statement.lstrip()), statement.strip()
            start = at + 1
        elif letter == "{" and opens:
            depth += 1
            if not text[start:at].strip():
                start = at + 1
        elif letter == "}" and opens:
            depth -= 1
            if depth == 0:
                if text[start:at].strip():
                    yield start, text[start:at].strip()
                return
            start = at + 1
