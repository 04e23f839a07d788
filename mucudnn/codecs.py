"""Frozen values as JSON and back, with checks for rows written by other programs."""

import dataclasses
import enum
import functools
import json
import math
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem
from mucudnn.ir.measurement import Measurement, Race, Verdict

T = TypeVar("T")

_ANY_BATCH = "N"

_LARGEST = 2**63 - 1

_OPTIONAL: Mapping[object, Mapping[str, Any]] = {ConvPlan: {"workspace_limit": None}}
"""Members that older files lack, with defaults; None is not written."""

LATEST = 253_402_300_799.0
"""Last second of the year 9999 in seconds since 1970, the limit of calendars."""

LONGEST_MS = 1e12
"""Longest time in milliseconds (30 years), so that sums of times stay finite."""

_TIME = (0, LONGEST_MS)
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("batch", "split_alignment"), (1, math.inf)),
    **dict.fromkeys(("workspace", "samples", "memory_bytes"), (0, math.inf)),
    **dict.fromkeys(("time_ms", "noise_ms", "first_ms", "second_ms"), _TIME),
    "ratio": (0, 1e9),
    "measured_at": (0, LATEST),
}
"""Least and greatest values of members, by their names."""


def perf_to_dict(perf: AlgoPerf) -> dict[str, Any]:
    """Encode every field as JSON values."""
    data = {f.name: getattr(perf, f.name) for f in dataclasses.fields(perf)}
    data["notes"] = list(perf.notes)
    if perf.error is not None:
        data["time_ms"] = None
    # Refuse to write a row that could not be read back.
    decode_perf("perf", data)
    return data


def row_to_dict(row: Measurement) -> dict[str, Any]:
    """Encode a measurement without its device and convolution."""
    about = {"measured_at": row.measured_at, "version": row.version}
    return perf_to_dict(row.perf) | about


def verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    """Encode a verdict without its device and convolution."""
    batch, of = verdict.problem.batch, verdict.signature
    return {"batch": batch, "signature": of, "ratio": verdict.ratio}


def race_to_dict(race: Race) -> dict[str, Any]:
    """Encode a race without its device."""
    first, second = race.times_ms
    times = {"first_ms": first, "second_ms": second}
    return {"raced": race.raced, **times, "measured_at": race.measured_at}


def problem_key(problem: ConvProblem) -> str:
    """Return every field but the mini-batch size as canonical JSON.

    The key leaves N out, so that one measurement serves every mini-batch.
    """
    data = encode_fields(problem)
    # Sorted members without spaces: equal problems have equal keys.
    data["x_shape"][0] = _ANY_BATCH
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def problem_from_key(key: str, batch: int) -> ConvProblem:
    """Decode `problem_key` for a batch size."""
    return decode_layer("key", load_json(key), batch)


def load_json(text: str) -> Any:
    """Parse JSON; invalid or too deeply nested text raises a `ValueError`."""

    # Python reads and writes NaN and Infinity, which other readers of JSON refuse.
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def decode_layer(where: str, data: object, batch: int) -> ConvProblem:
    """Decode a convolution whose batch size is written "N"."""
    members = object_of(where, data)
    if "x_shape" in members:
        shape = list_of(f"{where}.x_shape", members["x_shape"])
        if shape[:1] != [_ANY_BATCH]:
            raise ValueError(
                f'{where}.x_shape: {reprlib.repr(shape)} does not start with "N"'
            )
        members = members | {"x_shape": [batch, *shape[1:]]}
    return decode_fields(where, ConvProblem, members)


def decode_perf(where: str, data: object) -> AlgoPerf:
    """Decode a measurement; the time of a failed one is null."""
    members = object_of(where, data)
    hint = _hints(AlgoPerf)["error"]
    failed = decode(f"{where}.error", hint, members.get("error")) is not None
    if failed and "time_ms" in members:
        if members["time_ms"] is not None:
            raise ValueError(f"{where}.time_ms: must be null, the row has an error")
        members = members | {"time_ms": 0.0}
    perf = decode_fields(where, AlgoPerf, members)
    for name in ("batch", "time_ms", "workspace", "noise_ms", "samples"):
        _check_range(where, name, getattr(perf, name))
    return dataclasses.replace(perf, time_ms=math.inf) if failed else perf


def _encode(value: Any) -> Any:
    if isinstance(value, AlgoPerf):
        return perf_to_dict(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if dataclasses.is_dataclass(value):
        return encode_fields(value)
    if isinstance(value, Mapping):
        return {name: _encode(item) for name, item in value.items()}
    if value is not None and not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} cannot be written as JSON")
    return value


def encode_fields(value: Any) -> dict[str, Any]:
    """Encode every field of a problem or plan as JSON values."""
    names = (f.name for f in dataclasses.fields(value) if f.init)
    members = {name: _encode(getattr(value, name)) for name in names}
    optional = _OPTIONAL.get(type(value), ())
    return {k: v for k, v in members.items() if k not in optional or v is not None}


def decode_fields(where: str, kind: Callable[..., T], data: object) -> T:
    """Decode `encode_fields`; a `ValueError` names `where` and the invalid field."""
    hints = _hints(kind)
    optional = _OPTIONAL.get(kind, {})
    names = tuple(name for name in hints if name not in optional)
    values = members_of(where, data, names, optional)
    decoded = {
        name: value
        if _is_plain(hints[name], value)
        else decode(f"{where}.{name}", hints[name], value)
        for name, value in zip((*names, *optional), values, strict=True)
    }
    try:
        return kind(**decoded)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{where}: {e}") from e


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    types_of = typing.get_type_hints(kind)
    return {f.name: types_of[f.name] for f in dataclasses.fields(kind) if f.init}


def decode(where: str, hint: Any, value: Any) -> Any:
    """Decode a value of an annotated type; a `ValueError` names `where`."""
    if hint is AlgoPerf:
        return decode_perf(where, value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode_fields(where, hint, value)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(
            decode(f"{where}[{i}]", item, v)
            for i, v in enumerate(list_of(where, value))
        )
    if typing.get_origin(hint) is Mapping:
        _, item = typing.get_args(hint)
        members = object_of(where, value)
        return {k: decode(f"{where}.{k}", item, v) for k, v in members.items()}
    if isinstance(hint, types.UnionType):
        (kind,) = (k for k in typing.get_args(hint) if k is not types.NoneType)
        return None if value is None else decode(where, kind, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            valid = ", ".join(str(member.value) for member in hint)
            raise ValueError(
                f"{where}: {reprlib.repr(value)} is not one of: {valid}"
            ) from None
    if hint is float and type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"{where}: {reprlib.repr(value)} is not finite")
        return number
    if type(value) is not hint:
        raise ValueError(
            f"{where}: {reprlib.repr(value)} is not of type {hint.__name__}"
        )
    if hint is int and abs(value) > _LARGEST:
        raise ValueError(f"{where}: {reprlib.repr(value)} does not fit in 64 bits")
    if hint is str:
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise ValueError(f"{where}: {value!r} is not Unicode: {e.reason}") from e
    return value


def _is_plain(hint: Any, value: Any) -> bool:
    """Return whether a value needs no further check: a fast path for large files."""
    kind = type(value)
    return kind is hint and (
        kind is bool
        or (kind is int and -_LARGEST <= value <= _LARGEST)
        or (kind is float and math.isfinite(value))
        or (kind is str and value.isascii())
    )


def members_of(
    where: str,
    data: object,
    names: tuple[str, ...],
    optional: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Return the members of an object that has no others.

    Args:
        where: Position named by errors.
        data: The object.
        names: Required members.
        optional: Optional members and their defaults, returned after the others.
    """
    members = object_of(where, data)
    others = optional or {}
    # Most rows have exactly the expected members, in order: the fast path.
    if tuple(members) == names:
        return (*members.values(), *others.values())
    for name in names:
        if name not in members:
            raise ValueError(f"{where}.{name}: missing")
    for name in members:
        if name not in names and name not in others:
            raise ValueError(f"{where}.{name}: unknown")
    found = {**others, **members}
    return tuple(found[name] for name in (*names, *others))


def object_of(where: str, data: Any) -> dict[str, Any]:
    """Return a JSON object, or raise a `ValueError` that names `where`."""
    if type(data) is not dict:
        raise ValueError(f"{where}: {reprlib.repr(data)} is not an object")
    return data


def list_of(where: str, data: Any) -> list[Any]:
    """Return a JSON array, or raise a `ValueError` that names `where`."""
    if type(data) is not list:
        raise ValueError(f"{where}: {reprlib.repr(data)} is not an array")
    return data


# Decode and validate rows of recordings and caches.
#
# Both are files that others may have written or damaged. A row is accepted completely
# or rejected here, so that later code can rely on valid times and names.


LayerAt = Callable[[int], ConvProblem]
"""Function from a batch size to the convolution."""

_EXTRA = {"measured_at": float, "version": str}
_VERDICT = {"batch": int, "signature": str, "ratio": float}
_RACE = {"raced": str, "first_ms": float, "second_ms": float, "measured_at": float}


def decode_row(
    where: str, fingerprint: object, layer_at: LayerAt, data: object
) -> Measurement:
    """Decode a row, or raise a `ValueError` that names the invalid member.

    `data` has the fields of an `AlgoPerf`, `measured_at` and `version`.
    """
    members = object_of(where, data)
    extra = {name: members[name] for name in _EXTRA if name in members}
    measured_at, version = decode_members(where, extra, _EXTRA)
    rest = {name: value for name, value in members.items() if name not in _EXTRA}
    perf = decode_perf(where, rest)
    return Measurement(
        fingerprint=decode(f"{where}.fingerprint", str, fingerprint),
        problem=layer_at(perf.batch),
        perf=perf,
        measured_at=measured_at,
        version=version,
    )


def decode_verdict(
    where: str, fingerprint: object, layer_at: LayerAt, data: object
) -> Verdict:
    """Decode the verdict on a plan; see `decode_row`."""
    batch, plans, ratio = decode_members(where, data, _VERDICT)
    return Verdict(
        fingerprint=decode(f"{where}.fingerprint", str, fingerprint),
        problem=layer_at(batch),
        signature=plans,
        ratio=ratio,
    )


def decode_race(where: str, fingerprint: object, data: object) -> Race:
    """Decode a race; see `decode_row`."""
    raced, first, second, measured_at = decode_members(where, data, _RACE)
    return Race(
        fingerprint=decode(f"{where}.fingerprint", str, fingerprint),
        raced=raced,
        times_ms=(first, second),
        measured_at=measured_at,
    )


def decode_members(
    where: str, data: object, kinds: Mapping[str, type]
) -> tuple[Any, ...]:
    """Return the members of an object, of these types and in their ranges."""
    values = zip(kinds.items(), members_of(where, data, tuple(kinds)), strict=True)
    return tuple(decode_in_range(where, *kind, value) for kind, value in values)


def decode_in_range(where: str, name: str, kind: Any, value: object) -> Any:
    """Decode one member, which is in its range."""
    found = decode(f"{where}.{name}", kind, value)
    if name in _RANGES:
        _check_range(where, name, found)
    return found


def _check_range(where: str, name: str, value: Any) -> None:
    least, most = _RANGES[name]
    if value < least:
        raise ValueError(f"{where}.{name}: {value} is below {least}")
    if value > most:
        raise ValueError(f"{where}.{name}: {value} is above {most:g}")
