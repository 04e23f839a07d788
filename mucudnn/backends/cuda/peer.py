"""Memory of another GPU, as a place to swap out to.

Copies go from GPU to GPU without the host where the two can reach each other; else the
driver stages them. It has not run on two GPUs yet.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mucudnn.backends.base import Copier, Device
from mucudnn.backends.cuda.copies import CudaCopier
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.sizes import format_bytes

__all__ = ["PeerMemory"]


class PeerMemory:
    """One slab on another GPU.

    Args:
        cupy: The module.
        index: The GPU that computes.
        peer: The other one.
        nbytes: Size.
        compute: Tells the address of the stream that kernels go to now.

    Raises:
        ValueError: There is no such GPU, or it is the one that computes.
        OutOfMemoryError: It has no room.
    """

    def __init__(
        self, cupy: Any, index: int, peer: int, nbytes: int, compute: Callable[[], int]
    ) -> None:
        runtime = cupy.cuda.runtime
        count = runtime.getDeviceCount()
        if peer == index or not 0 <= peer < count:
            raise ValueError(
                f"peer:{peer} is no other GPU: this is number {index} of {count}"
            )
        self.name = f"peer:{peer}"
        self.nbytes = nbytes
        self._cupy, self._index, self._compute = cupy, index, compute
        with cupy.cuda.Device(index), suppress(runtime.CUDARuntimeError):
            if runtime.deviceCanAccessPeer(index, peer):
                runtime.deviceEnablePeerAccess(peer)  # refused where it is already
        try:
            with cupy.cuda.Device(peer):
                self._slab = cupy.empty(nbytes, "uint8")
        except cupy.cuda.memory.OutOfMemoryError as e:
            raise OutOfMemoryError(
                f"no room for {format_bytes(nbytes)} on {self.name}: {e}"
            ) from e

    def view(self, offset: int, nbytes: int) -> Any:
        """A slice of the slab."""
        return self._slab[offset : offset + nbytes]

    def copier(self, device: Device) -> Copier:
        """Two streams of the GPU that computes."""
        return CudaCopier(self._cupy, self._index, self._compute, peer=True)

    def close(self) -> None:
        """Drop the slab."""
        self._slab = None
