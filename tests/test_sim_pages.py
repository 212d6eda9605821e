"""docs/perplexity.md and docs/dlrm.md show what the results say."""

import importlib.util
import json
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from weft.sim.perplexity_machines import OFI_HOST_S

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def sim_pages() -> ModuleType:
    path = ROOT / "benchmarks" / "sim_pages.py"
    spec = importlib.util.spec_from_file_location("benchmarks_sim_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["perplexity", "dlrm"])
def test_a_page_is_made_from_its_results(sim_pages: ModuleType, name: str) -> None:
    text = sim_pages.page(name).read_text(encoding="utf-8")
    shown = {match[1] for match in sim_pages.SECTION.findall(text)}
    assert shown == {*sim_pages.TABLES[name], "notes"}
    assert sim_pages.with_tables(name, text) == text, "run `make bench-articles`"


def test_every_cell_that_was_published_is_compared(sim_pages: ModuleType) -> None:
    rows = sim_pages.read("perplexity")["rows"]
    assert len(rows) == 2 * 2 * 4 * 2
    compared = [row for row in rows if row["deviation"] is not None]
    assert len(compared) == len(rows) - 2
    assert all(row["published_us"] is not None for row in compared)


def test_the_pictures_of_the_pages_are_modest() -> None:
    for name in ("perplexity-cx7.svg", "perplexity-efa.svg", "dlrm.svg"):
        picture = ROOT / "docs" / "images" / name
        assert 1000 < picture.stat().st_size < 200_000


def test_the_host_cost_over_ofi_is_the_measured_one(sim_pages: ModuleType) -> None:
    lines = (sim_pages.RESULTS / "ofi.jsonl").read_text(encoding="utf-8").splitlines()
    times = {
        (row["side"], row["bytes"]): row["median_us"]
        for row in map(json.loads, lines)
        if (row.get("libfabric"), row["path"], row.get("pattern")) == ("2.5.1", "ofi-shm", "stream")
    }
    added = [times["weft", size] - times["libfabric", size] for size in (8, 64, 512, 4096)]
    assert round(median(added) * 1e3) == round(OFI_HOST_S * 1e9)
