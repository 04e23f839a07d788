"""Measurements are remembered, whatever happens to the file."""

import contextlib
import dataclasses
import gzip
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import CacheError
from mucudnn.ir.conv import AlgoPerf, ConvProblem, Direction
from mucudnn.runtime.store.measurements import BenchmarkCache, default_path
from mucudnn.runtime.store.sqlite_file import CacheWarning
from tests.commands import run_code, start_python
from tests.examples import examples

PROBLEM = ConvProblem(
    direction=Direction.FORWARD, x_shape=(8, 3, 9, 9), w_shape=(4, 3, 3, 3)
)
GPU = "gpu/1.0"
FLIPS = 25

CHILD = """
import math, os, sys, time, warnings
from mucudnn.ir.conv import AlgoPerf, ConvProblem, Direction
from mucudnn.runtime.store.measurements import BenchmarkCache

PROBLEM = ConvProblem(
    direction=Direction.FORWARD, x_shape=(8, 3, 9, 9), w_shape=(4, 3, 3, 3)
)

def perf(algo, batch=8):
    return AlgoPerf(algo=algo, batch=batch, time_ms=1.0, workspace=0)
"""


def perf(algo="GEMM", batch=8, time_ms=1.5, **fields):
    return AlgoPerf(
        algo=algo, batch=batch, time_ms=time_ms, **{"workspace": 0, **fields}
    )


FAILED = perf("FFT", time_ms=math.inf, error="OutOfMemoryError: no room", samples=0)


def spawn(code, *arguments, **options):
    return start_python("-W", "error", "-c", CHILD + code, *arguments, **options)


def output_of(code, *arguments):
    return run_code(CHILD + code, *arguments)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "perf.sqlite"


@pytest.fixture(params=["memory", "file"])
def cache(request, file):
    with BenchmarkCache(None if request.param == "memory" else file) as cache:
        yield cache


def aside(file, kind):
    return [
        p for p in file.parent.glob(f"{file.name}.{kind}-*") if "-wal" not in p.name
    ]


# What it remembers


def test_a_row_and_a_verdict_come_back_as_they_were(cache):
    rows = (
        FAILED,
        perf(deterministic=False, noise_ms=0.25, samples=7, workspace=2**40),
        perf(math_mode="tf32"),
    )
    cache.put(GPU, PROBLEM, rows)
    cache.put_verdict(GPU, PROBLEM, "2+6", 1.5)
    cache.put_verdict(GPU, PROBLEM, "2+6", 1.25)
    assert cache.get(GPU, PROBLEM) == rows
    assert cache.get_verdict(GPU, PROBLEM, "2+6") == 1.25
    assert cache.get_verdict(GPU, PROBLEM, "4+4") is None
    backward = PROBLEM.with_direction(Direction.BACKWARD_DATA)
    for key in (("other", PROBLEM), (GPU, backward), (GPU, PROBLEM.with_batch(9))):
        assert cache.get(*key) == ()
        assert cache.get_verdict(*key, "2+6") is None


def test_every_field_of_the_problem_counts(cache):
    wide = {"x_shape": (8, 4, 9, 9), "w_shape": (4, 4, 3, 3)}
    others = [
        dataclasses.replace(PROBLEM, **change)
        for change in (
            {"direction": Direction.BACKWARD_FILTER},
            {"x_shape": (8, 3, 9, 10)},
            {"w_shape": (5, 3, 3, 3)},
            {"stride": (1, 2)},
            {"padding": (1, 0)},
            {"dilation": (2, 1)},
            {**wide, "groups": 1},
            {**wide, "w_shape": (4, 2, 3, 3), "groups": 2},
            {"dtype": "float64"},
            {"layout": "NHWC"},
        )
    ]
    for i, problem in enumerate([PROBLEM, *others]):
        cache.put(GPU, problem, [perf(time_ms=float(i))])
    for i, problem in enumerate([PROBLEM, *others]):
        assert cache.get(GPU, problem) == (perf(time_ms=float(i)),)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_time_must_be_a_time(cache, bad):
    with pytest.raises(ValueError, match="time_ms"):
        cache.put(GPU, PROBLEM, [perf(), perf("FFT", time_ms=bad)])
    assert cache.get(GPU, PROBLEM) == ()
    with pytest.raises(ValueError, match="ratio"):
        cache.put_verdict(GPU, PROBLEM, "2+6", bad)


def test_summary_rows_and_clear(cache):
    other = PROBLEM.with_direction(Direction.BACKWARD_DATA)
    cache.put("b", PROBLEM, [perf(batch=b) for b in (1, 2, 4)])
    cache.put("b", other, [perf()])
    cache.put("a", PROBLEM, [FAILED])
    cache.put_verdict("a", PROBLEM, "2+6", 1.0)
    assert cache.fingerprints() == ("a", "b")
    a, b = cache.summary()
    assert (a.problems, a.rows, b.problems, b.rows) == (1, 1, 2, 4)
    assert b.oldest <= b.newest <= a.newest
    assert [(m.problem, m.perf) for m in cache.rows("a")] == [(PROBLEM, FAILED)]
    assert {m.problem.batch for m in cache.rows("b")} == {1, 2, 4, 8}
    assert cache.clear("a") == 1
    assert cache.fingerprints() == ("b",)
    assert cache.get_verdict("a", PROBLEM, "2+6") is None
    assert cache.clear() == 4
    assert cache.rows() == ()


def test_a_file_outlives_its_cache(file):
    deep = file.parent / "made" / "on demand" / "perf?mode=memory%20.sqlite"
    with BenchmarkCache(str(deep)) as cache:
        cache.put(GPU, PROBLEM, [FAILED])
        cache.put_verdict(GPU, PROBLEM, "2+6", 2.0)
        assert cache.path == deep
    with BenchmarkCache(deep) as cache:
        assert cache.get(GPU, PROBLEM) == (FAILED,)
        assert cache.get_verdict(GPU, PROBLEM, "2+6") == 2.0
    assert default_path().suffix == ".sqlite"


def test_a_closed_cache_says_so(cache):
    cache.close()
    cache.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        cache.get(GPU, PROBLEM)


operations = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.integers(1, 3),
        st.sampled_from(["GEMM", "FFT"]),
        st.none() | st.floats(0, 10),
    )
)


@examples(40)
@given(operations)
def test_it_is_a_dictionary(steps):
    model = {}
    with BenchmarkCache() as cache:
        for device, batch, algo, time_ms in steps:
            row = perf(algo, batch, math.inf if time_ms is None else time_ms)
            row = dataclasses.replace(row, error="no" if time_ms is None else None)
            cache.put(device, PROBLEM, [row])
            model[device, batch, algo] = row
        for device in ("a", "b"):
            for batch in (1, 2, 3):
                wanted = {
                    row for key, row in model.items() if key[:2] == (device, batch)
                }
                assert set(cache.get(device, PROBLEM.with_batch(batch))) == wanted


# Export and import


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_export_and_import(cache, tmp_path, name):
    cache.put(GPU, PROBLEM, [perf(), FAILED, perf(math_mode="tf32")])
    cache.put("other", PROBLEM, [perf(batch=3)])
    assert cache.export_json(tmp_path / name) == 4
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x1f\x8b") == name.endswith("gz")
    assert {p.name for p in tmp_path.iterdir() if "out" in p.name} == {name}
    with BenchmarkCache() as fresh:
        assert fresh.import_json(tmp_path / name) == 4
        assert fresh.rows() == cache.rows()
        assert fresh.import_json(str(tmp_path / name)) == 0
    with BenchmarkCache() as empty:
        assert empty.export_json(tmp_path / name) == 0
        assert cache.import_json(tmp_path / name) == 0


def test_import_keeps_what_is_newer(cache, tmp_path):
    cache.put(GPU, PROBLEM, [perf(time_ms=1.0), perf("FFT", time_ms=1.0)])
    out = tmp_path / "out.json"
    cache.export_json(out)
    document = json.loads(out.read_bytes())
    fft, gemm = document["devices"][0]["problems"][0]["rows"]
    fft |= {"time_ms": 2.0, "measured_at": fft["measured_at"] + 60}
    gemm |= {"time_ms": 2.0, "measured_at": gemm["measured_at"] - 60}
    out.write_text(json.dumps(document))
    assert cache.import_json(out) == 1
    assert [p.time_ms for p in cache.get(GPU, PROBLEM)] == [2.0, 1.0]


def test_verdicts_go_along_and_do_not_replace_what_is_known(cache, tmp_path):
    cache.put(GPU, PROBLEM, [perf()])
    cache.put_verdict(GPU, PROBLEM, "a / b", 0.5)
    cache.put_verdict(GPU, PROBLEM.with_batch(9), "c / d", 1.0)
    cache.put_verdict("other", PROBLEM, "a / b", 0.75)
    assert [v.ratio for v in cache.verdicts(GPU)] == [0.5, 1.0]
    out = tmp_path / "out.json.gz"
    assert cache.export_json(out) == 1
    with BenchmarkCache() as fresh:
        fresh.put_verdict("other", PROBLEM, "a / b", 0.25)
        assert fresh.import_json(out) == 1
        assert fresh.get_verdict(GPU, PROBLEM, "a / b") == 0.5
        assert fresh.get_verdict(GPU, PROBLEM.with_batch(9), "c / d") == 1.0
        assert fresh.get_verdict("other", PROBLEM, "a / b") == 0.25
        assert len(fresh.verdicts()) == len(cache.verdicts()) == 3


def test_a_bad_import_imports_nothing(cache, tmp_path):
    with BenchmarkCache() as other:
        other.put(GPU, PROBLEM, [perf(), perf("FFT")])
        other.export_json(tmp_path / "good.json")
    good = (tmp_path / "good.json").read_bytes()
    zipped = gzip.compress(good)
    for name, data, message in (
        ("cut.json", good[:-9], "line"),
        ("cut.json.gz", zipped[:-9], "damaged gzip"),
        ("other.json", b'{"rows": []}', "not a recording"),
        ("new.json", good.replace(b'"schema": 2', b'"schema": 3'), "schema is 3"),
        ("row.json", good.replace(b'"GEMM"', b"5"), r"rows\[1\].algo: 5"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CacheError, match=f"{name}.*{message}"):
            cache.import_json(tmp_path / name)
    with pytest.raises(CacheError, match=r"missing\.json"):
        cache.import_json(tmp_path / "missing.json")
    assert cache.rows() == ()


# Threads and processes


def test_threads_share_a_cache(cache):
    def work(name):
        for batch in range(1, 21):
            cache.put(GPU, PROBLEM, [perf(name, batch)])
            assert perf(name, batch) in cache.get(GPU, PROBLEM.with_batch(batch))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, [f"A{i}" for i in range(6)]))
    assert len(cache.rows()) == 120


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("start", ["garbage", "empty"])
def test_opening_at_the_same_instant_loses_nothing(tmp_path, start):
    """Eight processes, many rounds: what one creates no other takes for foreign."""
    code = """
folder, start = sys.argv[1:]
warnings.simplefilter("ignore")
BenchmarkCache().close()
for turn in range(10):
    path = f"{folder}/{turn}.sqlite"
    if start == "garbage":
        with open(path, "wb") as stream:
            stream.write(b"garbage" * 1000)
    instant, children = time.time() + 0.02, []
    for i in range(8):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                while time.time() < instant:
                    pass
                with BenchmarkCache(path) as cache:
                    cache.put("gpu", PROBLEM, [perf(f"A{i}")])
                    status = 0 if cache.path is not None else 2
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
    with BenchmarkCache(path) as cache:
        assert len(cache.rows()) == 8, turn
"""
    output_of(code, tmp_path, start)
    kept = list(tmp_path.glob("*.corrupt-*"))
    assert len(kept) == (10 if start == "garbage" else 0)


def test_a_killed_process_loses_at_most_its_last_row(file):
    code = """
with BenchmarkCache(sys.argv[1]) as cache:
    for batch in range(1, 100_000):
        cache.put("gpu", PROBLEM, [perf("GEMM", batch)])
        print(batch, flush=True)
"""
    child = spawn(code, file)
    for _ in range(30):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    said = 30 + len(child.stdout.read().splitlines())
    child.communicate()
    with BenchmarkCache(file) as cache:
        batches = [p.batch for p in cache.get_all("gpu", PROBLEM)]
    assert batches in ([*range(1, said + 1)], [*range(1, said + 2)])


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_process_gets_its_own_connection(file):
    code = """
cache = BenchmarkCache(sys.argv[1])
cache.put("gpu", PROBLEM, [perf("PARENT")])
pid = os.fork()
if pid == 0:
    cache.put("gpu", PROBLEM, [perf("CHILD")])
    cache.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
cache.put("gpu", PROBLEM, [perf("AFTER")])
print([p.algo for p in cache.get("gpu", PROBLEM)])
"""
    assert output_of(code, file) == "['AFTER', 'CHILD', 'PARENT']\n"


# Files that are not what they should be


def some_rows(file, count=400):
    rows = [perf("GEMM", batch) for batch in range(1, count + 1)]
    with BenchmarkCache(file) as cache:
        cache.put(GPU, PROBLEM, rows)
    return rows


def assert_works(cache, path):
    assert cache.path == path
    cache.put(GPU, PROBLEM, [FAILED])
    assert FAILED in cache.get(GPU, PROBLEM)


def damage_header(file):
    some_rows(file)
    file.write_bytes(b"x" * 200 + file.read_bytes()[200:])


def truncate(file):
    some_rows(file)
    os.truncate(file, file.stat().st_size // 2)


def altered(*statements, count=400):
    """Return what makes a file of some of our rows, and runs SQL on it."""

    def ruin(file):
        if count:
            some_rows(file, count)
        with contextlib.closing(sqlite3.connect(file)) as db:
            for statement in statements:
                db.execute(statement)
            db.commit()

    return ruin


THEIRS = "CREATE TABLE theirs AS SELECT 42 AS answer"
FOREIGN = "PRAGMA journal_mode = WAL", THEIRS


def opened(path, match):
    """A cache that warns once as it is opened."""
    with pytest.warns(CacheWarning, match=match) as caught:
        cache = BenchmarkCache(path)
    assert len(caught) == 1
    return cache


ALTERED = (
    "DROP TABLE entries",
    "ALTER TABLE entries ADD COLUMN more TEXT",
    "CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END",
)


@pytest.mark.parametrize(
    "ruin",
    [
        lambda file: file.write_bytes(b"\x07" * 3000),
        damage_header,
        truncate,
        *map(altered, ALTERED),
    ],
)
def test_a_damaged_file_is_set_aside(file, ruin):
    ruin(file)
    before = file.read_bytes()
    with opened(file, "a new") as cache:
        assert_works(cache, file)
    (kept,) = aside(file, "corrupt")
    assert kept.read_bytes() == before
    with BenchmarkCache(file) as cache:
        assert cache.get(GPU, PROBLEM) == (FAILED,)


def contents(cache):
    texts = [cache.get_plan_text(GPU, PROBLEM.with_batch(b), "A") for b in range(1, 9)]
    return (
        *((m.problem, m.perf, m.version) for m in cache.rows()),
        *cache.verdicts(),
        *((race.raced, race.times_ms) for race in cache.races()),
        *filter(None, texts),
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A file with entries of every kind on several pages, and what they are."""
    file = tmp_path_factory.mktemp("sound") / "perf.sqlite"
    with BenchmarkCache(file) as cache:
        for k in range(1, 8):
            layer = dataclasses.replace(PROBLEM, w_shape=(k, 3, 3, 3))
            batches = [perf("GEMM", b, time_ms=1.1 * b + k) for b in range(1, 17)]
            cache.put(GPU, layer, [*batches, FAILED])
            cache.put_verdict(GPU, layer, "2+6", 0.5 + k)
            cache.put_race(GPU, f"race {k}", (1.5, 2.5 + k))
            cache.put_plan_text(GPU, PROBLEM.with_batch(k), "A", f'{{"plan": {k}}}')
        found = contents(cache)
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    return file.read_bytes(), found


@pytest.mark.parametrize("count", [1, 3, 10])
def test_flipped_bits_are_harmless_or_noticed(count, sound, tmp_path):
    """No row vanishes in silence, none is wrong, and what is put later stays."""
    data, wanted = sound
    rnd = random.Random(count)
    noticed = kept = 0
    for trial in range(FLIPS):
        file = tmp_path / str(trial) / "perf.sqlite"
        file.parent.mkdir()
        damaged = bytearray(data)
        for at in rnd.choices(range(len(data)), k=count):
            damaged[at] ^= 1 << rnd.randrange(8)
        file.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with BenchmarkCache(file) as cache:
                found = contents(cache)
                cache.put("other", PROBLEM, [perf()])
                path = cache.path
        assert set(found) <= set(wanted), f"trial {trial}: rows are wrong"
        noticed += bool(caught)
        kept += len(found)
        if not caught:
            assert found == wanted, f"trial {trial}: rows are gone"
        if path is None:
            assert caught
            continue
        with warnings.catch_warnings(record=True), BenchmarkCache(path) as cache:
            assert cache.get("other", PROBLEM) == (perf(),), f"trial {trial}"
    assert noticed
    assert kept > FLIPS * len(wanted) / 2  # most can still be read


def test_damaged_text_is_set_aside(file):
    altered("UPDATE entries SET device = CAST(x'ff' AS TEXT)", count=3)(file)
    with BenchmarkCache(file) as cache:
        with pytest.warns(CacheWarning, match="UTF-8"):
            assert cache.rows() == ()
        assert_works(cache, file)


def test_a_damaged_file_in_use_is_left_alone(file):
    some_rows(file)
    code = """
with BenchmarkCache(sys.argv[1]) as cache:
    print(len(cache.get_all("gpu/1.0", PROBLEM)), flush=True)
    sys.stdin.readline()
"""
    child = spawn(code, file, stdin=subprocess.PIPE)
    assert child.stdout.readline() == "400\n"
    file.write_bytes(b"x" * 200 + file.read_bytes()[200:])
    with opened(file, "in memory") as cache:
        assert_works(cache, None)
    assert aside(file, "corrupt") == []
    child.communicate("\n")


def test_what_a_newer_version_wrote_stays_where_it_is(file):
    altered(THEIRS, "PRAGMA user_version = 99")(file)
    before = file.read_bytes()
    with opened(file, "newer version .* not changed") as cache:
        assert_works(cache, None)
    assert file.read_bytes() == before
    assert aside(file, "*") == []


@pytest.mark.parametrize(
    "make",
    [
        altered(*FOREIGN, count=0),
        altered(*FOREIGN, "PRAGMA application_id = 7", count=0),
        altered(THEIRS, "PRAGMA user_version = 2"),
    ],
)
def test_a_foreign_database_is_kept_whole(file, make):
    make(file)
    with opened(file, "a new") as cache:
        assert_works(cache, file)
    (kept,) = aside(file, "foreign")
    with contextlib.closing(sqlite3.connect(kept)) as db:
        assert db.execute("SELECT answer FROM theirs").fetchone() == (42,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_setting_aside_never_overwrites(file):
    for i in range(3):
        file.write_bytes(b"garbage %d" % i)
        opened(file, "a new").close()
        for name in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
            name.unlink(missing_ok=True)
    kept = {p.read_bytes() for p in aside(file, "corrupt")}
    assert kept == {b"garbage 0", b"garbage 1", b"garbage 2"}


def test_links_are_followed_to_an_empty_file_and_to_a_damaged_one(file, tmp_path):
    link = tmp_path / "link.sqlite"
    link.symlink_to(file)
    file.touch()
    with BenchmarkCache(link) as cache:
        assert_works(cache, file)
    with BenchmarkCache(file) as cache:
        assert cache.get(GPU, PROBLEM) == (FAILED,)
    file.write_bytes(b"garbage")
    with opened(link, "a new") as cache:
        assert_works(cache, file)
    assert link.is_symlink()
    assert [p.read_bytes() for p in aside(file, "corrupt")] == [b"garbage"]


# Files that cannot be written


@pytest.mark.parametrize("name", ["plain/perf.sqlite", "folder", "loop"])
def test_a_path_that_cannot_be_used_means_memory(tmp_path, name):
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with opened(tmp_path / name, "in memory") as cache:
        assert_works(cache, None)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX permissions")
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("wal_left", [False, True])
def test_read_only_rows_stay_readable(what, wal_left):
    """A child without privileges: permission bits do not bind root."""
    code = """
path, what = sys.argv[1:]
BenchmarkCache().close()
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with BenchmarkCache(path) as cache:
        known = len(cache.get_all("gpu/1.0", PROBLEM))
        cache.put("gpu/1.0", PROBLEM, [perf("NEW", 1000)])
        cache.put("gpu/1.0", PROBLEM, [perf("NEW", 1001)])
        print(known, len(cache.rows()), cache.path, len(caught))
"""
    folder = Path(tempfile.mkdtemp())
    file = folder / "perf.sqlite"
    try:
        rows = some_rows(file)
        before = file.read_bytes()
        folder.chmod(0o555 if what == "folder" else 0o777)
        file.chmod(0o444)
        assert len(rows) == 400
        if wal_left:
            with BenchmarkCache(file) as other:
                other.get(GPU, PROBLEM)
                for name in folder.iterdir():
                    name.chmod(0o444)
                out = output_of(code, file, what)
        else:
            out = output_of(code, file, what)
        assert out == "400 402 None 1\n"
        assert file.read_bytes() == before
    finally:
        folder.chmod(0o777)
        shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
@pytest.mark.parametrize("limit", [0, 8192, 200_000])
def test_a_full_disk_means_memory(file, limit):
    """A limit on file sizes stands for the disk; writes past it fail."""
    some_rows(file, 10)
    code = """
import resource
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
    with BenchmarkCache(sys.argv[1]) as cache:
        for batch in range(100, 400):
            cache.put("gpu/1.0", PROBLEM, [perf("GEMM", batch)])
        print(len(cache.rows()), cache.path, len(caught))
"""
    assert output_of(code, file, limit) == "310 None 1\n"
    with BenchmarkCache(file) as cache:
        assert len(cache.rows()) >= 10


def test_a_lock_held_for_ever_means_memory(file):
    some_rows(file, 5)
    with BenchmarkCache(file, timeout_s=0.02) as cache:
        with contextlib.closing(sqlite3.connect(file)) as db:
            db.execute("BEGIN IMMEDIATE")
            with pytest.warns(CacheWarning, match="locked") as caught:
                cache.put(GPU, PROBLEM, [perf("NEW", 99)])
        assert len(caught) == 1
        assert cache.path is None
        assert len(cache.rows()) == 6
