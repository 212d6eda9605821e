"""Process groups of torch.distributed by name, with the communicator of each.

A communicator is made by the first fused call of its group, on all ranks together, and closed with
the group.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import distributed_c10d as c10d

from weft import _native
from weft.communicator import Communicator
from weft.errors import WeftError
from weft.fused.agreement import Verdict, agree
from weft.fused.tables import learn, table_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weft.fused.agreement import Place
    from weft.fused.tables import Table

__all__ = ["Group", "communicator_of", "group_of"]

#: Seconds to wait for ranks that did not come to the last comparison.
_LATE_TIMEOUT: Final = 1.0


class Group:
    """A process group for fused operators.

    Attributes:
        name: as in functional collectives.
        rank, ranks: of this process, and number of processes.
        refusals: reason by tables of embedding bags, once the ranks have exchanged theirs.
    """

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.rank, self.ranks = name, group.rank(), group.size()
        self.refusals: dict[object, str | None] = {}
        self._group = weakref.ref(group)
        self._store: Any = c10d._get_process_group_store(group)
        # A store may have served a former group of this name.
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
        """Agreement of the ranks on a compiled graph; ranks compare graphs in the same order.

        Args:
            values: to compare, by name.
            places: of the graph, in the order in which this rank would run them.
            timeout: seconds to wait for the other ranks; at most 1 after they did not come.
            is_rewrite: the comparison is of a rewrite, before that of the same graph.
        """
        if not is_rewrite:
            self._number += 1
        kind, number = ("rewrites", self._number + 1) if is_rewrite else ("graphs", self._number)
        own = {"host": _native.host_id(), **values}
        return self._agree(f"{kind}/{number}", own, places, timeout)

    def runs(self, site: str, timeout: float) -> str | None:
        """Agreement of the ranks to run a compiled graph fused; asked at its first call.

        One rank may have loaded a graph that another one has compiled without the fused operator.

        Args:
            site: GRAPH/POSITION, of which the graph counts.
            timeout: seconds to wait for the other ranks.
        """
        graph = site.partition("/")[0]
        if graph not in self._calls:
            self._calls[graph] = self._agree(f"calls/{graph}", {}, (), timeout).reason
        return self._calls[graph]

    def _agree(
        self, key: str, values: Mapping[str, str], places: Sequence[Place], timeout: float
    ) -> Verdict:
        # Without the pass, a rank comes to no comparison at all.
        limit = min(timeout, _LATE_TIMEOUT) if self._is_late else timeout
        whole = f"{self._prefix}/{key}"
        verdict = agree(self._store, self.rank, self.ranks, whole, values, places, limit)
        self._is_late = verdict.is_late
        return verdict

    @property
    def communicator(self) -> Communicator:
        """That of the ranks, with their numbers; the first use is a collective call."""
        return self._make()

    @property
    def is_on_one_host(self) -> bool:
        """True if all ranks share a host; the first use is a collective call."""
        return self._make() is not None and self._is_on_one_host

    @property
    def table(self) -> Table:
        """Measured choices: those of rank 0; the first use is a collective call."""
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


#: By name and by the address of the object, which another group of the same name may replace.
_GROUPS: Final[dict[str, tuple[weakref.ref[Any], Group]]] = {}


def group_of(name: str) -> Group:
    """The group of a name of functional collectives; no communication.

    Raises:
        RuntimeError: if there is no such group, as torch raises it.
    """
    resolved = c10d._resolve_process_group(name)
    found = _GROUPS.get(name)
    if found is None or found[0]() is not resolved:
        found = weakref.ref(resolved), Group(name, resolved)
        _GROUPS[name] = found
    return found[1]


def communicator_of(name: str) -> Communicator:
    """The communicator of the group of a name, for the functions of `weft.fused`.

    The first call for a group is made by all its ranks, as `weft.Communicator.from_group`. It is
    closed when the group is destroyed and no longer referenced.

    Args:
        name: `group.group_name` of a `torch.distributed.ProcessGroup` of any backend.

    Raises:
        ConfigurationError, RendezvousError, ListenError: as of `from_group`.
    """
    return group_of(name).communicator


def _close(made: Communicator) -> None:
    # Peers may have closed theirs before.
    with contextlib.suppress(WeftError):
        made.close()
