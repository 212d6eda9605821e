"""A rank's measuring rig: a case's all-to-all, inputs, and checked rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import weft
from weft.bench.device.cases import BLOCK
from weft.bench.device.check import difference, error_share, expert_outputs, plan
from weft.bench.device.inputs import Inputs, Source, owners

if TYPE_CHECKING:
    from weft.bench.device.cases import Case
    from weft.bench.device.machine import Device

__all__ = ["Checked", "Rig", "WrongResultError"]


class WrongResultError(Exception):
    """A result that differs from the reference."""


@dataclass
class Checked:
    """A batch that went through a round, whose results were held to the reference."""

    inputs: Inputs
    #: Expert outputs, [positions in use, hidden].
    outputs: Any
    #: Combine result, to be repeated bit by bit.
    combined: Any
    share_of_bound: float


class Rig:
    """An all-to-all for a case, on this rank."""

    def __init__(
        self,
        communicator: weft.Communicator,
        device: Device,
        case: Case,
        memory: str | None = None,
    ) -> None:
        self.communicator, self.device, self.case = communicator, device, case
        self.source = Source(case, device, communicator.world_size)
        self.all_to_all = make_all_to_all(communicator, device, case, memory)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    def close(self) -> None:
        """Free the memory; on every rank."""
        self.device.synchronise()
        self.all_to_all.close()

    def dispatch(self, inputs: Inputs, out: Any = None) -> Any:
        """Fused dispatch launch."""
        return self.all_to_all.dispatch(
            inputs.tokens, inputs.ids, inputs.weights, scales=inputs.scales, out=out
        )

    def dispatch_send(self, inputs: Inputs) -> Any:
        """Send half of dispatch."""
        return self.all_to_all.dispatch_send(
            inputs.tokens, inputs.ids, inputs.weights, scales=inputs.scales
        )

    def round(self, inputs: Inputs, outputs: Any) -> Any:
        """Dispatch and combine with given outputs; returns the result of combine."""
        with self.dispatch(inputs) as received:
            return self.all_to_all.combine(received, outputs)

    def checked(self, number: int) -> Checked:
        """Send a batch through a round and compare everything with the reference.

        Raises:
            WrongResultError: names the difference.
        """
        case, torch = self.case, self.device.torch
        inputs = self.source.inputs(self.rank, number)
        with self.dispatch(inputs) as received:
            expected = plan(case, self.source, self.rank, number)
            self.device.synchronise()
            wrong = difference(case, self.device, self.source, number, expected, received)
            if wrong is not None:
                self.fail(f"dispatch of batch {number}: {wrong}")
            outputs = self.outputs(received, int(expected.offsets[-1]), expected)
            combined = self.all_to_all.combine(received, self.full(outputs))
        self.device.synchronise()
        share = error_share(case, self.device, self.source, self.rank, number, combined)
        if not share <= 1:
            self.fail(f"combine of batch {number}: {share:.3g} times the error bound")
        return Checked(inputs, outputs, torch.clone(combined), share)

    def outputs(self, received: Any, used: int, expected: Any) -> Any:
        """Expert outputs for the received tokens; zeros at positions without one."""
        case, torch, where = self.case, self.device.torch, self.device.name
        if case.layout == "dense":
            return self.dense_outputs(received, used, expected)
        made = torch.zeros((used, case.hidden), dtype=getattr(torch, case.wide), device=where)
        first = self.all_to_all.local_experts.start
        for begin in range(0, len(expected.position), 4096):
            part = slice(begin, begin + 4096)
            position = torch.from_numpy(expected.position[part]).to(where)
            row = torch.from_numpy(expected.row[part]).to(where)
            experts = torch.from_numpy(expected.expert[part] + first).to(where)
            at = row if case.layout == "indexed" else position
            made[position] = expert_outputs(
                case,
                torch,
                gather(torch, received.tokens, at),
                None if received.scales is None else gather(torch, received.scales, at),
                experts,
            )
        return made

    def dense_outputs(self, received: Any, used: int, expected: Any) -> Any:
        """Weighted sums over each row's experts, in float32 and rounded once."""
        case, torch, where = self.case, self.device.torch, self.device.name
        sums = torch.zeros((used, case.hidden), dtype=torch.float32, device=where)
        first = self.all_to_all.local_experts.start
        for choice in range(case.top_k):
            mine = np.flatnonzero(expected.choice == choice)
            row = torch.from_numpy(expected.position[mine]).to(where)
            experts = torch.from_numpy(expected.expert[mine] + first).to(where)
            weights = torch.from_numpy(expected.weight[mine]).to(where)
            scales = None if received.scales is None else gather(torch, received.scales, row)
            made = expert_outputs(case, torch, gather(torch, received.tokens, row), scales, experts)
            sums[row] += weights[:, None] * made
        return sums.to(getattr(torch, case.wide))

    def full(self, outputs: Any) -> Any:
        """Outputs with rows for all positions; rows beyond those in use are not read."""
        torch = self.device.torch
        shape = (self.all_to_all.positions, self.case.hidden)
        whole = torch.zeros(shape, dtype=outputs.dtype, device=self.device.name)
        whole[: len(outputs)] = outputs
        return whole

    def fail(self, what: str) -> None:
        """Raise `WrongResultError`."""
        raise WrongResultError(f"rank {self.rank}: {what}")

    def rows_sent(self, number: int) -> list[int]:
        """Rows in this rank's batch for each rank; none for itself."""
        ids, _ = self.source.routes(self.rank, number)
        rows = owners(self.case, self.source.ranks, ids).sum(axis=0)
        rows[self.rank] = 0
        counts: list[int] = np.asarray(rows).tolist()
        return counts

    def facts(self) -> dict[str, Any]:
        """The all-to-all's choices and memory."""
        names = ("path", "num_sms", "positions", "build")
        facts = {name: getattr(self.all_to_all, name) for name in names}
        return facts | {"heap_bytes": self.all_to_all.memory_bytes}


def gather(torch: Any, tensor: Any, at: Any) -> Any:
    """Tensor rows in any dtype."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)[at].view(tensor.dtype)
    return tensor[at]


def make_all_to_all(
    communicator: weft.Communicator, device: Device, case: Case, memory: str | None
) -> Any:
    """All-to-all for a case."""
    ranks = communicator.world_size
    optional: dict[str, Any] = {
        "expert_capacity": case.expert_capacity(ranks),
        "max_positions": case.max_positions(ranks),
        "num_sms": case.num_sms,
        "path": case.path,
        "memory": memory,
        "wire_dtype": case.wire if case.casts else None,
        "block": BLOCK if case.scales else None,
    }
    make: Any = weft.moe.AllToAll
    return make(
        communicator,
        device=device.place,
        experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens=case.tokens,
        dtype=case.dtype,
        layout=case.layout,
        timeout=case.limit,
        **{name: value for name, value in optional.items() if value is not None},
    )
