"""Type checks for public arguments."""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any, Final

from weft.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "expect",
    "expect_bytes",
    "expect_flag",
    "expect_json",
    "expect_list",
    "expect_names",
    "expect_number",
    "expect_range",
    "expect_text",
    "shown",
]

#: Maximum length, in characters, for a value in an error.
MAX_SHOWN: Final = 100
#: Packages whose names programs write in full, by the packages that define the classes.
PACKAGES: Final = {
    "weft.moe.device": "weft.cuda",
    "weft.collectives": "weft.cuda",
    "weft.gpu": "weft.cuda",
    "weft.moe": "weft.moe",
}


def expect(value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Raise unless an argument has an expected type.

    Args:
        value: the argument.
        kind: expected type or types.
        name: argument name, for the error.

    Raises:
        TypeError: names the argument, the type expected and the type given.
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise TypeError(
            f"{name}: expected {' or '.join(map(type_name, kinds))}, got {type_name(type(value))}"
        )


def expect_text(value: object, name: str) -> str:
    """Check a string that can be encoded as UTF-8.

    Raises:
        TypeError: as in `expect`.
        ConfigurationError: if it contains half a surrogate pair, as Python makes from bytes that
            are not UTF-8.
    """
    expect(value, str, name)
    assert isinstance(value, str)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{name} {value!r}: expected text, but character {error.start} has no form in UTF-8; "
            "leave it out"
        ) from None
    return value


def expect_bytes(value: object, name: str) -> bytes:
    """Bytes.

    Raises:
        TypeError: as in `expect`.
    """
    expect(value, (bytes, bytearray), name)
    assert isinstance(value, (bytes, bytearray))
    return bytes(value)


def expect_flag(value: object, name: str) -> bool:
    """Check a Python or numpy truth value.

    Raises:
        TypeError: as in `expect`.
    """
    # numpy's is no subclass, and numpy may not be loaded.
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        expect(value, bool, name)
    return bool(value)


def expect_number(value: object, name: str) -> int:
    """Check a Python or numpy whole number; its range is checked where it is used.

    Raises:
        TypeError: as in `expect`.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected int, got {type_name(type(value))}") from None


def expect_range(value: object, name: str, least: int, most: int) -> int:
    """Check a Python or numpy whole number from `least` to `most`.

    Raises:
        TypeError: as in `expect`.
        ConfigurationError: if it is outside that range.
    """
    number = expect_number(value, name)
    if not least <= number <= most:
        raise ConfigurationError(f"{name}={shown(number)}: expected {least} to {most}")
    return number


def expect_json(value: object, name: str) -> str:
    """A value as JSON.

    Raises:
        ConfigurationError: if it has no form in JSON, such as an array or NaN.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{name}: expected values of JSON (numbers, texts, lists, objects): {error}"
        ) from error


def shown(value: object) -> str:
    """A value as Python writes it, shortened for an error."""
    try:
        text = repr(value)
    except ValueError:
        # Python does not print numbers with more than some thousand digits.
        text = "(too many digits)"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def expect_list(value: Iterable[Any], name: str) -> list[Any]:
    """An argument's elements, in order.

    Raises:
        TypeError: as in `expect`.
    """
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"{name}: expected a sequence, got {type_name(type(value))}; pass a list")
    try:
        return list(value)
    except TypeError:
        raise TypeError(
            f"{name}: expected a sequence, got {type_name(type(value))}; pass a list"
        ) from None


def expect_names(value: object, name: str) -> list[str]:
    """Check a list with strings, rather than a single string.

    Raises:
        TypeError: as in `expect`.
        ConfigurationError: as in `expect_text`.
    """
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(value, "__iter__"):
        raise TypeError(
            f"{name}: expected a sequence of str, got {type_name(type(value))}; pass a list"
        )
    return [expect_text(each, name) for each in expect_list(value, name)]


def type_name(kind: type) -> str:
    """A type's name in programs, such as `weft.Region` or `ndarray`."""
    module = kind.__module__
    if not module.startswith("weft"):
        return kind.__qualname__
    package = next((PACKAGES[each] for each in PACKAGES if module.startswith(each)), "weft")
    return f"{package}.{kind.__qualname__}"
