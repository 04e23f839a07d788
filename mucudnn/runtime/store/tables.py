"""The table of the cache's database, with values that are sealed against damage.

An entry is a JSON value by its kind, device, key and batch size. What has no device or
batch has an empty name, or 0, in their place.

A database with the right identity but another table, or with triggers, is rejected:
SQLite would execute whatever else its schema contains. It has no checksums either, so a
flipped bit would silently change a time or a key: each value is stored behind a hash of
itself and its name.
"""

import contextlib
import hashlib
import sqlite3
from typing import Any

_APPLICATION_ID = int.from_bytes(b"muCD", "big")
_IDENTITY = """SELECT application_id, user_version,
  (SELECT count(*) FROM sqlite_master)
FROM pragma_application_id, pragma_user_version"""
_VERSION = 4
_CREATE = """CREATE TABLE entries (
  kind TEXT NOT NULL,
  device TEXT NOT NULL,
  key TEXT NOT NULL,
  batch INTEGER NOT NULL,
  value BLOB NOT NULL,
  used_at REAL NOT NULL,
  PRIMARY KEY (kind, device, key, batch)
)"""

NAME = "kind, device, key, batch"
"""The columns that name an entry."""

Name = tuple[str, str, str, int]
"""Kind, device, key, batch size."""


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
    """Create our table and identity in an empty database."""
    db.execute(_CREATE)
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {_VERSION}")


def is_empty(db: sqlite3.Connection) -> bool:
    """Return whether the database is new; raise `ForeignError` if it is not ours."""
    # One statement, as another process could create the table between two.
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


def check_table(db: sqlite3.Connection) -> None:
    """Raise `UnusableError` unless the table is as created and has no triggers."""
    query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = 'entries'"
    if db.execute(query).fetchone() != (_CREATE,):
        raise UnusableError("table entries is missing or altered")
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger'"
    if db.execute(query).fetchone() != (0,):
        raise UnusableError("there are triggers in it")


def check_contents(db: sqlite3.Connection) -> None:
    """Raise `UnusableError` where entries may be missing, which is not reported."""
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise UnusableError(f"it is damaged: {found.splitlines()[-1]}")


def insert(db: sqlite3.Connection, name: Name, data: bytes, used_at: float) -> None:
    """Write an entry, which replaces the one of this name."""
    row = *name, seal(name, data), used_at
    db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", row)


def salvage(source: sqlite3.Connection, target: sqlite3.Connection) -> int:
    """Copy the sound entries of a possibly damaged database; return their number."""
    count = 0
    found: dict[tuple[Any, ...], None] = {}
    for way in ("ASC", "DESC"):
        query = f"SELECT * FROM entries NOT INDEXED ORDER BY rowid {way}"
        with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError):
            for row in source.execute(query):
                found[row] = None
    for *name, value, used_at in found:
        with contextlib.suppress(ValueError, sqlite3.IntegrityError):
            insert(target, tuple(name), unseal(tuple(name), value), used_at)
            count += 1
    return count


def seal(name: Name, data: bytes) -> bytes:
    """Return the data of an entry, prefixed by a hash of its name and itself."""
    return hashlib.sha256(f"{name}\0".encode() + data).digest() + data


def unseal(name: tuple[object, ...], value: object) -> bytes:
    """Return the data of `seal`, or raise a `ValueError` if it is damaged."""
    data = value[hashlib.sha256().digest_size :] if type(value) is bytes else b""
    if seal(name, data) != value:  # type: ignore[arg-type]
        raise ValueError("its contents are not what was written for it")
    return data
