"""Prediction sensitivity: one constant or assumption is varied at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from reproductions.moe_rdma.machines import PHASES, Constants, Runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["VARIED", "vary"]

#: Variations: a factor on a constant, or a job change.
VARIED: Final[Sequence[tuple[str, Callable[[Constants], Constants], dict[str, Any]]]] = (
    ("as predicted", lambda constants: constants, {}),
    (
        "bandwidth of NICs +10%",
        lambda constants: constants | {"bytes_per_s": constants["bytes_per_s"] * 1.1},
        {},
    ),
    (
        "latency of a message +20%",
        lambda constants: constants | {"message_latency_s": constants["message_latency_s"] * 1.2},
        {},
    ),
    (
        "posting twice as long",
        lambda constants: constants | {"post_s": constants["post_s"] * 2},
        {},
    ),
    (
        "fixed costs on GPUs +20%",
        lambda constants: (
            constants | {name: constants[name] * 1.2 for name in ("dispatch_s", "combine_s")}
        ),
        {},
    ),
    (
        "NVLink -20%",
        lambda constants: (
            constants
            | {
                name: constants[name] * 0.8
                for name in ("nvlink_dispatch_bytes_per_s", "nvlink_combine_bytes_per_s")
            }
        ),
        {},
    ),
    ("no row before the counts are known", lambda constants: constants, {"private_rows": 0}),
    (
        "four rounds back to back",
        lambda constants: constants,
        {"barrier": False, "rounds": 4},
    ),
    (
        "zipf routing, exponent 1",
        lambda constants: constants,
        {"token_routing": {"kind": "zipf", "exponent": 1.0}},
    ),
)


def vary(runs: Runs, machines: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes in the 32-rank times with each constant and assumption."""
    found = []
    for machine, about in machines.items():
        base: dict[tuple[str, str], float] = {}
        for what, change, job in VARIED:
            row: dict[str, Any] = {"machine": machine, "varied": what}
            for phase, (_, tokens) in PHASES.items():
                times = runs.times(machine, 32, tokens, change(about["constants"]), **job)
                for name, value in times.items():
                    before = base.setdefault((phase, name), value)
                    row[f"{phase}_{name}_us"] = value
                    row[f"{phase}_{name}_change"] = value / before - 1.0
            found.append(row)
    return found
