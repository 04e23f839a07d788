"""Descriptors of both cuDNN APIs, and sessions: handle, stream, checked calls."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mucudnn.backends.cuda.libcudnn import (
    Attribute,
    AttributeType,
    ConvolutionMode,
    Cudnn,
    DataType,
    DescriptorType,
    HeurMode,
    NanPropagation,
    PointwiseMode,
)
from mucudnn.errors import BackendUnavailableError, MucudnnError, UnsupportedError

_C_TYPES: Mapping[AttributeType, Any] = {
    AttributeType.HANDLE: ctypes.c_void_p,
    AttributeType.BOOLEAN: ctypes.c_bool,
    AttributeType.INT64: ctypes.c_int64,
    AttributeType.FLOAT: ctypes.c_float,
    AttributeType.DOUBLE: ctypes.c_double,
    AttributeType.VOID_PTR: ctypes.c_void_p,
    AttributeType.BACKEND_DESCRIPTOR: ctypes.c_void_p,
    AttributeType.CHAR: ctypes.c_char,
}
"""Other attribute types are enumerations, which are C ints."""


class Descriptor:
    """An object of the library, destroyed with this one."""

    def __init__(self, calls: Cudnn, kind: DescriptorType) -> None:
        self._calls = calls
        self._kept: list[object] = []
        pointer = ctypes.c_void_p()
        calls.call("cudnnBackendCreateDescriptor", kind, ctypes.byref(pointer))
        self.pointer: int = pointer.value or 0

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            with contextlib.suppress(MucudnnError):
                self._calls.call("cudnnBackendDestroyDescriptor", self.pointer)

    def set(
        self, attribute: Attribute, *values: Any, kind: AttributeType | None = None
    ) -> "Descriptor":
        """Set an attribute to one or several values; return self.

        Descriptors among the values are kept alive as long as this one. `kind` is the
        attribute type if the values' Python type does not imply it.
        """
        if kind is None:
            kind = _KINDS.get(type(values[0]), AttributeType.INT64)
        if kind is AttributeType.BACKEND_DESCRIPTOR:
            self._kept += values
            values = tuple(value.pointer for value in values)
        array = (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values)
        arguments = self.pointer, attribute, kind, len(values), array
        self._calls.call("cudnnBackendSetAttribute", *arguments)
        return self

    def set_text(self, attribute: Attribute, text: str) -> "Descriptor":
        """Set an attribute that is text; return self."""
        buffer = ctypes.create_string_buffer(text.encode())
        arguments = self.pointer, attribute, AttributeType.CHAR, len(buffer), buffer
        self._calls.call("cudnnBackendSetAttribute", *arguments)
        return self

    def finalize(self) -> "Descriptor":
        """Check and freeze the descriptor, which can be used only then; return self."""
        self._calls.call("cudnnBackendFinalize", self.pointer)
        return self

    def keep(self, other: object) -> "Descriptor":
        """Keep an object alive as long as this one; return self."""
        self._kept.append(other)
        return self

    def count(self, attribute: Attribute, kind: AttributeType) -> int:
        """Return the number of values of an attribute."""
        return self._get(attribute, kind, 0, None)

    def get(
        self,
        attribute: Attribute,
        kind: AttributeType = AttributeType.INT64,
        most: int = 1,
    ) -> Any:
        """Return up to `most` values of an attribute, as a list."""
        values = (_C_TYPES.get(kind, ctypes.c_int) * most)()
        return list(values[: self._get(attribute, kind, most, values)])

    def get_text(self, attribute: Attribute) -> str:
        """Return the value of an attribute that is text."""
        nbytes = self.count(attribute, AttributeType.CHAR)
        buffer = ctypes.create_string_buffer(nbytes + 1)
        self._get(attribute, AttributeType.CHAR, nbytes, buffer)
        return buffer.value.decode()

    def get_new(
        self, attribute: Attribute, kind: DescriptorType, most: int
    ) -> "list[Descriptor]":
        """Return up to `most` new descriptors, filled from an attribute."""
        found = [Descriptor(self._calls, kind) for _ in range(most)]
        pointers = (ctypes.c_void_p * most)(*(each.pointer for each in found))
        descriptor = AttributeType.BACKEND_DESCRIPTOR
        return found[: self._get(attribute, descriptor, most, pointers)]

    def _get(
        self, attribute: Attribute, kind: AttributeType, most: int, array: Any
    ) -> int:
        """Fill an array of up to `most` values; return how many there are."""
        count = ctypes.c_int64()
        arguments = self.pointer, attribute, kind, most, ctypes.byref(count), array
        self._calls.call("cudnnBackendGetAttribute", *arguments)
        return count.value


_KINDS: Mapping[type, AttributeType] = {
    ConvolutionMode: AttributeType.CONVOLUTION_MODE,
    DataType: AttributeType.DATA_TYPE,
    Descriptor: AttributeType.BACKEND_DESCRIPTOR,
    HeurMode: AttributeType.HEUR_MODE,
    NanPropagation: AttributeType.NAN_PROPOGATION,
    PointwiseMode: AttributeType.POINTWISE_MODE,
    bool: AttributeType.BOOLEAN,
    float: AttributeType.FLOAT,
}
"""Python type of values to attribute type; whole numbers are INT64."""


_LARGEST_INT = 2**31 - 1


class Descriptors:
    """The descriptors of one call of the library, destroyed with this object."""

    def __init__(self, calls: Cudnn) -> None:
        self._calls = calls
        self._made: list[tuple[str, int]] = []

    def __del__(self) -> None:
        for kind, pointer in self._made:
            with contextlib.suppress(MucudnnError):
                self._calls.call(f"cudnnDestroy{kind}Descriptor", pointer)

    def create(self, kind: str, setter: str, *values: Any) -> int:
        """Return the address of a new descriptor, set by a function `cudnnSet…`."""
        address = self.empty(kind)
        self._calls.call(f"cudnnSet{setter}Descriptor", address, *values)
        return address

    def empty(self, kind: str) -> int:
        """Return the address of a new descriptor without values."""
        pointer = ctypes.c_void_p()
        self._calls.call(f"cudnnCreate{kind}Descriptor", ctypes.byref(pointer))
        address = pointer.value or 0
        self._made.append((kind, address))
        return address

    def tensor(
        self, data_type: int, shape: Sequence[int], strides: Sequence[int]
    ) -> int:
        """Return the address of a tensor descriptor."""
        sizes = ints(shape), ints(strides)
        return self.create("Tensor", "TensorNd", data_type, len(shape), *sizes)


def ints(values: Sequence[int]) -> Any:
    """Return an array of C integers."""
    if any(value > _LARGEST_INT for value in values):
        raise UnsupportedError(
            f"{tuple(values)} does not fit the 32 bits of the first API"
        )
    return (ctypes.c_int * len(values))(*values)


# Library sessions: on a device, with one handle per thread, or on a description.


class _Handle:
    """A cuDNN handle, destroyed with this object; `stream` is its current stream."""

    def __init__(self, calls: Cudnn) -> None:
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

    description: Descriptor | None = None  # of the device, if it is absent

    def __init__(self, calls: Cudnn, current_stream: Callable[[], int]) -> None:
        self.calls = calls
        self._current_stream = current_stream
        self._thread = _Thread()

    def handle(self) -> int:
        """Return the thread's handle, made at its first call, on its current stream."""
        stream = self._current_stream()  # first: it sets the thread's device
        if (handle := self._thread.handle) is None:
            handle = self._thread.handle = _Handle(self.calls)
        if stream != handle.stream:
            self.calls.call("cudnnSetStream", handle.address, stream)
            handle.stream = stream
        return handle.address


class DescribedSession:
    """A session on an absent device, described by the JSON that cuDNN writes."""

    def __init__(self, calls: Cudnn, text: str) -> None:
        self.calls = calls
        try:
            made = Descriptor(calls, DescriptorType.DEVICEPROP)
            made.set_text(Attribute.DEVICEPROP_JSON_REPRESENTATION, text)
            self.description = made.finalize()
        except MucudnnError as e:
            raise BackendUnavailableError(
                f"cuDNN does not take this device description: {e}"
            ) from e

    def handle(self) -> None:
        """Return None: there is no device."""


Session = LiveSession | DescribedSession
"""The library's environment, as the convolution libraries see it."""


def describe_device(calls: Cudnn, index: int) -> str:
    """Return the description of a present device, as JSON."""
    description = Descriptor(calls, DescriptorType.DEVICEPROP)
    description.set(Attribute.DEVICEPROP_DEVICE_ID, index, kind=AttributeType.INT32)
    return description.finalize().get_text(Attribute.DEVICEPROP_JSON_REPRESENTATION)
