"""`python -m weft.loadgen`: builds the library into the cache and prints its path."""

import sys

from weft.base.errors import ConfigurationError
from weft.loadgen.build import built

try:
    print(built())
except ConfigurationError as error:
    sys.exit(str(error))
