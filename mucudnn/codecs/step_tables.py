"""Encode and decode tables of step times."""

import json
from collections.abc import Mapping
from typing import Any

from mucudnn.codecs.values import decode, list_of, load_json, members_of
from mucudnn.ir.fleet import StepPoint, StepTable

__all__ = ["KIND", "format_step_table", "kind_of", "read_step_table"]

KIND = "mucudnn step table"
_SCHEMA = 1
_NAMES = ("kind", "schema", "device", "steps")
_OPTIONAL: Mapping[str, Any] = {"memory_bytes": None}


def format_step_table(table: StepTable, memory: int | None = None) -> str:
    """Return a table as JSON, with its device's memory if known."""
    document = {
        "kind": KIND,
        "schema": _SCHEMA,
        "device": table.device,
        "memory_bytes": memory,
        "steps": [
            {"samples": p.samples, "time_ms": p.time_ms, "nbytes": p.nbytes}
            for p in table.points
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def kind_of(text: str) -> object:
    """Return the `kind` member of a JSON file; None if it has none."""
    document = load_json(text)
    return document.get("kind") if isinstance(document, dict) else None


def read_step_table(text: str) -> tuple[StepTable, int | None]:
    """Decode the output of `format_step_table`."""
    document = load_json(text)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ValueError(f'no step table: it lacks "kind": "{KIND}"')
    _, schema, device, steps, memory = members_of("table", document, _NAMES, _OPTIONAL)
    if schema != _SCHEMA:
        raise ValueError(f"its schema is {schema!r}, this version reads {_SCHEMA}")
    points = [
        _decode_point(f"steps[{i}]", step)
        for i, step in enumerate(list_of("steps", steps))
    ]
    nbytes = decode("memory_bytes", int | None, memory)
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"memory_bytes: {nbytes} is below 0")
    return StepTable(decode("device", str, device), tuple(points)), nbytes


def _decode_point(where: str, data: object) -> StepPoint:
    values = members_of(where, data, ("samples", "time_ms"), {"nbytes": 0})
    names = {"samples": int, "time_ms": float, "nbytes": int}
    found = [
        decode(f"{where}.{name}", kind, value)
        for (name, kind), value in zip(names.items(), values, strict=True)
    ]
    try:
        return StepPoint(*found)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
