"""Read and write named arrays in a safetensors file with checksums.

Every reader of the format can read the arrays. The file's metadata has one additional
text, `mucudnn`: a JSON object of the writer's header, with the checksum of every tensor
(type and shape included) and one of the object itself. The first version wrote two
files, `NAME.npz` and `NAME.json`, which can still be read.
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
    """Write a file completely, or leave it as it was.

    Data types are preserved, bfloat16 and float16 included. `header` is plain JSON.

    Raises:
        OSError: The file cannot be written.
        ValueError: The format does not support a data type.
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
    """Return a file's header, unverified; None if the file has none of ours.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no safetensors file, or its header no JSON object.
    """
    metadata = _read_with(path, lambda file: file.metadata())
    if metadata is None or _KEY not in metadata:
        return None
    return _json_object(path, metadata[_KEY])


def read_arrays(path: Path, header: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arrays of a file, verified by its header's checksums if any.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no safetensors file, or damaged.
    """
    arrays = _read_with(path, _tensors)
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
    """Return the contents of a `step-N.json` of schema 1, unverified."""
    return _json_object(path, read_whole(path))


def read_first_arrays(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verified arrays of the `step-N.npz` beside a `step-N.json`."""
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
    """Return a header without its checksum, which is verified."""
    body = {name: value for name, value in header.items() if name != "crc32"}
    if header.get("crc32") != seal(body):
        raise ValueError(f"{path.name} does not have the checksum it states")
    return body


def seal(body: Mapping[str, Any]) -> int:
    """Return the checksum of a JSON object, independent of its formatting."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _json_object(path: Path, text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; `ValueError` for anything else."""
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


def _read_with(path: Path, read: Callable[[Any], T]) -> T:
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
    """Return an array in native byte order and contiguous."""
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
