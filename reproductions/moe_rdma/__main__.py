"""Command line: `python -m reproductions.moe_rdma`."""

import sys

from reproductions import moe_rdma
from reproductions.command import run

if __name__ == "__main__":
    sys.exit(run(moe_rdma))
