"""Language check: tools/language.py and its budgets."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

TOOL = ROOT / "tools" / "language.py"
NOUN = "write a noun phrase as the first line"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    names = ("prose", "wording", "budgets")
    yield {name: load(name) for name in names}
    for name in names:
        del sys.modules[name]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the project's glossary."""
    subprocess.run(["git", "init", "--quiet", "."], cwd=tmp_path, check=True)
    (tmp_path / "tools").mkdir()
    put(
        tmp_path,
        "docs/glossary.md",
        "# Words\n" + GLOSSARY[GLOSSARY.index("\n## Words to avoid") :],
    )
    return tmp_path


def put(tree: Path, name: str, text: str) -> None:
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "add", name], cwd=tree, check=True)


def run(tree: Path, *arguments: str, status: int = 0) -> list[str]:
    command = [sys.executable, str(TOOL), *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_every_area_keeps_its_budget() -> None:
    """A failure names the area, the kind, and the command that lists the new phrases."""
    assert run(ROOT, "--check") == []


def test_the_budgets_have_one_line_for_each_area() -> None:
    lines = (ROOT / "tools" / "language.toml").read_text(encoding="utf-8").splitlines()
    areas = [line.split('"')[1] for line in lines if line.startswith('"')]
    assert areas == sorted(set(areas))
    assert len(areas) == len(lines) - 2
    assert {"crates/fabric", "python", "docs"} <= set(areas)


def test_the_targets_are_the_documented_ones(tools: dict[str, ModuleType]) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name, kind in tools["wording"].KINDS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        bound = "" if kind.target is None else f"at {'least' if kind.is_floor else 'most'} "
        target = "" if kind.target is None else f"{kind.target:g}"
        cell = "none" if target == "0" else bound + target
        assert row.split("|")[-2].strip() == cell, name


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.rs", "// Lane of it.\nfn f() {}\n", ["1: of: Lane of it"]),
        ("a.rs", "/// Size of\n/// the rows of tiles.\n", ["1: of-of: Size of the rows of tiles"]),
        ("a.rs", "/// Row of it,\n/// tile of it.\n", ["1: of: Row of it", "2: of: tile of it"]),
        ("a.rs", "/// Row of it and tile of it.\n", ["1: of: Row of it", "1: of: tile of it"]),
        ("a.rs", '#[error("{r}: left the list of peers")]\n', ["1: of: left the list of peers"]),
        ("a.rs", 'const A: &str = "of";\nlet of = b"one two of three";\n', []),
        ("a.rs", "/// A row.\n///\n/// ```\n/// size of rows of tiles;\n/// ```\n", []),
        ("a.rs", "/// Whether it holds.\nfn f() {}\n", [f"1: banned: 'Whether': {NOUN}"]),
        ("a.rs", "// Whether it holds.\nfn f() {}\n", []),
        ("a.c", "/* One.\n * Those of it. */\nint of;\n", ["2: those-of: Those of it."]),
        ("a.cuh", "// One multiprocessor.\n", ["1: banned: 'multiprocessor': write SM, SMs"]),
        ("a.py", '"""Rows.\n\nSame as of tiles."""\n', ["3: as-of: as of tiles."]),
        ("a.py", "f(help='first part '\n  'in the list of rows')\n", ["2: of: the list of rows"]),
        ("a.py", "'''Rows.'''\nf()  # on tiles alone\n", ["2: banned: 'alone': write only"]),
        ("a.py", "x = '''size of a row of it'''\n", []),
        ("a.md", "A module\nstands alone, instead of two.\n", []),
        ("a.md", "The `size of` [it](of.md).\n\n```\nsize of it\n```\n\n    size of it\n", []),
        ("a.md", "<!-- table: a -->\nof it\n<!-- end -->\nRow of it.\n", ["4: of: Row of it"]),
        ("a.toml", "# mended\nname = 'piece'\n", ["1: banned: 'mended': write fix, repair"]),
        ("a.json", '{"says": "size of it"}\n', []),
        ("CHANGELOG.md", "Size of it.\n", []),
    ],
)  # fmt: skip
def test_phrases_in_prose_are_listed_with_their_lines(
    tree: Path, name: str, text: str, expected: list[str]
) -> None:
    put(tree, name, text)
    assert run(tree, name) == [f"{name}:{line}" for line in expected]


def test_examples_links_and_sources_are_counted(tools: dict[str, ModuleType]) -> None:
    def counts(name: str, text: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for passage in tools["prose"].passages(Path(name), text):
            total.update(tools["wording"].count(passage, []))
        return total

    rust = counts(
        "a.rs", "/// A [`Row`], e.g. 3. See https://a.b/c.\n///\n/// ```\n/// 1\n/// ```\n"
    )
    assert (rust["examples"], rust["links"], rust["sources"]) == (2, 2, 1)
    diagram = counts("a.rs", "/// A row.\n///\n/// ```text\n/// 1\n/// ```\n")
    assert diagram["examples"] == 0
    python = counts("a.py", '"""Rows, such as 3.\n\n>>> f(1)\n>>> f(2)\n\nA\'s::\n\n    g()\n"""\n')
    assert (python["examples"], python["links"]) == (3, 0)
    page = counts(
        "a.md", "[A](b.md) and [C](https://d.e). For example:\n\n    x\n\n    y\n\nEnd.\n"
    )
    assert (page["examples"], page["links"], page["sources"]) == (2, 2, 1)


def test_an_area_over_budget_fails_and_budgets_only_fall(tree: Path) -> None:
    budgets = tree / "tools" / "language.toml"
    run(tree, "--check", status=1)  # There is no budget yet.
    put(tree, "lab/a.py", "# Size of it.\n# Size of it.\n")
    run(tree, "--lower")
    assert '"lab" = { of = [2, 3333.4], of-of = [0, 0.0],' in budgets.read_text("utf-8")
    assert run(tree, "--check") == []
    put(tree, "lab/a.py", "# Size of it.\n# Row size.\n")
    run(tree, "--lower")
    lowered = budgets.read_text("utf-8")
    assert '"lab" = { of = [1, 2000.0],' in lowered
    put(tree, "lab/a.py", "# Size of it.\n# Size of it.\n")
    (line,) = run(tree, "--check", status=1)
    assert line.startswith(
        "lab, the word 'of': 2, 3333.3 per 10,000 words: expected at most 1 or 2000.0"
    )
    run(tree, "--lower")
    assert budgets.read_text("utf-8") == lowered


def test_a_budget_is_kept_by_count_by_rate_or_by_the_target(tools: dict[str, ModuleType]) -> None:
    budgets = tools["budgets"]
    budget = budgets.Budget(10, 500.0)

    def is_over(kind: str, count: int, words: int) -> bool:
        return bool(budgets.is_over(kind, Counter({kind: count, "words": words}), budget))

    assert is_over("of", 11, 200)
    assert not is_over("of", 10, 100)  # Deleted words.
    assert not is_over("of", 11, 220)  # More text, no denser.
    assert not is_over("of", 505, 10_000)  # Within the tolerance.
    assert is_over("of", 506, 10_000)
    few = budgets.Budget(1, 2.0)
    assert not budgets.is_over("of", Counter({"of": 2, "words": 100}), few)
    assert budgets.is_over("of", Counter({"of": 3, "words": 100}), few)
    # Examples: less is worse.
    assert budgets.is_over("examples", Counter({"examples": 0, "words": 10_000}), few)
    assert not budgets.is_over("examples", Counter({"examples": 9, "words": 10_000}), budget)


def test_only_changed_lines_are_listed_since_a_commit(tree: Path) -> None:
    put(tree, "a.md", "Size of it.\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *author, "commit", "--quiet", "-m", "a"], cwd=tree, check=True)
    put(tree, "a.md", "Size of it.\nRow of it.\n")
    assert run(tree, "--since", "HEAD") == ["a.md:2: of: Row of it"]


def test_files_are_listed_with_the_worst_phrase_first(tree: Path) -> None:
    put(tree, "a.md", "Size of it.\n")
    put(tree, "b.md", "Row of it. Size of the rows of tiles.\n")
    lines = run(tree, "--files", "a.md", "b.md")
    assert lines[0].startswith("b.md: 2 findings, 9 words; per 10,000: of 3333, of-of 1111")
    assert lines[1:3] == ["    1: of-of: Size of the rows of tiles", "    1: of: Row of it"]
    assert lines[3].startswith("a.md: 1 findings")


def test_the_table_has_every_area_and_json_the_same_counts(tree: Path) -> None:
    put(tree, "crates/a/src/lib.rs", "//! Size of it.\n")
    put(tree, "README.md", "Rows.\n")
    table = run(tree)
    assert [line.split()[0] for line in table[1:4]] == ["crates/a", "docs", "whole"]
    found = json.loads("\n".join(run(tree, "--json")))
    assert found["areas"]["crates/a"] == {"words": 3, "of": 1} | {
        kind: 0 for kind in found["targets"] if kind != "of"
    }
    assert found["files"]["crates/a/src/lib.rs"]["findings"] == [[1, "of", "Size of it"]]
