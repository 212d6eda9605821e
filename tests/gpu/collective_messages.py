"""Messages between two ranks in a group, and random message rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft import cuda

if TYPE_CHECKING:
    import random

    from tests.gpu.collective_calls import Group

DTYPES = ("uint8", "bfloat16", "float32", "complex64", "complex128", "bool", "int16")


@dataclass
class Message:
    """A message, and its tensors at both ends."""

    source: int
    target: int
    given: torch.Tensor
    into: torch.Tensor

    def at(self, rank: int) -> list[cuda.Send | cuda.Receive]:
        """Its part in a rank's batch."""
        if rank == self.source:
            return [cuda.Send(self.given, self.target)]
        return [cuda.Receive(self.into, self.source)] if rank == self.target else []

    def check(self) -> None:
        sent, received = (each.cpu().view(torch.uint8) for each in (self.given, self.into))
        assert torch.equal(sent, received), (self.source, self.target, self.given.numel())


def message(
    members: list[cuda.Collectives],
    source: int,
    target: int,
    count: int,
    *,
    dtype: str = "float32",
    offsets: tuple[int, int] = (0, 0),
) -> Message:
    """A random message, at element offsets behind the start of an allocation."""
    kind = getattr(torch, dtype)
    width = torch.empty(0, dtype=kind).element_size()

    def part(rank: int, bits: torch.Tensor, offset: int) -> torch.Tensor:
        whole = torch.zeros((count + offset) * width, dtype=torch.uint8)
        whole[offset * width :] = bits
        return whole.to(members[rank].device).view(kind)[offset:]

    bits = torch.randint(0, 2 if dtype == "bool" else 256, (count * width,), dtype=torch.uint8)
    return Message(
        source,
        target,
        part(source, bits, offsets[0]),
        part(target, torch.zeros_like(bits), offsets[1]),
    )


def drawn(members: list[cuda.Collectives], chance: random.Random, longest: int) -> list[Message]:
    """A round's messages, several for some pairs."""
    ranks = range(len(members))
    made = []
    for _ in range(chance.randrange(1, 10)):
        source = chance.choice(ranks)
        target = chance.choice([rank for rank in ranks if rank != source])
        count = chance.choice([0, 1, chance.randrange(200), chance.randrange(longest)])
        offsets = (chance.randrange(3), chance.randrange(3))
        dtype = chance.choice(DTYPES)
        made.append(message(members, source, target, count, dtype=dtype, offsets=offsets))
    return made


def verify(group: Group, rounds: list[list[Message]]) -> int:
    """Send and receive message rounds, a batch each, and compare; the message count."""
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        for messages in rounds:
            member.batch([part for each in messages for part in each.at(rank)])

    group.run(work)
    assert group.raised() == [""] * len(group.members)
    all_messages = [each for messages in rounds for each in messages]
    for each in all_messages:
        each.check()
    return len(all_messages)
