"""Read pickled NumPy arrays safely.

A pickle names functions that rebuild its objects, so reading an untrusted one runs
arbitrary code. The published CIFAR files name three functions of NumPy. They are
replaced by stand-ins that understand arrays of unsigned bytes only, and every other
name is refused. Each stand-in has a `__setstate__`, as otherwise a pickle may set
attributes on it.

The pure-Python unpickler is used, because the one in C allocates memory for the largest
memo index of a damaged file. Only the opcodes of plain data are allowed. Dictionary
keys must be texts or numbers, because hashing a deeply nested tuple overflows the
stack. The result may be nested a few levels deep and must not be larger than its file.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mucudnn.data.files import fault, read_file, shown

__all__ = ["read_pickled_dict"]


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

    Raises:
        DataError: The file is missing, truncated, too large, no such pickle, or names a
            function that is not allowed.
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
        raise fault(path, reader.file.tell(), "a pickle of plain data", found) from e
    if reader.file.tell() != len(raw):
        more = f"{len(raw) - reader.file.tell()} more bytes"
        raise fault(path, reader.file.tell(), "the end of the file", more)
    if not isinstance(value, dict):
        raise fault(path, 0, "a pickled dictionary", type(value).__name__)
    return entries
