"""Decode and validate rows of recordings and caches.

Both are files that others may have written or damaged. A row is accepted completely or
rejected here, so that later code can rely on valid times and names.
"""

from collections.abc import Callable
from typing import Any

from mucudnn.codecs.values import decode, decode_perf, members_of, object_of
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.measurement import Measurement, Race, Verdict

__all__ = [
    "LATEST",
    "LONGEST_MS",
    "LayerAt",
    "check_times",
    "count_of",
    "decode_race",
    "decode_row",
    "decode_verdict",
]

LATEST = 253_402_300_799.0
"""Last second of the year 9999 in seconds since 1970, the limit of calendars."""

LONGEST_MS = 1e12
"""Longest time in milliseconds (30 years), so that sums of times stay finite."""

LayerAt = Callable[[int], ConvProblem]
"""Function from a batch size to the convolution."""

_EXTRA = {"measured_at": float, "version": str}
_LARGEST_RATIO = 1e9


def decode_row(
    where: str, fingerprint: object, layer_at: LayerAt, data: object
) -> Measurement:
    """Decode a row, or raise a `ValueError` that names the invalid member.

    `data` has the fields of an `AlgoPerf`, `measured_at` and `version`.
    """
    members = object_of(where, data)
    extra = {name: members[name] for name in _EXTRA if name in members}
    values = members_of(where, extra, tuple(_EXTRA))
    measured_at, version = (
        decode(f"{where}.{name}", hint, value)
        for (name, hint), value in zip(_EXTRA.items(), values, strict=True)
    )
    _check_stamp(where, measured_at)
    rest = {name: value for name, value in members.items() if name not in _EXTRA}
    perf = decode_perf(where, rest)
    check_times(where, perf)
    return Measurement(
        fingerprint=decode(f"{where}.fingerprint", str, fingerprint),
        problem=layer_at(perf.batch),
        perf=perf,
        measured_at=measured_at,
        version=version,
    )


def check_times(where: str, perf: AlgoPerf) -> None:
    """Raise a `ValueError` if a time is out of range; failed rows have none."""
    times = {"noise_ms": perf.noise_ms}
    if perf.error is None:
        times["time_ms"] = perf.time_ms
    for name, ms in times.items():
        if ms > LONGEST_MS:
            raise ValueError(f"{where}.{name}: {ms} is above {LONGEST_MS:g}")


def decode_verdict(
    where: str, fingerprint: object, layer_at: LayerAt, data: object
) -> Verdict:
    """Decode the verdict on a plan; see `decode_row`."""
    batch, plans, ratio = members_of(where, data, ("batch", "signature", "ratio"))
    found = Verdict(
        fingerprint=decode(f"{where}.fingerprint", str, fingerprint),
        problem=layer_at(count_of(f"{where}.batch", batch)),
        signature=decode(f"{where}.signature", str, plans),
        ratio=decode(f"{where}.ratio", float, ratio),
    )
    if found.ratio < 0:
        raise ValueError(f"{where}.ratio: {found.ratio} is below 0")
    if found.ratio > _LARGEST_RATIO:
        raise ValueError(f"{where}.ratio: {found.ratio} is above {_LARGEST_RATIO:g}")
    return found


def decode_race(where: str, fingerprint: object, data: object) -> Race:
    """Decode a race; see `decode_row`."""
    names = ("raced", "first_ms", "second_ms", "measured_at")
    raced, *times, measured_at = members_of(where, data, names)
    first, second = (
        decode(f"{where}.{name}", float, ms)
        for name, ms in zip(names[1:3], times, strict=True)
    )
    for name, ms in zip(names[1:3], (first, second), strict=True):
        if not 0 <= ms <= LONGEST_MS:
            raise ValueError(f"{where}.{name}: {ms} is not from 0 to {LONGEST_MS:g}")
    stamp: float = decode(f"{where}.measured_at", float, measured_at)
    _check_stamp(where, stamp)
    return Race(
        fingerprint=decode(f"{where}.fingerprint", str, fingerprint),
        raced=decode(f"{where}.raced", str, raced),
        times_ms=(first, second),
        measured_at=stamp,
    )


def _check_stamp(where: str, measured_at: float) -> None:
    if not 0 <= measured_at <= LATEST:
        raise ValueError(
            f"{where}.measured_at: {measured_at} is not from 0 to {LATEST:.0f}, "
            "seconds from the year 1970 to 9999"
        )


def count_of(where: str, data: Any) -> int:
    """Decode an integer of at least 1."""
    number: int = decode(where, int, data)
    if number < 1:
        raise ValueError(f"{where}: {number} is below 1")
    return number
