"""Rounds on two sides, which must give equal bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.gpu.case import Batch, Chance, Result, Shape
    from tests.gpu.side import Mode


class Rounds(Protocol):
    """Side that runs rounds: `tests.gpu.side.Side` or `tests.gpu.reference.Reference`."""

    positions: int

    def run(self, batches: list[Batch], channel: int = 0, mode: Mode = "halves") -> list[Result]:
        """A round's outcome at every rank."""


def compare(
    shape: Shape, chance: Chance, subject: Rounds, against: Rounds, modes: Iterable[Mode]
) -> int:
    """A round with random batches for each of `modes`; the number of equal rounds."""
    assert subject.positions == against.positions, (subject.positions, against.positions)
    count = 0
    for round, mode in enumerate(modes):
        batches = chance.batches(shape, subject.positions)
        channel = round % shape.channels
        expected = against.run(batches, channel)
        assert shape.limited or not any(each.error for each in expected), (expected, shape)
        seen = subject.run(batches, channel, mode)
        for rank, pair in enumerate(zip(seen, expected, strict=True)):
            for wrong in differences(*pair):
                raise AssertionError(
                    f"seed {chance.seed}, {mode} {round}, rank {rank}: {wrong}; {shape}"
                )
        count += 1
    return count


#: Outputs that are compared in every position, written or not.
WHOLE = ("counts", "offsets", "tokens", "scales", "groups", "combined")


def differences(seen: Result, expected: Result) -> Iterable[str]:
    """Describes differing bits."""
    if seen.error != expected.error:
        yield f"{seen.error} was raised; {expected.error} should have been"
    used = int(expected.offsets[-1])
    # Dense rows have a value for each choice; all rows behind the last are unwritten.
    each = len(expected.rows) == len(expected.tokens)
    for name in (*WHOLE, "rows", "weights"):
        one: torch.Tensor = getattr(seen, name)
        other: torch.Tensor = getattr(expected, name)
        if name in ("rows", "weights") and each:
            one, other = one[:used], other[:used]
        if one.shape != other.shape:
            yield f"{name} has shape {tuple(one.shape)}; {tuple(other.shape)} is right"
        elif not torch.equal(one, other):
            places = (one != other).nonzero()
            first = tuple(places[0].tolist())
            yield (
                f"{name} differ in {len(places)} of {one.numel()} places, first at {first}: "
                f"{one[first]} in place of {other[first]}"
            )
