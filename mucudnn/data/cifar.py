"""CIFAR-10 and CIFAR-100 in both published forms, unpickled safely.

Binary: rows of one label (CIFAR-100: coarse, then fine) and 3072 bytes, the red, green
and blue planes of 32 x 32. Python: pickled dictionaries of the same rows.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
and the description beside the files.

No file states its number of rows, so a file cut between two rows looks complete. Hence
the number of rows is an argument, which defaults to the published one.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import check_path
from mucudnn.data.arrays import ArrayDataset
from mucudnn.data.dataset import Dataset, Split, checked_split
from mucudnn.data.files import (
    check_labels,
    check_length,
    data_error,
    find_file,
    read_file,
    shown,
)
from mucudnn.errors import DataError

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_PICKLED_ROW = 2 * _PIXELS + (1 << 10)
"""Maximum bytes of a row in a pickle; old protocols may use two per pixel."""

_BESIDE = 1 << 20
"""Maximum bytes of everything but rows."""


@dataclass(frozen=True, slots=True)
class _Labels:
    """A kind of labels, and its place in the files.

    Attributes:
        classes: Number of classes.
        column: Offset of the label in a binary row.
        columns: Number of labels in a binary row.
        key: Entry of the labels in a pickled dictionary.
        names: Text file, pickle and pickle entry with the names of the classes.
    """

    classes: int
    column: int
    columns: int
    key: str
    names: tuple[str, str, str]


_TEN = _Labels(
    *(10, 0, 1, "labels"), ("batches.meta.txt", "batches.meta", "label_names")
)
_FINE, _COARSE = (
    _Labels(n, i, 2, f"{name}_labels", (f"{names}.txt", "meta", names))
    for n, i, name in ((100, 1, "fine"), (20, 0, "coarse"))
    for names in (f"{name}_label_names",)
)


def open_cifar10(folder: str | Path, split: Split, *, rows: int = 10_000) -> Dataset:
    """Open CIFAR-10: `data_batch_1` to `_5` or `test_batch`, perhaps with `.bin`.

    Args:
        folder: Folder of the files, or the parent of the unpacked archive's folder.
        split: Training or test images.
        rows: Number of images per file.

    Raises:
        DataError: A file is missing, truncated or of another kind.
    """
    checked_split(split)
    stems = [f"data_batch_{i}" for i in range(1, 6)]
    stems = stems if split == "train" else ["test_batch"]
    unpacked = ("cifar-10-batches-bin", "cifar-10-batches-py")
    return _open(folder, unpacked, stems, _TEN, rows)


def open_cifar100(
    folder: str | Path, split: Split, *, coarse: bool = False, rows: int | None = None
) -> Dataset:
    """Open CIFAR-100: `train` or `test`, perhaps with `.bin`.

    Args:
        folder: Folder of the files, or the parent of the unpacked archive's folder.
        split: Training or test images.
        coarse: Label with the 20 superclasses instead of the 100 classes.
        rows: Number of images in the file; None is the published 50 000 or 10 000.

    Raises:
        DataError: A file is missing, truncated or of another kind.
    """
    checked_split(split)
    published = 50_000 if split == "train" else 10_000
    unpacked = ("cifar-100-binary", "cifar-100-python")
    which = _COARSE if coarse else _FINE
    return _open(folder, unpacked, [split], which, rows or published)


def _open(
    folder: str | Path,
    unpacked: tuple[str, ...],
    stems: list[str],
    which: _Labels,
    rows: int,
) -> Dataset:
    """Read the files of `stems` in a folder, or in the archive's folder inside it."""
    folder = check_path("folder", folder)
    inner = (folder / name for name in unpacked if (folder / name).is_dir())
    folder = next(inner, folder)
    parts = []
    for stem in stems:
        path = find_file(folder, (f"{stem}.bin", stem))
        read = _read_binary if path.suffix == ".bin" else _read_pickle
        parts.append(read(path, which, rows))
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    classes = _class_names(folder, which) or which.classes
    return ArrayDataset(images.reshape(-1, *_SHAPE), labels, classes)


def _read_binary(
    path: Path, which: _Labels, rows: int
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    raw = read_file(path)
    row = which.columns + _PIXELS
    check_length(path, len(raw), rows * row, f"{rows} rows of {row}")
    table = np.frombuffer(raw, np.uint8).reshape(rows, row)
    labels = table[:, which.column]
    check_labels(path, labels, which.classes, which.column, row)
    return table[:, which.columns :], labels


def _read_pickle(
    path: Path, which: _Labels, rows: int
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    entries = read_pickled_dict(path, rows * _PICKLED_ROW + _BESIDE)
    images, labels = entries.get("data"), entries.get(which.key)
    if not isinstance(images, np.ndarray) or not isinstance(labels, list):
        keys = shown(", ".join(sorted(entries)) or "nothing")
        raise data_error(path, 0, f"an array 'data' and a list '{which.key}'", keys)
    if images.shape != (rows, _PIXELS):
        raise data_error(
            path, 0, f"'data' of shape {(rows, _PIXELS)}", f"{images.shape}"
        )
    if len(labels) != rows:
        raise data_error(path, 0, f"{rows} entries in '{which.key}'", f"{len(labels)}")
    for index, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < which.classes:
            expected = f"labels from 0 to {which.classes - 1} in '{which.key}'"
            raise data_error(path, 0, expected, f"{shown(label)} (image {index})")
    return images, np.array(labels, np.int64)


def _class_names(folder: Path, which: _Labels) -> tuple[str, ...] | None:
    """Return the names of the classes; None without a file of names."""
    text, pickled, key = which.names
    if (folder / text).is_file():
        path = folder / text
        found: object = [*filter(None, read_file(path, _BESIDE).split(b"\n"))]
    elif (folder / pickled).is_file():
        path = folder / pickled
        found = read_pickled_dict(path, _BESIDE).get(key)
    else:
        return None
    if not isinstance(found, list) or len(found) != which.classes:
        number = f"{len(found)}" if isinstance(found, list) else "none"
        raise DataError(f"{path}: expected {which.classes} names, found {number}")
    for name in found:
        if not isinstance(name, str | bytes):
            raise DataError(f"{path}: expected texts for names, found {shown(name)}")
    texts = (n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in found)
    return tuple(text.strip() for text in texts)


# Read pickled NumPy arrays safely.
#
# A pickle names functions that rebuild its objects, so reading an untrusted one runs
# arbitrary code. The published CIFAR files name three functions of NumPy. They are
# replaced by stand-ins that understand arrays of unsigned bytes only, and every other
# name is refused. Each stand-in has a `__setstate__`, as otherwise a pickle may set
# attributes on it.
#
# The pure-Python unpickler is used, because the one in C allocates memory for the
# largest memo index of a damaged file. Only the opcodes of plain data are allowed.
# Dictionary keys must be texts or numbers, because hashing a deeply nested tuple
# overflows the stack. The result may be nested a few levels deep and must not be larger
# than its file.


class _Array:
    """Stand-in for `numpy.ndarray` and the function that makes an empty one."""

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
    """Stand-in for `numpy.dtype`; the only type is unsigned bytes."""

    __slots__ = ()

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            found = shown(code)
            raise pickle.UnpicklingError(f"elements of type {found} instead of 'u1'")

    def __setstate__(self, state: Any) -> None:
        """Ignore the state: bytes have no byte order."""


class _Latin1(bytes):
    """Stand-in for `_codecs.encode`, which Python 3 uses for bytes in old protocols."""

    __slots__ = ()

    def __new__(cls, text: str, encoding: str) -> Self:
        if encoding != "latin1":
            found = shown(encoding)
            raise pickle.UnpicklingError(f"bytes in {found} instead of 'latin1'")
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

_ALLOWED_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2"),
    *("LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
)

_KEYS = (str, bytes, int, float, type(None))

_DEEPEST = 4
"""Maximum levels of nesting; the published files have two."""

_Instruction = Callable[[Any], None]


def _keyed(instruction: _Instruction, keys: slice) -> _Instruction:
    def checked(machine: Any) -> None:
        for key in machine.stack[keys]:
            if not isinstance(key, _KEYS):
                raise pickle.UnpicklingError(
                    f"a {type(key).__name__} for a key instead of a text or a number"
                )
        instruction(machine)

    return checked


def _reduce(machine: Any) -> None:
    """Execute REDUCE, and limit the bytes made of texts.

    Encoding a text makes new bytes each time, so a small file could make any number.
    """
    function, arguments = machine.stack[-2:]
    if function is _Latin1 and arguments:
        machine.left -= len(arguments[0])
        if machine.left < 0:
            raise pickle.UnpicklingError("more bytes than the file has")
    machine.load_reduce()


def _instructions() -> dict[int, _Instruction]:
    known: dict[int, Any] = pickle._Unpickler.dispatch
    codes = (getattr(pickle, name)[0] for name in _ALLOWED_OPCODES)
    last, every = slice(-2, -1), slice(None, None, 2)
    keys = {pickle.SETITEM: last, pickle.SETITEMS: every, pickle.DICT: every}
    return {
        **{code: known[code] for code in codes},
        **{name[0]: _keyed(known[name[0]], where) for name, where in keys.items()},
        pickle.REDUCE[0]: _reduce,
    }


class _Unpickler(pickle._Unpickler):
    """An unpickler of `raw` with the opcodes of plain data only."""

    dispatch: ClassVar[dict[int, _Instruction]] = _instructions()

    def __init__(self, raw: bytes) -> None:
        self.file = io.BytesIO(raw)
        self.left = len(raw)
        super().__init__(self.file, encoding="bytes")

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name}, which is not admitted")
        return _ADMITTED[module, name]


def _check_nesting(value: Any) -> None:
    """Check the depth of nested containers, level by level.

    Each container counts once per level, as containers may contain one another.
    """
    level: dict[int, Any] = {id(value): value}
    for _ in range(_DEEPEST + 1):
        level = {
            id(inner): inner
            for outer in level.values()
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list | tuple)
        }
        if not level:
            return
    raise pickle.UnpicklingError(f"data nested in more than {_DEEPEST} levels")


def read_pickled_dict(path: Path, most: int | None = None) -> dict[str, Any]:
    """Read a pickled dictionary of arrays, lists, numbers and texts.

    The file may have `most` bytes. Python 2 wrote the published files, so texts are
    returned as bytes, except keys.
    """
    raw = read_file(path, most)
    reader = _Unpickler(raw)
    try:
        value = reader.load()
        if isinstance(value, dict):
            _check_nesting(value)
            entries = {
                key.decode("latin1") if isinstance(key, bytes) else str(key): (
                    entry.value if isinstance(entry, _Array) else entry
                )
                for key, entry in value.items()
            }
    except Exception as e:  # a damaged pickle may raise any
        found = shown(str(e) or type(e).__name__)
        if isinstance(e, KeyError):  # its key is an opcode
            found = f"an instruction that plain data does not need: {e}"
        raise data_error(
            path, reader.file.tell(), "a pickle of plain data", found
        ) from e
    if reader.file.tell() != len(raw):
        more = f"{len(raw) - reader.file.tell()} more bytes"
        raise data_error(path, reader.file.tell(), "the end of the file", more)
    if not isinstance(value, dict):
        raise data_error(path, 0, "a pickled dictionary", type(value).__name__)
    return entries
