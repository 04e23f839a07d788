"""What a cache's database is: its tables as they are made, and how it is told.

A database that has the right identity but other tables, or triggers, is not trusted:
what else its statements say would be obeyed, too.
"""

import contextlib
import sqlite3

__all__ = [
    "SCHEMA",
    "ForeignError",
    "NewerError",
    "UnusableError",
    "check_tables",
    "create",
    "in_memory",
    "is_empty",
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
    "verdict": """CREATE TABLE verdict (
  layer INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  signature TEXT NOT NULL,
  time_ms REAL NOT NULL,
  measured_at REAL NOT NULL,
  PRIMARY KEY (layer, batch, signature)
) WITHOUT ROWID""",
}


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
