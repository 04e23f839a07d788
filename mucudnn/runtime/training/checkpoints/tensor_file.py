"""Named arrays in one safetensors file that knows when it is damaged.

Any reader of the format has the arrays. Beside them the file's metadata holds one text,
`mucudnn`: a JSON object of what the writer wants to say, with the checksum of every
tensor (its type and shape included) and one of the object itself. The first version
wrote two files, `NAME.npz` and `NAME.json`: they are still read.
"""

import io
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mucudnn.files import check_file, read_whole, write_whole

__all__ = [
    "read_arrays",
    "read_first_arrays",
    "read_first_header",
    "read_header",
    "seal",
    "write_arrays",
]

_KEY = "mucudnn"

T = TypeVar("T")


def write_arrays(
    path: Path, arrays: Mapping[str, Any], header: Mapping[str, Any]
) -> None:
    """Write a file, or leave it as it was.

    Types stay what they are, bfloat16 and float16 included; `header` is plain JSON to
    say beside the arrays.

    Raises:
        OSError: It cannot be written; `strerror` says why.
        ValueError: The format has no such type of numbers.
    """
    dense = {name: _dense(np.asarray(array)) for name, array in arrays.items()}
    checksums = {name: _checksum(array) for name, array in dense.items()}
    body = {**header, "tensors": checksums}
    text = json.dumps({"crc32": seal(body), **body})
    try:
        raw = save(dense, metadata={_KEY: text})
    except SafetensorError as e:
        raise ValueError(f"arrays that a safetensors file cannot hold: {e}") from e
    write_whole(path, raw)


def read_header(path: Path) -> dict[str, Any] | None:
    """What a file says beside its arrays, not yet verified; None if not one of ours.

    Raises:
        OSError: It cannot be read, or is no file.
        ValueError: It is no such file, or what it says is no JSON object.
    """
    metadata = _opened(path, lambda file: file.metadata())
    if metadata is None or _KEY not in metadata:
        return None
    return _json_object(path, metadata[_KEY])


def read_arrays(path: Path, header: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arrays of a file, compared with the checksums of its header if it has one.

    Raises:
        OSError: It cannot be read, or is no file.
        ValueError: It is no such file, or damaged.
    """
    arrays = _opened(path, _tensors)
    if header is None:
        return arrays
    stated = _sealed(path, header).get("tensors")
    if not isinstance(stated, dict) or stated.keys() != arrays.keys():
        raise ValueError(f"{path.name} does not state the checksums of its tensors")
    for name, array in arrays.items():
        if stated[name] != _checksum(array):
            raise ValueError(
                f"{name!r} of {path.name} does not have the checksum it had"
            )
    return arrays


def read_first_header(path: Path) -> dict[str, Any]:
    """What a `step-N.json` says, not yet verified.

    Raises:
        OSError: It cannot be read, or is no file.
        ValueError: It is no JSON object.
    """
    return _json_object(path, read_whole(path))


def read_first_arrays(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the `step-N.npz` beside it.

    Raises:
        OSError: It cannot be read, or is no file.
        ValueError: One of the files is not what it was.
    """
    body = _sealed(path, header)
    data = path.with_suffix(".npz")
    raw = read_whole(data)
    if not isinstance(body.get("data"), dict) or (
        body["data"].get("crc32") != zlib.crc32(raw)
    ):
        raise ValueError(f"{data.name} does not have the checksum it had")
    try:
        with np.load(io.BytesIO(raw)) as archive:
            return dict(archive)
    except Exception as e:  # readers of archives raise anything
        raise ValueError(f"{data.name} is no archive of arrays: {e}") from e


def _sealed(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """What a header says, once it has the checksum that it states."""
    body = {name: value for name, value in header.items() if name != "crc32"}
    if header.get("crc32") != seal(body):
        raise ValueError(f"{path.name} does not have the checksum it states")
    return body


def seal(body: Mapping[str, Any]) -> int:
    """Checksum of what a JSON object says, however it is laid out."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _json_object(path: Path, text: str | bytes) -> dict[str, Any]:
    """The JSON object that a text of a file is.

    Raises:
        ValueError: It is something else.
    """
    try:
        found = json.loads(text)
    except RecursionError as e:
        raise ValueError(f"{path.name} is nested too deeply") from e
    except ValueError as e:
        raise ValueError(f"{path.name} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no JSON object")  # noqa: TRY004 (a file)
    return found


def _checksum(array: Any) -> int:
    kind = zlib.crc32(f"{array.dtype.name} {array.shape}".encode())
    return zlib.crc32(array.reshape(-1).view(np.uint8), kind)


def _opened(path: Path, read: Callable[[Any], T]) -> T:
    """What `read` finds in the file."""
    check_file(path)
    try:
        with safe_open(path, "numpy") as file:
            return read(file)
    except (SafetensorError, AttributeError, TypeError, ValueError) as e:
        raise ValueError(f"{path.name} cannot be read as arrays: {e}") from e


def _tensors(file: Any) -> dict[str, Any]:
    names = file.keys()
    return {name: file.get_tensor(name) for name in names}


def _dense(array: Any) -> Any:
    """In this machine's order of bytes, without gaps."""
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
