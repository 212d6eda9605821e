"""Generated blocks of docs/ equal their makers' output."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


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


@pytest.mark.parametrize("name", registry.PAGES)
def test_generated_blocks_are_up_to_date(name: str) -> None:
    made = registry.render(name)
    assert made == registry.PAGES[name].text(), f"run `benchmarks/pages.py --write {name}`"


def test_every_page_with_generated_blocks_is_registered() -> None:
    registered = {page.path for page in registry.PAGES.values()}
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
    monkeypatch.setitem(registry.PAGES, "test", registry.Page("page.md", "maker.py"))
    page.write_text("<!-- table: a -->\nold\n<!-- end -->\n", encoding="utf-8")
    assert registry.render("test") == "<!-- table: a -->\n\n1\n\n<!-- end -->\n"
    for text, odd in (("", "a"), (f"{page.read_text()}<!-- table: b --><!-- end -->\n", "b")):
        page.write_text(text.replace("--><", "-->\n<"), encoding="utf-8")
        with pytest.raises(ValueError, match=f"page.md, {odd}: expected each block"):
            registry.render("test")


def test_check_reports_a_page_that_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check", "speed"])
    assert registry.main() == 0
    monkeypatch.setattr(registry, "render", lambda name: "other")
    assert registry.main() == 1
    assert "benchmarks/pages.py --write speed" in capsys.readouterr().out


def test_an_unknown_page_is_refused() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "pages.py"), "--check", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "PAGE nope: expected one of speed, " in done.stderr
