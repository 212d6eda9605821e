"""Guardian: kills the process groups registered with it once its standard input ends.

Started by `weft.launch`, which holds the other end: that end closes with the launcher, however it
ends. Lines are "+GROUP" to register and "-GROUP" to remove. Run as a script, without `weft`, so
that it is ready within milliseconds.
"""

import contextlib
import os
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
