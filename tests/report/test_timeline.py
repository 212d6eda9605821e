from pathlib import Path

import pytest
from matplotlib.image import imread

from weft.report import Arrival, Phase, RankEvents, Write
from weft.report.timeline import MOST_WRITES_DRAWN, draw_timeline, time_unit, write_timeline


def ranks(count: int, writes: int) -> list[RankEvents]:
    return [
        RankEvents(
            rank,
            f"host-{rank % 2}",
            phases=[
                Phase("dispatch_send", 0, 40_000 + rank * 5_000),
                Phase("dispatch_recv", 45_000 + rank * 5_000, 90_000),
                Phase("experts", 90_000, 180_000),
            ],
            writes=[Write(i, (rank + 1) % count, 64, 1_000 + i, 0) for i in range(writes)],
            arrivals=[Arrival(i, (rank - 1) % count, 60_000 + i) for i in range(writes)],
        )
        for rank in range(count)
    ]


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    write_timeline(path, ranks(4, 3), "demo")
    height, width, _ = imread(path).shape
    assert width > height > 300


def test_rows_are_ranks_and_colours_are_phases() -> None:
    figure = draw_timeline(ranks(4, 3), "demo")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == [
        "rank 0\nhost-0",
        "rank 1\nhost-1",
    ]
    assert axes.get_xlabel() == "time in µs"
    assert axes.get_title("left") == "demo (12 writes)"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "dispatch_send",
        "dispatch_recv",
        "experts",
    ]


def test_many_writes_are_thinned_out_and_that_is_said() -> None:
    (axes,) = draw_timeline(ranks(4, 1000)).axes
    drawn = int(axes.get_title("left").split()[0])
    assert MOST_WRITES_DRAWN // 2 < drawn <= MOST_WRITES_DRAWN
    assert axes.get_title("left") == f"{drawn} of 4,000 writes drawn"


def test_a_run_without_events_can_be_drawn(tmp_path: Path) -> None:
    write_timeline(tmp_path / "empty.png", [])


@pytest.mark.parametrize(
    ("end_ns", "unit"), [(9_999, "ns"), (10_000, "µs"), (10**7, "ms"), (10**10, "s")]
)
def test_times_are_short_numbers(end_ns: int, unit: str) -> None:
    assert time_unit([RankEvents(0, "a", phases=[Phase("all", 0, end_ns)])])[1] == unit
