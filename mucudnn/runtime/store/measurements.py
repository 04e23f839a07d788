"""Store measurements in memory or in an SQLite file that processes share.

An entry has all measurements of a convolution at a micro-batch size on a device. Its
name holds no mini-batch size, limit or policy, so it serves all of them. `RecordFile`
handles the file, `tables` its table; this module defines the contents.
"""

import contextlib
import functools
import json
import math
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import platformdirs

from mucudnn.arguments import check_path
from mucudnn.codecs import (
    LayerAt,
    decode,
    decode_race,
    decode_row,
    decode_verdict,
    load_json,
    object_of,
    problem_from_key,
    problem_key,
    race_to_dict,
    row_to_dict,
    verdict_to_dict,
)
from mucudnn.errors import CacheError
from mucudnn.files import read_whole
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.measurement import DeviceSummary, Measurement, Race, Recording, Verdict
from mucudnn.plugins import installed_version
from mucudnn.recording_format import MOST, read_recording
from mucudnn.runtime.store.recordings import write_recording
from mucudnn.runtime.store.sqlite_file import RecordFile, transaction, warn
from mucudnn.runtime.store.tables import NAME, Name, insert, unseal

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
        name = _name(kind, key)
        query = f"SELECT value, used_at FROM entries WHERE {_NAMED}"
        rows = self._file.do(lambda db: db.execute(query, name).fetchall())
        if not rows:
            return None
        ((sealed, used_at),) = rows
        try:
            value = load_json(unseal(name, sealed).decode())
        except ValueError as e:
            self.refuse(kind, key, str(e))
            return None
        now = time.time()

        def touch(db: sqlite3.Connection) -> None:
            update = f"UPDATE entries SET used_at = ? WHERE {_NAMED}"
            with contextlib.suppress(sqlite3.OperationalError):  # of a read-only file
                db.execute(update, (now, *name))

        if not (isinstance(used_at, float) and 0 <= now - used_at < _FRESH_S):
            self._file.do(touch)
        return value

    def put(self, kind: str, key: str, value: Any) -> None:
        """Store a value, unless it is too large."""
        data = json.dumps(value, separators=(",", ":")).encode()
        if len(data) > min(_LARGEST, self._most):
            return

        def write(db: sqlite3.Connection) -> None:
            with transaction(db):
                insert(db, _name(kind, key), data, time.time())
                # The entries that were used last stay, up to the limit.
                query = (
                    "SELECT rowid, length(value) FROM entries WHERE device = '' "
                    "ORDER BY used_at DESC"
                )
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
            "WHERE device = '' GROUP BY kind ORDER BY kind"
        )
        rows = self._file.do(lambda db: db.execute(query).fetchall())
        return {str(kind): (count, nbytes) for kind, count, nbytes in rows}

    def clear(self) -> int:
        """Delete all entries, and release their disk space; return their number."""

        def delete(db: sqlite3.Connection) -> int:
            deleted = db.execute("DELETE FROM entries WHERE device = ''").rowcount
            with contextlib.suppress(sqlite3.OperationalError):  # others may be reading
                db.execute("VACUUM")
            return deleted

        return self._file.do(delete)


def _name(kind: str, key: str) -> Name:
    return kind, "", key, 0


_NAMED = " AND ".join(f"{column} = ?" for column in NAME.split(", "))


_PERF, _VERDICT, _RACE, _PLAN_TEXT = "perf", "verdict", "race", "plan_text"

_problem = functools.lru_cache(4096)(problem_from_key)
"""A convolution of (key, batch size): files have many rows of each."""

Items = dict[str, Any]
"""The JSON values of an entry by their names."""


_DECODERS: Mapping[str, Callable[[str, LayerAt, Any], Any]] = {
    _PERF: lambda device, layer_at, item: decode_row("row", device, layer_at, item),
    _VERDICT: lambda device, layer_at, item: decode_verdict(
        "verdict", device, layer_at, item
    ),
    _RACE: lambda device, _, item: decode_race("race", device, item),
    _PLAN_TEXT: lambda _, __, item: decode("plan text", str, item),
}
"""Kind of an entry -> decoder of its items, which are those of recordings."""

_Item = tuple[Name, str, Any]
"""Name of an entry, and name and JSON value of one of its items."""


def _perf_item(key: str, m: Measurement) -> _Item:
    name = _PERF, m.fingerprint, key, m.perf.batch
    return name, f"{m.perf.algo} {m.perf.math_mode}", row_to_dict(m)


def _verdict_item(key: str, v: Verdict) -> _Item:
    name = _VERDICT, v.fingerprint, key, v.problem.batch
    return name, v.signature, verdict_to_dict(v)


def _race_item(race: Race) -> _Item:
    return (_RACE, race.fingerprint, race.raced, 0), "", race_to_dict(race)


def _packed(items: Items) -> bytes:
    # The rows of an entry are much alike.
    return zlib.compress(json.dumps(items).encode(), level=1)


def _items(name: Name, value: object) -> tuple[Items, Items]:
    """Return the items of an entry, raw and decoded; `ValueError` if damaged."""
    raw = object_of("entry", load_json(zlib.decompress(unseal(name, value)).decode()))
    kind, device, key, _ = name
    decoder, layer_at = _DECODERS[kind], partial(_problem, key)
    return raw, {one: decoder(device, layer_at, raw[one]) for one in sorted(raw)}


def default_path() -> Path:
    """Return the cache file in the user's cache directory of this platform."""
    return platformdirs.user_cache_path("mucudnn") / "perf-v4.sqlite"


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
        name = _PERF, fingerprint, problem_key(problem), problem.batch
        return tuple(m.perf for m in self._entry(*name).values())

    def get_all(self, fingerprint: str, problem: ConvProblem) -> tuple[AlgoPerf, ...]:
        """Return the rows at every batch size, by ascending batch size."""
        return tuple(m.perf for m in self.rows(fingerprint, problem))

    def put(
        self, fingerprint: str, problem: ConvProblem, perfs: Iterable[AlgoPerf]
    ) -> None:
        """Store measurements at their own batch sizes, replacing older ones.

        Raises:
            ValueError: A number in them is negative, not finite or out of all bounds.
        """
        key, now = problem_key(problem), time.time()
        self._write(
            _perf_item(
                key,
                Measurement(
                    fingerprint=fingerprint,
                    problem=problem,
                    perf=perf,
                    measured_at=now,
                    version=self._version,
                ),
            )
            for perf in perfs
        )

    def get_verdict(
        self, fingerprint: str, problem: ConvProblem, signature: str
    ) -> float | None:
        """Return the measured ratio (`Verdict.ratio`) of a plan, None if unknown."""
        name = _VERDICT, fingerprint, problem_key(problem), problem.batch
        found: Verdict | None = self._entry(*name).get(signature)
        return None if found is None else found.ratio

    def put_verdict(
        self, fingerprint: str, problem: ConvProblem, signature: str, ratio: float
    ) -> None:
        """Store the ratio of a plan to its baseline; see `Verdict.ratio`.

        Raises:
            ValueError: The ratio is negative or not finite.
        """
        if not 0 <= ratio < math.inf:
            raise ValueError(f"ratio must be finite and not negative, got {ratio}")
        found = Verdict(
            fingerprint=fingerprint, problem=problem, signature=signature, ratio=ratio
        )
        self._write([_verdict_item(problem_key(problem), found)])

    def get_race(self, fingerprint: str, raced: str) -> tuple[float, float] | None:
        """Return the times of both candidates of a `Race`; None if not timed."""
        found: Race | None = self._entry(_RACE, fingerprint, raced, 0).get("")
        return None if found is None else found.times_ms

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
        race = Race(
            fingerprint=fingerprint,
            raced=raced,
            times_ms=times_ms,
            measured_at=time.time(),
        )
        decode_race("a race", fingerprint, race_to_dict(race))
        self._write([_race_item(race)], keep=not replace)
        return self.get_race(fingerprint, raced) or times_ms

    def get_plan_text(
        self, fingerprint: str, problem: ConvProblem, algo: str
    ) -> str | None:
        """Return an algorithm's serialized execution plan; None if unknown."""
        name = _PLAN_TEXT, fingerprint, problem_key(problem), problem.batch
        text: str | None = self._entry(*name).get(algo)
        return text

    def put_plan_text(
        self, fingerprint: str, problem: ConvProblem, algo: str, text: str
    ) -> None:
        """Store an execution plan as serialized by its library."""
        name = _PLAN_TEXT, fingerprint, problem_key(problem), problem.batch
        self._write([(name, algo, text)])

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
        return self._rows(_PERF, fingerprint, key)

    def verdicts(self, fingerprint: str | None = None) -> tuple[Verdict, ...]:
        """Return the verdicts on plans measured as a whole, of one device or all."""
        return self._rows(_VERDICT, fingerprint)

    def races(self, fingerprint: str | None = None) -> tuple[Race, ...]:
        """Return the races that were run, on one device or on all."""
        return self._rows(_RACE, fingerprint)

    def clear(self, fingerprint: str | None = None) -> int:
        """Delete the rows of one device, or all; return how many were measured."""
        count = len(self.rows(fingerprint))
        named = "device != '' AND device = coalesce(?, device)"
        delete = f"DELETE FROM entries WHERE {named}"
        self._file.do(lambda db: db.execute(delete, (fingerprint,)))
        return count

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
        key_of = functools.cache(problem_key)
        return self._write(
            [
                *(_perf_item(key_of(m.problem), m) for m in recording.measurements),
                *(_verdict_item(key_of(v.problem), v) for v in recording.verdicts),
                *map(_race_item, recording.races),
            ],
            keep=True,
        )

    def close(self) -> None:
        """Close the file; the cache must not be used afterwards."""
        self._file.close()

    def __enter__(self) -> "BenchmarkCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, rows: Iterable[_Item], *, keep: bool = False) -> int:
        """Write items in one transaction; return how many measurements were written.

        With `keep`, items that are known stay, unless they are older measurements.
        """
        entries: dict[Name, Items] = {}
        for name, key, item in rows:
            entries.setdefault(name, {})[key] = item
        query = f"SELECT value FROM entries WHERE {_NAMED}"

        def write(db: sqlite3.Connection) -> int:
            count, now = 0, time.time()
            with transaction(db):
                for name, items in entries.items():
                    known: Items = {}
                    for (value,) in db.execute(query, name):
                        with contextlib.suppress(ValueError):  # damaged: replaced
                            known, _ = _items(name, value)
                    new = {
                        key: item
                        for key, item in items.items()
                        if not (keep and key in known)
                        or (
                            name[0] == _PERF
                            and item["measured_at"] > known[key]["measured_at"]
                        )
                    }
                    if new:
                        insert(db, name, _packed(known | new), now)
                        count += len(new) if name[0] == _PERF else 0
            return count

        self.writes += 1
        return self._file.do(write)

    def _entry(self, *name: Any) -> Items:
        """Return the items of an entry by their names."""
        return next(iter(self._read(_NAMED, *name)), {})

    def _rows(
        self, kind: str, device: str | None, key: str | None = None
    ) -> tuple[Any, ...]:
        """Return all items of a kind, of one device or one key, or all."""
        where = {"kind": kind, "device": device, "key": key}
        known = {column: name for column, name in where.items() if name is not None}
        named = " AND ".join(f"{column} = ?" for column in known)
        found = self._read(named, *known.values())
        return tuple(item for items in found for item in items.values())

    def _read(self, condition: str, *names: Any) -> list[Items]:
        """Return the sound entries; the first damaged ones cause one warning."""
        query = f"SELECT {NAME}, value FROM entries WHERE {condition} ORDER BY {NAME}"
        rows = self._file.do(lambda db: db.execute(query, names).fetchall())
        found, wrong = [], []
        for *name, value in rows:
            try:
                found.append(_items(tuple(name), value)[1])
            except ValueError as e:
                wrong.append(f"{name[0]} of {name[1]!r}: {e}")
        if wrong and not self._warned:
            self._warned = True
            warn(
                f"ignoring damaged entries of {self.path or 'memory'} ({len(wrong)}); "
                f"the first: {wrong[0]}",
                stacklevel=5,
            )
        return found
