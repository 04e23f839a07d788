"""JSON files that are complete or not there."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_json", "write_json", "write_text"]


def read_json(file: Path) -> dict[str, Any]:
    """What is in a file; nothing where there is none or it cannot be read."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Replace a file; numbers that are not finite become null."""
    write_text(file, json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write beside the file, then rename over it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(file)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
