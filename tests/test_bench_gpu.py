"""`bench/gpu.sh` on the null backend: whole, in parts, killed and resumed."""

import io
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bench.gpu import archive, kernels, launches, packages, verdicts
from bench.gpu.__main__ import MOST_S, SECONDS, shares
from bench.gpu.job import Job
from bench.gpu.work import LIMITS, STAGES, deepbench_layers
from mucudnn.backends import get_backend
from tests.cuda_fake import fake_backend
from tests.cudnn_fake import FakeCudnn

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "gpu.sh"
GPU_TESTS = """
import pytest

@pytest.mark.gpu
def test_runs():
    pass

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="no")
def test_skipped():
    pass

def test_left_out():
    raise RuntimeError
"""


def command(out, *arguments):
    return ["bash", str(SCRIPT), str(out), "--backend", "null", *map(str, arguments)]


PART = (sys.executable, "-m", "bench.gpu")
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}


def script(out, *arguments):
    return subprocess.run(
        command(out, *arguments),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def contents(out):
    """What the archive holds."""
    with tarfile.open(out / "gpu-results.tar.gz") as tar:
        return {name: tar.extractfile(name).read() for name in tar.getnames()}


def unpacked(out, folder):
    folder.mkdir(exist_ok=True)
    archive.unpack(out / "gpu-results.tar.gz", folder)
    return folder


def load(file):
    return json.loads(file.read_text())


def result(out, name):
    return json.loads(contents(out)[name])


def states(out):
    return {n: p["state"] for n, p in load(out / "summary.json")["parts"].items()}


def job(tmp_path, **options):
    defaults = {"out": tmp_path, "backend_name": "null", "ends": math.inf}
    return Job(**{**defaults, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All parts, of one layer a suite: the folder and what was said."""
    folder = tmp_path_factory.mktemp("gpu")
    tests = folder / "test_some.py"
    tests.write_text(GPU_TESTS)
    out = folder / "out"
    return out, script(out, "--layers", 1, "--tests", tests)


def test_all_parts_run_and_leave_three_files(whole):
    out, done = whole
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in out.iterdir()} == {
        *("gpu-results.tar.gz", "summary.json", "gpu.log")
    }
    assert "gpu-results.tar.gz: " in done.stdout.splitlines()[-1]
    log = (out / "gpu.log").read_text()
    assert log.rstrip() == done.stdout.rstrip()
    assert contents(out)["gpu.log"].decode() == log
    parts = load(out / "summary.json")["parts"]
    assert list(parts) == list(SECONDS)
    assert {part["state"] for part in parts.values()} == {"complete"}
    for part in parts.values():
        assert part["files"]
        assert {*part["files"]} <= {*contents(out)}
    found = result(out, "tests.json")
    assert (found["passed"], found["skipped"], found["failed"]) == (1, 1, [])
    assert found["why_skipped"] == {"Skipped: no": 1}


def test_the_recordings_answer_as_the_device_did(whole, tmp_path):
    out = unpacked(whole[0], tmp_path)
    layer = deepbench_layers(job(out, layers=1))[0]
    for stage in STAGES:
        backend = get_backend(f"recorded:{out / stage.recording}")
        rows = backend.conv.algorithms(stage.of(layer.problem))
        assert {name for name, _ in rows} == {"SLOW", "FAST"}


def test_what_is_complete_is_not_done_again_and_other_settings_want_another_folder(
    whole,
):
    out, _ = whole
    before = contents(out)
    again = script(out, "models", "deepbench", "--layers", 1)
    assert again.returncode == 0
    after = contents(out)
    assert after["gpu.log"].startswith(before.pop("gpu.log"))
    assert {name: after[name] for name in after if name != "gpu.log"} == before
    assert again.stdout.index("deepbench: complete") < again.stdout.index("models: c")
    other = script(out, "models", "--layers", 2)
    assert other.returncode == 2
    assert "another folder" in other.stdout
    assert contents(out) == after


@pytest.mark.slow
def test_a_failing_test_is_told_and_costs_no_other_part(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text(GPU_TESTS.replace("    pass", "    assert 1 == 2", 1))
    out = tmp_path / "out"
    done = script(out, "tests", "models", "--layers", 1, "--tests", tests)
    assert done.returncode == 1
    assert "test_runs: failed: assert 1 == 2" in done.stdout
    assert states(out) == {"tests": "failed", "models": "complete"}


def layers_in(out, name=STAGES[0].file):
    """Rows of the archive's comparison; none while there is no archive."""
    try:
        return {row["key"]: row for row in result(out, name)["layers"]}
    except (OSError, KeyError):
        return {}


def wait_for_archive(process, out, count):
    ends = time.monotonic() + 300
    while len(layers_in(out)) < count:
        assert time.monotonic() < ends
        assert process.poll() is None
        time.sleep(0.01)


def assert_nothing_lost(out, kept, layers):
    """Going on ends with every layer, and what was there is as it was."""
    done = script(out, "deepbench", "--layers", layers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from" in done.stdout
    assert states(out) == {"deepbench": "complete"}
    rows = layers_in(out)
    assert len(rows) == len(deepbench_layers(job(out, layers=layers)))
    complete = {key: row for key, row in kept.items() if row["complete"]}
    assert complete
    assert {key: rows[key] for key in complete} == complete


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "count"), [(signal.SIGKILL, 1), (signal.SIGTERM, 5), (signal.SIGHUP, 9)]
)
def test_ended_anywhere_and_gone_on_with(number, count, tmp_path):
    out = tmp_path / "out"
    arguments = command(out, "deepbench", "--layers", 2, "--keep-every", 0)
    with subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        wait_for_archive(process, out, count)
        os.killpg(process.pid, number)
        said = process.stdout.read()
        status = process.wait(300)
    kept = layers_in(out)
    assert len(kept) >= count
    assert STAGES[0].recording in contents(out)
    assert states(out) == {"deepbench": "begun"}
    if number != signal.SIGKILL:
        assert status == 128 + number
        assert b"ended before it was done" in said
        assert "deepbench.json" in contents(out)
    assert_nothing_lost(out, kept, 2)


@pytest.mark.slow
def test_an_archive_that_was_taken_away_is_gone_on_with_elsewhere(whole, tmp_path):
    out, _ = whole
    taken = tmp_path / "taken.tar.gz"
    taken.write_bytes((out / "gpu-results.tar.gz").read_bytes())
    there = tmp_path / "there"
    done = script(there, "deepbench", "--layers", 1, "--from", taken)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deepbench: complete; --again" in done.stdout
    before, after = contents(out), contents(there)
    assert after.pop("gpu.log").startswith(before.pop("gpu.log"))
    assert after == before
    again = script(there, "models", "--layers", 1, "--from", tmp_path / "nothing")
    assert again.returncode == 0
    assert "is not read" in again.stdout


@pytest.mark.slow
def test_what_recordings_hold_is_not_measured_again(whole, tmp_path):
    folder = unpacked(whole[0], tmp_path / "work")
    job_ = job(folder, layers=1)
    with job_.open_cache() as cache:
        known = {m.problem.dtype for m in cache.rows()}
        before = {m.measured_at for m in cache.rows()}
    assert known == {"float32", "float16", "bfloat16"}
    for stage in STAGES:
        (folder / stage.file).unlink()
    arguments = [*PART, "deepbench", str(folder), "--backend", "null", "--layers", "1"]
    done = subprocess.run([*arguments, "--batch", "256"], cwd=ROOT, capture_output=True)
    assert done.returncode == 2  # other settings: nothing was begun
    (folder / "summary.json").unlink()
    subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True)
    with job_.open_cache() as cache:
        assert {m.measured_at for m in cache.rows()} == before


def test_an_archive_that_is_none_is_refused_before_anything_begins(tmp_path):
    bad = tmp_path / "bad.tar.gz"
    bad.write_bytes(b"no archive")
    done = script(tmp_path / "out", "models", "--from", bad)
    assert done.returncode == 2
    assert "no whole archive of results" in done.stderr
    done = script(tmp_path / "out", "models", "--from", tmp_path / "missing")
    assert done.returncode == 2
    assert "missing" in done.stderr


@pytest.mark.slow
def test_too_little_time_leaves_something_to_do(tmp_path):
    out = tmp_path / "out"
    done = script(out, "deepbench", "--seconds", "deepbench=5")
    assert done.returncode == 3, done.stdout + done.stderr
    assert states(out) == {"deepbench": "partial"}
    assert STAGES[0].recording in contents(out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("models", "--seconds", f"models={MOST_S + 1}"), "at most"),
        (("--seconds", f"models={MOST_S - 1}"), "at most"),
        (("nothing",), "unknown part 'nothing'"),
        (("--seconds", "models"), "PART=SECONDS"),
        (("--frobnicate",), "unknown option --frobnicate"),
        (("--wheels",), "needs a value"),
    ],
)
def test_bad_arguments(tmp_path, arguments, said):
    done = script(tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


@given(
    wanted=st.sets(st.sampled_from([*SECONDS]), min_size=1),
    given_=st.dictionaries(st.sampled_from([*SECONDS]), st.integers(0, 90)),
)
def test_a_call_takes_less_than_nine_minutes(wanted, given_):
    wanted = [part for part in SECONDS if part in wanted]
    found = shares(wanted, given_)
    assert list(found) == wanted
    assert sum(found.values()) <= MOST_S
    for part, seconds in found.items():
        assert seconds == given_[part] if part in given_ else seconds >= 10
    if sum(SECONDS[part] for part in wanted) <= MOST_S and not given_:
        assert found == {part: SECONDS[part] for part in wanted}


def test_the_documented_calls_get_what_they_are_said_to():
    lines = re.findall(r"bench/gpu\.sh OUT ([a-z ]+?) +(\d+) s", SCRIPT.read_text())
    assert {part for parts, _ in lines for part in parts.split()} == set(SECONDS)
    for parts, seconds in lines:
        assert sum(shares(parts.split(), {}).values()) == int(seconds) < MOST_S


def test_all_that_the_package_depends_on_is_looked_for_and_brought_along():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    assert names <= packages._BASE.keys() | packages._COMMAND.keys()


def test_a_package_that_every_part_needs_is_told_with_what_to_type(
    tmp_path, monkeypatch, capsys
):
    absent = set()
    monkeypatch.setattr(
        packages,
        "_why_not",
        lambda modules, site="": None if absent.isdisjoint(modules) else "too old",
    )
    for missing, package, status in (
        ("pulp", "'pulp<4'", 1),
        ("pytest", "pytest", 0),
        ("ml_dtypes", "ml_dtypes", 0),
        ("cuda.bindings.driver", "'cuda-bindings>=13,<14'", 0),
    ):
        absent = {missing}
        asked = ["install", str(tmp_path), str(tmp_path / "none"), "cuda", "tests"]
        assert packages.main(asked) == status
        said = capsys.readouterr().err
        assert f"pip install {package})" in said
        assert "too old" in said
        assert "make gpu-wheels GPU_PYTHON=3." in said
    absent = {"pytest"}
    assert packages.main([*asked[:4], "deepbench"]) == 0
    assert capsys.readouterr().err == ""


def test_wheels_for_another_machine_are_left_out():
    minor, machine = sys.version_info.minor, platform.machine()
    this = f"cp3{minor}-cp3{minor}-manylinux_2_17_{machine}"
    for name, fits in {
        "a-1-py3-none-any.whl": True,
        "a-1-py2.py3-none-any.whl": True,
        "a-1-py2-none-any.whl": False,
        f"a-1-{this}.whl": True,
        f"a-1-{this}.manylinux2014_{machine}.whl": True,
        f"a-1-cp38-abi3-manylinux_2_17_{machine}.whl": True,
        f"a-1-cp399-abi3-manylinux_2_17_{machine}.whl": False,
        f"a-1-cp3{minor}-cp3{minor}-win_amd64.whl": False,
        f"a-1-cp3{minor + 1}-cp3{minor + 1}-manylinux_2_17_{machine}.whl": False,
    }.items():
        assert packages._fits(name) == fits, name


# Archives.


def packed(folder, files):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_an_archive_goes_on_in_another_one_where_it_grows_too_large(tmp_path):
    rng = np.random.default_rng(0)
    files = {f"recording-{i}.json.gz": rng.bytes(40_000) for i in range(5)}
    files |= {"summary.json": b"{}", "cache.sqlite": b"x", "cache.sqlite-wal": b"x"}
    work, out = packed(tmp_path / "work", files), tmp_path / "out"
    out.mkdir()
    written = archive.pack(work, out, 100_000)
    assert [f.name for f in written] == [
        *("gpu-results.tar.gz", "gpu-results-2.tar.gz", "gpu-results-3.tar.gz")
    ]
    assert all(f.stat().st_size <= 100_000 for f in written)
    assert (out / "summary.json").read_bytes() == b"{}"
    back = tmp_path / "back"
    back.mkdir()
    archive.unpack(out / "gpu-results.tar.gz", back)
    found = {f.name: f.read_bytes() for f in back.iterdir()}
    assert found == {n: d for n, d in files.items() if not n.startswith("cache")}
    assert archive.pack(work, out) == [out / "gpu-results.tar.gz"]
    assert archive.volumes(out / "gpu-results.tar.gz") == [out / "gpu-results.tar.gz"]


@pytest.mark.parametrize(
    "name",
    ["../evil", "/tmp/evil", "a/b", "a/../../b", "..", ".hidden", "", "cache.sqlite"],
)
def test_names_that_lead_elsewhere_are_refused(name, tmp_path):
    file, work = tmp_path / "some.tar.gz", tmp_path / "work"
    work.mkdir()
    with tarfile.open(file, "w:gz") as tar:
        for one in ("fine.json", name):
            member = tarfile.TarInfo(one)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
    with pytest.raises(ValueError, match="holds"):
        archive.unpack(file, work)
    assert list(work.iterdir()) == []
    assert not (tmp_path / "evil").exists()


@given(cut=st.floats(0, 0.999))
def test_half_an_archive_is_refused(cut, tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    packed(folder, {"a.json": np.random.default_rng(1).bytes(3000), "b.json": b"b"})
    (whole,) = archive.pack(folder, folder)
    data = whole.read_bytes()
    half, work = folder / "half.tar.gz", folder / "work"
    half.write_bytes(data[: int(len(data) * cut)])
    work.mkdir()
    with pytest.raises(ValueError, match="no whole archive"):
        archive.unpack(half, work)
    assert list(work.iterdir()) == []


def comparison(stage, speedups, divided_ms=1.0):
    return {
        "layers": [
            {
                "key": f"{name} forward",
                "name": name,
                "complete": True,
                "plans": [
                    {
                        "workspace_limit": limit,
                        "speedup": speedup,
                        "undivided_ms": divided_ms * speedup,
                        "planned_ms": divided_ms,
                    }
                    for limit in LIMITS
                ],
            }
            for name, speedup in speedups.items()
        ],
        "stage": stage.name,
    }


def test_verdicts(tmp_path):
    nothing = verdicts.digest_text(verdicts.digest(Path("/nonexistent"), STAGES))
    assert "nothing yet" in nothing
    nchw, nhwc = STAGES[0], replace(STAGES[0], layout="NHWC")
    speedups = {
        "deepbench_train/1": 4.0,
        "deepbench_train/2": 1.0,
        "alexnet/conv1": 9.0,
    }
    (tmp_path / nchw.file).write_text(json.dumps(comparison(nchw, speedups)))
    last = comparison(nhwc, dict.fromkeys(speedups, 1.0), divided_ms=0.5)
    (tmp_path / nhwc.file).write_text(json.dumps(last))
    result = verdicts.digest(tmp_path, STAGES)
    found = {aim["figure"]: aim["found"] for aim in result["aims"]}
    assert found == {"geomean": pytest.approx(2.0), "best": 4.0, "least": 1.0}
    assert [row["ratio"] for row in result["layouts"]] == [2.0, 2.0, 2.0]
    text = verdicts.digest_text(result)
    assert text.count("reached") == 2  # 4.0 is below the aim of the best layer
    assert "NHWC undivided is faster than NCHW divided on 3" in verdicts.digest_text(
        result, brief=True
    )


def test_bfloat16_is_the_upper_half_of_float32():
    exact = np.array([1.0, -2.5, 3.140625, 0.0, 2.0**-130], "float32")
    bits = (exact.view("uint32") >> 16).astype("uint16")
    widened = np.empty_like(exact)
    kernels._widen(widened, bits, "bfloat16")
    assert np.array_equal(widened, exact)
    assert np.array_equal(kernels._on_host(bits, "bfloat16"), exact)


@pytest.mark.slow
def test_raw_calls_and_plan_launch_the_same_kernels(tmp_path):
    rehearsal = job(tmp_path, backend_name="cuda", batch=2, ends=time.monotonic() + 60)
    rehearsal.__dict__["backend"] = fake_backend(FakeCudnn())
    (row,) = launches.launches(rehearsal, divided=(2,), most_s=0.0)["rows"]
    assert row["parts"] == 2
    device_ms = row["device_ms"]
    assert device_ms["raw"] == pytest.approx(device_ms["plan"])
    assert device_ms["raw"] == pytest.approx(device_ms["graph"])
