"""Entry for `python -m lab`."""

import sys

from lab.run import main

if __name__ == "__main__":
    sys.exit(main())
