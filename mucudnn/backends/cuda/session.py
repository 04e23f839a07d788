"""Where the library runs: on a device, with a handle a thread, or on paper only."""

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
    """What the convolution libraries need to know of where they are."""

    @property
    def calls(self) -> Calls:
        """The raw calls."""
        ...

    @property
    def description(self) -> Descriptor | None:
        """The device's description, where the device itself is not there."""
        ...

    def handle(self) -> int | None:
        """The calling thread's cuDNN handle, on its current stream; None on paper."""
        ...


class _Handle:
    """A cuDNN handle, destroyed with this; `stream` is what it was last set to."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._pointer, self.stream = calls, ctypes.c_void_p(), -1
        calls.call("cudnnCreate", ctypes.byref(self._pointer))
        self.address = self._pointer.value or 0

    def __del__(self) -> None:
        if self._pointer:
            with contextlib.suppress(MucudnnError):
                self._calls.call("cudnnDestroy", self._pointer)


class _Thread(threading.local):
    """What a thread has; it goes when the thread ends."""

    handle: _Handle | None = None


class LiveSession:
    """A device that is there.

    `current_stream` tells the address of the stream that its caller launches on.
    """

    description: Descriptor | None = None

    def __init__(self, calls: Calls, current_stream: Callable[[], int]) -> None:
        self.calls = calls
        self._current_stream = current_stream
        self._thread = _Thread()

    def handle(self) -> int:
        """See `Session.handle`; made on a thread's first call.

        Raises:
            BackendError: There is no usable device.
        """
        stream = self._current_stream()  # first: it puts the thread on its device
        if (handle := self._thread.handle) is None:
            handle = self._thread.handle = _Handle(self.calls)
        if stream != handle.stream:
            self.calls.call("cudnnSetStream", handle.address, stream)
            handle.stream = stream
        return handle.address


class PaperSession:
    """A device that is not there, but described.

    Args:
        calls: The library.
        text: The description, as cuDNN serialises it (JSON).

    Raises:
        BackendUnavailableError: The library does not take the description.
    """

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
        """There is none."""


def describe_device(calls: Calls, index: int) -> str:
    """The description of a device that is there, as JSON.

    Raises:
        BackendError: There is no such device.
    """
    description = Descriptor(calls, DescriptorType.DEVICEPROP)
    description.set(Attribute.DEVICEPROP_DEVICE_ID, index, kind=AttributeType.INT32)
    return description.finalize().get_text(Attribute.DEVICEPROP_JSON_REPRESENTATION)
