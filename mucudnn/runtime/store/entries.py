"""JSON values by kind and key, in the store's file and within a number of bytes.

Entries are what is made anew if it is lost, such as plans of PyTorch steps. An entry
that is damaged, or was written for another key, counts as missing, with one warning.
Processes may share the file: of two that write the same entry the later wins.
"""

import contextlib
import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from mucudnn.codecs import load_json
from mucudnn.runtime.store.sqlite_file import RecordFile, transaction, warn
from mucudnn.runtime.store.tables import seal_entry, unseal_entry

_LARGEST = 16 << 20
"""Bytes of a value above which it is not stored."""

_MOST = 64 << 20

_FRESH_S = 60.0
"""Seconds within which the time of use is not written again."""


class Entries:
    """Entries of a file; those unused for the longest are evicted.

    Args:
        file: File that holds them.
        most: Bytes that all values may take.
    """

    def __init__(self, file: RecordFile, most: int = _MOST) -> None:
        self._file = file
        self._most = most

    def get(self, kind: str, key: str) -> Any | None:
        """Return the value of a key, or None."""
        query = "SELECT value, used_at FROM entries WHERE kind = ? AND key = ?"
        rows = self._file.do(lambda db: db.execute(query, (kind, key)).fetchall())
        if not rows:
            return None
        ((sealed, used_at),) = rows
        try:
            value = load_json(unseal_entry(kind, key, sealed).decode())
        except ValueError as e:
            self.refuse(kind, key, str(e))
            return None
        now = time.time()

        def touch(db: sqlite3.Connection) -> None:
            update = "UPDATE entries SET used_at = ? WHERE kind = ? AND key = ?"
            with contextlib.suppress(sqlite3.OperationalError):  # of a read-only file
                db.execute(update, (now, kind, key))

        if not (isinstance(used_at, float) and 0 <= now - used_at < _FRESH_S):
            self._file.do(touch)
        return value

    def put(self, kind: str, key: str, value: Any) -> None:
        """Store a value, unless it is too large."""
        data = json.dumps(value, separators=(",", ":")).encode()
        if len(data) > min(_LARGEST, self._most):
            return
        row = kind, key, seal_entry(kind, key, data), time.time()

        def write(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", row)
                query = "SELECT rowid, length(value) FROM entries ORDER BY used_at DESC"
                total, evicted = 0, []
                for rowid, nbytes in db.execute(query):
                    total += nbytes
                    if total > self._most:
                        evicted.append((rowid,))
                db.executemany("DELETE FROM entries WHERE rowid = ?", evicted)

        self._file.do(write)

    def refuse(self, kind: str, key: str, reason: str) -> None:
        """Warn that an entry is not used."""
        where = self._file.path or "memory"
        warn(
            f"passing over the {kind} {key[:12]} in {where}, which will be made anew: "
            f"{reason}"
        )

    def summary(self) -> Mapping[str, tuple[int, int]]:
        """Return the number of entries and their bytes, by kind."""
        query = (
            "SELECT kind, count(*), sum(length(value)) FROM entries "
            "GROUP BY kind ORDER BY kind"
        )
        rows = self._file.do(lambda db: db.execute(query).fetchall())
        return {str(kind): (count, nbytes) for kind, count, nbytes in rows}

    def clear(self) -> int:
        """Delete all entries, and release their disk space; return their number."""

        def delete(db: sqlite3.Connection) -> int:
            deleted = db.execute("DELETE FROM entries").rowcount
            with contextlib.suppress(sqlite3.OperationalError):  # others may be reading
                db.execute("VACUUM")
            return deleted

        return self._file.do(delete)
