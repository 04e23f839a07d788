"""Library sessions: on a device, with one handle per thread, or on a description."""

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.backends.cuda._enums import Attribute, AttributeType, DescriptorType
from mucudnn.backends.cuda.descriptors import Descriptor
from mucudnn.errors import BackendUnavailableError, MucudnnError

__all__ = ["LiveSession", "PaperSession", "Session", "describe_device"]


class Session(Protocol):
    """The library's environment, as the convolution libraries see it."""

    @property
    def calls(self) -> Calls:
        """The raw calls."""

    @property
    def description(self) -> Descriptor | None:
        """Description of the device, if the device itself is absent."""

    def handle(self) -> int | None:
        """Return the thread's handle, on its current stream; None without a device."""


class _Handle:
    """A cuDNN handle, destroyed with this object; `stream` is its current stream."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._pointer, self.stream = calls, ctypes.c_void_p(), -1
        calls.call("cudnnCreate", ctypes.byref(self._pointer))
        self.address = self._pointer.value or 0

    def __del__(self) -> None:
        if self._pointer:
            with contextlib.suppress(MucudnnError):
                self._calls.call("cudnnDestroy", self._pointer)


class _Thread(threading.local):
    handle: _Handle | None = None


class LiveSession:
    """A session on a device; `current_stream` returns the stream to launch on."""

    description: Descriptor | None = None

    def __init__(self, calls: Calls, current_stream: Callable[[], int]) -> None:
        self.calls = calls
        self._current_stream = current_stream
        self._thread = _Thread()

    def handle(self) -> int:
        """See `Session.handle`; a thread's handle is made at its first call."""
        stream = self._current_stream()  # first: it sets the thread's device
        if (handle := self._thread.handle) is None:
            handle = self._thread.handle = _Handle(self.calls)
        if stream != handle.stream:
            self.calls.call("cudnnSetStream", handle.address, stream)
            handle.stream = stream
        return handle.address


class PaperSession:
    """A session on an absent device, described by the JSON that cuDNN writes."""

    def __init__(self, calls: Calls, text: str) -> None:
        self.calls = calls
        try:
            self.description = (
                Descriptor(calls, DescriptorType.DEVICEPROP)
                .set_text(Attribute.DEVICEPROP_JSON_REPRESENTATION, text)
                .finalize()
            )
        except MucudnnError as e:
            raise BackendUnavailableError(
                f"cuDNN does not take this device description: {e}"
            ) from e

    def handle(self) -> None:
        """Return None: there is no device."""


def describe_device(calls: Calls, index: int) -> str:
    """Return the description of a present device, as JSON."""
    description = Descriptor(calls, DescriptorType.DEVICEPROP)
    description.set(Attribute.DEVICEPROP_DEVICE_ID, index, kind=AttributeType.INT32)
    return description.finalize().get_text(Attribute.DEVICEPROP_JSON_REPRESENTATION)
