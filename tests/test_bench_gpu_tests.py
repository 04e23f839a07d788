"""Part `tests` of `bench/gpu.sh`: which files; one test at a time, crashes, hangs."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from bench.gpu.gpu_tests import _FIRST, files_with_marker, run
from bench.gpu.job import Job
from bench.gpu.journal import Journal, append

ROOT = Path(__file__).parent.parent
HARMFUL = """
import os, time, warnings
from pathlib import Path
import pytest

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent

def ran(name):
    with (HERE / "ran").open("a") as file:
        file.write(name + "\\n")

def test_a_passes():
    ran("a")

def test_b_ends_the_process():
    ran("b")
    os.abort()

def test_c_fails():
    ran("c")
    assert [1] == [2]

def test_d_never_ends():
    ran("d")
    time.sleep(1000)

def test_e_warns():
    ran("e")
    warnings.warn("by a third party", DeprecationWarning)

@pytest.mark.xfail(reason="known", strict=True)
def test_f_fails_as_known():
    ran("f")
    raise RuntimeError

@pytest.fixture
def broken():
    raise OSError("no fixture")

def test_g_has_no_fixture(broken):
    ran("g")

@pytest.mark.skipif(not (HERE / "there").exists(), reason="needs more")
def test_h_may_be_skipped():
    ran("h")

def test_z_passes():
    ran("z")
"""

STICKY = """
import sys
from types import SimpleNamespace
import pytest

pytestmark = pytest.mark.gpu

def test_breaks_the_gpu(monkeypatch):
    def fails():
        raise RuntimeError("cudaErrorIllegalAddress")
    runtime = SimpleNamespace(deviceSynchronize=fails)
    sys.modules["cupy"] = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    raise OSError("an illegal access")

def test_runs_in_another_process():
    assert "cupy" not in sys.modules
"""


def job(out, tests, **options):
    out.mkdir(exist_ok=True)
    defaults = {"backend_name": "null", "ends": math.inf}
    return Job(**{**defaults, **options}, out=out, tests=tests)


def result(out):
    return json.loads((out / "tests.json").read_text())


def folder_of(tmp_path, **files):
    folder = tmp_path / "tests"
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_files_with_gpu_tests_are_named(request):
    """What is collected here and marked is in files that are found by their text."""
    marked = {i.path for i in request.session.items if i.get_closest_marker("gpu")}
    found = files_with_marker(ROOT / "tests")
    assert marked <= set(found)
    assert [file.name for file in found[: len(_FIRST)]] == list(_FIRST)
    assert len(found) < 10  # collecting those takes a few seconds


def test_a_marker_is_found_wherever_it_stands(tmp_path):
    folder = folder_of(
        tmp_path,
        conftest="import pytest\n@pytest.fixture(params=["
        "'cpu', pytest.param('cuda', marks=pytest.mark.gpu)])\ndef device(): ...",
        test_decorated="import pytest\n@pytest.mark.gpu\ndef test_a(): ...",
        test_module="import pytest\npytestmark = [pytest.mark.gpu, pytest.mark.slow]",
        test_parameter="import pytest as p\n@p.mark.parametrize('x', "
        "[p.param(1, marks=p.mark.gpu)])\ndef test_a(x): ...",
        test_fixture="def test_a(tmp_path, device): ...",
        test_own="import pytest\n@pytest.fixture\ndef device(): ...\n"
        "def test_a(device): ...",
        test_given="import pytest\n@pytest.mark.parametrize('x, device', [(1, 2)])\n"
        "def test_a(x, device): ...",
        test_wider="import pytest\n@pytest.fixture\ndef device(device): ...\n"
        "def test_a(device): ...",
        test_other="'''mark.gpu'''\ndef helper(device): ...\ndef test_a(): ...",
        helper="import pytest\nx = pytest.mark.gpu",
    )
    names = [file.stem for file in files_with_marker(folder)]
    assert names == [
        *("test_decorated", "test_fixture", "test_module", "test_parameter"),
        "test_wider",
    ]


@pytest.mark.slow
def test_each_test_ends_once_whatever_it_does(tmp_path):
    folder = folder_of(
        tmp_path,
        test_a="import os, pytest\npytestmark = pytest.mark.gpu\nos.abort()",
        test_b="import pytest\npytestmark = pytest.mark.gpu\nimport nowhere_at_all",
        test_c=HARMFUL,
        test_d=STICKY,
        test_unmarked="raise RuntimeError('not collected')",
    )
    out = tmp_path / "out"
    report = run(job(out, folder, hang_s=30.0))
    assert report.complete
    found = result(out)
    assert (found["passed"], found["skipped"]) == (5, 1)  # a, e, f, z, after; h
    bad = {t["name"].rpartition("/")[2]: t for t in found["failed"]}
    assert {name: t["outcome"] for name, t in bad.items()} == {
        "test_a.py": "crashed",
        "test_b.py": "failed",
        "test_c.py::test_b_ends_the_process": "crashed",
        "test_c.py::test_c_fails": "failed",
        "test_c.py::test_d_never_ends": "hung",
        "test_c.py::test_g_has_no_fixture": "failed",
        "test_d.py::test_breaks_the_gpu": "failed",
    }
    assert "SIGABRT" in bad["test_a.py"]["message"]
    assert "nowhere_at_all" in bad["test_b.py"]["message"]
    assert "assert [1] == [2]" in bad["test_c.py::test_c_fails"]["message"]
    assert len(report.failures) == 7
    ran = (folder / "ran").read_text().split()
    assert sorted(ran) == list("abcdefz")
    (folder / "there").touch()  # what a skipped test lacked; it alone is run again
    again = run(job(out, folder, hang_s=30.0))
    assert again.complete
    assert (folder / "ran").read_text().split() == [*ran, "h"]
    assert (result(out)["passed"], result(out)["skipped"]) == (6, 0)


@pytest.mark.slow
def test_time_that_is_up_costs_the_test_in_progress_and_no_outcome(tmp_path):
    slow = "import pytest, time\npytestmark = pytest.mark.gpu\n" + "".join(
        f"def test_{name}():\n    time.sleep({seconds})\n"
        for name, seconds in (("a", 0), ("b", 1000), ("c", 0))
    )
    folder, out = folder_of(tmp_path, test_some=slow), tmp_path / "out"
    journal = out / "tests.jsonl"
    for tries in (1, 2):
        arguments = [sys.executable, "-m", "bench.gpu", "tests", str(out)]
        arguments += ["--backend", "null", "--tests", str(folder), "--seconds", "300"]
        with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE) as process:
            ends = time.monotonic() + 300
            while (
                Journal.read(journal)._tries["nothing"]
                + sum("test_b" in line and "begun" in line for line in lines(journal))
                < tries
            ):
                assert time.monotonic() < ends
                time.sleep(0.02)
            process.terminate()
            assert b"ended before it was done" in process.communicate()[0]
        (ended,) = Journal.read(journal).ended
        assert ended.endswith("test_a")
    report = run(job(out, folder))  # twice is once too often
    assert report.complete
    assert result(out)["passed"] == 2
    (bad,) = result(out)["failed"]
    assert bad["outcome"] == "cut off"
    assert bad["name"].endswith("test_b")


def lines(file):
    return file.read_text().splitlines() if file.exists() else []


ENTRIES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["passed", "failed", None])),
    min_size=1,
)


@given(entries=ENTRIES, cut=st.integers(0, 60))
def test_a_journal_that_was_cut_off_loses_one_line(entries, cut, tmp_path_factory):
    file = tmp_path_factory.mktemp("journal") / "journal"
    whole = Journal(file)
    for name, outcome in entries:
        whole.add(begun=name)
        if outcome is not None:
            whole.add(ended=name, outcome=outcome, message="", seconds=0.0)
    assert Journal.read(file).ended == whole.ended
    assert Journal.read(file).begun == whole.begun
    data = file.read_bytes()
    last = len(data.splitlines(keepends=True)[-1])
    file.write_bytes(data[: len(data) - min(cut, last)])
    before = Journal.read(file).ended
    append(file, {"ended": "new", "outcome": "passed"})
    after = Journal.read(file).ended
    assert set(after) == {*before, "new"}
    assert len(before) >= len(whole.ended) - 1
