"""From the command line to the simulator's specifications."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.sim.sweep import Axis

if TYPE_CHECKING:
    import argparse

__all__ = ["algorithms", "allreduce", "dlrm", "from_file", "moe", "query", "train"]

#: Longer files are no scenarios.
MOST_FILE_BYTES: Final = 1 << 28
ZIPF: Final = 1.0
#: Models with layers, times and gradients, as the EFLOPS article trained them.
MODELS: Final = ("resnet50", "million-class", "bert")

At = dict[str, Any]
Spec = dict[str, Any]


def algorithms(arguments: argparse.Namespace) -> list[Axis]:
    """Several algorithms are an axis like any other, and the first one."""
    names = [name.strip() for name in arguments.algorithm.split(",")]
    if not all(names) or len(set(names)) != len(names):
        arguments.usage_error(f"--algorithm: {arguments.algorithm!r} is no list of algorithms")
    return [Axis("algorithm", names)]


def cluster(arguments: argparse.Namespace, at: At) -> Spec:
    """The network, its constants, and what is wrong with it.

    Raises:
        ValueError: if an option is not what it should be.
    """
    return {
        "topology": arguments.topology,
        "routing": arguments.routing,
        "seed": at.get("seed", arguments.seed),
        "constants": {
            "preset": arguments.preset,
            "set": dict(constant(text) for text in arguments.set),
        },
        "faults": [fault(text) for text in arguments.fault],
        "stragglers": [straggler(text) for text in arguments.straggler],
    }


def constant(text: str) -> tuple[str, float | None]:
    """A constant's name and value; `none` where a rate is without limit."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set: {text!r} is not NAME=VALUE")
    if value == "none":
        return name, None
    return name, number("--set", value)


def fault(text: str) -> Spec:
    """A link that is slow or broken."""
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(f"--fault: {text!r} is not FROM,TO,SHARE")
    return {"from": parts[0], "to": parts[1], "bandwidth": number("--fault", parts[2])}


def straggler(text: str) -> Spec:
    """A rank that is slow or late."""
    parts = text.split(",")
    if len(parts) not in (2, 3) or not parts[0].isdecimal():
        raise ValueError(f"--straggler: {text!r} is not RANK,SLOW or RANK,SLOW,LATE_US")
    late_us = number("--straggler", parts[2]) if len(parts) == 3 else 0.0
    slow = number("--straggler", parts[1])
    return {"rank": int(parts[0]), "slow": slow, "late_s": late_us * 1e-6}


def number(option: str, text: str) -> float:
    """A number that is finite."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is no number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{option}: {text!r} is not finite")
    return value


def without_none(values: Spec) -> Spec:
    """What was given; the simulator has defaults for the rest."""
    return {name: value for name, value in values.items() if value is not None}


def allreduce(arguments: argparse.Namespace, at: At) -> Spec:
    """A collective."""
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
    """Dispatch and combine."""
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
        "copies": arguments.algorithm,
        "rounds": arguments.rounds,
        "token_routing": token_routing(arguments),
        "nvlink": nvlink(arguments.nvlink),
    }
    return {"scenario": "moe", "cluster": cluster(arguments, at), "job": without_none(job)}


def nvlink(text: str | None) -> Spec | None:
    """An NVLink domain from `8:300:2`."""
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) not in (2, 3) or not parts[0].isdecimal():
        raise ValueError(f"--nvlink: {text!r} is not RANKS:GB/S or RANKS:GB/S:US")
    latency_us = number("--nvlink", parts[2]) if len(parts) == 3 else 0.0
    return {
        "ranks": int(parts[0]),
        "bytes_per_s": number("--nvlink", parts[1]) * 1e9,
        "latency_s": latency_us * 1e-6,
    }


def token_routing(arguments: argparse.Namespace) -> Spec:
    """Which experts tokens name, by a law or from a file."""
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
            f"--token-routing: {text!r} is neither uniform, zipf, incast nor a file that ends in"
            f" {' or '.join(SUFFIXES)}"
        )
    layers = read_routing(path, top_k=arguments.top_k, experts=arguments.experts)
    return {"kind": "trace", "layers": [layer.ids.ravel().tolist() for layer in layers]}


def train(arguments: argparse.Namespace, at: At) -> Spec:
    """Training."""
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


def model(text: str) -> Spec | str:
    """A model that the simulator knows by name, or one from a file."""
    if text in MODELS:
        return text
    return read_json(Path(text), f"neither a model ({', '.join(MODELS)}) nor a file")


def dlrm(arguments: argparse.Namespace, at: At) -> Spec:
    """A recommendation model."""
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
        "variant": arguments.algorithm,
        "job": without_none(job),
    }


def query(arguments: argparse.Namespace, at: At) -> Spec:
    """Queries and answers."""
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
        "policy": arguments.algorithm,
    }
    return {"scenario": "query", "cluster": cluster(arguments, at), "job": without_none(job)}


def from_file(path: Path) -> Spec:
    """A scenario from a JSON file, or from standard input.

    Raises:
        ValueError: if it cannot be read, or is not a scenario.
    """
    spec = read_json(path, "no file")
    if "scenario" not in spec:
        raise ValueError(f"{path} names no scenario")
    return spec


def read_json(path: Path, otherwise: str) -> Spec:
    """An object from a JSON file."""
    if str(path) != "-" and not path.is_file():
        raise ValueError(f"{path} is {otherwise}")
    try:
        text = sys.stdin.read(MOST_FILE_BYTES) if str(path) == "-" else read_text(path)
        value = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is JSON, but no object")
    return value


def read_text(path: Path) -> str:
    """A file that is not too long."""
    if path.stat().st_size > MOST_FILE_BYTES:
        raise ValueError(f"{path} is longer than {MOST_FILE_BYTES} bytes")
    return path.read_text(encoding="utf-8")
