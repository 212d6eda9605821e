"""What was published, and what the simulator makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main
from weft.sim.article import deviation, markdown, published
from weft.sim.perplexity_machines import derive

ALWAYS = {"time_s", "max_link_load", "cpu_s", "constants"}


def article(
    capsys: pytest.CaptureFixture[str], name: str, *arguments: str
) -> tuple[dict[str, Any], str]:
    assert main(["sim", name, *arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    found: dict[str, Any] = json.loads(output.out)
    assert set(found) >= ALWAYS
    return found, output.out


def test_constants_follow_from_what_was_published() -> None:
    cx7, efa = derive("cx7"), derive("efa")
    # 31 MiB more take 676 and 741 µs more.
    assert cx7["bytes_per_s"] == pytest.approx(48.1e9, rel=0.01)
    assert efa["bytes_per_s"] == pytest.approx(43.9e9, rel=0.01)
    assert cx7["message_latency_s"] == pytest.approx(11.9e-6, rel=0.01)
    assert efa["message_latency_s"] == pytest.approx(32.7e-6, rel=0.01)
    assert cx7["post_s"] == pytest.approx((8.502 - 0.842) / 56 * 1e-6)
    assert efa["post_s"] == pytest.approx((27.886 - 3.081) / 56 * 1e-6)


@pytest.mark.timeout(240)
def test_moe_stands_beside_its_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new"
    found, text = article(capsys, "perplexity", "--quick", "--out", str(out))
    rows = found["rows"]
    # Two machines, two phases, 8 and 16 ranks, two operations.
    assert len(rows) == 16
    known = [row for row in rows if row["published_us"] is not None]
    assert len(known) == 14, "two cells were left out"
    for row in known:
        assert row["deviation"] == pytest.approx(row["predicted_us"] / row["published_us"] - 1)
        # One node is what the constants were fitted to; the rest is what docs/perplexity.md shows.
        limit = 0.01 if row["is_fit"] else 0.35
        assert abs(row["deviation"]) < limit, row
        assert row["weft_us"] < row["predicted_us"], (
            "a copy for each rank is less than for each expert"
        )
    assert found["summary"]["cx7_deviation"]["worst"] < 0.1
    written = {path.name for path in out.iterdir()}
    assert written == {
        *("perplexity.md", "perplexity.json"),
        *("perplexity-cx7.svg", "perplexity-efa.svg"),
    }
    assert all(path.stat().st_size > 1000 for path in out.iterdir())
    assert json.loads((out / "perplexity.json").read_text(encoding="utf-8")) == json.loads(text)
    assert "| ranks | operation | published |" in (out / "perplexity.md").read_text("utf-8")


@pytest.mark.timeout(240)
def test_fusing_128_nodes_stands_beside_what_was_published(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from weft.sim import dlrm
    from weft.sim.sweep import simulate

    assumed = {name: value for name, (value, _) in dlrm.ASSUMED.items()}
    gain = simulate(dlrm.scenario(assumed, dlrm.RANKS, 0))["results"]["gain"]
    assert gain == pytest.approx(published("fused_operators")["dlrm_128_nodes_simulated"], abs=0.03)
    found = dlrm.reproduce(seed=0, quick=True, progress=False)
    assert [title for title, _, _ in dlrm.tables(found)] == ["16 nodes", "Assumptions"]


@pytest.mark.timeout(240)
def test_eflops_stands_beside_what_was_published(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, _ = article(capsys, "eflops", "--quick", "--out", str(tmp_path))
    known = [row for row in found["results"]["comparison"] if row["published"] is not None]
    assert len(known) >= 9
    for row in known:
        assert row["fitted_deviation"] == pytest.approx(row["fitted"] / row["published"] - 1)
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".svg"}


def test_tables_for_people_have_no_progress_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "perplexity", "--quick"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "ConnectX-7, decode: 128 tokens of each rank, µs" in output.out
    assert "off in the median" in output.out


def test_what_was_not_published_has_no_deviation() -> None:
    assert deviation(3.0, None) is None
    assert deviation(3.0, 2.0) == 0.5
    table = markdown(("name", "share", "count"), [("a", "+5.0%", 1500), ("b", None, None)])
    assert table.splitlines()[1] == "| --- | ---: | ---: |"
    assert table.splitlines()[3] == "| b |  |  |"


@pytest.mark.parametrize("name", ["perplexity", "dlrm", "eflops"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["sim", name, "--out", str(file)])
    assert ended.value.code == 2
    assert "--out" in capsys.readouterr().err
