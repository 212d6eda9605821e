"""Types of arguments of public calls."""

from __future__ import annotations

from typing import Final

__all__ = ["expect", "expect_names"]

#: Packages whose names programs write in full.
PACKAGES: Final = ("weft.moe", "weft.cuda")


def expect(value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Raise unless an argument is of a type.

    Args:
        value: the argument.
        kind: its type, or the types that it may have.
        name: of the argument, for the error.

    Raises:
        TypeError: names the argument, the type expected and the type given.
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise TypeError(
            f"{name}: expected {' or '.join(map(type_name, kinds))}, got {type_name(type(value))}"
        )


def expect_names(value: object, name: str) -> None:
    """Raise unless an argument is a sequence of strings, and not a single string.

    Raises:
        TypeError: as `expect`.
    """
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise TypeError(
            f"{name}: expected a sequence of str, got {type_name(type(value))}; pass a list"
        )


def type_name(kind: type) -> str:
    """A type as programs name it: `weft.Region`, `ndarray`."""
    module = kind.__module__
    if not module.startswith("weft"):
        return kind.__qualname__
    package = ".".join(module.split(".")[: 2 if module.startswith(PACKAGES) else 1])
    return f"{package}.{kind.__qualname__}"
