"""Reaper: a process that kills guests and removes their folder if the lab's process dies.

A guest is several host processes in one process group, each traced by the first: they survive when
SIGKILL ends the parent.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Reaper"]

#: Reads process groups until the pipe's end: the lab has died.
SCRIPT: Final = """
while read -r group; do groups="$groups -$group"; done
[ -z "$groups" ] || kill -s KILL -- $groups
rm -rf "$1"
"""


class Reaper:
    """Reaper for process groups, until `dismiss`."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            ["sh", "-c", SCRIPT, "sh", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Kill this process group with the others."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{group}\n".encode())
        self.process.stdin.flush()

    def dismiss(self) -> None:
        """End the reaper: the groups have been killed, and their numbers may be reused."""
        self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
