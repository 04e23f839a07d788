"""Copies on a GPU: a stream a direction, ordered with the kernels by events.

What a copy waits for is recorded on the stream that computes, which is looked up before
anything touches a copy stream: "the current stream" inside a copy stream's context
would be the copy stream itself, and the wait would do nothing.

A copy that is bound has events of its own, recorded anew whenever it is started: who
waits for one waits for what was recorded last. Others take theirs from a pool, to which
`finish` returns them. Until then the copier holds their sources and targets: CuPy keeps
neither alive for a copy. Where nothing is ever finished, it lets go of the oldest that
are done.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mucudnn.backends.device import Start, Way
from mucudnn.errors import BackendError, OutOfMemoryError

__all__ = ["CudaCopier", "pinned"]


_MOST_HELD = 512


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy as CUDA is asked for it, its two events, and what is to be kept for it."""

    stream: int
    arguments: tuple[int, int, int, int, int]
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
        self._held: deque[_Copy] = deque()
        self._closed = False

    def out(self, source: Any, target: Any, after: Sequence[Any] = ()) -> Any:
        """Copy a CuPy array into host memory; pinned, or the host waits."""
        return self._once("out", source, target, after)

    def back(self, source: Any, target: Any, after: Sequence[Any] = ()) -> Any:
        """Copy host memory into a CuPy array; pinned, or the host waits."""
        return self._once("back", source, target, after)

    def bound(self, way: Way, source: Any, target: Any) -> Start:
        """A copy to start over and over: five calls of CUDA, and nothing is made."""
        return partial(self._launch, self._made(way, source, target, self._new_event))

    def wait(self, ticket: Any) -> None:
        """Kernels launched from now on begin after the copy; the host goes on."""
        try:
            self._runtime.streamWaitEvent(self._compute(), ticket.ptr)
        except self._runtime.CUDARuntimeError as e:
            raise BackendError(f"waiting for a copy failed: {e}") from e

    def finish(self) -> None:
        """Wait on the host for both streams, and for graphs that copy as well."""
        with self._told("a copy"):
            self._runtime.streamSynchronize(self._compute())
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

    def _once(self, way: Way, source: Any, target: Any, after: Sequence[Any]) -> Any:
        """Start a copy with events of the pool."""
        self._let_go()
        copy = self._made(way, source, target, self._pooled_event)
        self._held.append(copy)
        return self._launch(copy, after)

    def _made(
        self, way: Way, source: Any, target: Any, event: Callable[[], Any]
    ) -> _Copy:
        """A copy that was not started yet."""
        if source.nbytes != target.nbytes:
            raise BackendError(
                f"a copy of {source.nbytes} bytes was given {target.nbytes}"
            )
        if way == "out":
            stream, kind = self._out.ptr, self._runtime.memcpyDeviceToHost
            addresses = self._address(target), source.data.ptr
        else:
            stream, kind = self._in.ptr, self._runtime.memcpyHostToDevice
            addresses = target.data.ptr, self._address(source)
        if self._peer:  # addresses are unique: CUDA finds out whose they are
            kind = self._runtime.memcpyDefault
        arguments = *addresses, source.nbytes, kind, stream
        with self._told("making events for copies"):
            return _Copy(stream, arguments, event(), event(), (source, target))

    def _launch(self, copy: _Copy, after: Sequence[Any] = ()) -> Any:
        """Start it behind what was computed so far, and behind other copies."""
        if self._closed:
            raise BackendError("a copy was asked of a closed copier")
        runtime, stream, computed = self._runtime, copy.stream, copy.computed.ptr
        try:
            runtime.eventRecord(computed, self._compute())
            runtime.streamWaitEvent(stream, computed)
            for ticket in after:
                runtime.streamWaitEvent(stream, ticket.ptr)
            runtime.memcpyAsync(*copy.arguments)
            runtime.eventRecord(copy.done.ptr, stream)
        except runtime.CUDARuntimeError as e:
            nbytes = copy.arguments[2]
            raise BackendError(f"a copy of {nbytes} bytes failed: {e}") from e
        return copy.done

    def _address(self, away: Any) -> int:
        """Of memory that is not this GPU's."""
        address: int = away.data.ptr if self._peer else away.ctypes.data
        return address

    def _new_event(self) -> Any:
        return self._cupy.cuda.Event(disable_timing=True)

    def _pooled_event(self) -> Any:
        return self._free.pop() if self._free else self._new_event()

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
