"""Random shapes and routings: the kernels, their CPU twin and plain arithmetic give the same bits.

`WEFT_SEED`: replay the shape of one seed, for example 7. `WEFT_SEEDS`: shape count.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.case import Shape

pytestmark = pytest.mark.torch

#: Shapes on a machine with GPUs, each compiled; and without one.
SHAPES = {"cuda": 64, "twin": 24}
#: Minimum.
COMPARISONS = 500


def seeds(kind: str) -> list[int]:
    """Seeds for the shapes."""
    if "WEFT_SEED" in os.environ:
        return [int(os.environ["WEFT_SEED"])]
    return list(range(int(os.environ.get("WEFT_SEEDS", SHAPES[kind]))))


def compiled(shape: Shape) -> None:
    """Compile a shape's kernels into the cache."""
    from tests.gpu.side import native_group

    for native in native_group(shape, "cuda"):
        native.abandon()


@pytest.mark.timeout(900)
def test_random_rounds_are_the_same_bits(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.gpu.case import Chance
    from tests.gpu.compare import Rounds, compare
    from tests.gpu.reference import Reference
    from tests.gpu.side import Mode, Side

    fused: list[Mode] = ["fused", "graph", "graph", "graph"] if kind == "cuda" else ["fused"] * 2
    modes: list[Mode] = ["halves", "halves", "halves", *fused, "halves", "fused"]
    chosen, began = seeds(kind), time.monotonic()
    seen: Counter[object] = Counter()
    count = 0
    if kind == "cuda":
        # Shapes are compiled ahead, in parallel, into the cache.
        shapes = [Chance(seed).shape() for seed in chosen]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compiled, shapes))
        with capsys.disabled():
            print(f"\n{len(shapes)} shapes compiled, {time.monotonic() - began:.0f} s")
    for done, seed in enumerate(chosen):
        chance = Chance(seed)
        shape = chance.shape() if kind == "cuda" else chance.shape(elements=1 << 19)
        subject = Side(shape, kind)
        against: Rounds = (
            Side(shape, "twin") if kind == "cuda" else Reference(shape, subject.positions)
        )
        try:
            count += compare(shape, chance, subject, against, modes)
            path = subject.ranks[0].native.path
        finally:
            subject.close()
            if isinstance(against, Side):
                against.close()
        seen.update([path, shape.layout, shape.ranks, (path, shape.layout)])
        seen.update(["placed"] * bool(shape.placement))
        seen.update(["cast" if shape.cast else "scaled" if shape.scales else shape.wire])
        if kind == "cuda" and done % 8 == 7:
            with capsys.disabled():
                print(f"\n{count} rounds of {done + 1} shapes, {time.monotonic() - began:.0f} s")
    if len(chosen) > 1:
        # The random shapes cover all cases.
        assert not {1, 2, 3, 4, 5, 6, 7, 8} - set(seen), seen
        layouts = {"contiguous", "indexed", "padded", "dense"}
        assert not layouts - set(seen), seen
        assert not {"packets", "latency", "bandwidth"} - set(seen), seen
        assert "placed" in seen
        assert not {"cast", "scaled", "float32", "bfloat16", "float16"} - set(seen), seen
    if kind == "cuda" and len(chosen) >= SHAPES[kind]:
        assert count >= COMPARISONS
