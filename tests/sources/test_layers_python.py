"""`weft` packages import in one direction, and so do the files in a package.

A room is a top-level package in `python/weft`, such as `weft.moe`. Imports only for type
checkers count too.
"""

import ast
from pathlib import Path

import pytest

from tests import ROOT
from tests.sources.imports import circles

PYTHON = ROOT / "python"

#: Rooms from the ground up; `face` is `weft` itself, with the modules that only export.
ROOMS = (
    "base",
    "report",
    "group",
    "gpu",
    "moe",
    "collectives",
    "cuda",
    "face",
    "triton",
    "launch",
    "diagnosis",
    "topology",
    "fused",
    "loadgen",
    "qdl",
    "torch",
    "adapters",
    "sim",
    "bench",
    "demo",
    "cli",
)
#: Rooms for the package's top-level modules.
TOP = {
    "weft": "face",
    "weft._native": "base",
    "weft._start": "face",
    "weft.communicator": "face",
    "weft.counter": "face",
    "weft.errors": "face",
    "weft.float8": "face",
    "weft.pair": "face",
    "weft.peer_group": "face",
    "weft.region": "face",
    "weft.request": "face",
    "weft.route": "face",
    "weft.units": "face",
    "weft.word": "face",
    "weft.__main__": "cli",
}
#: Imports from a room above, each with its reason; at most five.
EXCEPTIONS = {
    ("weft._native", "weft.moe.options"): (
        "the stub of the native module declares keywords that are generated for the all-to-all"
    ),
}

Module = tuple[str, ...]


class Package:
    """Modules below a folder, and what each imports."""

    def __init__(self, folder: Path, name: str) -> None:
        self.files: dict[str, Path] = {}
        for path in sorted((folder / name).rglob("*.py*")):
            if path.suffix in (".py", ".pyi"):
                parts = path.relative_to(folder).with_suffix("").parts
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def imports(self) -> dict[str, set[str]]:
        """By module, the others that it imports."""
        return {module: set(self.imported(module)) - {module} for module in self.files}

    def imported(self, module: str) -> list[str]:
        path = self.files[module]
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        found = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: 1 - node.level or None] if node.level else []
                origin = ".".join([*above, *([node.module] if node.module else [])])
                for name in node.names:
                    inner = f"{origin}.{name.name}"
                    found.append(inner if inner in self.files else origin)
        return [name for name in found if name in self.files]


def room_of(module: str) -> str:
    return TOP.get(module) or module.split(".")[1]


def upward(imports: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Imports from a room above."""
    return {
        (module, other)
        for module, others in imports.items()
        for other in others
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    }


@pytest.fixture(scope="module")
def weft() -> dict[str, set[str]]:
    return Package(PYTHON, "weft").imports()


def test_every_package_has_a_place_in_the_order(weft: dict[str, set[str]]) -> None:
    assert {room_of(module) for module in weft} == set(ROOMS)
    assert sum(map(len, weft.values())) > len(weft), "the reader of imports found hardly any"


def test_no_package_imports_one_above_it(weft: dict[str, set[str]]) -> None:
    assert len(EXCEPTIONS) <= 5
    found = upward(weft)
    assert found - EXCEPTIONS.keys() == set()
    assert EXCEPTIONS.keys() - found == set(), "an exception that is no longer needed: remove it"


@pytest.mark.parametrize("room", ROOMS)
def test_files_of_a_package_import_in_one_direction(weft: dict[str, set[str]], room: str) -> None:
    inside: dict[Module, set[Module]] = {
        tuple(module.split(".")): {
            tuple(other.split(".")) for other in others if room_of(other) == room
        }
        for module, others in weft.items()
        if room_of(module) == room
    }
    assert circles(inside) == []


def test_imports_of_all_kinds_are_found(tmp_path: Path) -> None:
    for name, text in {
        "__init__.py": "from weft.cli import main",
        "base/__init__.py": "",
        "base/errors.py": "def f():\n    from weft.moe import rounds",
        "moe/__init__.py": "from . import rounds\nfrom ..base.errors import Error",
        "moe/rounds.py": (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from weft.moe.all_to_all import AllToAll"
        ),
        "moe/all_to_all.py": "import weft.moe.rounds as rounds",
        "cli/__init__.py": "import weft",
    }.items():
        path = tmp_path / "weft" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = Package(tmp_path, "weft").imports()
    assert found["weft.moe"] == {"weft.moe.rounds", "weft.base.errors"}
    assert upward(found) == {("weft", "weft.cli"), ("weft.base.errors", "weft.moe.rounds")}
    rounds = {("weft", "moe", "rounds"), ("weft", "moe", "all_to_all")}
    assert rounds in circles(
        {tuple(name.split(".")): {tuple(each.split(".")) for each in found[name]} for name in found}
    )
