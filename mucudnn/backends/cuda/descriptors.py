"""Descriptors of cuDNN's graph API: create, set attributes, finalize, read, destroy."""

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.backends.cuda._enums import (
    Attribute,
    AttributeType,
    ConvolutionMode,
    DataType,
    DescriptorType,
    HeurMode,
    NanPropagation,
    PointwiseMode,
)
from mucudnn.errors import MucudnnError

__all__ = ["Descriptor"]

_C_TYPES: Mapping[AttributeType, Any] = MappingProxyType(
    {
        AttributeType.HANDLE: ctypes.c_void_p,
        AttributeType.BOOLEAN: ctypes.c_bool,
        AttributeType.INT64: ctypes.c_int64,
        AttributeType.FLOAT: ctypes.c_float,
        AttributeType.DOUBLE: ctypes.c_double,
        AttributeType.VOID_PTR: ctypes.c_void_p,
        AttributeType.BACKEND_DESCRIPTOR: ctypes.c_void_p,
        AttributeType.CHAR: ctypes.c_char,
    }
)
"""Other attribute types are enumerations, which are C ints."""


class Descriptor:
    """An object of the library, destroyed with this one."""

    def __init__(self, calls: Calls, kind: DescriptorType) -> None:
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
        array = (_c_type(kind) * len(values))(*values)
        self._set(attribute, kind, len(values), array)
        return self

    def set_text(self, attribute: Attribute, text: str) -> "Descriptor":
        """Set an attribute that is text; return self."""
        buffer = ctypes.create_string_buffer(text.encode())
        self._set(attribute, AttributeType.CHAR, len(buffer), buffer)
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
        count = ctypes.c_int64()
        self._get(attribute, kind, 0, count, None)
        return count.value

    def get(
        self,
        attribute: Attribute,
        kind: AttributeType = AttributeType.INT64,
        most: int = 1,
    ) -> Any:
        """Return up to `most` values of an attribute, as a list."""
        values, count = (_c_type(kind) * most)(), ctypes.c_int64()
        self._get(attribute, kind, most, count, values)
        return list(values[: count.value])

    def get_text(self, attribute: Attribute) -> str:
        """Return the value of an attribute that is text."""
        nbytes = self.count(attribute, AttributeType.CHAR)
        buffer, count = ctypes.create_string_buffer(nbytes + 1), ctypes.c_int64()
        self._get(attribute, AttributeType.CHAR, nbytes, count, buffer)
        return buffer.value.decode()

    def get_into(self, attribute: Attribute, targets: Sequence["Descriptor"]) -> int:
        """Fill prepared descriptors from an attribute; return their number."""
        pointers = (ctypes.c_void_p * len(targets))(*(t.pointer for t in targets))
        count = ctypes.c_int64()
        kind = AttributeType.BACKEND_DESCRIPTOR
        self._get(attribute, kind, len(targets), count, pointers)
        return count.value

    def _set(
        self, attribute: Attribute, kind: AttributeType, count: int, array: Any
    ) -> None:
        self._calls.call(
            "cudnnBackendSetAttribute", self.pointer, attribute, kind, count, array
        )

    def _get(
        self,
        attribute: Attribute,
        kind: AttributeType,
        most: int,
        count: ctypes.c_int64,
        array: Any,
    ) -> None:
        out = ctypes.byref(count), array
        name = "cudnnBackendGetAttribute"
        self._calls.call(name, self.pointer, attribute, kind, most, *out)


_KINDS: Mapping[type, AttributeType] = MappingProxyType(
    {
        ConvolutionMode: AttributeType.CONVOLUTION_MODE,
        DataType: AttributeType.DATA_TYPE,
        Descriptor: AttributeType.BACKEND_DESCRIPTOR,
        HeurMode: AttributeType.HEUR_MODE,
        NanPropagation: AttributeType.NAN_PROPOGATION,
        PointwiseMode: AttributeType.POINTWISE_MODE,
        bool: AttributeType.BOOLEAN,
        float: AttributeType.FLOAT,
    }
)
"""Python type of values to attribute type; whole numbers are INT64."""


def _c_type(kind: AttributeType) -> Any:
    return _C_TYPES.get(kind, ctypes.c_int)
