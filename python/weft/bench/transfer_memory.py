"""Source and destination memory for `weft bench transfer`: on the CPU, a twin or a GPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.base.errors import ProviderError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    import weft

__all__ = ["HostMemory", "memory_on"]


class HostMemory:
    """CPU memory, or memory on a twin's device, which is CPU memory as well."""

    def __init__(self, device: str | None = None) -> None:
        self.device = device

    def array(self, region: weft.Region) -> Any:
        """The bytes in a region, `[length]` uint8."""
        if self.device is None:
            return region.bytes
        return np.ctypeslib.as_array((ctypes.c_uint8 * len(region)).from_address(region.address))

    def put(self, pages: Any, places: NDArray[np.intp], values: NDArray[np.uint8]) -> None:
        """Store values `[count, bytes]` as the pages at `places`."""
        pages[places] = values

    def is_equal(self, pages: Any, expected: NDArray[np.uint8]) -> bool:
        """True if all pages have the expected bytes."""
        return bool(np.array_equal(pages, expected))

    def copier(self, values: NDArray[np.uint8]) -> Callable[[], None]:
        """A copy of these bytes within the memory, complete on return."""
        target = np.empty_like(values)
        return lambda: np.copyto(target, values)


class CudaMemory(HostMemory):
    """Memory on a GPU, through torch."""

    def __init__(self, rank: int) -> None:
        try:
            import torch
        except ImportError as error:
            raise ProviderError(f"--device cuda: {error}; install torch") from None
        if not torch.cuda.device_count():
            raise ProviderError("--device cuda: torch finds no GPU here; choose twin to try it out")
        number = rank % torch.cuda.device_count()
        super().__init__(f"cuda:{number}")
        torch.cuda.set_device(number)
        self.torch = torch

    def array(self, region: weft.Region) -> Any:
        return self.torch.as_tensor(region.cuda, device=self.device)

    def put(self, pages: Any, places: NDArray[np.intp], values: NDArray[np.uint8]) -> None:
        at = self.torch.from_numpy(places).to(self.device)
        pages[at] = self.torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        # A write reads the source only after the kernels that filled it have ended.
        self.torch.cuda.synchronize()

    def is_equal(self, pages: Any, expected: NDArray[np.uint8]) -> bool:
        return bool(self.torch.equal(pages, self.torch.from_numpy(expected).to(self.device)))

    def copier(self, values: NDArray[np.uint8]) -> Callable[[], None]:
        source = self.torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        target = self.torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)
            self.torch.cuda.synchronize()

        return copy


def memory_on(device: str, rank: int) -> HostMemory:
    """A rank's memory: on the CPU, on GPU number `rank` if there are as many, or on a twin's."""
    match device:
        case "cuda":
            return CudaMemory(rank)
        case "twin":
            return HostMemory(f"twin:{rank}")
        case _:
            return HostMemory()
