"""Pickled NumPy arrays, read without letting the file run anything.

A pickle names the functions that rebuild its objects, so reading a foreign one runs
whatever it says. The published CIFAR files name three of NumPy's; all are answered by
stand-ins of our own that understand arrays of unsigned bytes and nothing else. Every
other name is refused.

Every stand-in has a `__setstate__`: without one a pickle may set attributes on it.
The unpickler is the one in Python: that in C allocates as many places as a damaged
file's greatest memo number says.

Only the instructions that plain data needs are obeyed. Keys are texts or numbers, for
Python hashes a tuple by descending into it, as deep as the file says, on a stack that
is not. What is read may be nested a few levels deep and no larger than its file.
"""

import io
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mucudnn.data.files import fault, read_file, shown

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
            found = shown(code)
            raise pickle.UnpicklingError(f"elements of type {found} instead of 'u1'")

    def __setstate__(self, state: Any) -> None:
        """A byte has no byte order."""


class _Latin1(bytes):
    """Stands for `_codecs.encode`: how Python 3 writes bytes in old protocols."""

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


_OBEYED = (
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
"""Levels of nesting; the published files have two."""


_Instruction = Callable[[Any], None]


def _keyed(instruction: _Instruction, keys: slice) -> _Instruction:
    """The instruction, once the keys that are on the stack for it are admitted."""

    def checked(machine: Any) -> None:
        _check_keys(machine.stack[keys])
        instruction(machine)

    return checked


def _reduce(machine: Any) -> None:
    """Bytes made of a text are new ones, and a text can be asked for again."""
    function, arguments = machine.stack[-2:]
    if function is _Latin1 and arguments:
        machine.left -= len(arguments[0])
        if machine.left < 0:
            raise pickle.UnpicklingError("more bytes than the file has")
    machine.load_reduce()


def _instructions() -> dict[int, _Instruction]:
    known: dict[int, Any] = pickle._Unpickler.dispatch
    codes = (getattr(pickle, name)[0] for name in _OBEYED)
    last, every = slice(-2, -1), slice(None, None, 2)
    keys = {pickle.SETITEM: last, pickle.SETITEMS: every, pickle.DICT: every}
    return {
        **{code: known[code] for code in codes},
        **{name[0]: _keyed(known[name[0]], where) for name, where in keys.items()},
        pickle.REDUCE[0]: _reduce,
    }


class _Unpickler(pickle._Unpickler):
    """Reads `raw`, and no instruction that plain data does not need."""

    dispatch: ClassVar[dict[int, _Instruction]] = _instructions()

    def __init__(self, raw: bytes) -> None:
        self.file = io.BytesIO(raw)
        self.left = len(raw)
        super().__init__(self.file, encoding="bytes")

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name}, which is not admitted")
        return _ADMITTED[module, name]


def _check_keys(keys: Iterable[object]) -> None:
    for key in keys:
        if not isinstance(key, _KEYS):
            raise pickle.UnpicklingError(
                f"a {type(key).__name__} for a key instead of a text or a number"
            )


def _check_nesting(value: Any) -> None:
    """Level by level, each container once a level: they may hold one another."""
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
    """A pickled dictionary of arrays, lists, numbers and texts.

    Python 2 wrote the published files: its texts are bytes here, keys excepted.

    Args:
        path: The file.
        most: Bytes it may have.

    Raises:
        DataError: The file is missing, truncated, too large, no such pickle, or names
            something that is not admitted.
    """
    raw = read_file(path, most)
    reader = _Unpickler(raw)
    try:
        value = reader.load()
        if isinstance(value, dict):
            _check_nesting(value)
            entries = {_text(key): _plain(entry) for key, entry in value.items()}
    except Exception as e:  # a damaged pickle may raise any
        found = _reason(e)
        raise fault(path, reader.file.tell(), "a pickle of plain data", found) from e
    if reader.file.tell() != len(raw):
        more = f"{len(raw) - reader.file.tell()} more bytes"
        raise fault(path, reader.file.tell(), "the end of the file", more)
    if not isinstance(value, dict):
        raise fault(path, 0, "a pickled dictionary", type(value).__name__)
    return entries


def _reason(error: Exception) -> str:
    """What an error says; the key of a `KeyError` is an instruction's code."""
    if isinstance(error, KeyError):
        return f"an instruction that plain data does not need: {error}"
    return shown(str(error) or type(error).__name__)


def _text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _plain(entry: object) -> object:
    return entry.value if isinstance(entry, _Array) else entry
