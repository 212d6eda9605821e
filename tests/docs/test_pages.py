"""Generated blocks in docs/ equal their makers' output."""

import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT


def load_registry() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "benchmarks_pages", ROOT / "benchmarks" / "pages.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


registry = load_registry()


@pytest.mark.parametrize("subject", registry.subjects())
def test_generated_blocks_are_up_to_date(subject: str) -> None:
    for page, made in registry.render(subject).items():
        found = (ROOT / page).read_text(encoding="utf-8")
        assert made == found, f"run `benchmarks/pages.py --write {subject}`"


@pytest.mark.parametrize("subject", registry.subjects())
def test_a_maker_reads_the_registered_result_files(
    subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    open_file, open_descriptor = io.open, os.open

    def recorded(opens: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | os.PathLike):
            file = Path(path)
            if file.is_relative_to(ROOT / "benchmarks") and file.suffix in (".json", ".jsonl"):
                read.add(str(file.relative_to(ROOT / "benchmarks")))
        return opens(path, *arguments, **named)

    maker = registry.maker(subject)
    monkeypatch.setattr(io, "open", partial(recorded, open_file))
    monkeypatch.setattr(os, "open", partial(recorded, open_descriptor))
    maker.blocks(subject)
    monkeypatch.undo()
    every = [tables for tables in registry.REGISTRY if tables.subject == subject]
    assert read == {name for tables in every for name in tables.records}


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").iterdir()), ids=str)
def test_a_page_has_one_headline_table_and_a_link_to_its_results(page: Path) -> None:
    text = (ROOT / "docs" / page.name).read_text(encoding="utf-8")
    assert f"](results/{page.name})" in text
    assert sum("| ---" in match[3] for match in registry.BLOCK.finditer(text)) == 1
    assert f"](../{page.name}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_no_page_has_a_table_without_measurements(page: Path) -> None:
    assert "not measured yet" not in page.read_text(encoding="utf-8").lower()
    assert "Not measured" not in page.read_text(encoding="utf-8")


def test_every_page_with_generated_blocks_is_registered() -> None:
    registered = {tables.page for tables in registry.REGISTRY}
    for page in (ROOT / "docs").rglob("*.md"):
        path = str(page.relative_to(ROOT))
        text = re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8"))
        assert ("<!-- table:" in text) == (path in registered), path


def test_a_block_without_a_maker_and_a_missing_block_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "maker.py").write_text("def blocks(page):\n    return {'a': '1'}\n", "utf-8")
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    rows = [registry.Tables("test", "page.md", "maker.py", (), ("a",))]
    monkeypatch.setattr(registry, "REGISTRY", rows)
    page.write_text("<!-- table: a -->\nold\n<!-- end -->\n", encoding="utf-8")
    made = "<!-- table: a -->\n\n1\n\n<!-- end -->\n"
    assert registry.render("test") == {"page.md": made}
    for text, odd in (("", "a"), (f"{page.read_text()}<!-- table: b --><!-- end -->\n", "b")):
        page.write_text(text.replace("--><", "-->\n<"), encoding="utf-8")
        with pytest.raises(ValueError, match=f"page.md, {odd}: expected each block"):
            registry.render("test")
    rows[0] = rows[0]._replace(blocks=("a", "c"))
    with pytest.raises(ValueError, match=r"test, c: expected each block of maker.py once"):
        registry.render("test")


def test_check_reports_a_page_that_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check", "speed"])
    assert registry.main() == 0
    monkeypatch.setattr(registry, "render", lambda subject: {"docs/speed.md": "other"})
    assert registry.main() == 1
    assert "benchmarks/pages.py --write speed" in capsys.readouterr().out


def test_an_unknown_subject_is_refused() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "pages.py"), "--check", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "SUBJECT nope: expected one of speed, " in done.stderr
