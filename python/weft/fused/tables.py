"""Table of measured choices by class of shapes: a tiling, or the unfused operators.

The file is `fused-tuning.json` in `WEFT_CACHE_DIR`. A class is an operator, the number of rows
rounded up to a power of two, columns, inner size, dtype, number of ranks and name of the device.
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

from weft._cache import cache_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from weft.communicator import Communicator

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

#: Name of the choice to run the operators of torch.
UNFUSED: Final = "unfused"
#: Name of the choice of a product of torch and a collective of Weft: `fused=False` of functions.
COMPOSED: Final = "composed"
#: That of the kernel with its default tiling.
DEFAULT: Final = "default"
_FORMAT: Final = "weft-fused-tuning-1"
#: Seconds to wait for the ranks that agree on a table.
_AGREE_TIMEOUT: Final = 60.0


class Shape(NamedTuple):
    """Shapes of a call: rows of x on this rank, columns and inner size of the weight."""

    rows: int
    columns: int
    inner: int

    @property
    def rounded(self) -> Shape:
        """That of its class."""
        return self._replace(rows=1 << max(self.rows - 1, 0).bit_length())


@dataclass
class Table:
    """Choices by class.

    Attributes:
        entries: by key: "choice", a name among those measured; "tiling", its fields (`None` for
            the default tiling and for "unfused"); and "microseconds" by name.
    """

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def key(operator: str, shape: Shape, dtype: torch.dtype, ranks: int, device: str) -> str:
        """Key of a class."""
        name = str(dtype).removeprefix("torch.")
        return "/".join((operator, *map(str, shape.rounded), name, str(ranks), device))

    def choice(
        self, operator: str, shape: Shape, dtype: torch.dtype, ranks: int, device: torch.device
    ) -> tuple[str, Mapping[str, Any] | None] | None:
        """Name and tiling chosen for a call; `None` if its class was not measured."""
        if not self.entries:
            return None
        found = self.entries.get(self.key(operator, shape, dtype, ranks, device_name(device)))
        return None if found is None else (str(found["choice"]), found.get("tiling"))

    def times(
        self, operator: str, shape: Shape, dtype: torch.dtype, ranks: int, device: torch.device
    ) -> Mapping[str, float]:
        """Microseconds of each candidate of a call's class, by name; empty if not measured."""
        found = self.entries.get(self.key(operator, shape, dtype, ranks, device_name(device)), {})
        times: Mapping[str, float] = found.get("microseconds", {})
        return times

    def text(self) -> str:
        """JSON, with sorted keys."""
        whole = {"format": _FORMAT, "entries": self.entries}
        return json.dumps(whole, indent=1, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> Table:
        """Table of a JSON text; empty if it is damaged or of another format."""
        try:
            whole = json.loads(text)
        except ValueError:
            return cls()
        if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
            return cls()
        entries = whole.get("entries")
        if not isinstance(entries, dict):
            return cls()
        return cls({key: its for key, its in entries.items() if _is_entry(its)})

    def digest(self) -> str:
        """Digest of the choices, without their times."""
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
    """Path of the file: `fused-tuning.json` in Weft's cache directory."""
    return cache_directory() / "fused-tuning.json"


def own_table() -> Table:
    """Table of this process's file; empty without one."""
    try:
        return Table.parse(tuning_file().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Table()


#: By communicator: the table that its ranks share.
_SHARED: Final[weakref.WeakKeyDictionary[Communicator, Table]] = weakref.WeakKeyDictionary()


def table_of(communicator: Communicator) -> Table:
    """Choices of rank 0's file, for all ranks; the first use is a collective call."""
    found = _SHARED.get(communicator)
    if found is None:
        own = own_table().text() if communicator.rank == 0 else ""
        texts = communicator.all_gather(own.encode(), timeout=_AGREE_TIMEOUT)
        found = _SHARED[communicator] = Table.parse(texts[0].decode())
    return found


def learn(communicator: Communicator, table: Table) -> None:
    """Replace the choices of a communicator; all ranks pass the same."""
    _SHARED[communicator] = table


@cache
def device_name(device: torch.device) -> str:
    """Name of a GPU; of the CPU its architecture, behind "twin"."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"twin {platform.machine()}"


def write(key: str, entry: dict[str, Any]) -> None:
    """Set an entry of this process's file."""
    file = tuning_file()
    table = Table(own_table().entries | {key: entry})
    _replace(file, table.text())


def salt() -> str:
    """Text in the keys of Inductor's caches, of the file `fused-compile.salt`."""
    try:
        return _salt_file().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def renew_salt() -> None:
    """Have processes compile graphs again that this one has compiled."""
    _replace(_salt_file(), os.urandom(8).hex())


def _salt_file() -> Path:
    return cache_directory() / "fused-compile.salt"


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # A reader finds the old file or the new one.
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)
