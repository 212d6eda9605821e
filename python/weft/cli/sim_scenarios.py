"""Scenarios for `weft sim` as JSON values, from the command line or a file."""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.files import read_text
from weft.sim.sweep import Axis

if TYPE_CHECKING:
    import argparse

__all__ = ["algorithms", "allreduce", "dlrm", "from_file", "moe", "query", "train"]

#: Largest scenario file in bytes.
MOST_FILE_BYTES: Final = 1 << 28
#: Default zipf routing exponent.
ZIPF: Final = 1.0
#: Models in the package: layers with times and gradients, in `weft/sim/models`.
MODELS: Final = ("resnet50", "bert")

At = dict[str, Any]
Spec = dict[str, Any]


def algorithms(arguments: argparse.Namespace) -> list[Axis]:
    """Algorithm axis."""
    names = [name.strip() for name in arguments.algorithm.split(",")]
    if not all(names) or len(set(names)) != len(names):
        arguments.usage_error(
            f"--algorithm {arguments.algorithm!r}: expected different names, separated by commas"
        )
    return [Axis("algorithm", names)]


def cluster(arguments: argparse.Namespace, at: At) -> Spec:
    """Cluster: network, routing, constants, faults and stragglers.

    Raises:
        ValueError: for an option that cannot be parsed.
    """
    return {
        "topology": arguments.topology,
        "routing": arguments.routing,
        "seed": at.get("seed", arguments.seed),
        "constants": {"set": dict(constant(text) for text in arguments.set)},
        "faults": [fault(text) for text in arguments.fault],
        "stragglers": [straggler(text) for text in arguments.straggler],
    }


def constant(text: str) -> tuple[str, float | None]:
    """Name and value for a constant; None for `none`, a rate without limit."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set {text!r}: expected NAME=VALUE")
    if value == "none":
        return name, None
    return name, number("--set", value)


def fault(text: str) -> Spec:
    """Degraded or failed link."""
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(f"--fault {text!r}: expected FROM,TO,SHARE")
    return {"from": parts[0], "to": parts[1], "bandwidth": number("--fault", parts[2])}


def straggler(text: str) -> Spec:
    """Slow or late rank."""
    parts = text.split(",")
    if len(parts) not in (2, 3) or not parts[0].isdecimal():
        raise ValueError(f"--straggler {text!r}: expected RANK,SLOW or RANK,SLOW,LATE_US")
    late_us = number("--straggler", parts[2]) if len(parts) == 3 else 0.0
    slow = number("--straggler", parts[1])
    return {"rank": int(parts[0]), "slow": slow, "late_s": late_us * 1e-6}


def number(option: str, text: str) -> float:
    """Finite number for an option."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{option} {text!r}: expected a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{option} {text!r}: expected a finite number")
    return value


def without_none(values: Spec) -> Spec:
    """Only values that were given; the simulator has defaults for the others."""
    return {name: value for name, value in values.items() if value is not None}


def allreduce(arguments: argparse.Namespace, at: At) -> Spec:
    """Collective."""
    job = {
        "collective": arguments.collective,
        "algorithm": at["algorithm"],
        "bytes": at.get("bytes", arguments.bytes),
        "ranks": at.get("ranks", arguments.ranks),
        "rounds": arguments.rounds,
        "local": arguments.local,
        "chunks": arguments.chunks,
    }
    return {
        "scenario": "collective",
        "cluster": cluster(arguments, at),
        "job": without_none(job),
    }


def moe(arguments: argparse.Namespace, at: At) -> Spec:
    """MoE dispatch and combine."""
    job = {
        "ranks": at.get("ranks", arguments.ranks),
        "nics_per_rank": arguments.nics_per_rank,
        "ranks_per_nic": arguments.ranks_per_nic,
        "experts": arguments.experts,
        "top_k": arguments.top_k,
        "tokens": at.get("tokens", arguments.tokens),
        "hidden": arguments.hidden,
        "token_dtype": arguments.dtype,
        "answer_dtype": arguments.answer_dtype,
        "private_rows": arguments.private_rows,
        "copies": arguments.copies,
        "rounds": arguments.rounds,
        "token_routing": token_routing(arguments),
        "nvlink": nvlink(arguments.nvlink),
    }
    return {"scenario": "moe", "cluster": cluster(arguments, at), "job": without_none(job)}


def nvlink(text: str | None) -> Spec | None:
    """NVLink domain from `RANKS:GB/S[:US]`, such as `8:300:2`."""
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) not in (2, 3) or not parts[0].isdecimal():
        raise ValueError(f"--nvlink {text!r}: expected RANKS:GB/S or RANKS:GB/S:US")
    latency_us = number("--nvlink", parts[2]) if len(parts) == 3 else 0.0
    return {
        "ranks": int(parts[0]),
        "bytes_per_s": number("--nvlink", parts[1]) * 1e9,
        "latency_s": latency_us * 1e-6,
    }


def token_routing(arguments: argparse.Namespace) -> Spec:
    """Expert choice by tokens: a distribution, or a routing trace from a file."""
    from weft.bench.routing_file import SUFFIXES, read_routing

    text = arguments.token_routing
    name, colon, exponent = text.partition(":")
    if name in ("uniform", "incast") and not colon:
        return {"kind": name}
    if name == "zipf":
        return {"kind": name, "exponent": number("--token-routing", exponent) if colon else ZIPF}
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"--token-routing {text!r}: expected uniform, zipf[:EXPONENT], incast or a file that"
            f" ends in {' or '.join(SUFFIXES)}"
        )
    layers = read_routing(path, top_k=arguments.top_k, experts=arguments.experts)
    return {"kind": "trace", "layers": [layer.ids.ravel().tolist() for layer in layers]}


def train(arguments: argparse.Namespace, at: At) -> Spec:
    """Training iterations."""
    reduction = {
        "algorithm": at["algorithm"],
        "bytes": 1,
        "ranks": at.get("ranks", arguments.ranks),
    }
    return {
        "scenario": "train",
        "cluster": cluster(arguments, at),
        "job": {
            "model": model(arguments.model),
            "reduction": without_none(reduction),
            "bucket_bytes": at.get("bytes", arguments.bytes),
            "overlap": not arguments.no_overlap,
            "iterations": arguments.iterations,
        },
    }


def model(text: str) -> Spec:
    """Model from the package by name, or from a JSON file."""
    if text in MODELS:
        file = resources.files("weft.sim").joinpath("models", f"{text}.json")
        found: Spec = json.loads(file.read_text(encoding="utf-8"))
        return found
    return read_json(Path(text), f"--model {text}: expected {', '.join(MODELS)} or a JSON file")


def dlrm(arguments: argparse.Namespace, at: At) -> Spec:
    """Recommendation model."""
    job = {
        "ranks": at.get("ranks", arguments.ranks),
        "training": not arguments.inference,
        "batch": arguments.batch,
        "tables": arguments.tables,
        "dimension": arguments.dimension,
        "pooling": arguments.pooling,
        "slices_per_peer": arguments.slices_per_peer,
    }
    return {
        "scenario": "dlrm",
        "cluster": cluster(arguments, at),
        "variant": arguments.variant,
        "job": without_none(job),
    }


def query(arguments: argparse.Namespace, at: At) -> Spec:
    """Queries and their responses."""
    job = {
        "front_ends": arguments.front_ends,
        "accelerators": arguments.accelerators,
        "queries": arguments.queries,
        "arrivals": arguments.arrivals,
        "rate_per_s": arguments.rate,
        "query_bytes": at.get("bytes", arguments.bytes),
        "answer_bytes": arguments.answer_bytes,
        "service_s": arguments.service_us * 1e-6,
        "slots": arguments.slots,
        "policy": arguments.policy,
    }
    return {"scenario": "query", "cluster": cluster(arguments, at), "job": without_none(job)}


def from_file(path: Path) -> Spec:
    """Scenario from a JSON file, or from standard input for `-`.

    Raises:
        ValueError: if it cannot be read, or is no scenario.
    """
    spec = read_json(path, f"{path}: no such file")
    if "scenario" not in spec:
        raise ValueError(f'{path}: expected a field "scenario", such as "collective"')
    return spec


def read_json(path: Path, missing: str) -> Spec:
    """JSON object in a file; `missing` is the error without the file."""
    if str(path) != "-" and not path.is_file():
        raise ValueError(missing)
    try:
        is_input = str(path) == "-"
        text = sys.stdin.read(MOST_FILE_BYTES) if is_input else read_text(path, MOST_FILE_BYTES)
        value = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{path}: not valid JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value
