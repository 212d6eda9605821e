"""Words: a u32 that the host and a GPU share."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from weft import _native
from weft.base.arguments import expect_range, expect_text, shown
from weft.base.errors import ConfigurationError
from weft.group.devices import device_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["Word", "WordWatch"]

_LARGEST: Final = (1 << 32) - 1
_HOMES: Final = ("auto", "gdrcopy", "pinned")


class Word:
    """A u32, initially 0, that the host and a GPU share.

    `Counter.set_word` sets it once a counter has reached a count: a stream waits for it, or a
    kernel polls it, whatever the program does meanwhile. In the other direction a kernel or a
    stream stores to it, and `on` or `on_change` calls back. For example, a stream that starts once
    a peer's write is there::

        word = weft.Word("cuda")
        counter.set_word({peer: [len(inbox)]}, word, 1)
        (error,) = cuda.bindings.driver.cuStreamWaitValue32(stream, word.address, 1, 0)

    Keep it while kernels, streams or graphs have the address.

    Args:
        device: a GPU, for example "cuda:0"; or "twin" for ordinary memory, without a GPU.
        home: memory for the word. "pinned": on the host, so that a GPU's poll crosses PCIe.
            "gdrcopy": on the GPU, where the host stores through GDRCopy's mapping, and `on` and
            `on_change` cannot look. "auto": "gdrcopy" where that works, else "pinned". See
            `weft.triton.Proxy`.

    Raises:
        ConfigurationError: if an argument is not one of these.
        ProviderError: without CUDA, or with `home="gdrcopy"` without GDRCopy.
        DeviceError: if the memory cannot be allocated or mapped.
    """

    def __init__(
        self, device: object, *, home: Literal["auto", "gdrcopy", "pinned"] = "pinned"
    ) -> None:
        kind, number = device_number(device)
        if expect_text(home, "home") not in _HOMES:
            names = ", ".join(f'"{name}"' for name in _HOMES)
            raise ConfigurationError(f"home={shown(home)}: expected one of {names}")
        self._native = _native.Word(number if kind == "cuda" else None, home)

    @property
    def address(self) -> int:
        """Address in bytes for kernels and streams."""
        return self._native.address

    @property
    def home(self) -> str:
        """Memory that the word is in: "gdrcopy" or "pinned"."""
        return self._native.home

    @property
    def value(self) -> int:
        """The value, loaded with acquire and stored with release."""
        return self._native.get()

    @value.setter
    def value(self, value: int) -> None:
        self._native.set(expect_range(value, "value", 0, _LARGEST))

    @property
    def array(self) -> NDArray[np.uint32]:
        """The word as an array of shape [1] in host memory, for example for kernels on the CPU.

        It keeps the word alive.

        Raises:
            ConfigurationError: if the word is in GPU memory.
        """
        address = self._native.host_address
        if address is None:
            raise ConfigurationError('a word in GPU memory has no array: pass home="pinned"')
        return np.asarray(_Held(self._native, address))

    def check(self) -> None:
        """Raise the last error that ended a `Counter.set_word` on this word, once.

        Raises:
            GroupPoisonedError: or the subclass that names the cause.
            CreditError, UnknownError, ClosedError: as in `Counter.wait_async`.
        """
        self._native.check()

    def on(self, value: int, callback: Callable[[int, int], object]) -> WordWatch:
        """Call back once the word has reached a value, perhaps before this returns.

        A thread of the process looks at all watched words: without a pause for a millisecond after
        a change, else every 100 µs, which takes a few percent of a core. The callback runs on that
        thread, and may make any call; a long one delays all other words' callbacks. An exception
        goes to `sys.unraisablehook`. When the interpreter exits, callbacks end, and one that runs
        has 10 s to return.

        Args:
            value: compared modulo 2^32: `word - value` is below 2^31.
            callback: called with the value that was seen first, when this was called, and the
                present one.

        Returns:
            The watch. Closing or dropping it ends it: keep it.

        Raises:
            ConfigurationError: if the word is in GPU memory.
        """
        return WordWatch(self._watch(expect_range(value, "value", 0, _LARGEST), callback))

    def on_change(self, callback: Callable[[int, int], object]) -> WordWatch:
        """Call back each time the word has changed, as `on` does.

        Args:
            callback: called with the former value and the present one. Values that the word has
                only between two looks are skipped.

        Returns:
            The watch. Closing or dropping it ends it: keep it.

        Raises:
            ConfigurationError: if the word is in GPU memory.
        """
        return WordWatch(self._watch(None, callback))

    def _watch(
        self, value: int | None, callback: Callable[[int, int], object]
    ) -> _native.WordWatch:
        if not callable(callback):
            raise TypeError(f"callback: expected a callable, got {type(callback).__name__}")
        return self._native.watch(value, callback)


class WordWatch:
    """A watched word: see `Word.on`."""

    def __init__(self, native: _native.WordWatch) -> None:
        self._native = native

    @property
    def is_open(self) -> bool:
        """True until the callback was called for the last time, or `close`."""
        return self._native.is_open

    def close(self) -> None:
        """End the watch.

        A callback that runs on another thread has returned then, and none follows. The callback
        itself may call this.
        """
        self._native.close()


class _Held:
    """Array interface of a word that it keeps alive."""

    def __init__(self, native: _native.Word, address: int) -> None:
        self._native = native
        self.__array_interface__ = {
            "version": 3,
            "shape": (1,),
            "typestr": "<u4",
            "data": (address, False),
        }


atexit.register(_native.end_words)
