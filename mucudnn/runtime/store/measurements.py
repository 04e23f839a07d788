"""Store measurements in memory or in an SQLite file that processes share.

A measurement belongs to a device, a convolution at a micro-batch size, an algorithm and
a math mode. The key holds no mini-batch size, limit or policy, so one row serves all of
them. `RecordFile` handles the file; this module defines its contents.
"""

import contextlib
import functools
import json
import math
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import platformdirs

from mucudnn.arguments import check_path
from mucudnn.codecs import check_times, decode_race, load_json, problem_key
from mucudnn.errors import CacheError
from mucudnn.files import read_whole
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.measurement import DeviceSummary, Measurement, Race, Recording, Verdict
from mucudnn.plugins import installed_version
from mucudnn.recording_format import MOST, read_recording
from mucudnn.runtime.store.recordings import write_recording
from mucudnn.runtime.store.sqlite_file import RecordFile, transaction, warn
from mucudnn.runtime.store.tables import (
    OF_ALL,
    OF_ANY_DEVICE,
    OF_BATCH,
    OF_LAYER,
    PERF,
    PLAN_TEXT,
    PUT_LAYER,
    RACE,
    TABLES,
    UNLESS_KNOWN,
    UNLESS_NEWER,
    VERDICT,
    Table,
    perf_values,
    seal_entry,
    unseal_entry,
)

# JSON values by kind and key, in the store's file and within a number of bytes.
#
# Entries are what is made anew if it is lost, such as plans of PyTorch steps. An entry
# that is damaged, or was written for another key, counts as missing, with one warning.
# Processes may share the file: of two that write the same entry the later wins.


_LARGEST = 16 << 20
"""Bytes of a value above which it is not stored."""

_MOST = 64 << 20

_FRESH_S = 60.0
"""Seconds within which the time of use is not written again."""


class Entries:
    """Entries of a file; above `most` bytes the least recently used are evicted."""

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
                # The entries that were used last stay, up to the limit.
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
            f"ignoring the {kind} {key[:12]} in {where}, which will be created again: "
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


T = TypeVar("T")


def default_path() -> Path:
    """Return the cache file in the user's cache directory of this platform."""
    return platformdirs.user_cache_path("mucudnn") / "perf-v3.sqlite"


class BenchmarkCache:
    """Measurements by device and convolution, shared by threads and processes.

    Args:
        path: SQLite file, created where it is missing; None keeps rows in memory only.
        timeout_s: Seconds to wait for other processes that write to the file.

    Attributes:
        writes: Number of write operations by this object, `entries` not counted.
        entries: Values of other kinds, such as plans of PyTorch steps.

    An unusable file never raises: see `mucudnn.runtime.store.sqlite_file`. Damaged
    rows are skipped with one warning that counts them.
    """

    def __init__(
        self, path: Path | str | None = None, *, timeout_s: float = 30.0
    ) -> None:
        found = None if path is None else check_path("path", path)
        self._file = RecordFile(found, timeout_s)
        self.entries = Entries(self._file)
        self._version = installed_version()
        self.writes = 0
        self._warned = False

    @property
    def path(self) -> Path | None:
        """Path of the file in use; None for an in-memory cache."""
        return self._file.path

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a BenchmarkCache cannot be copied or pickled, as it holds an open file; "
            "open another with BenchmarkCache(path), or transfer its rows with "
            "export_json"
        )

    def get(self, fingerprint: str, problem: ConvProblem) -> tuple[AlgoPerf, ...]:
        """Return the rows at the problem's own batch size, failures included."""
        key = (fingerprint, problem_key(problem), problem.batch)
        return tuple(m.perf for m in self._read(PERF, OF_BATCH, *key))

    def get_all(self, fingerprint: str, problem: ConvProblem) -> tuple[AlgoPerf, ...]:
        """Return the rows at every batch size, by ascending batch size."""
        key = (fingerprint, problem_key(problem))
        return tuple(m.perf for m in self._read(PERF, OF_LAYER, *key))

    def put(
        self, fingerprint: str, problem: ConvProblem, perfs: Iterable[AlgoPerf]
    ) -> None:
        """Store measurements at their own batch sizes, replacing older ones.

        Raises:
            ValueError: A number in them is negative, not finite or out of all bounds.
        """
        perfs = tuple(perfs)
        for perf in perfs:
            check_times(perf.algo, perf)
        layer, stamp = (fingerprint, problem_key(problem)), (time.time(), self._version)
        rows = [(*layer, *perf_values(perf), *stamp) for perf in perfs]
        self._write((PERF, PERF.insert(), rows))

    def get_verdict(
        self, fingerprint: str, problem: ConvProblem, signature: str
    ) -> float | None:
        """Return the measured ratio (`Verdict.ratio`) of a plan, None if unknown."""
        key = (fingerprint, problem_key(problem), problem.batch, signature)
        found = self._read(VERDICT, f"{OF_BATCH} AND signature = ?", *key)
        return found[0].ratio if found else None

    def put_verdict(
        self, fingerprint: str, problem: ConvProblem, signature: str, ratio: float
    ) -> None:
        """Store the ratio of a plan to its baseline; see `Verdict.ratio`.

        Raises:
            ValueError: The ratio is negative or not finite.
        """
        if not 0 <= ratio < math.inf:
            raise ValueError(f"ratio must be finite and not negative, got {ratio}")
        key = (fingerprint, problem_key(problem), problem.batch, signature)
        self._write((VERDICT, VERDICT.insert(), [(*key, ratio, time.time())]))

    def get_race(self, fingerprint: str, raced: str) -> tuple[float, float] | None:
        """Return the times of both candidates of a `Race`; None if not timed."""
        found = self._read(RACE, OF_LAYER, fingerprint, raced)
        return next((race.times_ms for race in found), None)

    def put_race(
        self,
        fingerprint: str,
        raced: str,
        times_ms: tuple[float, float],
        *,
        replace: bool = False,
    ) -> tuple[float, float]:
        """Store the times of two candidates, unless known and `replace` is false.

        Returns the times in the cache afterwards: processes that race at the same time
        thus all make the same choice.

        Raises:
            ValueError: A time is negative, not finite or out of all bounds.
        """
        row = (fingerprint, raced, *times_ms, time.time())
        members = zip(("raced", *RACE.columns), row[1:], strict=True)
        decode_race("a race", fingerprint, dict(members))
        known = self._decoded(RACE, OF_LAYER, fingerprint, raced)
        if any(isinstance(one, ValueError) for one in known):  # it is damaged
            replace = True
        put = RACE.insert() if replace else f"{RACE.insert('')} {UNLESS_KNOWN}"
        self._write((RACE, put, [row]))
        return self.get_race(fingerprint, raced) or times_ms

    def get_plan_text(
        self, fingerprint: str, problem: ConvProblem, algo: str
    ) -> str | None:
        """Return an algorithm's serialized execution plan; None if unknown."""
        key = (fingerprint, problem_key(problem), problem.batch, algo)
        return next(iter(self._read(PLAN_TEXT, f"{OF_BATCH} AND algo = ?", *key)), None)

    def put_plan_text(
        self, fingerprint: str, problem: ConvProblem, algo: str, text: str
    ) -> None:
        """Store an execution plan as serialized by its library."""
        key = (fingerprint, problem_key(problem), problem.batch, algo)
        self._write((PLAN_TEXT, PLAN_TEXT.insert(), [(*key, text)]))

    def fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprints of all known devices, sorted."""
        return tuple(device.fingerprint for device in self.summary())

    def summary(self) -> tuple[DeviceSummary, ...]:
        """Return one `DeviceSummary` per device, sorted by fingerprint."""
        devices: dict[str, list[Measurement]] = {}
        for m in self.rows():
            devices.setdefault(m.fingerprint, []).append(m)
        return tuple(
            DeviceSummary(
                fingerprint=fingerprint,
                problems=len({m.problem.with_batch(1) for m in rows}),
                rows=len(rows),
                oldest=min(m.measured_at for m in rows),
                newest=max(m.measured_at for m in rows),
            )
            for fingerprint, rows in sorted(devices.items())
        )

    def rows(
        self, fingerprint: str | None = None, problem: ConvProblem | None = None
    ) -> tuple[Measurement, ...]:
        """Return all measurements of one device, or of all, at every batch size."""
        key = None if problem is None else problem_key(problem)
        return self._read(PERF, OF_ALL, fingerprint, key)

    def verdicts(self, fingerprint: str | None = None) -> tuple[Verdict, ...]:
        """Return the verdicts on plans measured as a whole, of one device or all."""
        return self._read(VERDICT, OF_ALL, fingerprint, None)

    def races(self, fingerprint: str | None = None) -> tuple[Race, ...]:
        """Return the races that were run, on one device or on all."""
        return self._read(RACE, OF_ALL, fingerprint, None)

    def clear(self, fingerprint: str | None = None) -> int:
        """Delete the rows of one device, or all; return how many were measured."""

        def delete(db: sqlite3.Connection) -> int:
            named = f"WHERE {OF_ANY_DEVICE}"
            layers = f"WHERE layer IN (SELECT id FROM layer {named})"
            with transaction(db):
                for table in ("verdict", "plan_text", "race"):
                    db.execute(f"DELETE FROM {table} {layers}", (fingerprint,))
                deleted = db.execute(f"DELETE FROM perf {layers}", (fingerprint,))
                db.execute(f"DELETE FROM layer {named}", (fingerprint,))
            return deleted.rowcount

        return self._file.do(delete)

    def export_json(self, file: Path | str) -> int:
        """Write all measurements, verdicts and races to a recording.

        A file name in `.gz` is compressed. The file appears complete or not at all. The
        environments are empty, as a cache does not know them. Returns the number of
        measurements.

        Raises:
            CacheError: The file cannot be written.
        """
        if self.path is not None and Path(file).resolve() == self.path:
            raise CacheError(f"{file} is the cache itself; name another file")
        recording = Recording(
            measurements=self.rows(), verdicts=self.verdicts(), races=self.races()
        )
        write_recording(file, recording)
        return len(recording.measurements)

    def import_json(self, file: Path | str) -> int:
        """Merge a recording, all of it or nothing; the newest measurement wins.

        Verdicts and races that the cache already has are kept. Returns the number of
        new rows.

        Raises:
            CacheError: The file cannot be read, or is not a recording; says where.
        """
        try:
            recording = read_recording(read_whole(file, most=MOST, streams=True))
        except OSError as e:
            raise CacheError(f"cannot import {file}: {e.strerror or e}") from e
        except ValueError as e:
            raise CacheError(f"cannot import {file}: {e}") from e
        # All rows are decoded: from here on only the database can fail.
        key_of, now = functools.cache(problem_key), time.time()
        rows = [
            (
                *(m.fingerprint, key_of(m.problem), *perf_values(m.perf)),
                *(m.measured_at, m.version),
            )
            for m in recording.measurements
        ]
        verdicts = [
            (
                *(v.fingerprint, key_of(v.problem), v.problem.batch),
                *(v.signature, v.ratio, now),
            )
            for v in recording.verdicts
        ]
        races = [
            (r.fingerprint, r.raced, *r.times_ms, r.measured_at)
            for r in recording.races
        ]
        return self._write(
            (PERF, f"{PERF.insert('')} {UNLESS_NEWER}", rows),
            (VERDICT, VERDICT.insert("OR IGNORE"), verdicts),
            (RACE, f"{RACE.insert('')} {UNLESS_KNOWN}", races),
        )

    def close(self) -> None:
        """Close the file; the cache must not be used afterwards."""
        self._file.close()

    def __enter__(self) -> "BenchmarkCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(
        self, *changes: tuple[Table[Any], str, Sequence[tuple[Any, ...]]]
    ) -> int:
        """Execute statements on their rows in one transaction.

        Every row begins with a fingerprint and a problem. Returns the number of rows
        that the first statement changed.
        """
        layers = dict.fromkeys(row[:2] for *_, rows in changes for row in rows)

        def write(db: sqlite3.Connection) -> int:
            with transaction(db):
                db.executemany(PUT_LAYER, layers)
                counts = [
                    db.executemany(statement, map(table.sealed, rows)).rowcount
                    if rows
                    else 0
                    for table, statement, rows in changes
                ]
            return counts[0]

        self.writes += 1
        return self._file.do(write)

    def _read(self, table: Table[T], condition: str, *arguments: Any) -> tuple[T, ...]:
        """Return the valid rows; the first invalid ones cause one warning."""
        found = self._decoded(table, condition, *arguments)
        wrong = [row for row in found if isinstance(row, ValueError)]
        if wrong and not self._warned:
            self._warned = True
            every = (self._decoded(some, OF_ALL, None, None) for some in TABLES)
            of_all = [row for rows in every for row in rows]
            count = sum(isinstance(row, ValueError) for row in of_all)
            warn(
                f"{count} of the {len(of_all)} rows in {self.path or 'memory'} are "
                f"damaged and ignored; the first: {wrong[0]}"
            )
        return tuple(row for row in found if not isinstance(row, ValueError))

    def _decoded(
        self, table: Table[T], condition: str, *arguments: Any
    ) -> list[T | ValueError]:
        query = table.select(condition)
        rows = self._file.do(lambda db: db.execute(query, arguments).fetchall())
        return table.decode(rows, self._file.checked_since)
