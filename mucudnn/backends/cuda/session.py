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


class _Thread(threading.local):
    """A thread's handle and the stream it was last set to."""

    handle: ctypes.c_void_p | None = None
    stream: int = -1
    finalizer: object = None


class LiveSession:
    """A device that is there.

    Args:
        calls: The library.
        current_stream: The stream that the calling thread launches on, as an address.
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
        mine = self._thread
        stream = self._current_stream()  # first: it puts the thread on its device
        if mine.handle is None:
            handle = ctypes.c_void_p()
            self.calls.call("cudnnCreate", ctypes.byref(handle))
            mine.handle = handle
            mine.finalizer = _Closing(self.calls, handle)
        address = mine.handle.value or 0
        if stream != mine.stream:
            self.calls.call("cudnnSetStream", address, stream)
            mine.stream = stream
        return address


class _Closing:
    """Destroys a handle when its thread ends."""

    def __init__(self, calls: Calls, handle: ctypes.c_void_p) -> None:
        self._calls, self._handle = calls, handle

    def __del__(self) -> None:
        with contextlib.suppress(MucudnnError):
            self._calls.call("cudnnDestroy", self._handle)


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
