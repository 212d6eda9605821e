"""`python -m weft.torch`: makes the backend's C++ library ready and prints the path.

With `--prebuild` it compiles the library into the package, for a wheel.
"""

import shutil
import sys

from weft.base.errors import ConfigurationError
from weft.torch import build


def main(arguments: list[str]) -> None:
    """Build what the arguments ask for, and print the library's path."""
    if arguments not in ([], ["--prebuild"]):
        sys.exit("usage: python -m weft.torch [--prebuild]")
    try:
        if arguments:
            import torch

            target = build.prebuilt(torch.__version__)
            shutil.rmtree(target.parent, ignore_errors=True)
            target.parent.mkdir()
            shutil.copy(build.built(), target)
        print(build.load().__file__)
    except ConfigurationError as error:
        sys.exit(str(error))


main(sys.argv[1:])
