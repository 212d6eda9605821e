"""docs/eflops.md shows what its figures say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def eflops_page() -> ModuleType:
    path = ROOT / "benchmarks" / "eflops_page.py"
    spec = importlib.util.spec_from_file_location("benchmarks_eflops_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_results(eflops_page: ModuleType) -> None:
    page = eflops_page.PAGE.read_text(encoding="utf-8")
    made = eflops_page.with_tables(page, eflops_page.read())
    assert made == page, "run `python benchmarks/eflops_page.py --write`"


def test_every_published_figure_has_a_deviation(eflops_page: ModuleType) -> None:
    rows = eflops_page.read()["results"]["comparison"]
    published = [row for row in rows if row["published"] is not None]
    assert len(published) == 9
    for row in published:
        assert row["fitted_deviation"] == pytest.approx(row["fitted"] / row["published"] - 1)
