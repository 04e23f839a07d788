"""Rows in and out of the tables of a cache's file.

A row of `layer` is a device and a convolution without its batch size; rows of the other
tables belong to one. Statements speak of a layer by fingerprint and problem.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from mucudnn.codecs.rows import LATEST, LayerAt, decode_row, decode_verdict
from mucudnn.codecs.values import decode, perf_to_dict, problem_from_key
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.measurement import Measurement, Verdict

__all__ = [
    "OF_ALL",
    "OF_BATCH",
    "OF_LAYER",
    "PERF",
    "PLAN_TEXT",
    "PUT_LAYER",
    "UNLESS_NEWER",
    "VERDICT",
    "Table",
    "perf_values",
]

T = TypeVar("T")
_LayerOf = Callable[[object], LayerAt]

PUT_LAYER = "INSERT OR IGNORE INTO layer (fingerprint, problem) VALUES (?, ?)"
OF_ALL = "(?1 IS NULL OR fingerprint = ?1) AND (?2 IS NULL OR problem = ?2)"
OF_LAYER = "fingerprint = ? AND problem = ?"
OF_BATCH = f"{OF_LAYER} AND batch = ?"


@dataclass(frozen=True, slots=True)
class Table(Generic[T]):
    """One table whose rows belong to layers.

    Attributes:
        name: In the file.
        columns: Those of a row, after its layer; the first ones are its key.
        keys: How many these are.
        decoded: Checks a row: what makes layers, fingerprint, problem, the columns.
    """

    name: str
    columns: tuple[str, ...]
    keys: int
    decoded: Callable[..., T]

    def insert(self, conflict: str = "OR REPLACE") -> str:
        """A statement that takes a fingerprint, a problem and the columns."""
        layer = f"(SELECT id FROM layer WHERE {OF_LAYER})"
        return (
            f"INSERT {conflict} INTO {self.name} (layer, {', '.join(self.columns)}) "
            f"VALUES ({layer}, {', '.join('?' * len(self.columns))})"
        )

    def select(self, condition: str) -> str:
        """A statement that gives a fingerprint, a problem and the columns."""
        columns = ", ".join(f"{self.name}.{column}" for column in self.columns)
        order = ", ".join(self.columns[: self.keys])
        return (
            f"SELECT fingerprint, problem, {columns} FROM layer JOIN {self.name} "
            f"ON layer = id WHERE {condition} ORDER BY fingerprint, problem, {order}"
        )

    def decode(self, rows: Iterable[Sequence[Any]]) -> list[T | ValueError]:
        """What rows say, or what is wrong with them."""
        layer_of = functools.cache(_layer_at)
        found: list[T | ValueError] = []
        for row in rows:
            try:
                found.append(self.decoded(layer_of, *row))
            except ValueError as e:
                found.append(e)
        return found


def perf_values(perf: AlgoPerf) -> tuple[Any, ...]:
    """The columns of a row of `PERF`, but for when and by which version."""
    values = perf_to_dict(perf)
    values["notes"] = " ".join(perf.notes)
    key = [values.pop(name) for name in _PERF_KEY]
    return (*key, *values.values())


def _layer_at(key: object) -> LayerAt:
    """A convolution by its batch size, each made once: files have many rows."""
    text: str = decode("problem", str, key)
    return functools.cache(problem_from_key(text, 1).with_batch)


def _measurement(
    layer_of: _LayerOf, fingerprint: object, key: object, *values: Any
) -> Measurement:
    """A row as recordings have it, and so under the same rules."""
    data = dict(zip(PERF.columns, values, strict=True))
    if data["deterministic"] in (0, 1):
        data["deterministic"] = bool(data["deterministic"])
    if isinstance(data["notes"], str):
        data["notes"] = data["notes"].split()
    where = f"{fingerprint!r}, {data['algo']!r} at {data['batch']!r}"
    return decode_row(where, fingerprint, layer_of(key), data)


def _verdict(
    layer_of: _LayerOf,
    fingerprint: object,
    key: object,
    batch: object,
    signature: object,
    ratio: object,
    _: object,
) -> Verdict:
    data = {"batch": batch, "signature": signature, "ratio": ratio}
    where = f"{fingerprint!r}, {signature!r}"
    return decode_verdict(where, fingerprint, layer_of(key), data)


def _plan_text(*row: object) -> str:
    text: str = decode("plan text", str, row[-1])
    return text


_PERF_KEY = ("batch", "algo", "math_mode")
_PERF_REST = (f.name for f in fields(AlgoPerf) if f.name not in _PERF_KEY)
PERF = Table(
    "perf", (*_PERF_KEY, *_PERF_REST, "measured_at", "version"), 3, _measurement
)
PLAN_TEXT = Table("plan_text", ("batch", "algo", "text"), 2, _plan_text)
VERDICT = Table(  # files call the ratio a time
    "verdict", ("batch", "signature", "time_ms", "measured_at"), 2, _verdict
)
UNLESS_NEWER = f"""ON CONFLICT DO UPDATE SET
{", ".join(f"{name} = excluded.{name}" for name in PERF.columns)}
WHERE excluded.measured_at > perf.measured_at
OR NOT perf.measured_at BETWEEN 0 AND {LATEST}"""
"""After an insertion into `PERF`: the newest measurement wins."""
