"""Ranks with random delays and two rounds in flight, thousands of times.

`WEFT_SEED`: delay seed, for example 7. `WEFT_SEEDS`: replays for each shape.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

SEED = int(os.environ.get("WEFT_SEED", "1"))
#: Each shape's replays on GPUs; rounds for each on the twin.
REPLAYS = {"cuda": int(os.environ.get("WEFT_SEEDS", "2000")), "twin": 20}
#: Each rank's captures, with different delays.
GRAPHS = 4
#: Launches on all ranks between two checks.
TOGETHER = 50
RANKS = {"cuda": 8, "twin": 3}


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("halves", [True, False], ids=["halves", "fused"])
def test_ranks_that_dawdle_lose_nothing(
    kind: str, number: int, halves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from tests.gpu.side import devices, native_group
    from tests.gpu.station import Station, shapes

    shape = replace(shapes()[number], ranks=RANKS[kind])
    natives = native_group(shape, kind)
    places = devices(kind, shape.ranks)
    stations = [
        Station(shape, native, place, rank, SEED)
        for rank, (native, place) in enumerate(zip(natives, places, strict=True))
    ]
    replays, began = REPLAYS[kind], time.monotonic()
    if kind == "cuda":
        # All kernels in between are loaded before any Weft wait.
        for station in stations:
            with torch.cuda.stream(station.stream):
                station.prepare(station.channels[0], 0)
                station.experts(station.channels[0])
                station.judge(station.channels[0])
                station.delay()
                station.wrong.zero_()
        torch.cuda.synchronize()
        graphs = [
            station.graphs(station.rounds if halves else station.fused_rounds, GRAPHS)
            for station in stations
        ]
        for replay in range(replays):
            for station, choices in zip(stations, graphs, strict=True):
                with torch.cuda.stream(station.stream):
                    if station.chance.random() < 0.3:
                        station.delay(most=4)
                    station.chance.choice(choices).replay()
            if replay % TOGETHER == TOGETHER - 1:
                for station in stations:
                    station.synchronise()
                    station.native.check()
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
    else:

        def play(station: Station) -> None:
            for _ in range(replays):
                station.rounds() if halves else station.fused_rounds()

        with ThreadPoolExecutor(len(stations)) as pool:
            list(pool.map(play, stations))
    for rank, station in enumerate(stations):
        station.native.check()
        assert int(station.round) == replays
        assert int(station.wrong) == 0, f"rank {rank}, seed {SEED}: {int(station.wrong)} elements"
    if kind == "cuda":
        with capsys.disabled():
            took = time.monotonic() - began
            print(f"\n{shape.path}: {replays} replays of {shape.ranks} ranks, {took:.1f} s")
    for native in natives:
        native.abandon()
