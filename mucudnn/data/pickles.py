"""Pickled NumPy arrays, read without letting the file run anything.

A pickle names the functions that rebuild its objects, so reading a foreign one runs
whatever it says. The published CIFAR files name three of NumPy's; all are answered by
stand-ins of our own that understand arrays of unsigned bytes and nothing else. Every
other name is refused.

Every stand-in has a `__setstate__`: without one a pickle may set attributes on it.
The unpickler is the one in Python: that in C allocates as many places as a damaged
file's greatest memo number says.
"""

import io
import pickle
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mucudnn.data.files import fault, read_file

__all__ = ["read_pickled_dict"]


class _Array:
    """Stands for `numpy.ndarray` and the function that makes an empty one."""

    __slots__ = ("value",)

    def __init__(self, *_: object) -> None:
        self.value: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not (isinstance(dtype, _Dtype) and isinstance(raw, bytes)):
            raise pickle.UnpicklingError("an array of something else than bytes")
        flat: NDArray[np.uint8] = np.frombuffer(raw, np.uint8)
        self.value = flat.reshape(shape, order="F" if fortran else "C")


class _Dtype:
    """Stands for `numpy.dtype`; unsigned bytes are the only one there is."""

    __slots__ = ()

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"elements of type {code!r} instead of 'u1'")

    def __setstate__(self, state: Any) -> None:
        """A byte has no byte order."""


class _Latin1(bytes):
    """Stands for `_codecs.encode`: how Python 3 writes bytes in old protocols."""

    __slots__ = ()

    def __new__(cls, text: str, encoding: str) -> Self:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes in {encoding!r} instead of 'latin1'")
        return super().__new__(cls, text, encoding)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("bytes with a state")


_ADMITTED: dict[tuple[str, str], type] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Latin1,
}


class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name}, which is not admitted")
        return _ADMITTED[module, name]


def read_pickled_dict(path: Path) -> dict[str, Any]:
    """A pickled dictionary of arrays, lists, numbers and texts.

    Python 2 wrote the published files: its texts are bytes here, keys excepted.

    Raises:
        DataError: The file is missing, truncated, no such pickle, or names something
            that is not admitted.
    """
    raw = read_file(path)
    file = io.BytesIO(raw)
    try:
        value = _Unpickler(file, encoding="bytes").load()
    except Exception as e:  # a damaged pickle may raise any
        found = str(e) or type(e).__name__
        raise fault(path, file.tell(), "a pickle of plain data", found) from e
    if file.tell() != len(raw):
        more = f"{len(raw) - file.tell()} more bytes"
        raise fault(path, file.tell(), "the end of the file", more)
    if not isinstance(value, dict):
        raise fault(path, 0, "a pickled dictionary", type(value).__name__)
    return {_text(key): _plain(entry) for key, entry in value.items()}


def _text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _plain(entry: object) -> object:
    return entry.value if isinstance(entry, _Array) else entry
