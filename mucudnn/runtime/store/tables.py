"""Schema of the cache's database: table definitions, and encoding of rows.

A row of `layer` is a device and a convolution without its batch size, or the name of a
race; rows of most tables refer to one. SQL statements address a layer by fingerprint
and problem. A row of `entries` is a value of another kind by its key.

A database with the right identity but other tables, or with triggers, is rejected:
SQLite would execute whatever else its schema contains.

SQLite has no checksums, so a flipped bit would silently change a time or a key. The
lowest 16 bits of `measured_at` (16 ms) are therefore a checksum of the row and its
layer. Table `checked` has the time since when rows carry one. A plan text carries its
checksum as a suffix, an entry as a prefix.
"""

import contextlib
import functools
import hashlib
import math
import re
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any, Generic, TypeVar

from mucudnn import codecs
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.measurement import Measurement, Race, Verdict

_APPLICATION_ID = int.from_bytes(b"muCD", "big")
_IDENTITY = """SELECT application_id, user_version,
  (SELECT count(*) FROM sqlite_master)
FROM pragma_application_id, pragma_user_version"""
_VERSION = 3
SCHEMA = {
    statement.split()[2]: statement
    for statement in re.findall(
        r"^CREATE [^;]+",
        files("mucudnn.runtime.store").joinpath("schema.sql").read_text("utf-8"),
        re.MULTILINE,
    )
}
"""Table -> the statement that creates it."""

_ADDED = ("race", "checked", "entries")
"""Tables that older files of the same schema version lack."""

_SINCE = "INSERT OR REPLACE INTO checked VALUES (0, ?)"
_CHECKSUM = 0xFFFF


class UnusableError(Exception):
    """The database lacks a table or a column, or is damaged."""


class ForeignError(UnusableError):
    """The database belongs to another application, or has another schema version."""


class NewerError(Exception):
    """The database has a later schema version of ours."""


def in_memory() -> sqlite3.Connection:
    """Return a new database in memory with our schema."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    create(db)
    return db


def create(db: sqlite3.Connection) -> None:
    """Create our tables and identity in an empty database."""
    for statement in SCHEMA.values():
        db.execute(statement)
    db.execute(_SINCE, (0.0,))
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {_VERSION}")


def is_empty(db: sqlite3.Connection) -> bool:
    """Return whether the database is new; raise `ForeignError` if it is not ours."""
    # One statement, as another process could create the tables between two.
    application, version, tables = db.execute(_IDENTITY).fetchone()
    if application == _APPLICATION_ID:
        if version > _VERSION:
            raise NewerError(
                f"a newer version of mucudnn wrote it (schema {version}, this one "
                f"reads {_VERSION}); it is not changed"
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
    """Create the tables that older files lack; altered tables stay as they are."""
    for table in _ADDED:
        if not _create_statements(db, table):
            db.execute(SCHEMA[table].replace("TABLE", "TABLE IF NOT EXISTS", 1))
            if table == "checked":
                db.execute(_SINCE, (time.time(),))


def check_tables(db: sqlite3.Connection) -> None:
    """Raise `UnusableError` unless tables are as created and there are no triggers."""
    with contextlib.closing(in_memory()) as model:
        for table in SCHEMA:
            found = _create_statements(db, table)
            if not found and table in _ADDED:
                continue
            if found != _create_statements(model, table):
                raise UnusableError(f"table {table} is missing or altered")
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger'"
    if db.execute(query).fetchone() != (0,):
        raise UnusableError("there are triggers in it")


def check_contents(db: sqlite3.Connection) -> None:
    """Raise `UnusableError` where rows may be missing; SQLite would not report it."""
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise UnusableError(f"it is damaged: {found.splitlines()[-1]}")
    for table in TABLES:
        query = f"SELECT 1 FROM {table.name} WHERE layer NOT IN (SELECT id FROM layer)"
        if db.execute(f"{query} LIMIT 1").fetchone() is not None:
            raise UnusableError(f"it is damaged: rows of {table.name} have no layer")


def checked_since(db: sqlite3.Connection) -> float:
    """Return since when rows have checksums, in seconds since 1970.

    Infinity for a file of an older version that cannot be written, as no row has one; 0
    where the time is unreadable, so that all rows are checked.
    """
    if not _create_statements(db, "checked"):
        return math.inf
    found = db.execute("SELECT since FROM checked WHERE id = 0").fetchone()
    return found[0] if found and isinstance(found[0], float) else 0.0


def salvage(source: sqlite3.Connection, target: sqlite3.Connection) -> int:
    """Copy the sound rows of a possibly damaged database; return their number."""
    target.execute(_SINCE, (since := checked_since(source),))
    # Layers get other numbers in the new file: rows name them in full.
    layers = {key: names for key, *names in _rows(source, "layer", _LAYER, 1)}
    target.executemany(PUT_LAYER, (n for n in layers.values() if len(n) == 2))
    count = 0
    for table in TABLES:
        if not _create_statements(source, table.name):
            continue
        found = _rows(source, table.name, ("layer", *table.columns), table.keys + 1)
        named = [(*layers[layer], *row) for layer, *row in found if layer in layers]
        sound = [row for row in named if table.is_sound(row, since)]
        count += target.executemany(table.insert("OR IGNORE"), sound).rowcount
    if _create_statements(source, "entries"):
        columns = "rowid", "kind", "key", "value", "used_at"
        for _, *entry in _rows(source, "entries", columns, 1):
            with contextlib.suppress(ValueError):
                unseal_entry(*entry[:3])
                insert = "INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?)"
                count += target.execute(insert, entry).rowcount
    return count


def seal_entry(kind: str, key: str, data: bytes) -> bytes:
    """Return the data of an entry, prefixed by a checksum of key and data."""
    return hashlib.sha256(f"{kind}\0{key}\0".encode() + data).digest() + data


def unseal_entry(kind: object, key: object, value: object) -> bytes:
    """Return the data of `seal_entry`, or raise a `ValueError` if it is damaged."""
    if not (isinstance(kind, str) and isinstance(key, str) and type(value) is bytes):
        raise ValueError("a column has another type than was written")
    data = value[hashlib.sha256().digest_size :]
    if seal_entry(kind, key, data) != value:
        raise ValueError("its contents are not what was written for it")
    return data


def _rows(
    db: sqlite3.Connection, name: str, columns: Sequence[str], keys: int
) -> Iterable[tuple[Any, ...]]:
    """Return the readable rows of a table, read from its beginning and its end."""
    found: dict[tuple[Any, ...], None] = {}
    for way in ("ASC", "DESC"):
        order = ", ".join(f"{column} {way}" for column in columns[:keys])
        query = f"SELECT {', '.join(columns)} FROM {name} NOT INDEXED ORDER BY {order}"
        with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError):
            for row in db.execute(query):
                found[row] = None
    return found


def _create_statements(db: sqlite3.Connection, table: str) -> list[tuple[str]]:
    """Return the statement that created a table; nothing if there is none."""
    query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
    return db.execute(query, (table,)).fetchall()


T = TypeVar("T")
_LAYER = ("id", "fingerprint", "problem")
_STAMP, _MARK = "measured_at", "\n#"
_LayerOf = Callable[[object], codecs.LayerAt]

PUT_LAYER = "INSERT OR IGNORE INTO layer (fingerprint, problem) VALUES (?, ?)"
OF_ANY_DEVICE = "fingerprint = coalesce(?, fingerprint)"
OF_ALL = f"{OF_ANY_DEVICE} AND problem = coalesce(?, problem)"
OF_LAYER = "fingerprint = ? AND problem = ?"
OF_BATCH = f"{OF_LAYER} AND batch = ?"


@dataclass(frozen=True, slots=True)
class Table(Generic[T]):
    """A table whose rows belong to layers.

    Attributes:
        name: Name in the database.
        columns: Columns after the layer; the first `keys` are the key.
        keys: Number of key columns.
        decoded: Decoder of a row: (layer factory, fingerprint, problem, *columns).
    """

    name: str
    columns: tuple[str, ...]
    keys: int
    decoded: Callable[..., T]

    def insert(self, conflict: str = "OR REPLACE") -> str:
        """Return an INSERT that takes fingerprint, problem and the columns."""
        layer = f"(SELECT id FROM layer WHERE {OF_LAYER})"
        return (
            f"INSERT {conflict} INTO {self.name} (layer, {', '.join(self.columns)}) "
            f"VALUES ({layer}, {', '.join('?' * len(self.columns))})"
        )

    def select(self, condition: str) -> str:
        """Return a SELECT that yields fingerprint, problem and the columns."""
        columns = ", ".join(f"{self.name}.{column}" for column in self.columns)
        order = ", ".join(self.columns[: self.keys])
        return (
            f"SELECT fingerprint, problem, {columns} FROM layer JOIN {self.name} "
            f"ON layer = id WHERE {condition} ORDER BY fingerprint, problem, {order}"
        )

    def sealed(self, row: Sequence[Any]) -> tuple[Any, ...]:
        """Return a row (fingerprint, problem, columns) with its checksum."""
        if _STAMP not in self.columns:
            return (*row[:-1], f"{row[-1]}{_MARK}{self._checksum(row):x}")
        # The stamp's lowest bits, 16 ms, hold the checksum: the schema needs no column.
        at = 2 + self.columns.index(_STAMP)
        bits = _bits(row[at]) & ~_CHECKSUM | self._checksum(row)
        (stamp,) = struct.unpack(">d", struct.pack(">Q", bits))
        return (*row[:at], stamp, *row[at + 1 :])

    def is_sound(self, row: Sequence[Any], since: float) -> bool:
        """Return whether a row has its checksum, or is older than `since`."""
        if _STAMP not in self.columns:
            text, mark, checksum = str(row[-1]).rpartition(_MARK)
            wanted = f"{self._checksum((*row[:-1], text)):x}"
            return checksum == wanted if mark else since > 0
        stamp = row[2 + self.columns.index(_STAMP)]
        if not isinstance(stamp, float):
            return False
        return stamp < since or _bits(stamp) & _CHECKSUM == self._checksum(row)

    def _checksum(self, row: Sequence[Any]) -> int:
        """Return the checksum of all columns but the stamp."""
        stamp = 2 + self.columns.index(_STAMP) if _STAMP in self.columns else -1
        # Integers count as floats, as SQLite may return either of them.
        values = [
            _bits(v) & ~_CHECKSUM
            if i == stamp
            else float(v)
            if isinstance(v, int | float)
            else v
            for i, v in enumerate(row)
        ]
        return zlib.crc32(repr((self.name, values)).encode()) & _CHECKSUM

    def decode(
        self, rows: Iterable[Sequence[Any]], since: float
    ) -> list[T | ValueError]:
        """Decode rows; an invalid one becomes the `ValueError` that says why."""
        layer_of = functools.cache(_layer_at)
        found: list[T | ValueError] = []
        for row in rows:
            try:
                made: T | ValueError = self.decoded(layer_of, *row)
            except ValueError as e:
                made = e
            if not (isinstance(made, ValueError) or self.is_sound(row, since)):
                made = ValueError(f"{row[0]!r}: the checksum of a row is wrong")
            found.append(made)
        return found


def _bits(number: float) -> int:
    """Return the 64 bits in which a number is stored."""
    (bits,) = struct.unpack(">Q", struct.pack(">d", number))
    return int(bits)


def perf_values(perf: AlgoPerf) -> tuple[Any, ...]:
    """Return the columns of a `PERF` row, without time and version."""
    values = codecs.perf_to_dict(perf)
    values["notes"] = " ".join(perf.notes)
    return (*[values.pop(name) for name in _PERF_KEY], *values.values())


def _layer_at(key: object) -> codecs.LayerAt:
    """Return a convolution as a cached function of its batch size."""
    # Files have many rows of a layer: decode its problem once.
    text: str = codecs.decode("problem", str, key)
    return functools.cache(codecs.problem_from_key(text, 1).with_batch)


def _measurement(
    layer_of: _LayerOf, fingerprint: object, key: object, *values: Any
) -> Measurement:
    """Decode a measurement under the same rules as recordings."""
    data = dict(zip(PERF.columns, values, strict=True))
    if data["deterministic"] in (0, 1):
        data["deterministic"] = bool(data["deterministic"])
    if isinstance(data["notes"], str):
        data["notes"] = data["notes"].split()
    where = f"{fingerprint!r}, {data['algo']!r} at {data['batch']!r}"
    return codecs.decode_row(where, fingerprint, layer_of(key), data)


def _verdict(
    layer_of: _LayerOf, fingerprint: object, key: object, *values: object
) -> Verdict:
    data = dict(zip(("batch", "signature", "ratio"), values, strict=False))
    where = f"{fingerprint!r}, {data['signature']!r}"
    return codecs.decode_verdict(where, fingerprint, layer_of(key), data)


def _race(_: _LayerOf, fingerprint: object, raced: object, *values: object) -> Race:
    data = {"raced": raced, **dict(zip(RACE.columns, values, strict=True))}
    return codecs.decode_race(f"{fingerprint!r}, {raced!r}", fingerprint, data)


def _plan_text(*row: object) -> str:
    text: str = codecs.decode("plan text", str, row[-1])
    return text.rpartition(_MARK)[0] or text


_PERF_KEY = ("batch", "algo", "math_mode")
_PERF_REST = (f.name for f in fields(AlgoPerf) if f.name not in _PERF_KEY)
PERF = Table(
    "perf", (*_PERF_KEY, *_PERF_REST, "measured_at", "version"), 3, _measurement
)
PLAN_TEXT = Table("plan_text", ("batch", "algo", "text"), 2, _plan_text)
VERDICT = Table(  # the column `time_ms` holds the ratio
    "verdict", ("batch", "signature", "time_ms", "measured_at"), 2, _verdict
)
RACE = Table("race", ("first_ms", "second_ms", "measured_at"), 1, _race)
TABLES: tuple[Table[Any], ...] = (PERF, PLAN_TEXT, VERDICT, RACE)
UNLESS_KNOWN = f"""ON CONFLICT DO UPDATE SET
{", ".join(f"{name} = excluded.{name}" for name in RACE.columns)}
WHERE NOT (race.first_ms BETWEEN 0 AND {codecs.LONGEST_MS}
AND race.second_ms BETWEEN 0 AND {codecs.LONGEST_MS}
AND race.measured_at BETWEEN 0 AND {codecs.LATEST})"""
"""Conflict clause of `RACE`: an existing row is kept, unless it is damaged."""
UNLESS_NEWER = f"""ON CONFLICT DO UPDATE SET
{", ".join(f"{name} = excluded.{name}" for name in PERF.columns)}
WHERE excluded.measured_at > perf.measured_at
OR NOT perf.measured_at BETWEEN 0 AND {codecs.LATEST}"""
"""Conflict clause of `PERF`: the newest measurement wins."""
