"""Memory of another GPU as an offload target.

Copies between GPUs bypass the host if the two can access each other; otherwise the
driver stages them. This has not run on two GPUs yet.
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
    """A slab of memory on GPU `peer` for computing GPU `index`; see `Device.peer`."""

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
                runtime.deviceEnablePeerAccess(peer)  # fails if already enabled
        try:
            with cupy.cuda.Device(peer):
                self._slab = cupy.empty(nbytes, "uint8")
        except cupy.cuda.memory.OutOfMemoryError as e:
            raise OutOfMemoryError(
                f"no room for {format_bytes(nbytes)} on {self.name}: {e}"
            ) from e

    def view(self, offset: int, nbytes: int) -> Any:
        """Return a slice of the slab."""
        return self._slab[offset : offset + nbytes]

    def copier(self, device: Device) -> Copier:
        """Return two copy streams of the computing GPU."""
        return CudaCopier(self._cupy, self._index, self._compute, peer=True)

    def close(self) -> None:
        """Release the slab."""
        self._slab = None
