"""Checkpoints of schema 1, as earlier versions wrote them: read, and left alone.

Each was two files: `step-N.npz` with the arrays, and `step-N.json` with the rest and
the first one's size and checksum.
"""

import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mucudnn.files import read_whole
from mucudnn.runtime.training.tensor_file import json_object, seal

__all__ = ["FIRST_SCHEMA", "read_first_arrays", "read_first_header"]

FIRST_SCHEMA = 1


def read_first_header(path: Path) -> dict[str, Any]:
    """What a `step-N.json` says, not yet verified.

    Raises:
        OSError: It cannot be read, or is no file.
        ValueError: It is no JSON object.
    """
    return json_object(path, read_whole(path))


def read_first_arrays(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the `step-N.npz` beside it.

    Raises:
        OSError: It cannot be read, or is no file.
        ValueError: One of the files is not what it was.
    """
    body = {name: value for name, value in header.items() if name != "crc32"}
    if header.get("crc32") != seal(body):
        raise ValueError(f"{path.name} does not have the checksum it states")
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
