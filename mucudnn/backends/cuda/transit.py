"""Inputs and results of steps, copied while the GPU computes: the host goes on.

An input is written into page-locked memory, from there copied to a place on the device
that only this stream of copies writes, and into its tensor by the stream that computes:
so the next batch arrives while a step still reads this one's. Where the device has no
room for that place, the stream that computes fetches the input itself as a step begins.
A result is copied into page-locked memory behind the kernels that were launched, and
waited for by who reads it. Of page-locked memory there are two places each, taken in
turn: the host is at most two steps ahead.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mucudnn.backends.cuda.copies import pinned
from mucudnn.backends.cuda.remedies import refuse_bits
from mucudnn.errors import BackendError, OutOfMemoryError

__all__ = ["CudaTransit"]

_PLACES = 2


class _Arrivals:
    """Of one input: its places on the host, and the one on the device if it has one."""

    def __init__(self, cupy: Any, nbytes: int, staged: bool) -> None:
        self.staging = cupy.empty(nbytes, "uint8") if staged else None
        self.taken = cupy.cuda.Event(disable_timing=True)
        self.places = _in_turn(cupy, nbytes)


class _Result:
    """What a tensor was, once it has arrived on the host."""

    def __init__(self, place: Any, like: Any, told: Any) -> None:
        self._place, self._like, self._told = place, like, told
        self._value: Any = None

    def __call__(self) -> Any:
        """A NumPy array of its own, waited for."""
        if self._value is None:
            buffer, event = self._place
            with self._told("a copy to the host"):
                event.synchronize()
            found = buffer.view(self._like.dtype).reshape(self._like.shape)
            self._value, self._place = found.copy(), None
        return self._value

    @property
    def ready(self) -> bool:
        """Whether nothing has to be waited for."""
        return self._value is not None or bool(self._place[1].done)


class CudaTransit:
    """Copies of inputs and results beside the kernels of a GPU.

    Args:
        cupy: The module.
        index: Which GPU.
        compute: Tells the address of the stream that kernels go to now, and makes the
            GPU the thread's own.
        staged: Whether inputs take memory of the device on their way.
    """

    def __init__(
        self,
        cupy: Any,
        index: int,
        compute: Callable[[], int],
        *,
        staged: bool = True,
    ) -> None:
        self._cupy, self._compute, self._staged = cupy, compute, staged
        self._runtime = cupy.cuda.runtime
        with cupy.cuda.Device(index), self._told("making a stream for inputs"):
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._arrivals: dict[tuple[int, int], _Arrivals] = {}
        self._departures: dict[tuple[int, int], Iterator[Any]] = {}
        self._unread: dict[int, _Result] = {}

    def upload(self, source: Any, target: Any) -> None:
        """Have a NumPy array in a tensor of its shape and type, for later kernels.

        The source may be changed as soon as this returns.

        Raises:
            BackendError: CUDA fails.
            OutOfMemoryError: There is no room to copy by way of.
        """
        refuse_bits(target.dtype.name, "a copy from the host")
        if target.nbytes == 0:
            return
        compute = self._compute()
        with self._told(f"a copy of {target.nbytes} bytes to the device"):
            known = self._known(target)
            buffer, arrived = next(known.places)
            arrived.synchronize()  # of two inputs ago: what was in this place has left
            buffer.view(source.dtype).reshape(source.shape)[...] = source
            if known.staging is None:
                self._fetch(buffer, target, compute)
                self._runtime.eventRecord(arrived.ptr, compute)
                return
            beside = self._stream.ptr
            self._stream.wait_event(known.taken)
            self._fetch(buffer, known.staging, beside)
            self._runtime.eventRecord(arrived.ptr, beside)
            self._runtime.streamWaitEvent(compute, arrived.ptr)
            ends = target.data.ptr, known.staging.data.ptr
            kind = self._runtime.memcpyDeviceToDevice
            self._runtime.memcpyAsync(*ends, target.nbytes, kind, compute)
            self._runtime.eventRecord(known.taken.ptr, compute)

    def download(self, source: Any) -> _Result:
        """A tensor as it is behind what was launched; waited for when it is called.

        Raises:
            BackendError: CUDA fails.
            OutOfMemoryError: There is no room on the host.
        """
        refuse_bits(source.dtype.name, "a copy to the host")
        compute = self._compute()
        key = source.data.ptr, source.nbytes
        with self._told("a copy to the host"):
            if key not in self._departures:
                self._departures[key] = _in_turn(self._cupy, source.nbytes)
            place = buffer, event = next(self._departures[key])
            if (before := self._unread.get(id(buffer))) is not None:
                before()  # or it would be overwritten
            ends = buffer.ctypes.data, source.data.ptr
            kind = self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(*ends, source.nbytes, kind, compute)
            self._runtime.eventRecord(event.ptr, compute)
        made = self._unread[id(buffer)] = _Result(place, source, self._told)
        return made

    def close(self) -> None:
        """Wait for what is under way, and let go of all places.

        It raises nothing: what failed is told to those who read it.
        """
        for wait in (self._stream.synchronize, *self._unread.values()):
            with contextlib.suppress(BackendError), self._told("a copy"):
                wait()
        self._arrivals.clear()
        self._departures.clear()
        self._unread.clear()

    def _fetch(self, buffer: Any, target: Any, stream: int) -> None:
        """From page-locked memory to the device."""
        ends = target.data.ptr, buffer.ctypes.data
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(*ends, target.nbytes, kind, stream)

    def _known(self, target: Any) -> _Arrivals:
        key = target.data.ptr, target.nbytes
        if key not in self._arrivals:
            self._arrivals[key] = _Arrivals(self._cupy, target.nbytes, self._staged)
        return self._arrivals[key]

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Tell of a failure of CUDA in our words."""
        try:
            yield
        except self._cupy.cuda.memory.OutOfMemoryError as e:
            raise OutOfMemoryError(f"no room for {what}: {e}") from e
        except self._runtime.CUDARuntimeError as e:
            raise BackendError(f"{what} failed: {e}") from e


def _in_turn(cupy: Any, nbytes: int) -> Iterator[tuple[Any, Any]]:
    """Page-locked places and their events, one after the other without an end."""
    made = [
        (pinned(cupy, nbytes), cupy.cuda.Event(disable_timing=True))
        for _ in range(_PLACES)
    ]
    while True:
        yield from made
