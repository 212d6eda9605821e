"""Table of measured choices by shape class: a tiling, or the unfused operators.

The file is `fused-tuning.json` in `WEFT_CACHE_DIR`. A class is an operator, row count rounded up to
a power of two, columns, inner size, dtype, rank count and device name. For example, calls with 1000
and 1024 rows share a class.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import weakref
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from weft.base import cache as _cache

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from weft.group.communicator import Communicator

__all__ = [
    "COMPOSED",
    "DEFAULT",
    "UNFUSED",
    "Shape",
    "Table",
    "device_name",
    "learn",
    "own_table",
    "renew_salt",
    "salt",
    "table_of",
    "tuning_file",
    "write",
]

#: Choice: run torch's operators.
UNFUSED: Final = "unfused"
#: Choice: torch's GEMM and Weft's collective, as with `fused=False`.
COMPOSED: Final = "composed"
#: Choice: the kernel with the default tiling.
DEFAULT: Final = "default"
#: File names in the cache.
_NAME: Final = "fused-tuning.json"
_SALT: Final = "fused-compile.salt"
_FORMAT: Final = "weft-fused-tuning-1"
#: Seconds to wait for the ranks that agree on a table.
_AGREE_TIMEOUT: Final = 60.0


class Shape(NamedTuple):
    """A call's shapes: rows of x on this rank, weight columns and inner size."""

    rows: int
    columns: int
    inner: int

    @property
    def rounded(self) -> Shape:
        """The class representative."""
        return self._replace(rows=1 << max(self.rows - 1, 0).bit_length())


@dataclass
class Table:
    """Choices by class.

    Attributes:
        entries: by key: "choice", a name among those measured; "tiling", the fields (`None` for the
            default tiling and for "unfused"); and "microseconds" by name.
    """

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def key(operator: str, shape: Shape, dtype: torch.dtype, ranks: int, device: str) -> str:
        """Key for a class."""
        name = str(dtype).removeprefix("torch.")
        return "/".join((operator, *map(str, shape.rounded), name, str(ranks), device))

    def choice(
        self, operator: str, shape: Shape, dtype: torch.dtype, ranks: int, device: torch.device
    ) -> tuple[str, Mapping[str, Any] | None] | None:
        """Name and tiling chosen for a call; `None` if the class was not measured."""
        if not self.entries:
            return None
        found = self.entries.get(self.key(operator, shape, dtype, ranks, device_name(device)))
        return None if found is None else (str(found["choice"]), found.get("tiling"))

    def times(
        self, operator: str, shape: Shape, dtype: torch.dtype, ranks: int, device: torch.device
    ) -> Mapping[str, float]:
        """Microseconds by candidate name for a call's class; empty if not measured."""
        found = self.entries.get(self.key(operator, shape, dtype, ranks, device_name(device)), {})
        times: Mapping[str, float] = found.get("microseconds", {})
        return times

    def text(self) -> str:
        """JSON, with sorted keys."""
        whole = {"format": _FORMAT, "entries": self.entries}
        return json.dumps(whole, indent=1, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> Table:
        """Table from a JSON text; empty if it is damaged or in another format."""
        try:
            whole = json.loads(text)
        # RecursionError: brackets nested deeper than in any entry.
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
            return cls()
        entries = whole.get("entries")
        if not isinstance(entries, dict):
            return cls()
        return cls({key: its for key, its in entries.items() if _is_entry(its)})

    def digest(self) -> str:
        """Digest over the choices, without times."""
        chosen = {key: [its["choice"], its.get("tiling")] for key, its in self.entries.items()}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def _is_entry(found: object) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("choice"), str):
        return False
    tiling = found.get("tiling")
    return tiling is None or (
        isinstance(tiling, dict) and all(isinstance(value, int | None) for value in tiling.values())
    )


def tuning_file() -> Path:
    """File path: `fused-tuning.json` in Weft's cache."""
    return _cache.place(_NAME)


def own_table() -> Table:
    """Table in this user's file; empty without one."""
    found = _cache.read(_NAME)
    return Table.parse(found[1]) if found else Table()


#: By communicator: the table that the ranks share.
_SHARED: Final[weakref.WeakKeyDictionary[Communicator, Table]] = weakref.WeakKeyDictionary()


def table_of(communicator: Communicator) -> Table:
    """Choices in rank 0's file, for all ranks; the first use is a collective call."""
    found = _SHARED.get(communicator)
    if found is None:
        own = own_table().text() if communicator.rank == 0 else ""
        texts = communicator.all_gather(own.encode(), timeout=_AGREE_TIMEOUT)
        found = _SHARED[communicator] = Table.parse(texts[0].decode())
    return found


def learn(communicator: Communicator, table: Table) -> None:
    """Replace a communicator's choices; all ranks pass the same."""
    _SHARED[communicator] = table


@cache
def device_name(device: torch.device) -> str:
    """GPU name; on the CPU, "twin" and the architecture."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"twin {platform.machine()}"


def write(key: str, entry: dict[str, Any]) -> None:
    """Set an entry in this user's file."""
    table = Table(own_table().entries | {key: entry})
    _cache.write(_NAME, table.text().encode())


def salt() -> str:
    """Text in Inductor's cache keys, from the file `fused-compile.salt`."""
    found = _cache.read(_SALT)
    return found[1] if found else ""


def renew_salt() -> None:
    """Make processes recompile graphs that this one has compiled."""
    _cache.write(_SALT, os.urandom(8).hex().encode())
