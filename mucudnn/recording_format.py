"""File formats of recordings (measured tables) and of step tables.

Measurements are grouped by device and convolution, so that long keys are written
once. `environment` describes the device in free text (versions, driver, clocks); it
is not part of the fingerprint, and may be empty::

    {"kind": "mucudnn-recording", "schema": 2, "devices": [
      {"fingerprint": "…", "environment": {"driver": "580.65", …},
       "split_alignment": 16, "problems": [
        {"problem": {"direction": "forward", "x_shape": ["N", 3, 32, 32], …},
         "rows": [{"algo": "GEMM", "batch": 8, "time_ms": 0.5, "noise_ms": 0.01, …,
                   "measured_at": 1700000000.0, "version": "0.1.0"}],
         "verdicts": [{"batch": 32, "ratio": 0.8,
                       "signature": "GEMM@16+GEMM@16 / DIRECT@32"}]}],
       "races": [{"raced": "…", "first_ms": 0.5, "second_ms": 0.4,
                  "measured_at": 1700000000.0}]}]}

Optional members are written only if known: `split_alignment`, the alignment of
micro-batches in bytes, `verdicts` on whole plans, and `races` between two ways to
compute something else. A recording may be compressed with gzip. This module converts
bytes only and opens no files.
"""

import functools
import gzip
import io
import json
import reprlib
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from mucudnn.codecs import (
    decode,
    decode_in_range,
    decode_layer,
    decode_race,
    decode_row,
    decode_verdict,
    list_of,
    load_json,
    members_of,
    object_of,
    problem_key,
    race_to_dict,
    row_to_dict,
    verdict_to_dict,
)
from mucudnn.ir.fleet import StepPoint, StepTable
from mucudnn.ir.measurement import Measurement, Race, Recording, Verdict

_KIND = "mucudnn-recording"

SCHEMA = 2

_GZIP_MAGIC = b"\x1f\x8b"

MOST = 1 << 29
"""Largest size of a recording in bytes, compressed or not."""

_DEVICE = ("fingerprint", "environment", "problems")


def format_recording(recording: Recording, *, compress: bool = False) -> bytes:
    """Return a recording as bytes; equal measurements give equal bytes."""
    known, aligned = recording.environments, recording.alignments
    devices: dict[str, dict[str, tuple[list[str], list[str]]]] = {}
    key_of = functools.cache(problem_key)

    def lines(of: Measurement | Verdict) -> tuple[list[str], list[str]]:
        """Return the rows and the verdicts of a device's convolution."""
        problems = devices.setdefault(of.fingerprint, {})
        return problems.setdefault(key_of(of.problem), ([], []))

    def array(lines: list[str]) -> str:
        return "[\n" + ",\n".join(lines) + "]"

    for m in recording.measurements:
        lines(m)[0].append(_dumps(row_to_dict(m)))
    for v in recording.verdicts:
        lines(v)[1].append(_dumps(verdict_to_dict(v)))
    raced: dict[str, list[str]] = {}
    for r in recording.races:
        devices.setdefault(r.fingerprint, {})
        raced.setdefault(r.fingerprint, []).append(_dumps(race_to_dict(r)))
    text = f'{{"kind": "{_KIND}", "schema": {SCHEMA}, "devices": [' + ",".join(
        f'\n{{"fingerprint": {_dumps(name)}, '
        f'"environment": {_dumps(dict(known.get(name, {})))}, '
        + (f'"split_alignment": {aligned[name]}, ' if name in aligned else "")
        + '"problems": ['
        + ",".join(
            f'\n{{"problem": {key}, "rows": {array(rows)}'
            + (f',\n"verdicts": {array(found)}' if found else "")
            + "}"
            for key, (rows, found) in problems.items()
        )
        + "]"
        + (f',\n"races": {array(raced[name])}' if name in raced else "")
        + "}"
        for name, problems in devices.items()
    )
    # No time stamp in the compressed file: equal recordings are equal bytes.
    data = f"{text}]}}\n".encode()
    return gzip.compress(data, compresslevel=6, mtime=0) if compress else data


def read_recording(data: bytes) -> Recording:
    """Decode and validate a recording, compressed or not.

    Raises:
        ValueError: The data is truncated, not a recording, or has an invalid field; the
            message names its position.
    """
    devices = _decode_devices(data)
    measurements: list[Measurement] = []
    verdicts: list[Verdict] = []
    races: list[Race] = []
    for device in devices:
        where = f"{device.where}.problems"
        for i, entry in enumerate(list_of(where, device.problems)):
            there, name = f"{where}[{i}]", device.fingerprint
            layer, rows, verdict_rows = members_of(
                there, entry, ("problem", "rows"), {"verdicts": []}
            )
            # Files have many rows of equal size: decode each problem once.
            decoded = decode_layer(f"{there}.problem", layer, 1)
            layer_at = functools.cache(decoded.with_batch)
            for j, row in enumerate(list_of(f"{there}.rows", rows)):
                found = decode_row(f"{there}.rows[{j}]", name, layer_at, row)
                measurements.append(found)
            for j, row in enumerate(list_of(f"{there}.verdicts", verdict_rows)):
                verdict = decode_verdict(f"{there}.verdicts[{j}]", name, layer_at, row)
                verdicts.append(verdict)
        where = f"{device.where}.races"
        for i, entry in enumerate(list_of(where, device.races)):
            races.append(decode_race(f"{where}[{i}]", device.fingerprint, entry))
    return Recording(
        environments={device.fingerprint: device.environment for device in devices},
        alignments={
            device.fingerprint: device.split_alignment
            for device in devices
            if device.split_alignment is not None
        },
        measurements=tuple(measurements),
        verdicts=tuple(verdicts),
        races=tuple(races),
    )


def recorded_environments(data: bytes) -> dict[str, dict[str, str]]:
    """Return the environment of each device by fingerprint, without checking rows.

    Raises:
        ValueError: The data is truncated or not a recording.
    """
    return {device.fingerprint: device.environment for device in _decode_devices(data)}


def recorded_schema(data: bytes) -> float | None:
    """Return the schema number of a recording of any version, or None."""
    try:
        document = load_json(_decompress(data))
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        return None
    return _schema_of(document)


def _schema_of(document: Mapping[str, Any]) -> float:
    """Return 0 for a schema that is not a number, which no version ever wrote."""
    schema = document.get("schema")
    return schema if isinstance(schema, int | float) else 0


class _Device(NamedTuple):
    """A device entry and its position in the file; problems are not decoded yet."""

    where: str
    fingerprint: str
    environment: dict[str, str]
    split_alignment: int | None
    problems: Any
    races: Any


def _decode_devices(data: bytes) -> list[_Device]:
    document = load_json(_decompress(data))
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise ValueError(f'not a recording: it lacks "kind": "{_KIND}"')
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        newer = "; a newer one wrote it" if _schema_of(document) > SCHEMA else ""
        raise ValueError(
            f"its schema is {reprlib.repr(schema)}, and this version reads "
            f"{SCHEMA}{newer}"
        )
    _, _, entries = members_of("recording", document, ("kind", "schema", "devices"))
    found = []
    for i, entry in enumerate(list_of("devices", entries)):
        where = f"devices[{i}]"
        name, environment, problems, alignment, races = members_of(
            where, entry, _DEVICE, {"split_alignment": None, "races": []}
        )
        if alignment is not None:
            alignment = decode_in_range(where, "split_alignment", int, alignment)
        at = f"{where}.environment"
        environment = object_of(at, environment)
        fingerprint = decode(f"{where}.fingerprint", str, name)
        described = {
            decode(at, str, key): decode(f"{at}.{key}", str, value)
            for key, value in environment.items()
        }
        found.append(_Device(where, fingerprint, described, alignment, problems, races))
    names = [device.fingerprint for device in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"devices[{i}].fingerprint: {name!r} occurs twice")
    return found


def _decompress(data: bytes) -> str:
    """Decompress if needed, bounded against decompression bombs."""
    if data.startswith(_GZIP_MAGIC):
        try:
            # One byte more than allowed is enough to notice a decompression bomb.
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MOST + 1)
        except (OSError, EOFError, zlib.error) as e:
            raise ValueError(f"damaged gzip data: {e}") from e
    if len(data) > MOST:
        raise ValueError(f"it has more than {MOST:,} bytes")
    return data.decode()


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


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
        raise ValueError(f'not a step table: it lacks "kind": "{KIND}"')
    _, schema, device, steps, memory = members_of("table", document, _NAMES, _OPTIONAL)
    if schema != _SCHEMA:
        raise ValueError(f"its schema is {schema!r}, and this version reads {_SCHEMA}")
    points, names = [], {"samples": int, "time_ms": float, "nbytes": int}
    for i, step in enumerate(list_of("steps", steps)):
        where = f"steps[{i}]"
        values = members_of(where, step, ("samples", "time_ms"), {"nbytes": 0})
        found = [
            decode(f"{where}.{name}", kind, value)
            for (name, kind), value in zip(names.items(), values, strict=True)
        ]
        try:
            points.append(StepPoint(*found))
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from e
    nbytes = None
    if memory is not None:
        nbytes = decode_in_range("table", "memory_bytes", int, memory)
    return StepTable(decode("device", str, device), tuple(points)), nbytes
