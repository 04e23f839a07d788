"""Recordings: files of measurements that one machine makes and others read.

Measurements are grouped by device and convolution, so that long keys are written
once. `environment` says in free words what else is known of the device (versions,
driver, clocks); it is no part of the fingerprint, and may be empty::

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

What else decides a plan stands only where there is any: `split_alignment`, the bytes
that micro-batches must be aligned to, `verdicts`, what became of plans when they were
run whole, and `races`, what two ways to compute something else took.

It may be compressed with gzip. A cache imports it, a backend answers from it; nothing
here touches a file.
"""

import functools
import gzip
import io
import json
import reprlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mucudnn.codecs.rows import (
    LayerAt,
    count_of,
    decode_race,
    decode_row,
    decode_verdict,
)
from mucudnn.codecs.values import (
    decode,
    decode_layer,
    list_of,
    load_json,
    members_of,
    object_of,
    perf_to_dict,
    problem_key,
)
from mucudnn.ir.measurement import Measurement, Race, Recording, Verdict

__all__ = [
    "MOST",
    "SCHEMA",
    "format_recording",
    "read_recording",
    "recorded_environments",
    "recorded_schema",
]

_KIND = "mucudnn-recording"
SCHEMA = 2
_GZIP_MAGIC = b"\x1f\x8b"
MOST = 1 << 29
"""Bytes a recording may have, packed or unpacked."""
_DEVICE = ("fingerprint", "environment", "problems")


def format_recording(
    measurements: Iterable[Measurement],
    environments: Mapping[str, Mapping[str, str]] | None = None,
    *,
    alignments: Mapping[str, int] | None = None,
    verdicts: Iterable[Verdict] = (),
    races: Iterable[Race] = (),
    compress: bool = False,
) -> bytes:
    """A recording as bytes; the same measurements always give the same bytes.

    Args:
        measurements: Any number, of any number of devices.
        environments: By fingerprint, what else is known of a device.
        alignments: By fingerprint, bytes that micro-batches are aligned to.
        verdicts: On plans for what was measured.
        races: Of the same devices, or others.
        compress: With gzip.
    """
    known, aligned = environments or {}, alignments or {}
    devices: dict[str, dict[str, _Lines]] = {}
    key_of = functools.cache(problem_key)

    def lines(of: Measurement | Verdict) -> _Lines:
        problems = devices.setdefault(of.fingerprint, {})
        return problems.setdefault(key_of(of.problem), _Lines([], []))

    for m in measurements:
        row = perf_to_dict(m.perf)
        row |= {"measured_at": m.measured_at, "version": m.version}
        lines(m).rows.append(_dumps(row))
    for v in verdicts:
        members = {"batch": v.problem.batch, "signature": v.signature, "ratio": v.ratio}
        lines(v).verdicts.append(_dumps(members))
    raced: dict[str, list[str]] = {}
    for r in races:
        first, second = r.times_ms
        members = {"raced": r.raced, "first_ms": first, "second_ms": second}
        line = _dumps(members | {"measured_at": r.measured_at})
        devices.setdefault(r.fingerprint, {})
        raced.setdefault(r.fingerprint, []).append(line)
    text = f'{{"kind": "{_KIND}", "schema": {SCHEMA}, "devices": [' + ",".join(
        f'\n{{"fingerprint": {_dumps(name)}, '
        f'"environment": {_dumps(dict(known.get(name, {})))}, '
        + (f'"split_alignment": {aligned[name]}, ' if name in aligned else "")
        + '"problems": ['
        + ",".join(_problem_text(key, lines) for key, lines in problems.items())
        + "]"
        + (',\n"races": [\n' + ",\n".join(raced[name]) + "]" if name in raced else "")
        + "}"
        for name, problems in devices.items()
    )
    data = f"{text}]}}\n".encode()
    return gzip.compress(data, compresslevel=6, mtime=0) if compress else data


class _Lines(NamedTuple):
    """What is written of one convolution."""

    rows: list[str]
    verdicts: list[str]


def _problem_text(key: str, lines: _Lines) -> str:
    judged = ',\n"verdicts": [\n' + ",\n".join(lines.verdicts) + "]"
    return (
        f'\n{{"problem": {key}, "rows": [\n'
        + ",\n".join(lines.rows)
        + ("]" + judged if lines.verdicts else "]")
        + "}"
    )


def read_recording(data: bytes) -> Recording:
    """Read and check a whole recording, compressed or not.

    Raises:
        ValueError: It is truncated, no recording, or wrong in some field; the message
            says where.
    """
    devices = _devices(data)
    measurements: list[Measurement] = []
    verdicts: list[Verdict] = []
    races: list[Race] = []
    for device in devices:
        where = f"{device.where}.problems"
        for i, entry in enumerate(list_of(where, device.problems)):
            there, name = f"{where}[{i}]", device.fingerprint
            layer, rows, judged = members_of(
                there, entry, ("problem", "rows"), {"verdicts": []}
            )
            layer_at = _sizes_of(f"{there}.problem", layer)
            for j, row in enumerate(list_of(f"{there}.rows", rows)):
                found = decode_row(f"{there}.rows[{j}]", name, layer_at, row)
                measurements.append(found)
            for j, row in enumerate(list_of(f"{there}.verdicts", judged)):
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
    """What is known of each device, by fingerprint, in order; rows are not checked.

    Raises:
        ValueError: It is truncated or no recording.
    """
    return {device.fingerprint: device.environment for device in _devices(data)}


def recorded_schema(data: bytes) -> float | None:
    """The schema number of a recording, of whatever version; None if it is none."""
    try:
        document = load_json(_text(data))
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        return None
    return _schema_of(document)


def _schema_of(document: Mapping[str, Any]) -> float:
    """What is no number no version wrote; 0."""
    schema = document.get("schema")
    return schema if isinstance(schema, int | float) else 0


class _Device(NamedTuple):
    """One device, and where it is in the file; its problems are not checked yet."""

    where: str
    fingerprint: str
    environment: dict[str, str]
    split_alignment: int | None
    problems: Any
    races: Any


def _devices(data: bytes) -> list[_Device]:
    document = load_json(_text(data))
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise ValueError(f'no recording: it lacks "kind": "{_KIND}"')
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        newer = "; a newer one wrote it" if _schema_of(document) > SCHEMA else ""
        raise ValueError(
            f"its schema is {reprlib.repr(schema)}, this version reads {SCHEMA}{newer}"
        )
    _, _, entries = members_of("recording", document, ("kind", "schema", "devices"))
    found = [
        _decode_device(f"devices[{i}]", entry)
        for i, entry in enumerate(list_of("devices", entries))
    ]
    names = [device.fingerprint for device in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"devices[{i}].fingerprint: {name!r} occurs twice")
    return found


def _decode_device(where: str, data: object) -> _Device:
    name, environment, problems, alignment, races = members_of(
        where, data, _DEVICE, {"split_alignment": None, "races": []}
    )
    if alignment is not None:
        alignment = count_of(f"{where}.split_alignment", alignment)
    return _Device(
        where,
        decode(f"{where}.fingerprint", str, name),
        _decode_environment(f"{where}.environment", environment),
        alignment,
        problems,
        races,
    )


def _decode_environment(where: str, data: object) -> dict[str, str]:
    return {
        decode(where, str, name): decode(f"{where}.{name}", str, value)
        for name, value in object_of(where, data).items()
    }


def _text(data: bytes) -> str:
    """Unpacked if need be; a file that was packed to burst is not."""
    if data.startswith(_GZIP_MAGIC):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MOST + 1)
        except (OSError, EOFError, zlib.error) as e:
            raise ValueError(f"damaged gzip data: {e}") from e
    if len(data) > MOST:
        raise ValueError(f"it has more than {MOST:,} bytes")
    return data.decode()


def _sizes_of(where: str, data: object) -> LayerAt:
    """A convolution by its batch size, each made once: files have many rows."""
    return functools.cache(decode_layer(where, data, 1).with_batch)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
