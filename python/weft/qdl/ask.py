"""Queries and their answers without LoadGen: tests of nodes, and rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from weft import _native
from weft._environment import check_variables
from weft.errors import ConfigurationError
from weft.qdl.sources import expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Answers", "ask"]


@dataclass(frozen=True)
class Answers:
    """Answers to the queries of a call of `ask`."""

    #: Of each query the bytes of the answer's tensors; `None` for one that has failed.
    answers: list[tuple[bytes, ...] | None]
    #: Causes of failures, by the number of the query.
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
        nodes: addresses of nodes of one schema, each `host:port`, or several of one node with
            commas between them; `host:port@source` connects from that address of this host,
            `host:port@auto` from each that reaches it by its own interface.
        queries: of each query its tensors, as bytes or as arrays of the node's element types.
        provider: shm, verbs, ofi or tcp; by default the better of shm and tcp that reaches a node.
        slots: most queries in flight to a node.
        checksum: verify every payload by a checksum.
        deadline: seconds after which a query without an answer fails.
        repeat: seconds for which the queries are sent again and again, for a rate; 0: once.

    Raises:
        ConfigurationError: an argument cannot be used, or a query is not of the nodes' schema.
        WeftError: a node cannot be reached, or refuses.
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
    """Bytes of a tensor, row by row."""
    if isinstance(tensor, bytes | bytearray | memoryview):
        return bytes(tensor)
    return np.ascontiguousarray(tensor).tobytes()
