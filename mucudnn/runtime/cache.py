"""Remember measurements, in memory or in a file that processes share.

A measurement is of a device, a convolution at a micro-batch size, an algorithm and a
math mode. Its key holds no mini-batch size, limit or policy, so it serves them all.
The file is `RecordFile`'s business; this module says what is in it.
"""

import functools
import math
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import platformdirs

from mucudnn.errors import CacheError
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.measurement import Measurement, Verdict
from mucudnn.ir.recording import read_recording
from mucudnn.ir.serial import perf_to_dict, problem_from_key, problem_key
from mucudnn.runtime.export import write_recording
from mucudnn.runtime.storage import CacheWarning, RecordFile, transaction
from mucudnn.version import installed_version

__all__ = ["BenchmarkCache", "CacheWarning", "DeviceSummary", "default_path"]

_SCHEMA_VERSION = 3
_SCHEMA = {
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
_RATIO = "time_ms"  # what files call the column that holds `Verdict.ratio`
_PERF = tuple(field.name for field in fields(AlgoPerf))
_PERF_COLUMNS = ", ".join(f"perf.{name}" for name in _PERF)
_COLUMNS = (*_PERF, "measured_at", "version")
_LAYER = "(SELECT id FROM layer WHERE fingerprint = ? AND problem = ?)"
_PUT_LAYER = "INSERT OR IGNORE INTO layer (fingerprint, problem) VALUES (?, ?)"
_PUT_PERF = (
    f"INSERT INTO perf (layer, {', '.join(_COLUMNS)}) "
    f"VALUES ({_LAYER}, {', '.join('?' * len(_COLUMNS))}) "
    "ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)
)
_MERGE_PERF = f"{_PUT_PERF} WHERE excluded.measured_at > perf.measured_at"
_MERGE_VERDICT = f"INSERT OR IGNORE INTO verdict VALUES ({_LAYER}, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """What a cache knows of one device; times are seconds since 1970."""

    fingerprint: str
    problems: int
    rows: int
    oldest: float
    newest: float


def default_path() -> Path:
    """The file in the user's cache directory, as the platform defines it."""
    return platformdirs.user_cache_path("mucudnn") / "perf-v3.sqlite"


class BenchmarkCache:
    """Measurements by device and convolution; threads and processes may share it.

    Args:
        path: The file to remember in, made where it is missing; None is memory only.

    A file that cannot be used never raises: see `mucudnn.runtime.storage`.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._file = RecordFile(
            None if path is None else Path(path), _SCHEMA_VERSION, _SCHEMA
        )
        self._version = installed_version()

    @property
    def path(self) -> Path | None:
        """The file in use; None if it is memory."""
        return self._file.path

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a BenchmarkCache cannot be copied or pickled, as it holds an open file; "
            "open another with BenchmarkCache(path), or carry its rows with export_json"
        )

    def get(self, fingerprint: str, problem: ConvProblem) -> tuple[AlgoPerf, ...]:
        """What was measured at the problem's own batch size, failures included."""
        arguments = (fingerprint, problem_key(problem), problem.batch)
        return self._perfs("AND perf.batch = ?", arguments)

    def get_all(self, fingerprint: str, problem: ConvProblem) -> tuple[AlgoPerf, ...]:
        """What was measured at any batch size, ascending in it."""
        return self._perfs("", (fingerprint, problem_key(problem)))

    def put(
        self, fingerprint: str, problem: ConvProblem, perfs: Iterable[AlgoPerf]
    ) -> None:
        """Remember measurements at their own batch sizes, replacing older ones.

        Raises:
            ValueError: A number in them is negative or not finite.
        """
        key = problem_key(problem)
        stamp = (time.time(), self._version)
        rows = [(fingerprint, key, *_values(perf), *stamp) for perf in perfs]

        def write(db: sqlite3.Connection) -> None:
            with transaction(db):
                _write(db, _PUT_PERF, rows)

        self._file.do(write)

    def get_verdict(
        self, fingerprint: str, problem: ConvProblem, signature: str
    ) -> float | None:
        """See `Verdict.ratio`; None if the plans of that signature never ran whole."""
        row = self._file.do(
            lambda db: db.execute(
                f"SELECT {_RATIO} FROM verdict "
                f"WHERE layer = {_LAYER} AND batch = ? AND signature = ?",
                (fingerprint, problem_key(problem), problem.batch, signature),
            ).fetchone()
        )
        return None if row is None else float(row[0])

    def put_verdict(
        self, fingerprint: str, problem: ConvProblem, signature: str, ratio: float
    ) -> None:
        """Remember how a plan did against its rival; see `Verdict.ratio`.

        Raises:
            ValueError: The ratio is negative or not finite.
        """
        if not 0 <= ratio < math.inf:
            raise ValueError(f"ratio must be finite and not negative, got {ratio}")
        layer = (fingerprint, problem_key(problem))
        row = (*layer, problem.batch, signature, ratio, time.time())

        def write(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.execute(_PUT_LAYER, layer)
                db.execute(
                    f"INSERT OR REPLACE INTO verdict VALUES ({_LAYER}, ?, ?, ?, ?)", row
                )

        self._file.do(write)

    def get_plan_text(
        self, fingerprint: str, problem: ConvProblem, algo: str
    ) -> str | None:
        """The execution plan of one algorithm as its library wrote it, if known."""
        row = self._file.do(
            lambda db: db.execute(
                "SELECT text FROM plan_text "
                f"WHERE layer = {_LAYER} AND batch = ? AND algo = ?",
                (fingerprint, problem_key(problem), problem.batch, algo),
            ).fetchone()
        )
        return None if row is None else str(row[0])

    def put_plan_text(
        self, fingerprint: str, problem: ConvProblem, algo: str, text: str
    ) -> None:
        """Remember an execution plan as its library writes it."""
        layer = (fingerprint, problem_key(problem))
        row = (*layer, problem.batch, algo, text)

        def write(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.execute(_PUT_LAYER, layer)
                db.execute(
                    f"INSERT OR REPLACE INTO plan_text VALUES ({_LAYER}, ?, ?, ?)", row
                )

        self._file.do(write)

    def fingerprints(self) -> tuple[str, ...]:
        """Devices that something is known of, in alphabetical order."""
        return tuple(device.fingerprint for device in self.summary())

    def summary(self) -> tuple[DeviceSummary, ...]:
        """One line a device, in alphabetical order."""
        query = (
            "SELECT fingerprint, count(DISTINCT problem), count(*), min(measured_at), "
            "max(measured_at) FROM layer JOIN perf ON perf.layer = layer.id "
            "GROUP BY fingerprint ORDER BY fingerprint"
        )
        rows = self._file.do(lambda db: db.execute(query).fetchall())
        return tuple(DeviceSummary(*row) for row in rows)

    def rows(
        self, fingerprint: str | None = None, problem: ConvProblem | None = None
    ) -> tuple[Measurement, ...]:
        """Every measurement, of one device or of all.

        Args:
            fingerprint: Of the device; all of them without it.
            problem: A convolution, at any batch size; all of them without it.
        """
        key = None if problem is None else problem_key(problem)
        query = (
            f"SELECT fingerprint, problem, measured_at, version, {_PERF_COLUMNS} "
            "FROM layer JOIN perf ON perf.layer = layer.id "
            "WHERE (?1 IS NULL OR fingerprint = ?1) AND (?2 IS NULL OR problem = ?2) "
            "ORDER BY fingerprint, problem, batch, algo, math_mode"
        )
        chosen = (fingerprint, key)
        rows = self._file.do(lambda db: db.execute(query, chosen).fetchall())
        problem_of = functools.cache(problem_from_key)
        measurements = []
        for device, layer, measured_at, maker, *values in rows:
            perf = _perf(values)
            measurements.append(
                Measurement(
                    fingerprint=device,
                    problem=problem_of(layer, perf.batch),
                    perf=perf,
                    measured_at=measured_at,
                    version=maker,
                )
            )
        return tuple(measurements)

    def verdicts(self, fingerprint: str | None = None) -> tuple[Verdict, ...]:
        """What became of plans that were run whole, on one device or on all."""
        query = (
            f"SELECT fingerprint, problem, batch, signature, {_RATIO} "
            "FROM layer JOIN verdict ON verdict.layer = layer.id "
            "WHERE ?1 IS NULL OR fingerprint = ?1 "
            "ORDER BY fingerprint, problem, batch, signature"
        )
        rows = self._file.do(lambda db: db.execute(query, (fingerprint,)).fetchall())
        return tuple(
            Verdict(
                fingerprint=device,
                problem=problem_from_key(layer, batch),
                signature=plans,
                ratio=ratio,
            )
            for device, layer, batch, plans, ratio in rows
        )

    def clear(self, fingerprint: str | None = None) -> int:
        """Forget one device or everything; returns how many measurements went."""

        def delete(db: sqlite3.Connection) -> int:
            layers = "(SELECT id FROM layer WHERE ?1 IS NULL OR fingerprint = ?1)"
            with transaction(db):
                for table, column in (
                    ("verdict", "layer"),
                    ("plan_text", "layer"),
                    ("perf", "layer"),
                    ("layer", "id"),
                ):
                    where = f"WHERE {column} IN {layers}"
                    gone = db.execute(f"DELETE FROM {table} {where}", (fingerprint,))
                    if table == "perf":
                        count = gone.rowcount
            return count

        return self._file.do(delete)

    def export_json(self, file: Path | str) -> int:
        """Write all measurements to a recording; a name in `.gz` is compressed.

        What became of plans that were run whole goes along. The file appears complete
        or not at all. A cache does not know the environments of its devices, so they
        are empty. Returns how many rows it has.

        Raises:
            CacheError: The file cannot be written.
        """
        rows = self.rows()
        write_recording(file, rows, verdicts=self.verdicts())
        return len(rows)

    def import_json(self, file: Path | str) -> int:
        """Merge a recording, all of it or nothing; the newest measurement wins.

        Of two verdicts on the same plans the one that is here stays. Returns how many
        rows were new.

        Raises:
            CacheError: The file cannot be read, or is not a recording; says where.
        """
        try:
            recording = read_recording(Path(file).read_bytes())
        except (OSError, ValueError) as e:
            raise CacheError(f"cannot import {file}: {e}") from e
        rows = [
            (
                m.fingerprint,
                problem_key(m.problem),
                *_values(m.perf),
                m.measured_at,
                m.version,
            )
            for m in recording.measurements
        ]
        now = time.time()
        verdicts = [
            (
                v.fingerprint,
                problem_key(v.problem),
                v.problem.batch,
                v.signature,
                v.ratio,
                now,
            )
            for v in recording.verdicts
        ]

        def merge(db: sqlite3.Connection) -> int:
            with transaction(db):
                count = _write(db, _MERGE_PERF, rows)
                _write(db, _MERGE_VERDICT, verdicts)
            return count

        return self._file.do(merge)

    def close(self) -> None:
        """Close the file; nothing else may be asked after it."""
        self._file.close()

    def __enter__(self) -> "BenchmarkCache":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _perfs(self, condition: str, arguments: Sequence[Any]) -> tuple[AlgoPerf, ...]:
        query = (
            f"SELECT {_PERF_COLUMNS} FROM perf WHERE layer = {_LAYER} {condition} "
            "ORDER BY batch, algo, math_mode"
        )
        rows = self._file.do(lambda db: db.execute(query, arguments).fetchall())
        return tuple(_perf(row) for row in rows)


def _write(
    db: sqlite3.Connection, statement: str, rows: Sequence[tuple[Any, ...]]
) -> int:
    """Rows that begin with a fingerprint and a problem, within a transaction."""
    db.executemany(_PUT_LAYER, dict.fromkeys(row[:2] for row in rows))
    return db.executemany(statement, rows).rowcount if rows else 0


def _values(perf: AlgoPerf) -> tuple[Any, ...]:
    values = perf_to_dict(perf)
    values["notes"] = " ".join(perf.notes)
    return tuple(values.values())


def _perf(row: Sequence[Any]) -> AlgoPerf:
    values = dict(zip(_PERF, row, strict=True))
    if values["error"] is not None:
        values["time_ms"] = math.inf
    values["deterministic"] = bool(values["deterministic"])
    values["notes"] = tuple(values["notes"].split())
    return AlgoPerf(**values)
