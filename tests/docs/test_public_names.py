"""Names by which programs import from Weft, as `tests/docs/public_names.json` lists them.

`BLESS=1` writes the list anew, once a change to it is in CHANGELOG.md.
"""

import importlib
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

from tests import ROOT

LIST = ROOT / "tests/docs/public_names.json"
NAMES: dict[str, dict[str, list[str]]] = json.loads(LIST.read_text(encoding="utf-8"))
#: Modules whose import needs torch.
OF_TORCH = ("weft.cuda", "weft.fused", "weft.torch", "weft.triton")


def public_names(module: ModuleType) -> dict[str, list[str]]:
    """A module's exports, and its other names without an underscore except submodules."""
    exported = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("weft.")
    ]
    others = [
        name
        for name in dir(module)
        if not name.startswith("_")
        and name not in exported
        and not isinstance(getattr(module, name), ModuleType)
    ]
    # A module, unlike a package, is not a place where programs find what it imports.
    return {"exported": sorted(exported), "others": others if hasattr(module, "__path__") else []}


def check(name: str) -> None:
    found = public_names(importlib.import_module(name))
    if os.environ.get("BLESS"):
        NAMES[name] = found
        LIST.write_text(json.dumps(NAMES, indent=1) + "\n", encoding="utf-8")
    assert found == NAMES[name]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(OF_TORCH)])
def test_public_names_are_those_listed(name: str) -> None:
    check(name)


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(OF_TORCH)])
def test_public_names_of_modules_with_torch_are_those_listed(name: str) -> None:
    pytest.importorskip("torch")
    if name in ("weft.fused", "weft.triton"):
        pytest.importorskip("triton")
    check(name)


def test_public_modules_can_be_imported_first() -> None:
    """Each in a separate process: an import cycle shows only from one end."""
    names = [name for name in NAMES if not name.startswith(OF_TORCH)]
    programs = [subprocess.Popen([sys.executable, "-c", f"import {name}"]) for name in names]
    assert [program.wait() for program in programs] == [0] * len(names)


def test_the_package_imports_neither_torch_nor_triton() -> None:
    """Nor does any public module but those for torch."""
    names = [name for name in NAMES if not name.startswith(OF_TORCH)]
    program = (
        f"import sys, {', '.join(names)}\n"
        "assert not {'torch', 'triton', 'weft.cuda', 'weft.fused'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
