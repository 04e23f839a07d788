"""Copies on a GPU: one stream for each direction, ordered by events.

The event that a copy waits for is recorded on the compute stream, which is looked up
before anything touches a copy stream: inside a copy stream's context "the current
stream" would be the copy stream itself, and the wait would have no effect.

A copy has events of its own, which it records anew at every start: waiting for it means
waiting for the latest start.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mucudnn.backends.device import Start, Way
from mucudnn.errors import BackendError, OutOfMemoryError


@dataclass(frozen=True, slots=True)
class _Copy:
    """Arguments of an asynchronous copy, its two events, and its arrays."""

    stream: int
    arguments: tuple[int, int, int, int, int]
    computed: Any
    done: Any
    ends: tuple[Any, Any]


class CudaCopier:
    """Two non-blocking copy streams beside the compute stream.

    `compute` returns the address of the current compute stream, and makes the GPU the
    thread's current device. With `peer`, targets are CuPy arrays too, on another GPU.
    """

    def __init__(
        self, cupy: Any, index: int, compute: Callable[[], int], *, peer: bool = False
    ) -> None:
        self._cupy = cupy
        self._compute = compute
        self._peer = peer
        self._runtime = cupy.cuda.runtime
        with (
            cupy.cuda.Device(index),
            _cuda_errors(self._cupy, "making streams for copies"),
        ):
            self._out = cupy.cuda.Stream(non_blocking=True)
            self._in = cupy.cuda.Stream(non_blocking=True)
        self._closed = False

    def prebind(self, way: Way, source: Any, target: Any) -> Start:
        """Return a function that starts this copy with five CUDA calls.

        It blocks the host if host memory is not pinned.
        """
        return partial(self._launch, self._prepare(way, source, target))

    def wait(self, ticket: Any) -> None:
        """Make kernels launched from now on wait for the copy; the host continues."""
        try:
            self._runtime.streamWaitEvent(self._compute(), ticket.ptr)
        except self._runtime.CUDARuntimeError as e:
            raise BackendError(f"waiting for a copy failed: {e}") from e

    def finish(self) -> None:
        """Wait on the host for both copy streams and the compute stream."""
        with _cuda_errors(self._cupy, "a copy"):
            self._runtime.streamSynchronize(self._compute())
            self._out.synchronize()
            self._in.synchronize()

    def close(self) -> None:
        """Wait for the launched copies, which cannot be cancelled."""
        self._closed = True
        for stream in (self._out, self._in):
            # If the device is lost, so is every copy.
            with contextlib.suppress(self._runtime.CUDARuntimeError):
                stream.synchronize()

    def _prepare(self, way: Way, source: Any, target: Any) -> _Copy:
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
        if self._peer:  # CUDA infers the devices from the unified addresses
            kind = self._runtime.memcpyDefault
        arguments = *addresses, source.nbytes, kind, stream
        with _cuda_errors(self._cupy, "making events for copies"):
            event = partial(self._cupy.cuda.Event, disable_timing=True)
            events = event(), event()
        return _Copy(stream, arguments, *events, (source, target))

    def _launch(self, copy: _Copy, after: Sequence[Any] = ()) -> Any:
        """Start a copy after the work launched so far and after other copies."""
        if self._closed:
            raise BackendError("a copy was requested from a closed copier")
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
        """Return the address of memory outside this GPU."""
        address: int = away.data.ptr if self._peer else away.ctypes.data
        return address


@contextmanager
def _cuda_errors(cupy: Any, what: str) -> Iterator[None]:
    """Convert CuPy's errors to ours."""
    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as e:
        raise BackendError(f"{what} failed: {e}") from e
    except cupy.cuda.memory.OutOfMemoryError as e:
        raise OutOfMemoryError(f"no room for {what}: {e}") from e


def pinned(cupy: Any, nbytes: int) -> Any:
    """Return exactly `nbytes` page-locked bytes as a NumPy array."""
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


# Asynchronous copies of step inputs and results, overlapped with computation.
#
# An input is written to page-locked memory, copied from there to a staging buffer on
# the device that only this copy stream writes, and from there to its tensor by the
# compute stream. So the next batch can arrive while a step still reads the current one.
# Without device memory for staging, the compute stream fetches the input itself at the
# start of a step. A result is copied to page-locked memory after the kernels launched
# so far, and its reader waits for it. Inputs and results have two page-locked buffers
# each, used in turn: the host is at most two steps ahead.


_BUFFERS = 2


class _InputBuffers:
    """The host buffers of an input, and its staging buffer on the device, if any."""

    def __init__(self, cupy: Any, nbytes: int, staged: bool) -> None:
        self.staging = cupy.empty(nbytes, "uint8") if staged else None
        self.consumed = cupy.cuda.Event(disable_timing=True)
        self.host = _alternate_buffers(cupy, nbytes)


class _Result:
    """A result on its way to the host, or arrived there."""

    def __init__(self, slot: Any, like: Any, cupy: Any) -> None:
        self._slot, self._like, self._cupy = slot, like, cupy
        self._value: Any = None

    def __call__(self) -> Any:
        if self._value is None:
            buffer, event = self._slot
            with _cuda_errors(self._cupy, "a copy to the host"):
                event.synchronize()
            found = buffer.view(self._like.dtype).reshape(self._like.shape)
            self._value, self._slot = found.copy(), None
        return self._value

    @property
    def ready(self) -> bool:
        return self._value is not None or bool(self._slot[1].done)


class CudaStepIO:
    """Copies of inputs and results beside the kernels of a GPU; see `StepIO`.

    `compute` is as for `CudaCopier`; with `staged` inputs are staged in device memory.
    """

    def __init__(
        self, cupy: Any, index: int, compute: Callable[[], int], *, staged: bool = True
    ) -> None:
        self._cupy, self._compute, self._staged = cupy, compute, staged
        self._runtime = cupy.cuda.runtime
        with (
            cupy.cuda.Device(index),
            _cuda_errors(self._cupy, "making a stream for inputs"),
        ):
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._inputs: dict[tuple[int, int], _InputBuffers] = {}
        self._result_buffers: dict[tuple[int, int], Iterator[Any]] = {}
        self._unread: dict[int, _Result] = {}

    def upload(self, source: Any, target: Any) -> None:
        """See `StepIO.upload`; the tensor has the array's shape and type."""
        if target.nbytes == 0:
            return
        compute = self._compute()
        with _cuda_errors(self._cupy, f"a copy of {target.nbytes} bytes to the device"):
            key = target.data.ptr, target.nbytes
            if key not in self._inputs:
                made = _InputBuffers(self._cupy, target.nbytes, self._staged)
                self._inputs[key] = made
            known = self._inputs[key]
            buffer, arrived = next(known.host)
            arrived.synchronize()  # the input before last has left this buffer
            buffer.view(source.dtype).reshape(source.shape)[...] = source
            # Without a staging buffer the copy runs in the order of the step's work.
            if known.staging is None:
                self._fetch(buffer, target, compute)
                self._runtime.eventRecord(arrived.ptr, compute)
                return
            # With one it overlaps the step before, which still reads the tensor.
            beside = self._stream.ptr
            self._stream.wait_event(known.consumed)
            self._fetch(buffer, known.staging, beside)
            self._runtime.eventRecord(arrived.ptr, beside)
            # The step itself waits for the copy and moves the bytes within the device.
            self._runtime.streamWaitEvent(compute, arrived.ptr)
            ends = target.data.ptr, known.staging.data.ptr
            kind = self._runtime.memcpyDeviceToDevice
            self._runtime.memcpyAsync(*ends, target.nbytes, kind, compute)
            self._runtime.eventRecord(known.consumed.ptr, compute)

    def download(self, source: Any) -> _Result:
        """Start to copy a tensor's value after the work launched so far."""
        compute = self._compute()
        key = source.data.ptr, source.nbytes
        with _cuda_errors(self._cupy, "a copy to the host"):
            if key not in self._result_buffers:
                self._result_buffers[key] = _alternate_buffers(
                    self._cupy, source.nbytes
                )
            slot = buffer, event = next(self._result_buffers[key])
            if (before := self._unread.get(id(buffer))) is not None:
                before()  # read it before it is overwritten
            ends = buffer.ctypes.data, source.data.ptr
            kind = self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(*ends, source.nbytes, kind, compute)
            self._runtime.eventRecord(event.ptr, compute)
        made = self._unread[id(buffer)] = _Result(slot, source, self._cupy)
        return made

    def close(self) -> None:
        """Wait for copies in progress, and release all buffers; raise nothing."""
        for wait in (self._stream.synchronize, *self._unread.values()):
            with contextlib.suppress(BackendError), _cuda_errors(self._cupy, "a copy"):
                wait()
        self._inputs.clear()
        self._result_buffers.clear()
        self._unread.clear()

    def _fetch(self, buffer: Any, target: Any, stream: int) -> None:
        ends = target.data.ptr, buffer.ctypes.data
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(*ends, target.nbytes, kind, stream)


def _alternate_buffers(cupy: Any, nbytes: int) -> Iterator[tuple[Any, Any]]:
    """Yield page-locked buffers with their events, in turn, without end."""
    made = [
        (pinned(cupy, nbytes), cupy.cuda.Event(disable_timing=True))
        for _ in range(_BUFFERS)
    ]
    while True:
        yield from made
