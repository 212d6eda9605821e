"""Settings that ranks compare."""

import weft
from weft.base.errors import ConfigurationMismatchError
from weft.group.sharing import check_equal


def compared(values: list[int]) -> str:
    """Error text on this rank after it passes its own value, or an empty text."""
    group = weft.init()
    try:
        check_equal(group, {"size": values[group.rank]}, timeout=60)
    except ConfigurationMismatchError as error:
        return str(error)
    return ""
