"""Entry for `python -m lab.rdma`."""

import sys

from lab.rdma.run import main

if __name__ == "__main__":
    sys.exit(main())
