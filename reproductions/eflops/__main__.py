"""Command line: `python -m reproductions.eflops`."""

import sys

from reproductions import eflops
from reproductions.command import run

if __name__ == "__main__":
    sys.exit(run(eflops))
