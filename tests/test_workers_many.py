"""Measuring by workers of dask and of MPI, really run."""

import json
import os
import signal
import subprocess
import sys

import pytest

from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK, problem

pytestmark = pytest.mark.many

PROBLEMS = [problem(n) for n in (13, 5)]

ALL = {"rule": QUICK, "prune": False}  # which algorithms are ahead, clocks say

MPI = """
import json, sys
from mpi4py.futures import MPIPoolExecutor
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import problem
from tests.test_workers_many import ALL

if __name__ == "__main__":
    backend, path = sys.argv[1:]
    with MPIPoolExecutor() as executor:
        tuner = Tuner(backend=backend, cache=path, executor=executor, **ALL)
        tables = tuner.measure_all([problem(13), problem(5)])
    rows = [[p.algo, p.batch, p.error] for t in tables for p in t.perfs]
    print(json.dumps(rows))
"""


def keys(tables):
    return [[p.algo, p.batch, p.error] for t in tables for p in t.perfs]


def expected(backend):
    return keys(Tuner(backend=backend, cache=None, **ALL).measure_all(PROBLEMS))


@pytest.fixture
def client(tmp_path):
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
    import dask

    settings = {"temporary-directory": str(tmp_path), "distributed.worker.daemon": True}
    # As many threads as here: dask gives its workers one.
    settings["distributed.nanny.pre-spawn-environ"] = {}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.filterwarnings("default")  # dask's own, at its end
def test_dask_measures_and_survives_a_lost_worker(client, tmp_path):
    path = tmp_path / "cache.sqlite"
    with client.get_executor() as executor:
        options = {**ALL, "executor": executor}
        with Tuner(backend="cpu", cache=path, **options) as tuner:
            assert keys(tuner.measure_all(PROBLEMS)) == expected("cpu")
        with BenchmarkCache(path) as cache:
            found = {(r.problem.batch, r.perf.algo) for r in cache.rows()}
            assert len(found) == len(cache.rows()) > 0

        victim = next(iter(client.run(os.getpid).values()))
        lost = []

        def kill(measured):
            if not lost:
                lost.append(victim)
                os.kill(victim, signal.SIGKILL)

        tuner = Tuner(backend="cpu", cache=None, progress=kill, **options)
        assert keys(tuner.measure_all(PROBLEMS)) == expected("cpu")
        assert lost == [victim]


@pytest.mark.parametrize("backend", ["null", "cpu"])
def test_mpi_measures(backend, tmp_path):
    mpi4py = pytest.importorskip("mpi4py", reason="needs mpi4py")
    mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")  # noqa: PTH118, PTH120
    if not os.access(mpiexec, os.X_OK):
        pytest.skip("needs the mpiexec of the mpich wheel beside Python")
    assert mpi4py.__version__
    script = tmp_path / "measure.py"
    script.write_text(MPI)
    path = tmp_path / "cache.sqlite"
    command = [mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    run = subprocess.run(
        [*command, str(script), backend, str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == expected(backend)
    with BenchmarkCache(path) as cache:
        assert len(cache.rows()) == len(
            {(r.problem.batch, r.perf.algo) for r in cache.rows()}
        )
