"""Remember measurements, in memory or in a file that processes share.

A measurement is of a device, a convolution at a micro-batch size, an algorithm and a
math mode. Its key holds no mini-batch size, limit or policy, so it serves them all.
The file is `RecordFile`'s business; this module says what is in it.
"""

import functools
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import platformdirs

from mucudnn.arguments import a_path
from mucudnn.codecs.recordings import MOST, read_recording
from mucudnn.codecs.rows import (
    LATEST,
    LayerAt,
    check_times,
    decode_row,
    decode_verdict,
)
from mucudnn.codecs.values import decode, perf_to_dict, problem_from_key, problem_key
from mucudnn.errors import CacheError
from mucudnn.files import read_whole
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.measurement import Measurement, Verdict
from mucudnn.runtime.database.recordings import write_recording
from mucudnn.runtime.database.sqlite_file import (
    CacheWarning,
    RecordFile,
    transaction,
    warn,
)
from mucudnn.version import installed_version

__all__ = ["BenchmarkCache", "CacheWarning", "DeviceSummary", "default_path"]

T = TypeVar("T")
_LayerOf = Callable[[object], LayerAt]

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
_COLUMNS = (*_PERF, "measured_at", "version")
_ROWS = f"""SELECT fingerprint, problem, {", ".join(f"perf.{c}" for c in _COLUMNS)}
FROM layer JOIN perf ON perf.layer = layer.id WHERE {{condition}}
ORDER BY fingerprint, problem, batch, algo, math_mode"""
_VERDICTS = f"""SELECT fingerprint, problem, batch, signature, {_RATIO}
FROM layer JOIN verdict ON verdict.layer = layer.id WHERE {{condition}}
ORDER BY fingerprint, problem, batch, signature"""
_OF_ALL = "(?1 IS NULL OR fingerprint = ?1) AND (?2 IS NULL OR problem = ?2)"
_OF_LAYER = "fingerprint = ? AND problem = ?"
_OF_BATCH = f"{_OF_LAYER} AND batch = ?"
_OF_VERDICT = f"{_OF_BATCH} AND signature = ?"
_LAYER = "(SELECT id FROM layer WHERE fingerprint = ? AND problem = ?)"
_PUT_LAYER = "INSERT OR IGNORE INTO layer (fingerprint, problem) VALUES (?, ?)"
_PUT_PERF = (
    f"INSERT INTO perf (layer, {', '.join(_COLUMNS)}) "
    f"VALUES ({_LAYER}, {', '.join('?' * len(_COLUMNS))}) "
    "ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)
)
_MERGE_PERF = (
    f"{_PUT_PERF} WHERE excluded.measured_at > perf.measured_at "
    f"OR NOT perf.measured_at BETWEEN 0 AND {LATEST}"
)
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

    A file that cannot be used never raises: see
    `mucudnn.runtime.database.sqlite_file`. Damaged rows are passed over, with a
    warning that counts them.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._file = RecordFile(
            None if path is None else a_path("path", path), _SCHEMA_VERSION, _SCHEMA
        )
        self._version = installed_version()
        self._warned = False

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
        return self._perfs(_OF_BATCH, arguments)

    def get_all(self, fingerprint: str, problem: ConvProblem) -> tuple[AlgoPerf, ...]:
        """What was measured at any batch size, ascending in it."""
        return self._perfs(_OF_LAYER, (fingerprint, problem_key(problem)))

    def put(
        self, fingerprint: str, problem: ConvProblem, perfs: Iterable[AlgoPerf]
    ) -> None:
        """Remember measurements at their own batch sizes, replacing older ones.

        Raises:
            ValueError: A number in them is negative, not finite or out of all bounds.
        """
        perfs = tuple(perfs)
        for perf in perfs:
            check_times(perf.algo, perf)
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
        key = (fingerprint, problem_key(problem), problem.batch, signature)
        found = self._verdicts(_OF_VERDICT, key)
        return found[0].ratio if found else None

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
        return row[0] if row is not None and isinstance(row[0], str) else None

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
        """Every measurement, of one device or of all.

        Args:
            fingerprint: Of the device; all of them without it.
            problem: A convolution, at any batch size; all of them without it.
        """
        key = None if problem is None else problem_key(problem)
        return self._measurements(_OF_ALL, (fingerprint, key))

    def verdicts(self, fingerprint: str | None = None) -> tuple[Verdict, ...]:
        """What became of plans that were run whole, on one device or on all."""
        return self._verdicts(_OF_ALL, (fingerprint, None))

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
        if self.path is not None and Path(file).resolve() == self.path:
            raise CacheError(f"{file} is the cache itself; name another file")
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
            recording = read_recording(read_whole(file, most=MOST, streams=True))
        except OSError as e:
            raise CacheError(f"cannot import {file}: {e.strerror or e}") from e
        except ValueError as e:
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
        rows = self._measurements(condition, arguments)
        return tuple(m.perf for m in rows)

    def _measurements(
        self, condition: str, arguments: Sequence[Any]
    ) -> tuple[Measurement, ...]:
        return self._sound(self._read(_ROWS, condition, arguments, _measurement))

    def _verdicts(
        self, condition: str, arguments: Sequence[Any]
    ) -> tuple[Verdict, ...]:
        return self._sound(self._read(_VERDICTS, condition, arguments, _verdict))

    def _read(
        self,
        query: str,
        condition: str,
        arguments: Sequence[Any],
        decoded: Callable[[_LayerOf, Sequence[Any]], T],
    ) -> list[T | ValueError]:
        """Rows, or what is wrong with them."""
        text = query.format(condition=condition)
        rows = self._file.do(lambda db: db.execute(text, arguments).fetchall())
        layer_of = functools.cache(_layer_at)
        found: list[T | ValueError] = []
        for row in rows:
            try:
                found.append(decoded(layer_of, row))
            except ValueError as e:
                found.append(e)
        return found

    def _sound(self, found: Sequence[T | ValueError]) -> tuple[T, ...]:
        """The rows that are as they should be; of others there is one warning."""
        wrong = [row for row in found if isinstance(row, ValueError)]
        if wrong and not self._warned:
            self._warned = True
            of_all = [
                *self._read(_ROWS, _OF_ALL, (None, None), _measurement),
                *self._read(_VERDICTS, _OF_ALL, (None, None), _verdict),
            ]
            count = sum(isinstance(row, ValueError) for row in of_all)
            warn(
                f"{count} of the {len(of_all)} rows in {self.path or 'memory'} are "
                f"damaged and passed over; the first: {wrong[0]}",
                stacklevel=5,
            )
        return tuple(row for row in found if not isinstance(row, ValueError))


def _layer_at(key: object) -> LayerAt:
    """A convolution by its batch size, each made once: files have many rows."""
    text: str = decode("problem", str, key)
    return functools.cache(problem_from_key(text, 1).with_batch)


def _measurement(layer_of: _LayerOf, row: Sequence[Any]) -> Measurement:
    """A row as recordings have it, and so under the same rules."""
    fingerprint, key, *values = row
    data = dict(zip(_COLUMNS, values, strict=True))
    if data["deterministic"] in (0, 1):
        data["deterministic"] = bool(data["deterministic"])
    if isinstance(data["notes"], str):
        data["notes"] = data["notes"].split()
    where = f"{fingerprint!r}, {data['algo']!r} at {data['batch']!r}"
    return decode_row(where, fingerprint, layer_of(key), data)


def _verdict(layer_of: _LayerOf, row: Sequence[Any]) -> Verdict:
    fingerprint, key, *values = row
    data = dict(zip(("batch", "signature", "ratio"), values, strict=True))
    where = f"{fingerprint!r}, {data['signature']!r}"
    return decode_verdict(where, fingerprint, layer_of(key), data)


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
