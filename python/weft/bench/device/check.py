"""Reference results of dispatch and combine, computed from every rank's inputs without Weft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from weft.bench.device.inputs import dequantise, owners

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weft.bench.device.cases import Case
    from weft.bench.device.inputs import Source
    from weft.bench.device.machine import Device

__all__ = ["Plan", "difference", "error_share", "expert_outputs", "plan"]

#: Unit roundoff and smallest positive number by type.
PRECISION: Final = {
    "float32": (2.0**-24, 2.0**-149),
    "float16": (2.0**-11, 2.0**-24),
    "bfloat16": (2.0**-8, 2.0**-133),
}


class Plan(NamedTuple):
    """A rank's received batch; arrays from `position` on have a value for each (token, expert)."""

    counts: NDArray[np.int64]  # [local experts]
    offsets: NDArray[np.int64]  # [local experts + 1], or [ranks + 1] in the dense layout
    position: NDArray[np.int64]  # in the dense layout the row, which pairs share
    expert: NDArray[np.int64]
    choice: NDArray[np.int64]
    source: NDArray[np.int64]
    token: NDArray[np.int64]
    row: NDArray[np.int64]
    weight: NDArray[np.float32]


def plan(case: Case, source: Source, rank: int, number: int) -> Plan:
    """A rank's received batch, for one batch number."""
    ranks = source.ranks
    capacity = case.expert_capacity(ranks)
    begin, end = (r * case.experts // ranks for r in (rank, rank + 1))
    parts = []
    for sender in range(ranks):
        ids, weights = source.routes(sender, number)
        slots = np.cumsum(owners(case, ranks, ids)[:, rank]) - 1
        token, slot = np.nonzero((ids >= begin) & (ids < end))
        parts.append(
            (
                ids[token, slot] - begin,
                slot,
                np.full(len(token), sender),
                token,
                sender * case.tokens + slots[token],
                weights[token, slot],
            )
        )
    expert, choice, sender_of, token, row, weight = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    order = np.lexsort((token, sender_of, expert))
    counts = np.bincount(expert, minlength=end - begin)
    if capacity is not None:
        offsets = np.arange(end - begin + 1) * capacity
    else:
        offsets = np.concatenate([[0], np.cumsum(counts)])
    starts = np.cumsum(counts) - counts
    expert = expert[order]
    position = offsets[expert] + np.arange(len(order)) - starts[expert]
    if case.layout == "dense":
        rows = [
            owners(case, ranks, source.routes(r, number)[0])[:, rank].sum() for r in range(ranks)
        ]
        offsets = np.concatenate([[0], np.cumsum(rows)])
        position = offsets[sender_of[order]] + row[order] % case.tokens
    return Plan(
        counts,
        offsets,
        position,
        expert,
        choice=choice[order],
        source=sender_of[order],
        token=token[order],
        row=row[order],
        weight=weight[order],
    )


def difference(
    case: Case, device: Device, source: Source, number: int, expected: Plan, received: Any
) -> str | None:
    """First difference between the received batch and the reference, bit by bit; None if equal."""
    torch = device.torch
    dense = case.layout == "dense"
    for name, wanted in (
        ("expert_counts", expected.counts),
        ("source_offsets" if dense else "expert_offsets", expected.offsets),
    ):
        # A rank may own fewer experts than others.
        seen = as_numpy(getattr(received, name)).astype(np.int64)[: len(wanted)]
        if not np.array_equal(seen, wanted):
            return f"{name}: {mismatch(seen, wanted)}"
    each: list[tuple[str, Any]] = [("rows", expected.row), ("weights", expected.weight)]
    if dense:
        each[0] = ("ids", expected.expert)
    for name, of_positions in each:
        seen = as_numpy(getattr(received, name))
        if name == "ids" and (named := np.count_nonzero(seen >= 0)) != len(expected.position):
            return f"{named} ids name an expert, not {len(expected.position)}"
        here = seen[expected.position, expected.choice] if dense else seen[expected.position]
        if not np.array_equal(here, of_positions):
            return f"{name}: {mismatch(here, of_positions)}"
    places = expected.row if case.layout == "indexed" else expected.position
    for sender in range(source.ranks):
        mine = np.nonzero(expected.source == sender)[0]
        at = torch.from_numpy(places[mine]).to(device.name)
        token = torch.from_numpy(expected.token[mine]).to(device.name)
        sent = source.wire(sender, number)
        for name, wire, got in zip(
            ("tokens", "scales"), sent, (received.tokens, received.scales), strict=True
        ):
            if wire is not None and not torch.equal(bits(torch, got)[at], bits(torch, wire)[token]):
                return f"{name} from rank {sender} are not those that it sent"
    return None


def bits(torch: Any, tensor: Any) -> Any:
    """The same bytes as whole numbers: NaN equals itself, and every dtype can be indexed."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(whole[tensor.element_size()])


def as_numpy(value: Any) -> NDArray[Any]:
    """A small array or tensor, on the CPU."""
    array: NDArray[Any] = value.cpu().numpy() if hasattr(value, "cpu") else np.asarray(value)
    return array


def mismatch(seen: NDArray[Any], wanted: NDArray[Any]) -> str:
    """First index at which two arrays differ, with both values."""
    if seen.shape != wanted.shape:
        return f"shape {seen.shape}, not {wanted.shape}"
    at = int(np.argmax(seen != wanted))
    return f"{seen[at]} at {at}, not {wanted[at]}"


def expert_outputs(case: Case, torch: Any, codes: Any, scales: Any, experts: Any) -> Any:
    """Expert outputs: tokens as on the wire times the expert's factor, rounded once."""
    factor = (0.5 + (experts + 1).to(torch.float32) / case.experts)[:, None]
    return (dequantise(torch, codes, scales) * factor).to(getattr(torch, case.wide))


def error_share(
    case: Case, device: Device, source: Source, rank: int, number: int, combined: Any
) -> float:
    """Largest error, as a share of the element's error bound in docs/moe.md.

    The reference is the dense sum in float64 over every token's experts.
    """
    torch = device.torch
    ids, weights = (torch.from_numpy(each).to(device.name) for each in source.routes(rank, number))
    codes, scales = source.wire(rank, number)
    exact = torch.zeros(combined.shape, dtype=torch.float64, device=device.name)
    absolute = torch.zeros_like(exact)
    for slot in range(case.top_k):
        expert = ids[:, slot]
        term = expert_outputs(case, torch, codes, scales, expert).to(torch.float64)
        weight = torch.where(expert < 0, 0.0, weights[:, slot].to(torch.float64))
        term *= weight[:, None]
        exact += term
        absolute += term.abs_()
    count = (ids >= 0).sum(dim=1, keepdim=True).to(torch.float64)
    unit32, smallest32 = PRECISION["float32"]
    unit, smallest = PRECISION[case.wide]
    bound = absolute * ((1 + unit32) ** count * (1 + unit) ** 2 - 1)
    bound += count * (smallest32 + smallest) + smallest
    share = ((combined.to(torch.float64) - exact).abs() / bound).nan_to_num(nan=float("inf"))
    return float(share.max()) if share.numel() else 0.0
