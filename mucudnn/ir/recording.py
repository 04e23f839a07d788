"""Recordings: files of measurements that one machine makes and others read.

Measurements are grouped by device and convolution, so that long keys are written
once. `environment` says in free words what else is known of the device (versions,
driver, clocks); it is no part of the fingerprint, and may be empty::

    {"kind": "mucudnn-recording", "schema": 2, "devices": [
      {"fingerprint": "…", "environment": {"driver": "580.65", …}, "problems": [
        {"problem": {"direction": "forward", "x_shape": ["N", 3, 32, 32], …},
         "rows": [{"algo": "GEMM", "batch": 8, "time_ms": 0.5, …,
                   "measured_at": 1700000000.0, "version": "0.1.0"}]}]}]}

It may be compressed with gzip. A cache imports it, a backend answers from it; nothing
here touches a file.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.serial import (
    decode,
    decode_layer,
    decode_perf,
    list_of,
    load_json,
    members_of,
    object_of,
    perf_to_dict,
    problem_key,
)

__all__ = [
    "KIND",
    "SCHEMA",
    "Measurement",
    "format_recording",
    "parse_recording",
    "recorded_environments",
    "recorded_fingerprints",
]

KIND = "mucudnn-recording"
SCHEMA = 2
_GZIP_MAGIC = b"\x1f\x8b"
_EXTRA = {"measured_at": float, "version": str}


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


def format_recording(
    measurements: Iterable[Measurement],
    environments: Mapping[str, Mapping[str, str]] | None = None,
    *,
    compress: bool = False,
) -> bytes:
    """A recording as bytes; the same measurements always give the same bytes.

    Args:
        measurements: Any number, of any number of devices.
        environments: By fingerprint, what else is known of a device.
        compress: With gzip.
    """
    known = environments or {}
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
        f'\n{{"fingerprint": {_dumps(fingerprint)}, '
        f'"environment": {_dumps(dict(known.get(fingerprint, {})))}, "problems": ['
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
    for where, fingerprint, _, problems in _devices(data):
        for i, entry in enumerate(list_of(f"{where}.problems", problems)):
            there = f"{where}.problems[{i}]"
            layer, rows = members_of(there, entry, ("problem", "rows"))
            base = decode_layer(f"{there}.problem", layer, 1)
            at_batch: dict[int, ConvProblem] = {}
            for j, row in enumerate(list_of(f"{there}.rows", rows)):
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
    return tuple(recorded_environments(data))


def recorded_environments(data: bytes) -> dict[str, dict[str, str]]:
    """What is known of each device, by fingerprint, in order; rows are not checked.

    Raises:
        ValueError: It is truncated or no recording.
    """
    return {name: environment for _, name, environment, _ in _devices(data)}


def _devices(data: bytes) -> list[tuple[str, str, dict[str, str], Any]]:
    """Where each device is, its fingerprint, environment and problems."""
    document = load_json(_text(data))
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ValueError(f'no recording: it lacks "kind": "{KIND}"')
    if document.get("schema") != SCHEMA:
        raise ValueError(
            f"its schema is {document.get('schema')!r}, this version reads {SCHEMA}"
        )
    _, _, devices = members_of("recording", document, ("kind", "schema", "devices"))
    found = []
    for i, device in enumerate(list_of("devices", devices)):
        where = f"devices[{i}]"
        name, environment, problems = members_of(
            where, device, ("fingerprint", "environment", "problems")
        )
        fingerprint = decode(f"{where}.fingerprint", str, name)
        facts = _decode_environment(f"{where}.environment", environment)
        found.append((where, fingerprint, facts, problems))
    names = [fingerprint for _, fingerprint, *_ in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"devices[{i}].fingerprint: {name!r} occurs twice")
    return found


def _decode_environment(where: str, data: object) -> dict[str, str]:
    return {
        decode(where, str, name): decode(f"{where}.{name}", str, value)
        for name, value in object_of(where, data).items()
    }


def _text(data: bytes) -> str:
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as e:
            raise ValueError(f"damaged gzip data: {e}") from e
    return data.decode()


def _decode_row(where: str, data: object) -> tuple[AlgoPerf, float, str]:
    members = object_of(where, data)
    extra = {name: members[name] for name in _EXTRA if name in members}
    measured_at, version = (
        decode(f"{where}.{name}", hint, value)
        for (name, hint), value in zip(
            _EXTRA.items(), members_of(where, extra, tuple(_EXTRA)), strict=True
        )
    )
    perf = {name: value for name, value in members.items() if name not in _EXTRA}
    return decode_perf(where, perf), measured_at, version


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
