"""Measuring by workers of dask and of MPI, really run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.training.checkpoints import read_arrays, read_header
from mucudnn.runtime.tuning.tuner import Tuner
from tests import mpi_fleet
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


ROOT = Path(__file__).parent.parent
MPIEXEC = mpi_fleet.mpiexec()


if MPIEXEC is None:
    pytest.skip("needs mpi4py and mpiexec: mucudnn[mpi]", allow_module_level=True)

WORK = (
    *("train", "lenet", "--data", "synthetic:length=36,classes=5", "--batch", "12"),
    *("--epochs", "2", "--dtype", "float64", "--lr", "0.01", "--cache", "none"),
)
CLOSE = 1e-9
"""In double precision: the order of sums, no more."""


def run(
    folder, *words, ranks=1, start=("-m", "mucudnn"), work=WORK, launcher=None, most=300
):
    launcher = launcher or (("-n", str(ranks)) if ranks > 1 else ())
    launcher = (MPIEXEC, *launcher) if launcher else ()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "FI_PROVIDER": "tcp",
        "MPICH_NETMASK": "127.0.0.1/8",
    }
    return subprocess.run(
        [*launcher, sys.executable, *map(str, start), *work, *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=most,
        check=False,
        env=environment,
    )


def two(folder, first, second, work=()):
    """Two ranks with words of their own."""
    start = sys.executable, "-m", "mucudnn"
    apart = (*work, *first, ":", "-n", "1", *start, *work, *second)
    return run(folder, *apart, launcher=("-n", "1"), work=())


def losses(file):
    epochs = json.loads(file.read_text())["epochs"]
    return [value for e in epochs for value in (e["loss"], e["test_loss"])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert run(folder, "--json", "one.json").returncode == 0
    return losses(folder / "one.json")


@pytest.mark.parametrize("shares", ["9,3", "equal", "auto"])
def test_losses_are_those_of_one_process(shares, alone, tmp_path):
    done = run(tmp_path, "--shares", shares, "--json", "two.json", ranks=2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two.json") == pytest.approx(alone, rel=CLOSE)
    assert done.stdout.count("epoch 2/2") == 1  # one process speaks for all


DIGITS = (
    *("train", "digits", "--data", "synthetic:length=24,classes=5", "--batch", "12"),
    *("--epochs", "1", "--dtype", "float64", "--lr", "0.01", "--cache", "none"),
)


def test_each_rank_trains_within_its_own_budget(tmp_path):
    """With slices, which differ, and with shares by what steps take so."""
    done = run(tmp_path, "--json", "one.json", work=DIGITS)
    assert done.returncode == 0, done.stderr
    words = ("--budget", "450KiB,550KiB", "--split", "2", "--shares", "auto")
    words += ("--policy", "superneurons")  # which is quickly planned
    done = run(tmp_path, *words, "--json", "two.json", ranks=2, work=DIGITS)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two.json") == pytest.approx(
        losses(tmp_path / "one.json"), rel=CLOSE
    )
    found = json.loads((tmp_path / "two.json").read_text())
    first, second = found["ranks"]
    assert [first["budget_bytes"], second["budget_bytes"]] == [450 << 10, 550 << 10]
    for number, each in enumerate((first, second)):
        assert 0 < each["peak_bytes"] <= each["budget_bytes"]
        assert f"rank {number}: {each['samples']} images, " in done.stdout
    assert [first["samples"], second["samples"]] == found["shares"][-1]
    assert bool(found["segments"]) == (first["samples"] > 1)  # one image is not split


def test_parts_of_a_batch_and_a_dynamic_scale_are_those_of_one_process(tmp_path):
    words = ("--accumulate", "2", "--loss-scale", "dynamic")
    done = run(tmp_path, *words, "--json", "one.json", work=DIGITS)
    assert done.returncode == 0, done.stderr
    done = run(
        *(tmp_path, *words, "--shares", "4,2", "--json", "two.json"),
        ranks=2,
        work=DIGITS,
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two.json") == pytest.approx(
        losses(tmp_path / "one.json"), rel=CLOSE
    )


def test_budgets_that_ranks_cannot_keep_are_refused(tmp_path):
    for words in (("--budget", "1MiB,1MiB"), ("--shares", "9,3")):
        done = run(tmp_path, *words, work=DIGITS)
        assert done.returncode != 0
        assert f"{words[0]} with several values needs several processes" in done.stderr
    done = run(tmp_path, "--budget", "1MiB,1MiB,1MiB", ranks=2, work=DIGITS)
    assert "--budget has 3 sizes for 2 processes" in done.stderr
    done = run(tmp_path, "--budget", "1KiB", ranks=2, work=DIGITS)
    assert done.returncode != 0
    assert "is enough" in done.stderr
    assert "Traceback" not in done.stderr
    done = run(tmp_path, "--batch", "1", ranks=2, work=DIGITS)
    assert "2 processes cannot share 1 images" in done.stderr


@pytest.mark.parametrize(
    ("name", "slow"),
    [("unet-48", 3.0), pytest.param("resnet18", 2.0, marks=pytest.mark.slow)],
)
def test_networks_with_batch_norm_and_dropout_are_those_of_one_process(name, slow):
    """The last rank takes so many times as long, as its own table says."""
    found = mpi_fleet.run(name, slow)
    quick, tardy = found["samples"]
    assert quick > tardy >= 1  # found by the planner
    assert found["idle_fall"] > 0.5  # by measured tables, of which whole images are cut
    assert found["losses_apart"] < CLOSE
    assert found["right_alike"]
    assert found["sums_apart"] < 1e-5


def test_shares_are_planned_again_when_a_rank_becomes_slow(alone, tmp_path):
    helper = ROOT / "tests" / "mpi_rank.py"
    words = ("--shares", "auto", "--json", "two.json")
    done = run(tmp_path, *words, ranks=2, start=(helper, "1:0:slow"))
    assert done.returncode == 0, done.stderr
    before, after = json.loads((tmp_path / "two.json").read_text())["shares"]
    assert before == [6, 6]
    assert sum(after) == 12
    assert after[1] < before[1]
    assert losses(tmp_path / "two.json") == pytest.approx(alone, rel=CLOSE)


def test_an_error_of_one_rank_ends_all_with_a_line(tmp_path):
    done = run(tmp_path, "--shares", "9,4", ranks=2)
    assert done.returncode != 0
    assert "--shares 9,4 has 2 shares of 13 images in total; 2 processes share 12" in (
        done.stderr
    )
    helper = ROOT / "tests" / "mpi_rank.py"
    done = run(tmp_path, ranks=2, start=(helper, "1:2:raise"))
    assert done.returncode != 0
    assert "mucudnn: error: rank 1: something of this rank's own" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lr", "0.2"), "--lr is 0.01 on rank 0, 0.2 on rank 1"),
        (("--accumulate", "2"), "--accumulate is 1 on rank 0, 2 on rank 1"),
        (("--resume",), "--resume is False on rank 0, True on rank 1"),
        (("--lr", "quick"), "rank 1: Invalid value for '--lr': 'quick'"),
    ],
)
def test_ranks_with_other_settings_end_with_one_line(words, said, tmp_path):
    equal = ("--shares", "equal")
    done = two(tmp_path, equal, (*equal, *words), DIGITS)
    assert done.returncode != 0
    assert done.stderr.count("mucudnn: error: ") == 1, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cold_cache_gives_the_bits_of_a_warm_one(tmp_path):
    """Ranks that measure the same layers at once plan by what the cache keeps."""
    words = ("train", "lenet", "--data", "synthetic:length=48,classes=5", "--batch")
    words += ("24", "--epochs", "1", "--lr", "0.01", "--shares", "equal")
    words += ("--cache", "shared.sqlite", "--workspace-limit", "1MiB")
    found = []
    for name in ("cold", "warm"):
        done = run(tmp_path, "--checkpoint", name, ranks=2, work=words)
        assert done.returncode == 0, done.stderr
        (kept,) = (tmp_path / name).glob("**/*.safetensors")
        found.append(read_arrays(kept, read_header(kept)))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name])


def test_a_killed_rank_ends_the_others_and_the_run_goes_on(alone, tmp_path):
    helper = ROOT / "tests" / "mpi_rank.py"
    keep = ("--checkpoint", "kept", "--checkpoint-every", "1")
    done = run(
        tmp_path, *(*keep, "--shares", "9,3"), ranks=2, start=(helper, "1:4:kill")
    )
    assert done.returncode != 0
    assert "signal" in done.stderr.lower() + done.stdout.lower()
    rest = (*keep, "--resume", "--json", "rest.json")
    done = run(tmp_path, *rest, "--shares", "4,4,4", ranks=3)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "rest.json") == pytest.approx(alone, rel=CLOSE)


def test_an_interrupt_of_one_rank_ends_all_with_a_checkpoint(tmp_path):
    helper = ROOT / "tests" / "mpi_rank.py"
    words = ("--checkpoint", "kept", "--json", "some.json", "--shares", "equal")
    done = run(tmp_path, *words, ranks=2, start=(helper, "1:4:interrupt"))
    assert done.returncode != 0
    found = json.loads((tmp_path / "some.json").read_text())
    assert found["interrupted"]
    assert found["steps"] == 5
    assert "checkpoint of step 5 in kept" in done.stdout
