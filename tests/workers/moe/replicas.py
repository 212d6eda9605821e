"""Placements changed by all processes."""

from typing import Any

import torch

import weft
import weft.cuda
from weft.moe import Placement

FIRST, SECOND = Placement([[0, 1, 2], [3, 2]]), Placement([[2, 3, 1], [0, 1]])


def change() -> list[Any]:
    """Round, rejected changes, change, round: results, and error beginnings."""
    with weft.init() as communicator:
        rank = communicator.rank
        made = weft.cuda.AllToAll(
            communicator,
            experts=4,
            top_k=1,
            hidden=16,
            max_tokens=4,
            device="twin",
            placement=FIRST,
        )
        with made as all_to_all:
            seen: list[Any] = [result(all_to_all, FIRST)]
            seen.append(refusal(all_to_all, SECOND if rank else Placement(FIRST.ranks)))
            open_round = dispatch(all_to_all) if rank == 0 else None
            seen.append(refusal(all_to_all, SECOND))
            if open_round is None:
                open_round = dispatch(all_to_all)
            open_round.recv().release()
            all_to_all.set_placement(SECOND)
            seen.append(result(all_to_all, SECOND))
            all_to_all.check()
        return seen


def dispatch(all_to_all: Any) -> Any:
    return all_to_all.dispatch_send(torch.full((4, 16), 3.0), torch.arange(4)[:, None])


def result(all_to_all: Any, placement: Placement) -> list[float]:
    """A round result's first column: expert e multiplies by e + 1."""
    with dispatch(all_to_all).recv() as received:
        outputs = torch.zeros(all_to_all.positions, 16)
        for local, expert in enumerate(placement.ranks[all_to_all.communicator.rank]):
            first = int(received.expert_offsets[local])
            rows = slice(first, first + int(received.expert_counts[local]))
            outputs[rows] = received.tokens[rows] * (expert + 1)
        column: list[float] = all_to_all.combine(received, outputs)[:, 0].tolist()
        return column


def refusal(all_to_all: Any, placement: Placement) -> str:
    """A change error's beginning."""
    try:
        all_to_all.set_placement(placement)
    except weft.WeftError as error:
        text = str(error)
        for words in ("placement's digest", "a round in flight"):
            if words in text:
                return text[: text.index(words) + len(words)]
        return text
    return "nothing"
