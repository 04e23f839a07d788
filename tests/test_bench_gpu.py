"""`bench/gpu.sh` on the null backend: whole, in parts, killed and resumed."""

import json
import math
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import halves, launches, packages, turns, verdicts
from bench.gpu.__main__ import MOST_S, SECONDS
from bench.gpu.job import Job
from bench.gpu.work import LIMITS, STAGES, deepbench_layers, network_layers
from mucudnn.backends import get_backend
from mucudnn.ir.conv import Direction
from mucudnn.runtime.timing import StoppingRule
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
        timeout=100,
        check=False,
    )


def wait_for_layers(process, file, count):
    ends = time.monotonic() + 60
    while not file.exists() or len(load(file)["layers"]) < count:
        assert time.monotonic() < ends
        assert process.poll() is None
        time.sleep(0.01)


def contents(out):
    return {file.name: file.read_bytes() for file in out.iterdir()}


def load(file):
    return json.loads(file.read_text())


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


def test_all_parts_run(whole):
    out, done = whole
    assert done.returncode == 0, done.stdout + done.stderr
    parts = load(out / "summary.json")["parts"]
    assert list(parts) == list(SECONDS)
    assert {part["state"] for part in parts.values()} == {"complete"}
    for part in parts.values():
        assert part["files"]
        assert {*part["files"]} <= {*contents(out)}


def test_every_result_says_what_made_it(whole):
    out, _ = whole
    results = [f for f in out.glob("*.json") if f.name != "info.json"]
    assert len(results) == len(STAGES) + 6
    for file in results:
        machine = load(file)["machine"]
        assert "python -m bench.gpu" in machine["command"]
        assert machine["versions"]["numpy"] == np.__version__


def test_the_recording_answers_as_the_device_did(whole):
    out, _ = whole
    backend = get_backend(f"recorded:{out / 'recording.json.gz'}")
    layer = deepbench_layers(job(out, layers=1))[0]
    for stage in STAGES:
        rows = backend.conv.algorithms(stage.of(layer.problem))
        assert {name for name, _ in rows} == {"SLOW", "FAST"}


def test_tests_are_counted(whole):
    out, _ = whole
    result = load(out / "tests.json")
    assert (result["passed"], result["skipped"], result["failed"]) == (1, 1, [])


def test_plain_library_and_torch_stand_beside_ours(whole):
    out, _ = whole
    peers = load(out / "peers.json")
    assert "left out" in peers["torch"]
    for row in peers["rows"]:
        rivals = row["rivals"]
        ours = rivals["ours_divided"]["time_ms"]
        assert ours <= rivals["cudnn_limited"]["time_ms"]


def test_a_step_sums_its_layers(whole):
    out, _ = whole
    for network in load(out / "models.json")["networks"].values():
        layers = network["comparison"]["layers"]
        expected = sum(x["count"] * x["plans"][0]["undivided_ms"] for x in layers)
        assert network["undivided_ms"] == pytest.approx(expected)


def test_what_is_complete_is_not_done_again(whole):
    out, _ = whole
    before = contents(out)
    again = script(out, "models", "deepbench", "--layers", 1)
    assert again.returncode == 0
    assert contents(out) == before
    assert again.stdout.index("deepbench: complete") < again.stdout.index("models: c")


def test_again_repeats(whole):
    out, _ = whole
    before = contents(out)
    done = script(out, "models", "--layers", 1, "--again")
    assert done.returncode == 0
    seconds = [
        load_part["parts"]["models"]["seconds"]
        for load_part in (
            json.loads(before["summary.json"]),
            load(out / "summary.json"),
        )
    ]
    assert seconds[0] != seconds[1]


def test_other_settings_want_another_folder(whole):
    out, _ = whole
    before = contents(out)
    done = script(out, "models", "--layers", 2)
    assert done.returncode == 2
    assert "another folder" in done.stderr
    assert contents(out) == before


def test_a_failing_test_is_told_and_costs_no_other_part(tmp_path):
    tests = tmp_path / "test_some.py"
    tests.write_text(GPU_TESTS.replace("    pass", "    assert 1 == 2", 1))
    out = tmp_path / "out"
    done = script(out, "tests", "models", "--layers", 1, "--tests", tests)
    assert done.returncode == 1
    assert "test_runs: assert 1 == 2" in done.stdout
    states = {n: p["state"] for n, p in load(out / "summary.json")["parts"].items()}
    assert states == {"tests": "failed", "models": "complete"}


def test_killed_in_the_middle_and_resumed(tmp_path):
    out = tmp_path / "out"
    first = out / STAGES[0].file
    arguments = [*PART, "deepbench", str(out), "--backend", "null", "--layers", "4"]
    with subprocess.Popen(arguments, cwd=ROOT) as process:
        wait_for_layers(process, first, 3)
        process.kill()
    kept = {row["key"]: row for row in load(first)["layers"]}
    assert load(out / "summary.json")["parts"]["deepbench"]["state"] == "begun"
    assert not (out / "deepbench.json").exists()
    done = script(out, "deepbench", "--layers", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    layers = load(first)["layers"]
    assert len(layers) == len(deepbench_layers(job(out, layers=4)))
    assert {k: row for row in layers if (k := row["key"]) in kept} == kept


def test_ended_itself_the_script_ends_what_it_runs(tmp_path):
    out = tmp_path / "out"
    arguments = command(out, "deepbench")
    with subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE) as script:
        wait_for_layers(script, out / STAGES[0].file, 1)
        script.terminate()
        # The part shares the script's output, which ends when both have.
        assert b"ended before it was done" in script.stdout.read()
        assert script.wait(20) == 130
    assert load(out / "summary.json")["parts"]["deepbench"]["state"] == "begun"
    assert (out / "recording.json.gz").exists()


def test_too_little_time_leaves_something_to_do(tmp_path):
    out = tmp_path / "out"
    done = script(out, "deepbench", "--seconds", "deepbench=5")
    assert done.returncode == 3, done.stdout + done.stderr
    assert load(out / "summary.json")["parts"]["deepbench"]["state"] == "partial"
    assert (out / "recording.json.gz").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("models", "--seconds", f"models={MOST_S + 1}"), "at most"),
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


def test_all_budgets_together_are_allowed():
    assert sum(SECONDS.values()) <= MOST_S


def test_a_missing_package_is_named_and_found_among_wheels(tmp_path):
    name = "mucudnn_absent"
    assert "No module named" in packages._missing({name: name})[name]
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            "Requires-Dist: something-that-is-installed\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    packages._install(str(site), str(wheels), [name])
    assert (site / f"{name}.py").exists()


def test_the_most_wanted_comes_first(tmp_path):
    layers = deepbench_layers(job(tmp_path))
    assert len({(x.name, x.problem.direction) for x in layers}) == len(layers)
    assert {x.problem.batch for x in layers} == {256}
    directions = [x.problem.direction for x in layers]
    assert directions[: len(directions) // 3] == [Direction.FORWARD] * (
        len(directions) // 3
    )
    assert (STAGES[0].name, STAGES[0].layout) == ("tf32", "NCHW")


def test_a_step_needs_no_gradient_of_its_input(tmp_path):
    layers = network_layers(job(tmp_path), "alexnet")
    first = [x.problem.direction for x in layers if x.name == layers[0].name]
    assert Direction.BACKWARD_DATA not in first
    assert len(layers) == 3 * len({x.name for x in layers}) - 1


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


def test_nothing_measured_is_said():
    text = verdicts.digest_text(verdicts.digest(Path("/nonexistent"), STAGES))
    assert "nothing yet" in text


def test_rivals_take_turns_and_drop_out():
    taken = []

    def rival(name, ms):
        def sample():
            taken.append(name)
            return ms

        return sample

    rule = StoppingRule(min_samples=2, max_samples=5, margin=-1.0, budget_ms=10.0)
    found = turns.in_turn(
        {"slow": rival("slow", 6.0), "fast": rival("fast", 1.0)}, rule, math.inf
    )
    assert taken == ["slow", "fast"] * 3 + ["fast"] * 3
    assert (found["slow"].samples, found["fast"].samples) == (2, 5)
    late = turns.in_turn({"slow": rival("slow", 6.0)}, rule, 0.0)
    assert late["slow"].samples == 1


def test_bfloat16_is_the_upper_half_of_float32():
    exact = np.array([1.0, -2.5, 3.140625, 0.0, 2.0**-130], "float32")
    bits = (exact.view("uint32") >> 16).astype("uint16")
    widened = np.empty_like(exact)
    halves._widen(widened, bits, "bfloat16")
    assert np.array_equal(widened, exact)
    assert np.array_equal(halves._on_host(bits, "bfloat16"), exact)


def test_raw_calls_and_plan_launch_the_same_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "_MOST_S", 0.0)
    monkeypatch.setattr(launches, "_PARTS", (2,))
    rehearsal = job(tmp_path, backend_name="cuda", batch=2, ends=time.monotonic() + 60)
    rehearsal.__dict__["backend"] = fake_backend(FakeCudnn())
    (row,) = launches.launches(rehearsal)["rows"]
    assert row["parts"] == 2
    device_ms = row["device_ms"]
    assert device_ms["raw"] == pytest.approx(device_ms["plan"])
    assert device_ms["raw"] == pytest.approx(device_ms["graph"])
