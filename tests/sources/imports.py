"""Imports between the source files in a crate, read from its `use` declarations and paths."""

import re
from collections.abc import Iterator
from pathlib import Path

#: A module by its path below the crate, such as `("device", "launch")`; the crate is `()`.
Module = tuple[str, ...]

INLINE = re.compile(r"^(?:pub(?:\([^)]*\))? )?mod \w+ \{\n.*?^\}", re.MULTILINE | re.DOTALL)
USE = re.compile(r"(?P<public>pub(?:\([^)]*\))?\s+)?\buse\s+(?P<tree>[^;]+);")
PATH = re.compile(r"(?<![\w:])(?:crate|super|[a-z_]\w*)(?:::\w+)+")


class Source:
    """One file: paths that it names, paths that it exports again."""

    def __init__(self, path: Path) -> None:
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        text = text.partition("mod tests {")[0]
        text = INLINE.sub(lambda inline: of_file(inline[0]), text)
        text = re.sub(r"\bpub\(in [^)]*\)", "pub", text)
        self.paths: set[str] = set(PATH.findall(USE.sub("", text)))
        self.exports: dict[str, str] = {}
        for use in USE.finditer(text):
            for name in branches(use["tree"]):
                self.paths.add(name)
                if use["public"]:
                    self.exports[name.rpartition("::")[2]] = name


def of_file(inline: str) -> str:
    """A module within a file, with its paths from the file on."""
    return re.sub(r"(?<![\w:])super::(super::)?", lambda path: path[1] or "self::", inline)


def branches(tree: str) -> Iterator[str]:
    """Paths in a `use` tree: `a::{b, c::d}` is `a::b` and `a::c::d`."""
    tree = re.sub(r"\s+", "", re.sub(r"\s+as\s+\w+", "", tree))
    head, brace, body = tree.partition("{")
    if not brace:
        yield tree
        return
    depth, begin = 0, 0
    body = body[:-1] + ","
    for end, character in enumerate(body):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            if body[begin:end]:
                yield from branches(head + body[begin:end])
            begin = end + 1


class Crate:
    """A crate's sources by module, without tests and fuzzing."""

    def __init__(self, source: Path) -> None:
        self.sources: dict[Module, Source] = {}
        for path in source.rglob("*.rs"):
            if not path.stem.endswith("tests") and path.stem != "fuzz":
                parts = path.relative_to(source).with_suffix("").parts
                self.sources[parts[:-1] if parts[-1] in ("mod", "lib") else parts] = Source(path)

    def imports(self) -> dict[Module, set[Module]]:
        """Modules that each module imports; exports are followed to their definition."""
        return {
            module: {
                found
                for path in source.paths
                if (found := self.definition(self.absolute(module, path))) not in (None, module, ())
            }
            for module, source in self.sources.items()
        }

    def absolute(self, module: Module, path: str) -> Module | None:
        """A path from the crate's root on; `None` for one in another crate."""
        first, *rest = path.removesuffix("::*").split("::")
        if first == "crate":
            return tuple(rest)
        if first == "self":
            return module + tuple(rest)
        if first == "super":
            while first == "super":
                module = module[:-1]
                first, *rest = rest or [""]
            return (*module, first, *rest) if first else module
        return (*module, first, *rest) if (*module, first) in self.sources else None

    def definition(self, path: Module | None) -> Module | None:
        """The module that defines an item."""
        if path is None:
            return None
        for length in range(len(path), -1, -1):
            module, rest = path[:length], path[length:]
            if module not in self.sources:
                continue
            again = self.sources[module].exports.get(rest[0]) if rest else None
            target = None if again is None else self.absolute(module, again)
            if target is None or target + rest[1:] == path:
                return module
            return self.definition(target + rest[1:])
        return None


def circles(imports: dict[Module, set[Module]]) -> list[set[Module]]:
    """Strongly connected components with more than one module."""
    reach = {module: reachable(imports, module) for module in imports}
    found: list[set[Module]] = []
    for module in imports:
        circle = {other for other in reach[module] if module in reach.get(other, ())}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def reachable(imports: dict[Module, set[Module]], start: Module) -> set[Module]:
    """Modules that `start` imports, directly or through others."""
    seen: set[Module] = set()
    waiting = [start]
    while waiting:
        for module in imports.get(waiting.pop(), ()):
            if module not in seen:
                seen.add(module)
                waiting.append(module)
    return seen
