"""Start-up for the command `weft`: Ctrl-C during imports ends it without a traceback.

Imported before all other modules, since importing them takes a good part of a second. The command
handles signals itself as soon as it can.
"""

# Not `signal`, which imports other modules for its enumerations.
import _signal  # type: ignore[import-not-found]
import os
import sys


def is_command() -> bool:
    """True in a process that was started as `weft` or as `python -m weft`."""
    if sys.argv[:1] == ["-m"]:
        given = sys.orig_argv
        return "-mweft" in given or ("-m", "weft") in zip(given, given[1:], strict=False)  # noqa: RUF007
    return os.path.basename(sys.argv[0]) == "weft" if sys.argv else False


if is_command() and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
