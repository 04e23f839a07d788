"""What was raced, in a cache's file and in recordings: damaged, old, carried along."""

import contextlib
import math
import sqlite3

import pytest

from mucudnn.ir.conv import AlgoPerf
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.store.recordings import record_run
from mucudnn.runtime.store.sqlite_file import CacheWarning
from tests.cuda_work import layer
from tests.test_racing import later

GPU = "gpu/1"
PROBLEM = layer(3)
ROW = AlgoPerf(algo="GEMM", batch=3, time_ms=1.0, workspace=64)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "perf.sqlite"


def test_a_race_is_kept_until_it_is_cleared(file):
    for path in (None, file):
        with BenchmarkCache(path) as cache:
            assert cache.get_race(GPU, "a") is None
            assert cache.put_race(GPU, "a", (1.0, 0.0)) == (1.0, 0.0)
            assert cache.put_race(GPU, "a", (3.0, 4.0)) == (1.0, 0.0)
            assert cache.put_race("gpu/2", "a", (3.0, 4.0)) == (3.0, 4.0)
            assert cache.get_race(GPU, "b") is None
            for bad in (-1.0, math.inf, math.nan, 1e13):
                with pytest.raises(ValueError, match="second_ms"):
                    cache.put_race(GPU, "c", (1.0, bad))
            assert cache.summary() == ()
            assert cache.clear(GPU) == 0
            assert [race.fingerprint for race in cache.races()] == ["gpu/2"]
            cache.clear()
            assert cache.put_race(GPU, "d", (5.0, 6.0)) == (5.0, 6.0)


def test_a_damaged_race_is_run_again_and_mended(file):
    with BenchmarkCache(file) as cache:
        cache.put_race(GPU, "a", (1.0, 2.0))
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("UPDATE entries SET value = x'00'")
        db.commit()
    with BenchmarkCache(file) as cache:
        with pytest.warns(CacheWarning, match=r"damaged entries .* \(1\)"):
            assert cache.get_race(GPU, "a") is None
        assert cache.put_race(GPU, "a", (3.0, 4.0)) == (3.0, 4.0)
    with BenchmarkCache(file) as cache:
        assert cache.get_race(GPU, "a") == (3.0, 4.0)


def test_a_recording_carries_races_to_other_machines(file, tmp_path):
    first, asked, tuner = later(0.5, file)
    assert asked
    tuner.plan([PROBLEM])
    for recorded in (tmp_path / "run.json.gz", tmp_path / "all.json"):
        if recorded.suffix == ".gz":
            record_run(recorded, tuner, [PROBLEM], [], 0.0)
        else:
            tuner.cache.export_json(recorded)
        with BenchmarkCache(tmp_path / f"{recorded.name}.sqlite") as elsewhere:
            elsewhere.import_json(recorded)
            assert later(2.0, elsewhere)[:2] == (first, [])
            elsewhere.import_json(recorded)
            assert elsewhere.races() == tuner.cache.races()
