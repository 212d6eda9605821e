"""Rounds of dispatch and combine, captured once, replayed with fresh inputs, and timed."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from weft.bench.device.inputs import Inputs
    from weft.bench.device.rig import Checked, Rig

__all__ = ["FUSED", "HALVES", "Bank", "Found", "Rounds", "Times", "sample"]

#: Phases between a round's marks; the last one is empty and measures the mark cost.
FUSED: Final = ("dispatch", "combine", "nothing")
HALVES: Final = ("dispatch send", "dispatch recv", "combine send", "combine recv", "nothing")

#: Microseconds by phase, in round order.
Times = dict[str, list[float]]


class Slot(NamedTuple):
    """Addresses that one round in a graph reads."""

    inputs: Inputs
    outputs: Any


class Bank:
    """Slots, and more batches than slots, so that a slot has another batch at each replay."""

    def __init__(self, rig: Rig, slots: int) -> None:
        torch = rig.device.torch
        self.rig = rig
        self.batches: list[Checked] = [rig.checked(number) for number in range(slots + 1)]
        self.slots = []
        for batch in self.batches[:slots]:
            inputs = type(batch.inputs)(
                *(None if each is None else torch.clone(each) for each in batch.inputs)
            )
            self.slots.append(Slot(inputs, rig.full(batch.outputs)))
        self.turn = 0

    def fill(self) -> None:
        """Copy other batches into the slots, on the stream."""
        self.turn += 1
        for number, slot in enumerate(self.slots):
            batch = self.batch_of(number)
            for target, source in zip(slot.inputs, batch.inputs, strict=True):
                if target is not None:
                    copy(self.rig.device.torch, target, source)
            slot.outputs[: len(batch.outputs)] = batch.outputs

    def batch_of(self, slot: int) -> Checked:
        """The batch that a slot holds."""
        return self.batches[(slot + self.turn) % len(self.batches)]

    def largest_share(self) -> float:
        """Largest share of the error bound, over all batches."""
        return max(batch.share_of_bound for batch in self.batches)


def copy(torch: Any, target: Any, source: Any) -> None:
    """Copy bytes; some PyTorch versions do not copy 8-bit floats everywhere."""
    if target.element_size() == 1:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


class Rounds:
    """A round for each slot, captured.

    Args:
        bank: slots and batches.
        count: rounds; by default one for each slot.
        marks: record when phases begin.
        halves: launch separate halves instead of a fused kernel.
        cold: flush the caches before each round.
        late_us: this rank's delay in microseconds.
    """

    def __init__(
        self,
        bank: Bank,
        *,
        count: int | None = None,
        marks: bool = False,
        halves: bool = False,
        cold: bool = False,
        late_us: float = 0.0,
    ) -> None:
        self.bank, self.rig, self.device = bank, bank.rig, bank.rig.device
        self.halves, self.cold, self.late_us = halves, cold, late_us
        self.phases = HALVES if halves else FUSED
        self.slots = bank.slots[:count]
        every = len(self.phases) + 1 if marks else 0
        self.marks = [[self.device.mark() for _ in range(every)] for _ in self.slots]
        self.combined: list[Any] = [None] * len(self.slots)
        self.replay = self.device.capture(self.run)

    def run(self) -> None:
        """All rounds, launched one after the other."""
        for number, slot in enumerate(self.slots):
            if self.cold:
                self.device.flush()
            if self.late_us:
                self.device.sleep(self.late_us)
            marks = iter(self.marks[number])
            self.mark(marks)
            if self.halves:
                self.combined[number] = self.run_halves(slot, marks)
            else:
                self.combined[number] = self.run_fused(slot, marks)
            self.mark(marks)
            self.mark(marks)

    def run_fused(self, slot: Slot, marks: Any) -> Any:
        """A round with fused launches."""
        with self.rig.dispatch(slot.inputs) as received:
            self.mark(marks)
            return self.rig.all_to_all.combine(received, slot.outputs)

    def run_halves(self, slot: Slot, marks: Any) -> Any:
        """A round with separate halves."""
        dispatch = self.rig.dispatch_send(slot.inputs)
        self.mark(marks)
        with dispatch.recv() as received:
            self.mark(marks)
            combine = self.rig.all_to_all.combine_send(received, slot.outputs)
            self.mark(marks)
            return combine.recv()

    def mark(self, marks: Any) -> None:
        """Write the time to the next mark, if there are any."""
        mark = next(marks, None)
        if mark is not None:
            self.device.set_mark(mark)

    def wrong(self) -> Any:
        """Number of rounds in the last replay whose result differs from the checked one in bits."""
        torch = self.device.torch
        total = torch.zeros((), dtype=torch.int64, device=self.device.name)
        for number, combined in enumerate(self.combined):
            expected = self.bank.batch_of(number).combined
            total += (combined.view(torch.int16) != expected.view(torch.int16)).any()
        return total

    def phase_times(self) -> Times:
        """Time by phase and round in the last replay, after `synchronise`."""
        times: Times = {phase: [] for phase in self.phases}
        for marks in self.marks:
            for phase, (begin, end) in zip(self.phases, pairwise(marks), strict=True):
                times[phase].append(self.device.elapsed_us(begin, end))
        return times


def sample(rounds: Rounds, align: Rounds, samples: int) -> tuple[Times, int]:
    """Replay rounds with fresh inputs; microseconds by phase, and rounds with wrong results.

    Each replay follows an untimed round, so that the ranks begin together. With marks, there is a
    time for each phase in each round; `round` is the whole replay's time over its rounds.
    """
    device, bank = rounds.device, rounds.bank
    times: Times = {"round": []}
    wrong = 0
    spans = []
    for _ in range(samples):
        bank.fill()
        align.replay()
        begin = device.stamp()
        rounds.replay()
        spans.append((begin, device.stamp()))
        missed = rounds.wrong()
        if rounds.marks[0]:
            device.synchronise()
            for phase, found in rounds.phase_times().items():
                times.setdefault(phase, []).extend(found)
        wrong += missed
    device.synchronise()
    rounds.rig.all_to_all.check()
    times["round"] = [device.elapsed_us(*span) / len(rounds.slots) for span in spans]
    return times, int(wrong)


class Found:
    """A rank's figures for a case."""

    def __init__(self, rig: Rig, bank: Bank) -> None:
        self.rig, self.bank = rig, bank
        self.times: dict[str, list[float]] = {}
        self.wrong = 0

    def add(
        self,
        prefix: str,
        times: dict[str, list[float]],
        wrong: int,
        *,
        only: tuple[str, ...] = (),
        but: tuple[str, ...] = (),
    ) -> None:
        """Keep times under prefixed names, and count wrong results."""
        self.wrong += wrong
        for name, values in times.items():
            if name not in but and (not only or name in only):
                self.times[f"{prefix}{name}"] = values

    def result(self) -> dict[str, Any]:
        """All figures, and the memory that the all-to-all takes."""
        return {
            "times": self.times,
            "wrong": self.wrong,
            "largest_share_of_bound": self.bank.largest_share(),
            "facts": self.rig.facts(),
        }
