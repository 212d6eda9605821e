"""One guest: a user-mode Linux kernel as a host process, and its consoles.

The guest runs programs from the host's file system, which it cannot change. `init.sh` has its setup
and the console protocol.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lab.errors import LabError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["NETWORKS", "Guest", "Outcome", "address"]

#: Networks, each with one NIC in every guest: vec0 with rxe0, vec1 with rxe1.
NETWORKS: Final = 2
INIT: Final = Path(__file__).with_name("init.sh")
#: Longest IP packet: RoCE packets with 4096 bytes of data fit.
MTU: Final = 4500
#: Packets in a NIC's queue.
DEPTH: Final = 512
#: Guest memory in MiB.
MEMORY_MIB: Final = 512
#: Seconds until a killed guest has ended.
END: Final = 2.0
#: Start of the line that ends a command's output.
MARK: Final = b"\x1e "

#: Variables for every command.
ENVIRONMENT: Final = {"HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}


def address(guest: int, network: int = 0) -> str:
    """Address for a guest's NIC in a network."""
    return f"10.0.{network}.{guest + 1}"


@dataclass(frozen=True)
class Outcome:
    """Command result in a guest.

    Attributes:
        guest: guest index.
        command: the command, for messages.
        status: exit status; `None` if the guest ended before the command.
        stdout: standard output.
        stderr: standard error.
    """

    guest: int
    command: str
    status: int | None
    stdout: str
    stderr: str

    def __str__(self) -> str:
        status = "the guest has ended" if self.status is None else f"exit status {self.status}"
        lines = [*self.stdout.splitlines()[-10:], *self.stderr.splitlines()[-20:]]
        detail = "".join(f"\n  {line}" for line in lines)
        return f"guest {self.guest}: {self.command}: {status}{detail}"


class Stream:
    """One guest output: bytes from the present command, then the exit status."""

    def __init__(self, show: Callable[[str], None] | None) -> None:
        self.bytes = bytearray()
        self.shown = 0
        self.status: int | None = None
        self.show = show

    def restart(self) -> None:
        """Begin the next command's output."""
        self.bytes.clear()
        self.shown = 0
        self.status = None

    def feed(self, data: bytes) -> None:
        """Take bytes from the guest."""
        self.bytes += data
        begin = self.bytes.find(MARK, self.shown)
        end = self.bytes.find(b"\n", begin)
        if begin >= 0 and end >= 0 and self.status is None:
            self.status = int(self.bytes[begin + len(MARK) : end])
            # A process in the background may go on writing.
            del self.bytes[begin : end + 1]
        self.show_lines()

    def show_lines(self) -> None:
        """Show complete lines."""
        end = len(self.bytes) if self.status is not None else self.bytes.rfind(b"\n") + 1
        lines = bytes(self.bytes[self.shown : end]).decode(errors="replace").splitlines()
        self.shown = max(self.shown, end)
        if self.show is not None:
            for line in lines:
                self.show(line)

    def text(self) -> str:
        """The output so far."""
        return self.bytes.decode(errors="replace")


class Guest:
    """A guest from its start on; `init.sh` completes its boot.

    Args:
        index: guest number, from 0.
        kernel: kernel program.
        folder: folder that the host and all guests share.
        cables: socket for each network; closed here.
        show: takes output lines, if any.
    """

    def __init__(
        self,
        index: int,
        kernel: Path,
        folder: Path,
        cables: Sequence[socket.socket],
        show: Callable[[str], None] | None = None,
        memory_mib: int = MEMORY_MIB,
    ) -> None:
        self.index = index
        self.folder = folder
        self.command = "boot"
        self.scripts = 0
        self.log = folder / f"guest{index}.log"
        self.streams = (Stream(show), Stream(show))
        commands, self.console = os.pipe()
        pipes = [os.pipe(), os.pipe()]
        self.outputs = tuple(read for read, _ in pipes)
        (_, output), (_, errors) = pipes
        inherited = [commands, output, errors, *(cable.fileno() for cable in cables)]
        arguments = [
            *(f"mem={memory_mib}M", "quiet", "panic=-1"),
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"),
            *(f"init={folder}/init.sh", f"LAB_GUEST={index}", f"LAB_FOLDER={folder}"),
            *(f"uml_dir={folder}/uml/", f"umid=guest{index}"),
            *("con=null", "con0=null,fd:1"),
            *(f"con1=fd:{commands},fd:{output}", f"con2=null,fd:{errors}"),
            *(nic(index, network, cable.fileno()) for network, cable in enumerate(cables)),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(kernel), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=inherited,
                start_new_session=True,
            )
        for descriptor in (commands, output, errors):
            os.close(descriptor)
        for cable in cables:
            cable.close()

    @property
    def alive(self) -> bool:
        """True until the guest's kernel ends; a stopped guest is alive."""
        return self.process.poll() is None

    @property
    def idle(self) -> bool:
        """True if no command runs."""
        return all(stream.status is not None for stream in self.streams)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path
    ) -> None:
        """Start a command; `outcome` has its result once the guest is idle.

        Raises:
            LabError: if a command runs, or the guest has ended.
        """
        if not self.alive:
            raise LabError(f"guest {self.index}: has ended{self.tail()}")
        if not self.idle:
            raise LabError(f"guest {self.index}: {self.command} still runs; finish it first")
        self.command = shlex.join(command)
        variables = {**ENVIRONMENT, **environment}
        script = self.folder / f"guest{self.index}-{self.scripts}.sh"
        self.scripts += 1
        script.write_text(
            f"cd {shlex.quote(str(directory))} || exit 126\n"
            + "".join(f"export {name}={shlex.quote(each)}\n" for name, each in variables.items())
            + f"exec {self.command}\n",
            encoding="utf-8",
        )
        for stream in self.streams:
            stream.restart()
        # The guest's outputs show that it has ended.
        with contextlib.suppress(BrokenPipeError):
            os.write(self.console, f"{script}\n".encode())

    def outcome(self) -> Outcome:
        """The last command's result, or the output so far."""
        status = self.streams[0].status if self.idle else None
        stdout, stderr = (stream.text() for stream in self.streams)
        return Outcome(self.index, self.command, status, stdout, stderr)

    def tail(self) -> str:
        """Last kernel log lines, for messages."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:]
        return "".join(f"\n  {line}" for line in lines)

    def kill(self) -> None:
        """Kill the guest: all processes in it end at once."""
        end = time.monotonic() + END
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END)
            # Other processes in the group; as zombies if no process on this machine reaps them.
            while time.monotonic() < end:
                os.killpg(self.process.pid, 0)
                time.sleep(0.002)

    def stop(self) -> None:
        """Stop the guest's kernel, and with it all system calls, until `resume`."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a stopped guest."""
        self.process.send_signal(signal.SIGCONT)

    def halt(self) -> None:
        """Request the guest's shutdown, by ending the console."""
        if self.console >= 0:
            os.close(self.console)
            self.console = -1

    def close(self) -> None:
        """Kill the guest and close the outputs."""
        self.halt()
        self.kill()
        for descriptor in self.outputs:
            os.close(descriptor)


def nic(guest: int, network: int, descriptor: int) -> str:
    """Kernel option for a NIC over a datagram socket."""
    hardware = f"02:00:00:00:{network:02x}:{guest + 1:02x}"
    options = f"fd={descriptor},depth={DEPTH},mtu={MTU},mac={hardware}"
    return f"vec{network}:transport=fd,{options}"
