"""`python -m weft.torch`: builds the backend's C++ library into the cache and prints its path."""

import sys

from weft.errors import ConfigurationError
from weft.torch.build import built

try:
    print(built())
except ConfigurationError as error:
    sys.exit(str(error))
