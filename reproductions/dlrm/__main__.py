"""Command line: `python -m reproductions.dlrm`."""

import sys

from reproductions import dlrm
from reproductions.command import run

if __name__ == "__main__":
    sys.exit(run(dlrm))
