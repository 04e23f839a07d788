"""What a cache's database is: its tables as they are made, and rows in and out of them.

A row of `layer` is a device and a convolution without its batch size, or what was raced
there; rows of the other tables belong to one. Statements speak of a layer by
fingerprint and problem.

A database that has the right identity but other tables, or triggers, is not trusted:
what else its statements say would be obeyed, too.
"""

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from mucudnn.codecs.rows import (
    LATEST,
    LONGEST_MS,
    LayerAt,
    decode_race,
    decode_row,
    decode_verdict,
)
from mucudnn.codecs.values import decode, perf_to_dict, problem_from_key
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.measurement import Measurement, Race, Verdict

__all__ = [
    "OF_ALL",
    "OF_ANY_DEVICE",
    "OF_BATCH",
    "OF_LAYER",
    "PERF",
    "PLAN_TEXT",
    "PUT_LAYER",
    "RACE",
    "SCHEMA",
    "UNLESS_KNOWN",
    "UNLESS_NEWER",
    "VERDICT",
    "ForeignError",
    "NewerError",
    "Table",
    "UnusableError",
    "add_missing",
    "check_tables",
    "create",
    "has_table",
    "in_memory",
    "is_empty",
    "perf_values",
]

_APPLICATION_ID = int.from_bytes(b"muCD", "big")
_IDENTITY = """SELECT application_id, user_version,
  (SELECT count(*) FROM sqlite_master)
FROM pragma_application_id, pragma_user_version"""
_VERSION = 3
SCHEMA = {
    "layer": """CREATE TABLE layer (
  id INTEGER PRIMARY KEY,
  fingerprint TEXT NOT NULL,
  problem TEXT NOT NULL,
  UNIQUE (fingerprint, problem)
)""",
    "perf": """CREATE TABLE perf (
  layer INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  algo TEXT NOT NULL,
  math_mode TEXT NOT NULL,
  notes TEXT NOT NULL,
  time_ms REAL,
  workspace INTEGER NOT NULL,
  deterministic INTEGER NOT NULL,
  error TEXT,
  noise_ms REAL NOT NULL,
  samples INTEGER NOT NULL,
  measured_at REAL NOT NULL,
  version TEXT NOT NULL,
  PRIMARY KEY (layer, batch, algo, math_mode),
  CHECK ((time_ms IS NULL) = (error IS NOT NULL))
) WITHOUT ROWID""",
    "plan_text": """CREATE TABLE plan_text (
  layer INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  algo TEXT NOT NULL,
  text TEXT NOT NULL,
  PRIMARY KEY (layer, batch, algo)
) WITHOUT ROWID""",
    "race": """CREATE TABLE race (
  layer INTEGER PRIMARY KEY,
  first_ms REAL NOT NULL,
  second_ms REAL NOT NULL,
  measured_at REAL NOT NULL
)""",
    "verdict": """CREATE TABLE verdict (
  layer INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  signature TEXT NOT NULL,
  time_ms REAL NOT NULL,
  measured_at REAL NOT NULL,
  PRIMARY KEY (layer, batch, signature)
) WITHOUT ROWID""",
}


_ADDED = "race"
"""Files of this schema may be from before there was such a table."""


class UnusableError(Exception):
    """The file is a database, but lacks a table or a column."""


class ForeignError(UnusableError):
    """The database is another application's, or of another schema version."""


class NewerError(Exception):
    """The database is ours, of a later schema version."""


def in_memory() -> sqlite3.Connection:
    """A database of ours that no file has."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    create(db)
    return db


def create(db: sqlite3.Connection) -> None:
    """Make a new database ours."""
    for statement in SCHEMA.values():
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {_VERSION}")


def is_empty(db: sqlite3.Connection) -> bool:
    """Whether the database is new; ForeignError if it is not ours."""
    # One statement: between two, another process could create the tables.
    application, version, tables = db.execute(_IDENTITY).fetchone()
    if application == _APPLICATION_ID:
        if version > _VERSION:
            raise NewerError(
                f"a newer version of mucudnn wrote it (schema {version}, this one "
                f"reads {_VERSION}); it stays as it is"
            )
        if version != _VERSION:
            raise ForeignError(
                f"its schema version is {version}, this one reads {_VERSION}"
            )
        return False
    if application or version or tables:
        raise ForeignError("it is the database of another application")
    return True


def add_missing(db: sqlite3.Connection) -> None:
    """Make a database of ours what it would be now; what is altered stays so."""
    if not has_table(db, _ADDED):
        db.execute(SCHEMA[_ADDED].replace("TABLE", "TABLE IF NOT EXISTS", 1))


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Whether there is a table of that name."""
    return bool(_made_by(db, name))


def check_tables(db: sqlite3.Connection) -> None:
    """Tables as they were made: what else a statement says would be obeyed, too."""
    with contextlib.closing(in_memory()) as model:
        for table in SCHEMA:
            if _made_by(db, table) != _made_by(model, table):
                raise UnusableError(f"table {table} is missing or altered")
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger'"
    if db.execute(query).fetchone() != (0,):
        raise UnusableError("there are triggers in it")


def _made_by(db: sqlite3.Connection, table: str) -> list[tuple[str]]:
    """The statement that made a table."""
    query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
    return db.execute(query, (table,)).fetchall()


T = TypeVar("T")
_LayerOf = Callable[[object], LayerAt]

PUT_LAYER = "INSERT OR IGNORE INTO layer (fingerprint, problem) VALUES (?, ?)"
OF_ANY_DEVICE = "fingerprint = coalesce(?, fingerprint)"
OF_ALL = f"{OF_ANY_DEVICE} AND problem = coalesce(?, problem)"
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


def _race(_: _LayerOf, fingerprint: object, raced: object, *values: object) -> Race:
    data = {"raced": raced, **dict(zip(RACE.columns, values, strict=True))}
    return decode_race(f"{fingerprint!r}, {raced!r}", fingerprint, data)


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
RACE = Table("race", ("first_ms", "second_ms", "measured_at"), 1, _race)
UNLESS_KNOWN = f"""ON CONFLICT DO UPDATE SET
{", ".join(f"{name} = excluded.{name}" for name in RACE.columns)}
WHERE NOT (race.first_ms BETWEEN 0 AND {LONGEST_MS}
AND race.second_ms BETWEEN 0 AND {LONGEST_MS}
AND race.measured_at BETWEEN 0 AND {LATEST})"""
"""After an insertion into `RACE`: what is there stays, but for what is damaged."""
UNLESS_NEWER = f"""ON CONFLICT DO UPDATE SET
{", ".join(f"{name} = excluded.{name}" for name in PERF.columns)}
WHERE excluded.measured_at > perf.measured_at
OR NOT perf.measured_at BETWEEN 0 AND {LATEST}"""
"""After an insertion into `PERF`: the newest measurement wins."""
