"""A group of guests on two networks, and commands that run in them at once.

with guests(count=2) as lab:
    lab.run({0: ["ibv_devinfo"], 1: ["ping", "-c", "1", address(0)]}, timeout_s=60)
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lab.errors import LabError
from lab.rdma.guest import INIT, MEMORY_MIB, NETWORKS, Guest, Outcome, address
from lab.rdma.kernel import cached
from lab.rdma.packages import GUEST, missing
from lab.rdma.reaper import Reaper
from lab.rdma.switch import Switch, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

__all__ = ["MOST", "Guests", "Outcome", "address", "guests", "unavailable"]

#: Most guests in a lab.
MOST: Final = 16
#: Seconds for all guests to boot.
BOOT: Final = 60.0
#: Seconds until guests that have not shut down are killed.
HALT: Final = 5.0
#: Seconds between two looks at the guests' processes.
LOOK: Final = 0.2


def unavailable() -> str | None:
    """Reason for which guests cannot run on this machine, with a remedy; `None` if they can."""
    if cached() is None:
        return "the guests' kernel is not in the cache: run `make rdma-kernel`"
    if absent := missing(GUEST):
        return f"packages {' '.join(absent)}: missing; apt-get install {' '.join(absent)}"
    return None


class Guests:
    """Running guests.

    Attributes:
        folder: folder that the host and all guests can write, at the same path.
        switches: switch by network; empty if two guests are joined directly.
    """

    def __init__(self, members: Sequence[Guest], switches: Sequence[Switch], folder: Path) -> None:
        self.members = members
        self.switches = switches
        self.folder = folder

    def run(
        self,
        commands: Mapping[int, Sequence[str]],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        *,
        directory: Path | None = None,
        check: bool = True,
    ) -> dict[int, Outcome]:
        """Run a command in each of some guests at once; returns the results.

        Args:
            commands: command by guest.
            timeout_s: seconds for all commands; guests that are not finished are then killed.
            environment: further variables for the commands.
            directory: working directory (default: this process's).
            check: demand exit status 0 from every command.

        Raises:
            LabError: if a command takes longer or, with `check`, fails or loses its guest.
        """
        self.start(commands, environment, directory=directory)
        return self.finish(commands, timeout_s, check=check)

    def start(
        self,
        commands: Mapping[int, Sequence[str]],
        environment: Mapping[str, str] | None = None,
        *,
        directory: Path | None = None,
    ) -> None:
        """Start the commands for `run`.

        Raises:
            LabError: if a guest does not exist, has ended or runs a command.
        """
        for index in commands:
            self.member(index)
        for index, command in commands.items():
            self.members[index].start(command, environment or {}, directory or Path.cwd())

    def finish(
        self, indices: Collection[int], timeout_s: float, *, check: bool = True
    ) -> dict[int, Outcome]:
        """Wait for the commands that `start` has started; as `run`."""
        members = [self.member(index) for index in indices]
        late = read_until_idle(members, timeout_s)
        for member in late:
            member.kill()
        if late:
            late_ones = "\n".join(str(member.outcome()) for member in late)
            raise LabError(f"not finished within {timeout_s:g} s; guests killed:\n{late_ones}")
        outcomes = {member.index: member.outcome() for member in members}
        failed = [str(each) for each in outcomes.values() if each.status != 0]
        if check and failed:
            raise LabError("\n".join(failed))
        return outcomes

    def kill(self, index: int) -> None:
        """Kill a guest: NICs and memory are gone at once."""
        self.member(index).kill()

    def stop(self, index: int) -> None:
        """Stop a guest until `resume`: the NICs neither send nor receive."""
        self.member(index).stop()

    def resume(self, index: int) -> None:
        """Resume a stopped guest."""
        self.member(index).resume()

    def alive(self, index: int) -> bool:
        """True until a guest has ended; a stopped guest is alive."""
        return self.member(index).alive

    def member(self, index: int) -> Guest:
        """Guest with this index."""
        if not 0 <= index < len(self.members):
            raise LabError(f"guest {index}: expected 0 to {len(self.members) - 1}")
        return self.members[index]


@contextlib.contextmanager
def guests(
    count: int = 2,
    drop: float = 0.0,
    delay_s: float = 0.0,
    seed: int = 0,
    *,
    switched: bool = False,
    memory_mib: int = MEMORY_MIB,
    show: Callable[[int, str], None] | None = None,
) -> Iterator[Guests]:
    """Booted guests for the block; they and all their processes end with it.

    Args:
        count: number of guests, 1 to 16.
        drop: probability that a frame between two guests is lost.
        delay_s: seconds that a frame takes between two guests.
        seed: seed for the lost frames.
        switched: networks have switches, whose `drop` and `delay_s` may be changed later. Two
            guests are otherwise joined directly if no frame is lost or delayed.
        memory_mib: guest memory in MiB.
        show: takes each output line with its guest's index.

    Raises:
        LabError: if guests cannot run here, an argument is out of range, or a guest does
            not boot.
    """
    if not 1 <= count <= MOST:
        raise LabError(f"count {count}: expected 1 to {MOST} guests")
    switches: list[Switch] = []
    if count != 2 or drop or delay_s or switched:
        switches = [
            Switch(count, drop, delay_s, seed * NETWORKS + network) for network in range(NETWORKS)
        ]
    kernel = cached()
    if kernel is None:
        raise LabError(str(unavailable()))
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="weft-rdma-lab-")).resolve()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        shutil.copy(INIT, folder)
        one_processor = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        (folder / "cpuinfo").write_text(one_processor + "\n\n", encoding="utf-8")
        reaper = Reaper(folder)
        stack.callback(reaper.dismiss)
        cables = wired(count, switches, stack)
        members: list[Guest] = []
        for index in range(count):
            print_line = None if show is None else shown(show, index)
            guest = Guest(index, kernel, folder, cables[index], print_line, memory_mib)
            reaper.add(guest.process.pid)
            stack.callback(guest.close)
            members.append(guest)
        stack.callback(halt, members)
        booted(members)
        yield Guests(members, switches, folder)


def shown(show: Callable[[int, str], None], index: int) -> Callable[[str], None]:
    """A guest's line function."""
    return lambda line: show(index, line)


def wired(
    count: int, switches: Sequence[Switch], stack: contextlib.ExitStack
) -> list[list[socket.socket]]:
    """Sockets for each guest, one per network, whose other ends are joined."""
    networks: list[list[socket.socket]] = []
    for network in range(NETWORKS):
        if not switches:
            networks.append(list(cable()))
            continue
        pairs = [cable() for _ in range(count)]
        networks.append([mine for mine, _ in pairs])
        wire = Wire(switches[network], [other for _, other in pairs])
        stack.callback(wire.close)
        wire.start()
    for each in networks:
        for end in each:
            # The guest's process has a separate descriptor.
            stack.callback(end.close)
    return [[ends[guest] for ends in networks] for guest in range(count)]


def cable() -> tuple[socket.socket, socket.socket]:
    """Both ends of a cable that loses no frame."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in (one, two):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    return one, two


def booted(members: Sequence[Guest]) -> None:
    """Wait until the guests have booted.

    Raises:
        LabError: if one ends or takes too long, with its log.
    """
    late = read_until_idle(members, BOOT)
    for member in members:
        outcome = member.outcome()
        if outcome.status != 0:
            why = f"not within {BOOT:.0f} s" if member in late else "ended"
            raise LabError(f"guest {member.index}: boot: {why}\n{outcome}{member.tail()}")


def halt(members: Sequence[Guest]) -> None:
    """Shut down the guests that are idle, for at most `HALT` seconds."""
    waiting = [member for member in members if member.alive and member.idle]
    for member in waiting:
        member.halt()
    end = time.monotonic() + HALT
    while any(member.alive for member in waiting) and time.monotonic() < end:
        time.sleep(0.005)


def read_until_idle(members: Sequence[Guest], timeout_s: float) -> list[Guest]:
    """Read guest outputs until each is idle or ended; returns those that are not in time."""
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for member in members:
            for descriptor, stream in zip(member.outputs, member.streams, strict=True):
                selector.register(descriptor, selectors.EVENT_READ, stream)
        while True:
            pending = [member for member in members if not member.idle and member.alive]
            rest = end - time.monotonic() if pending else 0
            found = selector.select(min(LOOK, max(rest, 0)))
            for key, _ in found:
                data = os.read(key.fd, 1 << 16)
                if data:
                    key.data.feed(data)
                else:
                    selector.unregister(key.fd)
            # An ended guest's last output is still in its pipes.
            if not found and rest <= 0:
                return pending
