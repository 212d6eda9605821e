"""Values that `weft qdl` options describe: a node, a test, a workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from weft.qdl import Test
    from weft.qdl.bench import Workload
    from weft.qdl.placement import Placement


def node_spec(arguments: argparse.Namespace) -> dict[str, Any]:
    """Node for `weft qdl accelerator`, as the native module takes it."""
    tensor = {"name": "input", "dtype": "uint8", "shape": [arguments.bytes]}
    answer: dict[str, Any] = {
        "name": "output",
        "dtype": "uint8",
        "shape": [arguments.answer_bytes],
    }
    if arguments.model == "tokens":
        shape = [{"tokens": arguments.tokens}]
        answer = {"name": "tokens", "dtype": "int32", "shape": shape}
    return {
        "address": arguments.listen,
        "name": arguments.name,
        "inputs": [tensor],
        "outputs": [answer],
        "provider": arguments.provider,
        "slots": arguments.slots,
        "checksum": arguments.checksum,
        "front_ends": arguments.front_ends,
        "max_batch": arguments.max_batch,
        "window_us": round(arguments.window * 1e6),
        "spin_us": round(arguments.spin * 1e6),
        "model": {"kind": arguments.model, "work_us": round(arguments.work * 1e6)},
    }


def placement_of(arguments: argparse.Namespace) -> Placement:
    """The placement that `--placement` names."""
    text: str | None = arguments.placement
    if text is None or text == "auto":
        return "auto"
    return None if text == "none" else int(text)


def check_placement(arguments: argparse.Namespace) -> None:
    """Reject `--placement` for a test without a network."""
    if arguments.in_process and arguments.placement is not None:
        arguments.usage_error("--placement is of a front end: pass --node, or leave it out")


def test_of(arguments: argparse.Namespace) -> Test:
    """Test for `weft qdl frontend`."""
    from weft.qdl import Test

    same = (
        *("scenario", "mode", "user_conf", "audit_config", "samples", "performance_samples"),
        *("target_qps", "target_latency", "samples_per_query", "max_duration", "min_queries"),
        *("max_queries", "coalesce", "provider", "slots", "queries", "policy", "checksum"),
        *("deadline", "kept_answers", "local_model", "work", "answer_bytes", "spin"),
        "max_slot_bytes",
    )
    return Test(
        nodes=tuple(arguments.node),
        sample_bytes=arguments.bytes,
        log_directory=arguments.logs,
        model=arguments.model_name,
        sample_file=arguments.data,
        placement=placement_of(arguments),
        min_duration=arguments.duration,
        **{name: getattr(arguments, name) for name in same},
    )


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Workload for `weft qdl bench`."""
    from weft.qdl.bench import Workload

    same = (
        *("model", "answer_bytes", "scenario", "samples", "duration", "target_qps"),
        *("target_latency", "coalesce", "work", "slots", "max_batch", "checksum", "spin"),
    )
    return Workload(
        sample_bytes=arguments.bytes,
        provider=arguments.provider or "shm",
        **{name: getattr(arguments, name) for name in same},
    )


def forwarded(arguments: argparse.Namespace) -> list[str]:
    """An audit's options for `weft qdl frontend`."""
    ours = {"audit", "json", "logs", "run", "usage_error"}
    options: list[str] = []
    for name, value in vars(arguments).items():
        option = f"--{name.replace('_', '-')}"
        if name in ours or value is None or value is False:
            continue
        if value is True:
            options.append(option)
        elif isinstance(value, list):
            options += [each for node in value for each in (option, node)]
        else:
            options += [option, str(value)]
    return options
