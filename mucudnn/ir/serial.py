"""Convolutions and their measurements as JSON, and back.

The codec walks `dataclasses.fields`, so a field added to a value cannot be forgotten in
its keys and files. Reading is strict: a missing, unknown or ill-typed field is an error
that names it. JSON has no infinity; the time of a failed row is null.

A recording is a file of measurements, grouped by device and convolution so that long
keys are written once::

    {"kind": "mucudnn-recording", "schema": 1, "devices": [
      {"fingerprint": "…", "problems": [
        {"problem": {"direction": "forward", "x_shape": ["N", 3, 32, 32], …},
         "rows": [{"algo": "GEMM", "batch": 8, "time_ms": 0.5, …,
                   "measured_at": 1700000000.0, "version": "0.1.0"}]}]}]}

It may be compressed with gzip. A cache imports it, a backend answers from it; nothing
here touches a file.
"""

import dataclasses
import enum
import functools
import gzip
import json
import math
import reprlib
import types
import typing
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, PerfTable

__all__ = [
    "KIND",
    "SCHEMA",
    "Measurement",
    "format_recording",
    "parse_recording",
    "perf_from_dict",
    "perf_to_dict",
    "plan_from_dict",
    "plan_to_dict",
    "problem_from_dict",
    "problem_from_key",
    "problem_key",
    "problem_to_dict",
    "recorded_fingerprints",
    "table_from_dict",
    "table_to_dict",
]

KIND = "mucudnn-recording"
SCHEMA = 1
_ANY_BATCH = "N"
_LARGEST = 2**63 - 1
_GZIP_MAGIC = b"\x1f\x8b"
_EXTRA = {"measured_at": float, "version": str}
_LEAST = {"batch": 1, "time_ms": 0, "workspace": 0, "noise_ms": 0, "samples": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of a recording: what was measured, where and when.

    Attributes:
        fingerprint: The device and its libraries.
        problem: The convolution, at the micro-batch size of `perf`.
        perf: The outcome.
        measured_at: Seconds since 1970.
        version: Version of mucudnn that measured.
    """

    fingerprint: str
    problem: ConvProblem
    perf: AlgoPerf
    measured_at: float
    version: str


def problem_to_dict(problem: ConvProblem) -> dict[str, Any]:
    """Every field, JSON-ready."""
    data: dict[str, Any] = _encode(problem)
    return data


def problem_from_dict(data: object) -> ConvProblem:
    """The inverse of `problem_to_dict`; ValueError names the field that is wrong."""
    problem: ConvProblem = _decode_fields("problem", ConvProblem, data)
    return problem


def perf_to_dict(perf: AlgoPerf) -> dict[str, Any]:
    """Every field, JSON-ready.

    Raises:
        ValueError: A number is not finite though the row has no error, or is negative.
    """
    data = {f.name: getattr(perf, f.name) for f in dataclasses.fields(perf)}
    if perf.error is not None:
        data["time_ms"] = None
    perf_from_dict(data)
    return data


def perf_from_dict(data: object) -> AlgoPerf:
    """The inverse of `perf_to_dict`; ValueError names the field that is wrong."""
    return _decode_perf("perf", data)


def table_to_dict(table: PerfTable) -> dict[str, Any]:
    """Every field, JSON-ready."""
    data: dict[str, Any] = _encode(table)
    return data


def table_from_dict(data: object) -> PerfTable:
    """The inverse of `table_to_dict`; ValueError names the field that is wrong."""
    table: PerfTable = _decode_fields("table", PerfTable, data)
    return table


def plan_to_dict(plan: ConvPlan) -> dict[str, Any]:
    """Every field, JSON-ready."""
    data: dict[str, Any] = _encode(plan)
    return data


def plan_from_dict(data: object) -> ConvPlan:
    """The inverse of `plan_to_dict`; ValueError names the field that is wrong."""
    plan: ConvPlan = _decode_fields("plan", ConvPlan, data)
    return plan


def problem_key(problem: ConvProblem) -> str:
    """Every field but the mini-batch size, as canonical JSON.

    N is no part of it, so that a measurement serves every mini-batch.
    """
    return json.dumps(_layer(problem), sort_keys=True, separators=(",", ":"))


def problem_from_key(key: str, batch: int) -> ConvProblem:
    """The inverse of `problem_key`, at a batch size.

    Raises:
        ValueError: Not such a key, or one with other fields.
    """
    return _decode_layer("key", _load_json(key), batch)


def format_recording(
    measurements: Iterable[Measurement], *, compress: bool = False
) -> bytes:
    """A recording as bytes; the same measurements always give the same bytes."""
    keys: dict[ConvProblem, str] = {}
    devices: dict[str, dict[str, list[str]]] = {}
    for m in measurements:
        if m.problem not in keys:
            keys[m.problem] = problem_key(m.problem)
        row = perf_to_dict(m.perf)
        row |= {"measured_at": m.measured_at, "version": m.version}
        problems = devices.setdefault(m.fingerprint, {})
        problems.setdefault(keys[m.problem], []).append(_dumps(row))
    text = f'{{"kind": "{KIND}", "schema": {SCHEMA}, "devices": [' + ",".join(
        f'\n{{"fingerprint": {_dumps(fingerprint)}, "problems": ['
        + ",".join(
            f'\n{{"problem": {key}, "rows": [\n' + ",\n".join(rows) + "]}"
            for key, rows in problems.items()
        )
        + "]}"
        for fingerprint, problems in devices.items()
    )
    data = f"{text}]}}\n".encode()
    return gzip.compress(data, compresslevel=6, mtime=0) if compress else data


def parse_recording(data: bytes) -> tuple[Measurement, ...]:
    """Read and check a whole recording, compressed or not.

    Raises:
        ValueError: It is truncated, no recording, or wrong in some field; the message
            says where.
    """
    measurements: list[Measurement] = []
    for where, fingerprint, problems in _devices(data):
        for i, entry in enumerate(_list(f"{where}.problems", problems)):
            there = f"{where}.problems[{i}]"
            layer, rows = _members(there, entry, ("problem", "rows"))
            base = _decode_layer(f"{there}.problem", layer, 1)
            at_batch: dict[int, ConvProblem] = {}
            for j, row in enumerate(_list(f"{there}.rows", rows)):
                perf, measured_at, version = _decode_row(f"{there}.rows[{j}]", row)
                if perf.batch not in at_batch:
                    at_batch[perf.batch] = base.with_batch(perf.batch)
                measurements.append(
                    Measurement(
                        fingerprint=fingerprint,
                        problem=at_batch[perf.batch],
                        perf=perf,
                        measured_at=measured_at,
                        version=version,
                    )
                )
    return tuple(measurements)


def recorded_fingerprints(data: bytes) -> tuple[str, ...]:
    """The devices of a recording, in order; its rows are not checked.

    Raises:
        ValueError: It is truncated or no recording.
    """
    return tuple(fingerprint for _, fingerprint, _ in _devices(data))


def _devices(data: bytes) -> list[tuple[str, str, Any]]:
    document = _load_json(_text(data))
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ValueError(f'no recording: it lacks "kind": "{KIND}"')
    if document.get("schema") != SCHEMA:
        raise ValueError(
            f"its schema is {document.get('schema')!r}, this version reads {SCHEMA}"
        )
    _, _, devices = _members("recording", document, ("kind", "schema", "devices"))
    found = []
    for i, device in enumerate(_list("devices", devices)):
        where = f"devices[{i}]"
        name, problems = _members(where, device, ("fingerprint", "problems"))
        fingerprint = _decode(f"{where}.fingerprint", str, name)
        found.append((where, fingerprint, problems))
    names = [fingerprint for _, fingerprint, _ in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"devices[{i}].fingerprint: {name!r} occurs twice")
    return found


def _text(data: bytes) -> str:
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as e:
            raise ValueError(f"damaged gzip data: {e}") from e
    return data.decode()


def _load_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _layer(problem: ConvProblem) -> dict[str, Any]:
    data = problem_to_dict(problem)
    data["x_shape"][0] = _ANY_BATCH
    return data


def _decode_layer(where: str, data: object, batch: int) -> ConvProblem:
    members = _object(where, data)
    if "x_shape" in members:
        shape = _list(f"{where}.x_shape", members["x_shape"])
        if shape[:1] != [_ANY_BATCH]:
            raise ValueError(
                f'{where}.x_shape: {reprlib.repr(shape)} does not start with "N"'
            )
        members = members | {"x_shape": [batch, *shape[1:]]}
    problem: ConvProblem = _decode_fields(where, ConvProblem, members)
    return problem


def _decode_row(where: str, data: object) -> tuple[AlgoPerf, float, str]:
    members = _object(where, data)
    extra = {name: members[name] for name in _EXTRA if name in members}
    measured_at, version = (
        _decode(f"{where}.{name}", hint, value)
        for (name, hint), value in zip(
            _EXTRA.items(), _members(where, extra, tuple(_EXTRA)), strict=True
        )
    )
    perf = {name: value for name, value in members.items() if name not in _EXTRA}
    return _decode_perf(where, perf), measured_at, version


def _decode_perf(where: str, data: object) -> AlgoPerf:
    members = _object(where, data)
    hint = _hints(AlgoPerf)["error"]
    failed = _decode(f"{where}.error", hint, members.get("error")) is not None
    if failed and "time_ms" in members:
        if members["time_ms"] is not None:
            raise ValueError(f"{where}.time_ms: must be null, the row has an error")
        members = members | {"time_ms": 0.0}
    perf: AlgoPerf = _decode_fields(where, AlgoPerf, members)
    for name, least in _LEAST.items():
        if (value := getattr(perf, name)) < least:
            raise ValueError(f"{where}.{name}: {value} is below {least}")
    return dataclasses.replace(perf, time_ms=math.inf) if failed else perf


def _encode(value: Any) -> Any:
    if isinstance(value, AlgoPerf):
        return perf_to_dict(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: _encode(getattr(value, f.name)) for f in fields}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot be written as JSON")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{value!r} cannot be written as JSON")
    return value


def _decode_fields(where: str, kind: type, data: object) -> Any:
    hints = _hints(kind)
    values = _members(where, data, tuple(hints))
    decoded = {
        name: value
        if _is_plain(hint, value)
        else _decode(f"{where}.{name}", hint, value)
        for (name, hint), value in zip(hints.items(), values, strict=True)
    }
    try:
        return kind(**decoded)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{where}: {e}") from e


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    types_of = typing.get_type_hints(kind)
    return {f.name: types_of[f.name] for f in dataclasses.fields(kind)}


def _decode(where: str, hint: Any, value: Any) -> Any:
    if hint is AlgoPerf:
        return _decode_perf(where, value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_fields(where, hint, value)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(
            _decode(f"{where}[{i}]", item, v) for i, v in enumerate(_list(where, value))
        )
    if isinstance(hint, types.UnionType):
        return None if value is None else _decode(where, str, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            valid = ", ".join(str(member.value) for member in hint)
            raise ValueError(
                f"{where}: {reprlib.repr(value)} is none of these: {valid}"
            ) from None
    return _decode_plain(where, hint, value)


def _is_plain(hint: Any, value: Any) -> bool:
    """Whether a value is beyond doubt; most are, and files have many."""
    kind = type(value)
    return kind is hint and (
        kind is bool
        or (kind is int and -_LARGEST <= value <= _LARGEST)
        or (kind is float and math.isfinite(value))
        or (kind is str and value.isascii())
    )


def _decode_plain(where: str, hint: Any, value: Any) -> Any:
    if hint is float and type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"{where}: {value!r} is not finite")
        return number
    if type(value) is not hint:
        raise ValueError(
            f"{where}: {reprlib.repr(value)} is not of type {hint.__name__}"
        )
    if hint is int and abs(value) > _LARGEST:
        raise ValueError(f"{where}: {value} does not fit in 64 bits")
    if hint is str:
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"{where}: {value!r} is not Unicode: {e.reason}") from e
    return value


def _members(where: str, data: object, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The values of an object that has exactly these members."""
    members = _object(where, data)
    if tuple(members) == names:
        return tuple(members.values())
    for name in names:
        if name not in members:
            raise ValueError(f"{where}.{name}: missing")
    for name in members:
        if name not in names:
            raise ValueError(f"{where}.{name}: unknown")
    return tuple(members[name] for name in names)


def _object(where: str, data: Any) -> dict[str, Any]:
    if type(data) is not dict:
        raise ValueError(f"{where}: {reprlib.repr(data)} is not an object")
    return data


def _list(where: str, data: Any) -> list[Any]:
    if type(data) is not list:
        raise ValueError(f"{where}: {reprlib.repr(data)} is not an array")
    return data
