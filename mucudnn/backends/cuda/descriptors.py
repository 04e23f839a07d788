"""Descriptors of both cuDNN APIs, and sessions: handle, stream, checked calls."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mucudnn.backends.cuda.libcudnn import (
    ATTRIBUTES,
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
    """An object of the library, destroyed with this one.

    Attributes are named without their prefix, which is the name of the object's type.
    """

    def __init__(self, calls: Cudnn, kind: DescriptorType) -> None:
        self._calls, self._prefix = calls, kind.name.replace("BACKWARD", "BWD")
        self._kept: list[object] = []
        pointer = ctypes.c_void_p()
        calls.call("cudnnBackendCreateDescriptor", kind, ctypes.byref(pointer))
        self.pointer: int = pointer.value or 0

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            with contextlib.suppress(MucudnnError):
                self._calls.call("cudnnBackendDestroyDescriptor", self.pointer)

    @classmethod
    def made(cls, calls: Cudnn, kind: DescriptorType, **values: Any) -> "Descriptor":
        """Return a finalized descriptor with attributes; those of None are not set.

        A tuple gives an attribute several values. Descriptors among the values are kept
        alive as long as this one.
        """
        made = cls(calls, kind)
        for name, value in values.items():
            if value is not None:
                made._set(name, value if isinstance(value, tuple) else (value,))
        calls.call("cudnnBackendFinalize", made.pointer)
        return made

    def _set(self, name: str, values: tuple[Any, ...]) -> None:
        kind = _KINDS.get(name) or _KINDS.get(type(values[0]), AttributeType.INT64)
        if kind is AttributeType.CHAR:
            array: Any = ctypes.create_string_buffer(values[0].encode())
        else:
            if kind is AttributeType.BACKEND_DESCRIPTOR:
                self._kept += values
                values = tuple(value.pointer for value in values)
            array = (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values)
        arguments = self.pointer, self._attribute(name), kind, len(array), array
        self._calls.call("cudnnBackendSetAttribute", *arguments)

    def keep(self, other: object) -> "Descriptor":
        """Keep an object alive as long as this one; return self."""
        self._kept.append(other)
        return self

    def get(self, name: str, most: int = 1) -> Any:
        """Return up to `most` values of an attribute, as a list."""
        kind = _KINDS.get(name, AttributeType.INT64)
        values = (_C_TYPES.get(kind, ctypes.c_int) * most)()
        return list(values[: self._get(name, kind, most, values)])

    def get_text(self, name: str) -> str:
        """Return the value of an attribute that is text."""
        nbytes = self._get(name, AttributeType.CHAR, 0, None)
        buffer = ctypes.create_string_buffer(nbytes + 1)
        self._get(name, AttributeType.CHAR, nbytes, buffer)
        return buffer.value.decode()

    def get_new(
        self, name: str, kind: DescriptorType, most: int | None = None
    ) -> "list[Descriptor]":
        """Return up to `most` new descriptors, or all, filled from an attribute."""
        descriptor = AttributeType.BACKEND_DESCRIPTOR
        if most is None:
            most = self._get(name, descriptor, 0, None)
        found = [Descriptor(self._calls, kind) for _ in range(most)]
        pointers = (ctypes.c_void_p * most)(*(each.pointer for each in found))
        return found[: self._get(name, descriptor, most, pointers)]

    def _get(self, name: str, kind: AttributeType, most: int, array: Any) -> int:
        """Fill an array of up to `most` values; return how many there are."""
        count = ctypes.c_int64()
        place = self.pointer, self._attribute(name)
        arguments = *place, kind, most, ctypes.byref(count), array
        self._calls.call("cudnnBackendGetAttribute", *arguments)
        return count.value

    def _attribute(self, name: str) -> int:
        return ATTRIBUTES[f"{self._prefix}_{name}"]


_KINDS: Mapping[object, AttributeType] = {
    "BEHAVIOR_NOTE": AttributeType.BEHAVIOR_NOTE,
    "DATA_POINTERS": AttributeType.VOID_PTR,
    "DEVICE_ID": AttributeType.INT32,
    "HANDLE": AttributeType.HANDLE,
    "JSON_REPRESENTATION": AttributeType.CHAR,
    "KNOB_TYPE": AttributeType.KNOB_TYPE,
    "NUMERICAL_NOTE": AttributeType.NUMERICAL_NOTE,
    "WORKSPACE": AttributeType.VOID_PTR,
    ConvolutionMode: AttributeType.CONVOLUTION_MODE,
    DataType: AttributeType.DATA_TYPE,
    Descriptor: AttributeType.BACKEND_DESCRIPTOR,
    HeurMode: AttributeType.HEUR_MODE,
    NanPropagation: AttributeType.NAN_PROPOGATION,
    PointwiseMode: AttributeType.POINTWISE_MODE,
    bool: AttributeType.BOOLEAN,
    ctypes.c_double: AttributeType.DOUBLE,
    ctypes.c_float: AttributeType.FLOAT,
}
"""Name of an attribute, or else type of its values -> attribute type; else INT64."""


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
            self.description = Descriptor.made(
                calls, DescriptorType.DEVICEPROP, JSON_REPRESENTATION=text
            )
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
    found = Descriptor.made(calls, DescriptorType.DEVICEPROP, DEVICE_ID=index)
    return found.get_text("JSON_REPRESENTATION")
