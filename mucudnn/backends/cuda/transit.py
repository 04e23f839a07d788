"""Asynchronous copies of step inputs and results, overlapped with computation.

An input is written to page-locked memory, copied from there to a staging buffer on the
device that only this copy stream writes, and from there to its tensor by the compute
stream. So the next batch can arrive while a step still reads the current one. Without
device memory for staging, the compute stream fetches the input itself at the start of a
step. A result is copied to page-locked memory after the kernels launched so far, and
its reader waits for it. Inputs and results have two page-locked buffers each, used in
turn: the host is at most two steps ahead.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mucudnn.backends.cuda.copies import pinned
from mucudnn.backends.cuda.remedies import refuse_bits
from mucudnn.errors import BackendError, OutOfMemoryError

__all__ = ["CudaTransit"]

_BUFFERS = 2


class _InputBuffers:
    """The host buffers of an input, and its staging buffer on the device, if any."""

    def __init__(self, cupy: Any, nbytes: int, staged: bool) -> None:
        self.staging = cupy.empty(nbytes, "uint8") if staged else None
        self.consumed = cupy.cuda.Event(disable_timing=True)
        self.host = _alternate_buffers(cupy, nbytes)


class _Result:
    """A result on its way to the host, or arrived there."""

    def __init__(self, slot: Any, like: Any, errors: Any) -> None:
        self._slot, self._like, self._errors = (slot, like, errors)
        self._value: Any = None

    def __call__(self) -> Any:
        if self._value is None:
            buffer, event = self._slot
            with self._errors("a copy to the host"):
                event.synchronize()
            found = buffer.view(self._like.dtype).reshape(self._like.shape)
            self._value, self._slot = found.copy(), None
        return self._value

    @property
    def ready(self) -> bool:
        return self._value is not None or bool(self._slot[1].done)


class CudaTransit:
    """Copies of inputs and results beside the kernels of a GPU; see `Transit`.

    `compute` is as for `CudaCopier`; with `staged` inputs are staged in device memory.
    """

    def __init__(
        self, cupy: Any, index: int, compute: Callable[[], int], *, staged: bool = True
    ) -> None:
        self._cupy, self._compute, self._staged = cupy, compute, staged
        self._runtime = cupy.cuda.runtime
        with cupy.cuda.Device(index), self._errors("making a stream for inputs"):
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._inputs: dict[tuple[int, int], _InputBuffers] = {}
        self._result_buffers: dict[tuple[int, int], Iterator[Any]] = {}
        self._unread: dict[int, _Result] = {}

    def upload(self, source: Any, target: Any) -> None:
        """See `Transit.upload`; the tensor has the array's shape and type."""
        refuse_bits(target.dtype.name, "a copy from the host")
        if target.nbytes == 0:
            return
        compute = self._compute()
        with self._errors(f"a copy of {target.nbytes} bytes to the device"):
            known = self._buffers_of(target)
            buffer, arrived = next(known.host)
            arrived.synchronize()  # the input before last has left this buffer
            buffer.view(source.dtype).reshape(source.shape)[...] = source
            if known.staging is None:
                self._fetch(buffer, target, compute)
                self._runtime.eventRecord(arrived.ptr, compute)
                return
            beside = self._stream.ptr
            self._stream.wait_event(known.consumed)
            self._fetch(buffer, known.staging, beside)
            self._runtime.eventRecord(arrived.ptr, beside)
            self._runtime.streamWaitEvent(compute, arrived.ptr)
            ends = target.data.ptr, known.staging.data.ptr
            kind = self._runtime.memcpyDeviceToDevice
            self._runtime.memcpyAsync(*ends, target.nbytes, kind, compute)
            self._runtime.eventRecord(known.consumed.ptr, compute)

    def download(self, source: Any) -> _Result:
        """Start to copy a tensor's value after the work launched so far."""
        refuse_bits(source.dtype.name, "a copy to the host")
        compute = self._compute()
        key = source.data.ptr, source.nbytes
        with self._errors("a copy to the host"):
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
        made = self._unread[id(buffer)] = _Result(slot, source, self._errors)
        return made

    def close(self) -> None:
        """Wait for copies in progress, and release all buffers; raise nothing."""
        for wait in (self._stream.synchronize, *self._unread.values()):
            with contextlib.suppress(BackendError), self._errors("a copy"):
                wait()
        self._inputs.clear()
        self._result_buffers.clear()
        self._unread.clear()

    def _fetch(self, buffer: Any, target: Any, stream: int) -> None:
        ends = target.data.ptr, buffer.ctypes.data
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(*ends, target.nbytes, kind, stream)

    def _buffers_of(self, target: Any) -> _InputBuffers:
        key = target.data.ptr, target.nbytes
        if key not in self._inputs:
            self._inputs[key] = _InputBuffers(self._cupy, target.nbytes, self._staged)
        return self._inputs[key]

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._cupy.cuda.memory.OutOfMemoryError as e:
            raise OutOfMemoryError(f"no room for {what}: {e}") from e
        except self._runtime.CUDARuntimeError as e:
            raise BackendError(f"{what} failed: {e}") from e


def _alternate_buffers(cupy: Any, nbytes: int) -> Iterator[tuple[Any, Any]]:
    """Yield page-locked buffers with their events, in turn, without end."""
    made = [
        (pinned(cupy, nbytes), cupy.cuda.Event(disable_timing=True))
        for _ in range(_BUFFERS)
    ]
    while True:
        yield from made
