"""Queries and answers without LoadGen: node tests, and rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from weft import _native
from weft.base.environment import check_variables
from weft.base.errors import ConfigurationError
from weft.qdl.sources import expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Answers", "ask"]


@dataclass(frozen=True)
class Answers:
    """Answers to the queries in one `ask` call."""

    #: For each query the bytes of the answer tensors; `None` if it failed.
    answers: list[tuple[bytes, ...] | None]
    #: Failure causes, by query number.
    failures: dict[int, str]
    #: Queries answered and failed, with those sent again.
    answered: int
    failed: int
    #: Seconds from the first query to the last answer.
    seconds: float = field(compare=False)

    @property
    def rate(self) -> float:
        """Queries answered a second."""
        return self.answered / self.seconds


def ask(
    nodes: Sequence[str],
    queries: Sequence[Sequence[Any]],
    *,
    provider: Literal["shm", "verbs", "ofi", "tcp"] | None = None,
    slots: int = 1024,
    checksum: bool = False,
    deadline: float = 60.0,
    repeat: float = 0.0,
) -> Answers:
    """Send queries to accelerator nodes as a front end, and wait for all answers.

    Args:
        nodes: node addresses with one schema, each `host:port`, or several for one node with commas
        between them; `host:port@source` connects from that address on this host, for example
        `10.0.0.2:7000@10.0.0.1`; `host:port@auto` from each that reaches it by its own interface.
        queries: tensors for each query, as bytes or as arrays in the node's element types.
        provider: shm, verbs, ofi or tcp; by default shm or tcp, the better one that reaches a node.
        slots: most queries in flight to a node.
        checksum: verify every payload by checksum.
        deadline: seconds for the whole call; queries that have no answer then fail.
        repeat: seconds for which the queries are sent again and again, for a rate; 0: once. Each
            has `deadline`, and the call takes at most both.

    Raises:
        ConfigurationError: an argument cannot be used, or a query does not fit the nodes' schema.
        WeftError: a node cannot be reached within the deadline, or refuses.
        KeyboardInterrupt: Ctrl-C, within 2 s.
    """
    check_variables()
    if deadline <= 0 or repeat < 0:
        raise ConfigurationError(
            f"deadline {deadline}, repeat {repeat}: expected more than 0, and at least 0"
        )
    answers, answered, failed, seconds = _native.qdl_ask(
        list(expanded(nodes)),
        [[as_bytes(tensor) for tensor in query] for query in queries],
        provider,
        slots,
        checksum,
        max(1, round(deadline * 1e3)),
        repeat,
    )
    return Answers(
        answers=[None if isinstance(each, str) else tuple(each) for each in answers],
        failures={at: each for at, each in enumerate(answers) if isinstance(each, str)},
        answered=answered,
        failed=failed,
        seconds=seconds,
    )


def as_bytes(tensor: Any) -> bytes:
    """Tensor bytes, row by row."""
    if isinstance(tensor, bytes | bytearray | memoryview):
        return bytes(tensor)
    return np.ascontiguousarray(tensor).tobytes()
