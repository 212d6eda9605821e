"""Mutations for the memory-order check: tools/mutate.py and tools/mutations.toml."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

PAGE = "docs/domain.md"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


def test_each_mutation_changes_its_source_once(tool: ModuleType) -> None:
    rows = tool.mutations()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        source = (ROOT / row.file).read_text(encoding="utf-8")
        assert row.apply(source) != source, row.name


def test_a_text_that_is_gone_or_comes_twice_is_an_error(tool: ModuleType) -> None:
    row = tool.mutations()[0]
    for source in ("", row.text * 2):
        with pytest.raises(ValueError, match=f"{row.name}: .* expected once"):
            row.apply(source)
    with pytest.raises(ValueError, match="expected once"):
        row._replace(replacement=row.text).apply(row.text)


def test_each_step_in_the_memory_order_table_has_mutations(tool: ModuleType) -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    (table,) = re.findall(r"\n\| step \| rule \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    steps = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert len(steps) == 5
    assert {row.step for row in tool.mutations()} == set(steps)


def test_each_mutation_names_an_existing_test(tool: ModuleType) -> None:
    for row in tool.mutations():
        kind, *words = row.test.split()
        if kind == "pytest":
            text = (ROOT / words[0]).read_text(encoding="utf-8")
            name = words[1]
        else:
            assert kind in ("cargo", "loom")
            package, target, name = words
            crate = ROOT / "crates" / package.removeprefix("weft-")
            files = crate.glob("src/**/*.rs") if target == "lib" else files_of(crate, target)
            # A path of modules ends in the file's folder.
            text = "".join(path.read_text(encoding="utf-8") for path in files)
            name = name.rpartition("::")[2]
        assert name in text, row.name


def files_of(crate: Path, target: str) -> list[Path]:
    return [crate / "tests" / f"{target}.rs", *(crate / "tests" / target).glob("*.rs")]


def test_outcomes_of_programs(tool: ModuleType, tmp_path: Path) -> None:
    runner = tool.Runner(tmp_path)
    runner.tree.mkdir()
    (runner.tree / "test_it.py").write_text(
        "def test_good():\n    pass\n\ndef test_bad():\n    assert False\n\n"
        "import pytest\n\n@pytest.fixture\ndef lost():\n    raise OSError\n\n"
        "def test_setup(lost):\n    pass\n"
    )
    for name, kind in {
        "good": "passed",
        "bad": "failed",
        # Neither a test that does not exist nor an error outside of one says anything.
        "other": "broken",
        "setup": "broken",
    }.items():
        assert runner.run(f"pytest test_it.py {name}").kind == kind, name


def test_a_renewed_tree_has_the_files_of_this_one(tool: ModuleType, tmp_path: Path) -> None:
    runner = tool.Runner(tmp_path)
    removed = runner.tree / "crates" / "fabric" / "src" / "removed.rs"
    removed.parent.mkdir(parents=True)
    removed.write_text("mod missing;\n")
    runner.copy()
    assert not removed.exists()
    assert (runner.tree / "Cargo.toml").read_bytes() == (ROOT / "Cargo.toml").read_bytes()
