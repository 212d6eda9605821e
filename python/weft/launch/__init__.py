"""Starts a command as N local ranks, watches them, and leaves none behind.

Every rank leads a separate process group, which is killed when the rank has ended. Should the
launcher itself be killed, the kernel kills the ranks (PR_SET_PDEATHSIG), and a guardian process
kills whatever else is in their groups. Only a process that leaves its rank's group escapes.
"""

from weft.launch.config import GRACE_SECONDS, LaunchConfig
from weft.launch.launcher import launch
from weft.launch.outcome import LaunchError, Outcome, RankExit

__all__ = ["GRACE_SECONDS", "LaunchConfig", "LaunchError", "Outcome", "RankExit", "launch"]
