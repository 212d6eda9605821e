"""Launcher loop: serves the ranks' output and exits, and the signals for them."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from weft.launch.config import GRACE_SECONDS
from weft.launch.environment import environments
from weft.launch.limits import descriptors_for
from weft.launch.outcome import LaunchError, Outcome, RankExit
from weft.launch.output import LinePrefixer
from weft.launch.processes import Guardian, die_with_parent, kill_group, signals_as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.launch.config import LaunchConfig

# How long output is still read after all ranks have ended: their groups are dead by then, so only a
# process that left its group can hold a pipe open.
DRAIN_SECONDS: Final = 1.0
#: Longest wait per call: a selector refuses much longer ones.
LONGEST_WAIT_SECONDS: Final = 3600.0
#: Signals that end a program: the ranks get the first and the grace, and the second ends the grace.
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals that programs handle for other purposes: a checkpoint, a stack dump.
PASSED: Final = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT)


def launch(config: LaunchConfig) -> Outcome:
    """Start the ranks and wait until all have ended.

    Call it from the main thread: it handles signals and passes them on while it starts ranks and
    while they run, and the kernel ties the ranks' lives to the calling thread's. Raises
    `LaunchError` if the command cannot be started.
    """
    with Launcher(config) as launcher:
        launcher.start_all()
        return launcher.wait()


class Launcher:
    """All ranks in one launch, from the first start to the last exit."""

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.running: dict[int, Rank] = {}
        self.pipes: set[IO[bytes]] = set()
        self.ended: list[RankExit] = []
        self.first_failure: RankExit | None = None
        self.signal: int | None = None
        self.started = 0
        self.failed_at = 0.0
        self.deadline: float | None = None
        self.selector = selectors.DefaultSelector()
        self.cleanup = contextlib.ExitStack()

    def __enter__(self) -> Launcher:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.selector.close)
            signals = cleanup.enter_context(signals_as_bytes((*ENDING, *PASSED)))
            self.watch(signals, lambda: self.forward(os.read(signals, 64)))
            self.descriptors = cleanup.enter_context(descriptors_for(self.config))
            self.guardian = cleanup.enter_context(Guardian())
            cleanup.callback(self.kill_all)
            self.cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup.close()

    def start_all(self) -> None:
        """Start the ranks, and serve output, exits and signals meanwhile.

        No more are started after a signal that ends them, nor long after one has failed.
        """
        for rank, environment in enumerate(environments(self.config)):
            self.serve(time.monotonic())
            if self.signal is not None or self.failed_long_ago():
                return
            self.start(rank, environment)
            self.started += 1

    def failed_long_ago(self) -> bool:
        """True once the grace has ended, and no rank was late only because it was short."""
        now = time.monotonic()
        return self.deadline is not None and now >= max(
            self.deadline, self.failed_at + GRACE_SECONDS
        )

    def wait(self) -> Outcome:
        """Serve output, exits and signals until every rank has ended."""
        while self.running:
            self.serve(self.deadline)
            late = self.deadline is not None and time.monotonic() >= self.deadline
            if late and self.running:
                self.end_grace()
        drained = time.monotonic() + DRAIN_SECONDS
        while self.pipes and time.monotonic() < drained:
            self.serve(drained)
        ranks = sorted(self.ended, key=lambda ended: ended.rank)
        return Outcome(ranks, self.first_failure, self.signal, self.config.ranks - self.started)

    def start(self, rank: int, environment: dict[str, str]) -> None:
        """Start one rank, in a process group that it leads."""
        pipe = subprocess.PIPE if self.config.prefix else None
        try:
            process = subprocess.Popen(
                self.config.command,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                env=environment,
                process_group=0,
                preexec_fn=die_with_parent(self.descriptors),
            )
        except OSError as error:
            raise LaunchError(f"cannot start {self.config.command[0]}", error) from error
        self.guardian.guard(process.pid)
        started = Rank(rank, process, os.pidfd_open(process.pid), time.monotonic())
        self.running[rank] = started
        self.watch(started.pidfd, lambda: self.end(started))
        prefix = f"[{rank:>{len(str(self.config.ranks - 1))}}] ".encode()
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                self.copy(source, LinePrefixer(prefix, sink.buffer))

    def copy(self, source: IO[bytes], sink: LinePrefixer) -> None:
        """Copy lines from a rank's pipe as they come."""

        def serve() -> None:
            chunk = os.read(source.fileno(), 1 << 16)
            if chunk:
                sink.write(chunk)
            else:
                sink.finish()
                self.selector.unregister(source)
                self.pipes.remove(source)
                source.close()

        self.pipes.add(source)
        self.watch(source, serve)

    def watch(self, source: int | IO[bytes], serve: Callable[[], None]) -> None:
        """Call `serve` whenever `source` can be read."""
        self.selector.register(source, selectors.EVENT_READ, serve)

    def serve(self, deadline: float | None) -> None:
        """Serve what is ready, or wait for something to be, until the deadline."""
        timeout = None
        if deadline is not None and deadline < math.inf:
            timeout = min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT_SECONDS)
        for key, _ in self.selector.select(timeout):
            key.data()

    def end(self, rank: Rank) -> None:
        """A rank has ended: if it is the first that failed, the others' grace begins."""
        ended = self.reap(rank)
        if ended is self.first_failure and (self.running or self.started < self.config.ranks):
            self.failed_at = time.monotonic()
            if self.signal is None or self.config.ended_by is None:
                self.say(str(ended))
            self.begin_grace()

    def reap(self, rank: Rank) -> RankExit:
        """Note how a rank ended, and end what it left in its group."""
        # Before the rank is reaped, while its process id cannot name another group.
        kill_group(rank.process.pid)
        self.selector.unregister(rank.pidfd)
        os.close(rank.pidfd)
        code = rank.process.wait()
        self.guardian.release(rank.process.pid)
        del self.running[rank.number]
        ended = RankExit(
            rank.number,
            rank.process.pid,
            exit=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            seconds=round(time.monotonic() - rank.started, 6),
        )
        self.ended.append(ended)
        if ended.status != 0 and self.first_failure is None:
            self.first_failure = ended
        return ended

    def forward(self, signals: bytes) -> None:
        """Pass signals on to all ranks; the second one that ends them is the last."""
        for number in signals:
            if number not in ENDING:
                self.signal_all(number)
                if number == signal.SIGTSTP:
                    # Stopped like the ranks; SIGCONT continues all.
                    os.kill(os.getpid(), signal.SIGSTOP)
            elif self.signal is not None:
                self.deadline = time.monotonic()
            else:
                self.signal = number
                self.signal_all(self.config.ended_by or number)
                self.begin_grace()

    def signal_all(self, number: int) -> None:
        """Send a signal to each running rank's process group."""
        for rank in self.running.values():
            kill_group(rank.process.pid, number)

    def begin_grace(self) -> None:
        """From now on the ranks still running have the grace to end."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.config.grace_seconds

    def end_grace(self) -> None:
        """Kill the ranks that have not ended in time."""
        late = ", ".join(str(rank) for rank in sorted(self.running))
        self.say(f"killing rank {late}: still running when the grace ended (--grace changes it)")
        self.deadline = None
        self.kill_all()

    def kill_all(self) -> None:
        """Kill and reap the ranks that are running."""
        for rank in list(self.running.values()):
            kill_group(rank.process.pid)
        for rank in list(self.running.values()):
            self.reap(rank)

    def say(self, message: str) -> None:
        """Print a message on stderr, between the ranks' lines."""
        print(f"weft run: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Rank:
    """A running rank."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    started: float
