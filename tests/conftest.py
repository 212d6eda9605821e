from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from device_group import group

# Machines are shared and busy: the duration of an example is not significant.
hypothesis.settings.register_profile("weft", deadline=None, print_blob=True)
hypothesis.settings.load_profile("weft")


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of one twin."""
    (rank,) = group(1)
    yield rank
    rank.close()
