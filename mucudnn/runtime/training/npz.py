"""Named arrays in one file, in the form of `numpy.savez`: any NumPy reads them.

A header says how large an array is, and NumPy believes it: memory is asked for before
the elements are looked for. Here what is not in the file is not allocated.
"""

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

__all__ = ["pack_arrays", "unpack_arrays"]

_SUFFIX = ".npy"


def pack_arrays(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """What `numpy.savez` writes, whatever the arrays are called."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}{_SUFFIX}", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def unpack_arrays(raw: bytes) -> dict[str, Any]:
    """The inverse of `pack_arrays`.

    Raises:
        ValueError: It is something else, packed, or does not hold what it says.
    """
    found = {}
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(_SUFFIX)
                if name in found:
                    raise ValueError(f"it has two arrays called {name!r}")
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{entry.filename!r} is compressed")
                if max(entry.file_size, entry.compress_size) > len(raw):
                    raise ValueError(f"{entry.filename!r} is longer than the file")
                found[name] = _array(entry.filename, archive.read(entry))
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as e:
        raise ValueError(f"it is no archive of arrays: {e}") from e
    return found


def _array(name: str, raw: bytes) -> Any:
    file = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(file)
        else:
            header = np.lib.format.read_array_header_2_0(file)
    except Exception as e:  # the header is a Python literal: parsers raise anything
        raise ValueError(f"{name!r} is no array: {e}") from e
    shape, fortran, dtype = header
    begin = file.tell()
    there, stated = len(raw) - begin, math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or there != stated:
        raise ValueError(
            f"{name!r} has {there} bytes, not those of {dtype} in the shape {shape}"
        )
    try:
        flat: Any = np.frombuffer(raw, dtype, math.prod(shape), begin)
        return flat.reshape(shape, order="F" if fortran else "C").copy("K")
    except (ValueError, ZeroDivisionError) as e:
        raise ValueError(f"{name!r} is no array: {e}") from e
