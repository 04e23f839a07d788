"""Caches and recordings that others wrote, or damaged: a warning or one clear error."""

import contextlib
import gzip
import json
import os
import random
import re
import shutil
import sqlite3
import sys
import warnings

import pytest

from mucudnn import recording_format as recording_format
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.sqlite_file import CacheWarning
from mucudnn.suites import parse_problem
from tests import commands
from tests.commands import json_of, refused
from tests.doubles import break_index, places_in

PROBLEM = "n=8,c=3,h=9,w=9,k=4,r=3,s=3"
ASKED = ("--problem", PROBLEM, "--directions", "forward")
KNOWN = parse_problem(PROBLEM)


def run(*args):
    """Invoke a command as people do: warnings are lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        return commands.run(*args)


def done(*args):
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result


def bearable(*args):
    """Done, or refused in one line; never a traceback."""
    result = run(*args)
    assert result.exit_code in (0, 2), result.output
    if result.exit_code == 2:
        errors = [line for line in result.stderr.splitlines() if "error: " in line]
        assert len(errors) == 1, result.stderr
    return result


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """A cache and its recording."""
    folder = tmp_path_factory.mktemp("genuine")
    cache, recording = folder / "cache.sqlite", folder / "recording.json"
    done("tune", *ASKED, "--backend", "null", "--cache", cache, "--batch-policy", "all")
    with BenchmarkCache(cache) as found:
        found.put_verdict("null", KNOWN, "A@8 / B@8", 0.5)
    done("cache", "export", recording, "--cache", cache)
    with contextlib.closing(sqlite3.connect(cache)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode = DELETE")
    return cache, recording


@pytest.fixture
def cache(genuine, tmp_path):
    return shutil.copy(genuine[0], tmp_path / "cache.sqlite")


@pytest.fixture
def recording(genuine, tmp_path):
    return shutil.copy(genuine[1], tmp_path / "recording.json")


def change(file, *statements):
    with contextlib.closing(sqlite3.connect(file)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


CHANGES = [
    "value = x'00ff'",
    "value = 'text'",
    "value = substr(value, 1, 40)",
    "value = (SELECT value FROM entries WHERE batch = 2)",
    "batch = -4",
    "batch = 'four'",
    "key = '{}'",
    "key = replace(key, '9', '0')",
    "device = x'00ff'",
]


@pytest.mark.parametrize("what", CHANGES)
def test_a_damaged_entry_is_passed_over_and_nothing_else(cache, what, tmp_path):
    with BenchmarkCache(cache) as found:
        before = found.rows()
    change(cache, f"UPDATE entries SET {what} WHERE kind = 'perf' AND batch = 4")
    with BenchmarkCache(cache) as found:
        with pytest.warns(CacheWarning, match=r"^ignoring damaged entries .* \(1\)"):
            after = found.rows()
        assert set(after) == {m for m in before if m.perf.batch != 4} != set(before)
        assert len(found.verdicts()) == 1  # and no second warning
        assert sum(d.rows for d in found.summary()) == len(after)
    out = tmp_path / "out.json"
    for args in (("list",), ("export", out)):
        result = done("cache", *args, "--cache", cache)
        (line,) = result.stderr.splitlines()
        assert line.startswith("mucudnn: warning: ignoring damaged entries")
    with BenchmarkCache() as fresh:
        assert fresh.import_json(out) == len(after)


def test_a_damaged_verdict_is_none(cache):
    change(cache, "UPDATE entries SET value = x'ff' WHERE kind = 'verdict'")
    with BenchmarkCache(cache) as found:
        with pytest.warns(CacheWarning, match="ignoring damaged entries"):
            assert found.get_verdict("null", KNOWN, "A@8 / B@8") is None
        assert found.verdicts() == ()


@pytest.mark.parametrize("measured", [True, False])
def test_what_is_damaged_is_measured_again_or_imported(cache, recording, measured):
    change(cache, "UPDATE entries SET value = x'00'")
    tune = ("tune", *ASKED, "--backend", "null", "--batch-policy", "all")
    done(*(tune if measured else ("cache", "import", recording)), "--cache", cache)
    assert done("cache", "list", "--cache", cache).stderr == ""


@pytest.mark.parametrize(
    ("member", "bad", "message"),
    [
        ("measured_at", 1e12, r"measured_at: .* is above"),
        ("measured_at", -1, "measured_at: -1.0 is below 0"),
        ("time_ms", 1e308, r"time_ms: 1e\+308 is above"),
        ("noise_ms", 1e308, r"noise_ms: 1e\+308 is above"),
        ("batch", 0, "batch: 0 is below 1"),
    ],
)
def test_imports_and_recordings_are_checked_alike(
    cache, recording, member, bad, message
):
    document = json.loads(recording.read_text())
    document["devices"][0]["problems"][0]["rows"][0][member] = bad
    recording.write_text(json.dumps(document))
    before = json_of("cache", "list", "--cache", cache)
    for args in (
        ("cache", "import", recording, "--cache", cache),
        *(
            (command, *ASKED, "--backend", f"recorded:{recording}", "--cache", "none")
            for command in ("tune", "explain")
        ),
    ):
        line = refused(*args)
        assert re.search(message, line), line
    assert json_of("cache", "list", "--cache", cache) == before


@pytest.mark.parametrize("fast", [0.0, 5e-324])
def test_times_of_nothing_at_all(recording, fast):
    document = json.loads(recording.read_text())
    for row in document["devices"][0]["problems"][0]["rows"]:
        row["time_ms"] = fast if row["batch"] < 8 else 1e11
        row["noise_ms"] = 0.0
    recording.write_text(json.dumps(document))
    args = ("tune", *ASKED, "--backend", f"recorded:{recording}", "--cache", "none")
    (layer,) = json_of(*args)["layers"]
    (plan,) = layer["plans"]
    assert plan["planned_ms"] == fast * len(plan["steps"])
    assert plan["undivided_ms"] == 1e11


# Whole files


def test_a_name_that_is_no_text_is_damage(cache):
    raw = cache.read_bytes()
    assert raw.count(b"used_at REAL") == 1
    cache.write_bytes(raw.replace(b"used_at REAL", b"used\xff\xfet REAL"))
    with pytest.warns(CacheWarning, match="a new"):
        found = BenchmarkCache(cache)
    with found:
        assert found.path == cache
        assert found.rows() == ()
    (kept,) = cache.parent.glob("*.corrupt-*")
    assert b"used\xff\xfet REAL" in kept.read_bytes()


def test_a_table_that_contradicts_its_index_is_set_aside(cache):
    break_index(cache)
    bearable("tune", *ASKED, "--backend", "null", "--cache", cache)


def test_names_that_no_file_has_mean_memory(tmp_path):
    path = f"{tmp_path}/\ud800"
    with pytest.warns(CacheWarning, match="in memory"):
        cache = BenchmarkCache(path)
    with cache:
        assert cache.path is None
    assert "cannot keep a cache" in refused("cache", "list", "--cache", path)
    with pytest.raises(ValueError, match="null character"):
        BenchmarkCache(f"{tmp_path}/a\0b")


@pytest.mark.skipif(sys.platform == "win32", reason="needs FIFOs")
@pytest.mark.parametrize("suffix", ["", "-wal", "-journal", "-shm"])
def test_a_fifo_is_not_waited_for(tmp_path, suffix):
    fifo = tmp_path / f"cache.sqlite{suffix}"
    os.mkfifo(fifo)
    with pytest.warns(CacheWarning, match="it is a FIFO, not a file"):
        cache = BenchmarkCache(tmp_path / "cache.sqlite")
    with cache:
        assert cache.path is None
    for args in (("cache", "import", fifo), ("tune", "--backend", f"recorded:{fifo}")):
        more = ("--cache", "none", *(ASKED if "tune" in args else ()))
        assert "it is a FIFO, not a file" in refused(*args, *more)


def test_a_packed_bomb_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(recording_format, "MOST", 1000)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        recording_format.read_recording(gzip.compress(b" " * 100_000))


# Thousands of damaged files were tried with these; some stay


VALUES = [
    *(None, True, -1, 0, 1, 1.5, 1e12, 1e308, 10**18, 2**63, 10**400, "", "x"),
    *("\0", "\ud800", [], {}, [[]], "N", ["N", 1e9, 2, 2], 5e-324, float("nan")),
]


def mutated_json(rnd, text):
    document = json.loads(text)
    *path, last = rnd.choice([p for p in places_in(document) if p])
    at = document
    for key in path:
        at = at[key]
    if rnd.random() < 0.8:
        at[last] = rnd.choice(VALUES)
    elif rnd.random() < 0.5:
        del at[last]
    elif isinstance(at, dict):
        at[rnd.choice(["more", "\ud800"])] = 1
    else:
        at.append(rnd.choice(VALUES))
    return json.dumps(document).encode()


def mutated_bytes(rnd, raw):
    data = bytearray(raw)
    for _ in range(rnd.choice([1, 1, 3, 10])):
        at = rnd.randrange(len(data))
        match rnd.randrange(4):
            case 0 | 1:
                data[at] = rnd.randrange(256)
            case 2:
                del data[at : at + 4]
            case 3:
                data[at : at + 32] = bytes([rnd.choice([0, 255])]) * 32
    return bytes(data)


@pytest.mark.parametrize("seed", range(9))
def test_damaged_recordings_are_no_traceback(genuine, tmp_path, seed):
    rnd = random.Random(seed)
    raw = genuine[1].read_bytes()
    file, cache = tmp_path / "r.json", tmp_path / "c.sqlite"
    file.write_bytes(mutated_json(rnd, raw) if seed % 3 else mutated_bytes(rnd, raw))
    bearable("cache", "import", file, "--cache", cache)
    bearable("cache", "list", "--cache", cache, "--json", "-")
    bearable("cache", "export", tmp_path / "out.json", "--cache", cache)
    replay = (*ASKED, "--backend", f"recorded:{file}", "--cache", "none")
    bearable("tune", *replay, "--json", "-")
    bearable("explain", *replay)


@pytest.mark.parametrize("seed", range(9))
def test_damaged_caches_are_no_traceback(genuine, tmp_path, seed):
    raw = mutated_bytes(random.Random(seed), genuine[0].read_bytes())
    for i, args in enumerate(
        [
            ("cache", "list", "--json", "-"),
            ("cache", "export", tmp_path / "out.json"),
            ("cache", "import", genuine[1]),
            ("tune", *ASKED, "--backend", "null"),
            ("explain", *ASKED, "--backend", "null"),
        ]
    ):
        file = tmp_path / f"{i}.sqlite"
        file.write_bytes(raw)
        bearable(*args, "--cache", file)
