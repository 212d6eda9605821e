"""Process groups in torch.distributed by name, each with a communicator.

A group's first fused call makes its communicator, on all ranks together; it is closed with the
group. For example, `communicator_of(group.group_name)` for a tensor-parallel group.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import distributed_c10d as c10d

from weft import _native
from weft.base.errors import WeftError
from weft.fused.agreement import Verdict, agree
from weft.fused.tables import learn, table_of
from weft.group.communicator import Communicator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weft.fused.agreement import Place
    from weft.fused.tables import Table

__all__ = ["Group", "communicator_of", "group_of"]

#: Seconds to wait for ranks that missed the last comparison.
_LATE_TIMEOUT: Final = 1.0


class Group:
    """A process group for fused operators.

    Attributes:
        name: as in functional collectives.
        rank, ranks: this process's rank, and the group size.
        refusals: reason by embedding tables, once the ranks have exchanged theirs.
    """

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.rank, self.ranks = name, group.rank(), group.size()
        self.refusals: dict[object, str | None] = {}
        self._group = weakref.ref(group)
        self._store: Any = c10d._get_process_group_store(group)
        # A store may have served an earlier group with this name.
        life = self._store.add(f"weft.fused/{name}/lives/{self.rank}", 1)
        self._prefix = f"{name}/{life}"
        self._number = 0
        self._calls: dict[str, str | None] = {}
        self._is_late = False
        self._made: Communicator | None = None
        self._is_on_one_host = False
        self._lock = threading.RLock()

    def compare(
        self,
        values: Mapping[str, str],
        places: Sequence[Place],
        timeout: float,
        *,
        is_rewrite: bool = False,
    ) -> Verdict:
        """Verdict on a compiled graph; all ranks compare graphs in the same order.

        Args:
            values: values to compare, by name.
            places: places in the graph, in the order in which this rank would run them.
            timeout: seconds to wait for the other ranks; at most 1 after they missed one.
            is_rewrite: the comparison concerns a rewrite, before the same graph's comparison.
        """
        if not is_rewrite:
            self._number += 1
        kind, number = ("rewrites", self._number + 1) if is_rewrite else ("graphs", self._number)
        own = {"host": _native.host_id(), **values}
        return self._agree(f"{kind}/{number}", own, places, timeout)

    def runs(self, site: str, timeout: float) -> str | None:
        """Agreement to run a compiled graph fused, made at the first call.

        One rank may have loaded a graph that another has compiled without the fused operator.

        Args:
            site: GRAPH/POSITION; only the graph part counts.
            timeout: seconds to wait for the other ranks.
        """
        graph = site.partition("/")[0]
        if graph not in self._calls:
            self._calls[graph] = self._agree(f"calls/{graph}", {}, (), timeout).reason
        return self._calls[graph]

    def _agree(
        self, key: str, values: Mapping[str, str], places: Sequence[Place], timeout: float
    ) -> Verdict:
        # Without the pass, a rank never compares.
        limit = min(timeout, _LATE_TIMEOUT) if self._is_late else timeout
        whole = f"{self._prefix}/{key}"
        verdict = agree(self._store, self.rank, self.ranks, whole, values, places, limit)
        self._is_late = verdict.is_late
        return verdict

    @property
    def communicator(self) -> Communicator:
        """A communicator with the group's ranks and numbers; the first use is a collective call."""
        return self._make()

    @property
    def is_on_one_host(self) -> bool:
        """True if all ranks share a host; the first use is a collective call."""
        return self._make() is not None and self._is_on_one_host

    @property
    def table(self) -> Table:
        """Measured choices on rank 0; the first use is a collective call."""
        return table_of(self._make())

    def learn(self, table: Table) -> None:
        """Replace the measured choices; all ranks pass the same."""
        learn(self.communicator, table)

    def _make(self) -> Communicator:
        with self._lock:
            if self._made is None:
                group = self._group()
                made = Communicator.from_group(group)
                weakref.finalize(group, _close, made).atexit = False
                table_of(made)
                self._is_on_one_host = len(set(made.hosts)) == 1
                self._made = made
            return self._made


#: By name and object address, since another group with the same name may replace one.
_GROUPS: Final[dict[str, tuple[weakref.ref[Any], Group]]] = {}


def group_of(name: str) -> Group:
    """The group with this name in functional collectives; no communication.

    Raises:
        RuntimeError: from torch, if there is no such group.
    """
    resolved = c10d._resolve_process_group(name)
    found = _GROUPS.get(name)
    if found is None or found[0]() is not resolved:
        found = weakref.ref(resolved), Group(name, resolved)
        _GROUPS[name] = found
    return found[1]


def communicator_of(name: str) -> Communicator:
    """A named group's communicator, for the functions in `weft.fused`.

    All ranks in a group make its first call, as with `weft.Communicator.from_group`. The
    communicator is closed when the group is destroyed and no longer referenced.

    Args:
        name: `group.group_name` from a `torch.distributed.ProcessGroup` with any backend.

    Raises:
        ConfigurationError, RendezvousError, ListenError: as in `from_group`.
    """
    return group_of(name).communicator


def _close(made: Communicator) -> None:
    # Peers may have closed theirs earlier.
    with contextlib.suppress(WeftError):
        made.close()
