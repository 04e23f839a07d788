"""Copies on a GPU: a stream a direction, ordered with the kernels by events.

What a copy waits for is recorded on the stream that computes, which is looked up before
anything touches a copy stream: "the current stream" inside a copy stream's context
would be the copy stream itself, and the wait would do nothing.

Events are taken from a pool, to which `finish` returns them. Until then the copier
holds sources and targets: CuPy keeps neither alive for a copy. Where nothing is ever
finished, since copies reach from step to step, it lets go of the oldest that are done.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mucudnn.errors import BackendError, OutOfMemoryError

__all__ = ["CudaCopier", "pinned"]


_MOST_HELD = 512


@dataclass(frozen=True, slots=True)
class _Held:
    """What a copy needs until it is done: two events, and its source and target."""

    computed: Any
    done: Any
    ends: tuple[Any, Any]


class CudaCopier:
    """Two non-blocking streams beside the one that computes.

    Args:
        cupy: The module.
        index: Which GPU.
        compute: Tells the address of the stream that kernels go to now, and makes the
            GPU the thread's own.
        peer: Whether what is copied to is a CuPy array, too: memory of another GPU.
    """

    def __init__(
        self, cupy: Any, index: int, compute: Callable[[], int], *, peer: bool = False
    ) -> None:
        self._cupy = cupy
        self._compute = compute
        self._peer = peer
        self._runtime = cupy.cuda.runtime
        with cupy.cuda.Device(index), self._told("making streams for copies"):
            self._out = cupy.cuda.Stream(non_blocking=True)
            self._in = cupy.cuda.Stream(non_blocking=True)
        self._free: list[Any] = []
        self._held: deque[_Held] = deque()
        self._closed = False

    def out(self, source: Any, target: Any, after: Sequence[Any] = ()) -> Any:
        """Copy a CuPy array into host memory; pinned, or the host waits."""
        kind = self._runtime.memcpyDeviceToHost
        addresses = self._address(target), source.data.ptr
        return self._copy(self._out, kind, addresses, (source, target), after)

    def back(self, source: Any, target: Any, after: Sequence[Any] = ()) -> Any:
        """Copy host memory into a CuPy array; pinned, or the host waits."""
        kind = self._runtime.memcpyHostToDevice
        addresses = target.data.ptr, self._address(source)
        return self._copy(self._in, kind, addresses, (source, target), after)

    def wait(self, ticket: Any) -> None:
        """Kernels launched from now on begin after the copy; the host goes on."""
        with self._told("waiting for a copy"):
            self._runtime.streamWaitEvent(self._compute(), ticket.ptr)

    def finish(self) -> None:
        """Wait on the host for both streams."""
        with self._told("a copy"):
            self._out.synchronize()
            self._in.synchronize()
        for held in self._held:
            self._free += (held.computed, held.done)
        self._held.clear()

    def close(self) -> None:
        """Wait for what was launched: it cannot be taken back."""
        self._closed = True
        for stream in (self._out, self._in):
            try:
                stream.synchronize()
            except self._runtime.CUDARuntimeError:
                continue  # the device is lost, and with it every copy
        self._free.clear()
        self._held.clear()

    def _address(self, away: Any) -> int:
        """Of memory that is not this GPU's."""
        address: int = away.data.ptr if self._peer else away.ctypes.data
        return address

    def _copy(
        self,
        stream: Any,
        kind: int,
        addresses: tuple[int, int],
        ends: tuple[Any, Any],
        after: Sequence[Any],
    ) -> Any:
        source, target = ends
        if self._closed:
            raise BackendError("a copy was asked of a closed copier")
        if source.nbytes != target.nbytes:
            raise BackendError(
                f"a copy of {source.nbytes} bytes was given {target.nbytes}"
            )
        with self._told(f"a copy of {source.nbytes} bytes"):
            self._let_go()
            computed, done = self._event(), self._event()
            self._runtime.eventRecord(computed.ptr, self._compute())
            stream.wait_event(computed)
            for ticket in after:
                stream.wait_event(ticket)
            self._held.append(_Held(computed, done, ends))
            if self._peer:  # addresses are unique: CUDA finds out whose they are
                kind = self._runtime.memcpyDefault
            self._runtime.memcpyAsync(*addresses, source.nbytes, kind, stream.ptr)
            self._runtime.eventRecord(done.ptr, stream.ptr)
        return done

    def _event(self) -> Any:
        if not self._free:
            self._free.append(self._cupy.cuda.Event(disable_timing=True))
        return self._free.pop()

    def _let_go(self) -> None:
        """Forget old copies that are done; their tickets stay good."""
        while len(self._held) > _MOST_HELD and self._held[0].done.done:
            self._free.append(self._held.popleft().computed)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Tell of a failure of CUDA in our words."""
        try:
            yield
        except self._runtime.CUDARuntimeError as e:
            raise BackendError(f"{what} failed: {e}") from e


def pinned(cupy: Any, nbytes: int) -> Any:
    """A NumPy array of page-locked bytes: exactly so many, not the next power of two.

    Raises:
        OutOfMemoryError: The host has no room, or may not lock so much.
    """
    import numpy as np

    if nbytes == 0:
        return np.empty(0, np.uint8)
    try:
        memory = cupy.cuda.PinnedMemory(nbytes)
    except cupy.cuda.runtime.CUDARuntimeError as e:
        raise OutOfMemoryError(
            f"no room for {nbytes} bytes of pinned memory: {e}"
        ) from e
    return np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)
