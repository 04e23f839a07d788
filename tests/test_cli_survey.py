"""The command line where the device may be missing: plans, recordings, refusals."""

import importlib
import json
import signal
import sys
import xml.etree.ElementTree as ET
from types import ModuleType

import numpy as np
import pytest

import mucudnn
from mucudnn import backends
from mucudnn.backends import Backend, get_backend
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.cli.app import ExitCode
from mucudnn.errors import BackendUnavailableError
from mucudnn.recording_format import read_recording, recorded_environments
from mucudnn.runtime.tuning import tuner as tuner_module
from tests.commands import done, json_of, refused, run
from tests.doubles import Crowded
from tests.interrupting import start

PROBLEM = ("--problem", "n=8,c=4,h=9,w=9,k=8,r=3,s=3,pad=1")
NULL = ("--backend", "null", "--cache", "none")
MISSING = "no NVIDIA driver\nwas found"


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MUCUDNN_DATABASE", str(tmp_path / "cache.sqlite"))


class Absent(VirtualDevice):
    """A device that is only described."""

    def allocate(self, nbytes):
        raise BackendUnavailableError("only a description of a device; add --plan-only")


@pytest.fixture
def gpu(monkeypatch):
    """A backend `cuda` of which the machine has descriptions but no device."""
    module = ModuleType("fake_gpu")

    def device_count(argument):
        if not argument:
            raise BackendUnavailableError(MISSING)
        return 1

    def load(argument, device):
        if argument not in ("h200", "h100") and not argument.endswith(".json"):
            raise BackendUnavailableError(f"no description {argument!r}")
        absent = Absent(f"cuda/{argument}", {"driver": "580"})
        return Backend(
            f"cuda:{argument}", absent, Crowded(get_backend("null").conv, 60)
        )

    module.device_count, module.load = device_count, load
    monkeypatch.setitem(sys.modules, "fake_gpu", module)
    monkeypatch.setattr(backends, "_MODULES", {**backends._MODULES, "cuda": "fake_gpu"})


def plans(*args: str) -> list:
    data = json_of("tune", *args)
    return [
        [(s["algo"], s["batch"], s["workspace"]) for s in plan["steps"]]
        for layer in data["layers"]
        for plan in layer["plans"]
    ]


def test_plan_only_measures_nothing_and_answers_by_size_and_limit(tmp_path):
    out, page = tmp_path / "survey.json", tmp_path / "survey.html"
    shown = done(
        *("tune", *PROBLEM, *NULL, "--plan-only", "--workspace-limit", "3KiB,64MiB"),
        *("--json", str(out), "--report", str(page)),
    )
    text = page.read_text()
    ET.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert "Workspace limit 3 KiB" in text
    assert "nothing was measured" in text
    data = json.loads(out.read_text())
    assert len(data["layers"]) == 3
    fits = data["layers"][0]["batches"][2]["fits"]
    assert {limit: fit["algorithms"] for limit, fit in fits.items()} == {
        "3072": 1,
        "67108864": 2,
    }
    assert shown.splitlines()[0].split() == [
        *("layer", "direction", "batch", "least", "greatest", "first", "choice"),
        *("needs", "limit", "fit", "best", "that", "fits", "workspace"),
    ]
    assert not (tmp_path / "cache.sqlite").exists()


@pytest.mark.parametrize("name", ["cpu", "null"])
def test_plan_only_works_on_every_backend(name):
    options = ("--backend", name, "--numerics", "strict", "--plan-only")
    data = json_of("tune", "alexnet", *options)
    assert len(data["layers"]) == 15
    assert data["numerics"] == "strict"
    assert data["limits"] == [64 << 20]
    assert all(b["algorithms"] for x in data["layers"] for b in x["batches"])


def test_plan_only_replays_a_recording(tmp_path):
    file = str(tmp_path / "r.json")
    done("tune", *PROBLEM, *NULL, "--record", file)
    options = ("--backend", f"recorded:{file}", "--plan-only", "--json", "-")
    data = json.loads(done("tune", *PROBLEM, *options))
    assert {b["algorithms"] for x in data["layers"] for b in x["batches"]} == {2}


def test_plan_only_tells_its_progress_on_request():
    result = run("tune", *PROBLEM, *NULL, "--plan-only", "--verbose")
    lines = result.stderr.splitlines()
    assert [line[:5] for line in lines] == ["[1/3]", "[2/3]", "[3/3]"]
    assert all("up to 2 algorithms at 4 sizes" in line for line in lines)


def test_ctrl_c_shows_what_is_listed_and_ends_with_130(tmp_path):
    rows = ["2,3,9,9,4,3,3", *["4096,8,64,64,8,3,3"] * 60]
    csv = tmp_path / "many.csv"
    csv.write_text("\n".join(["n,c,h,w,k,r,s", *rows]))
    out = tmp_path / "out.json"
    options = ("--plan-only", "--batch-policy", "all", "-v", "--json", str(out))
    with start("tune", str(csv), *options) as child:
        assert any(line.startswith("[1/183]") for line in child.stderr)
        child.send_signal(signal.SIGINT)
        shown, err = child.communicate(timeout=300)
    assert child.returncode == 130
    assert "Traceback" not in err
    assert "were not surveyed" in shown
    data = json.loads(out.read_text())
    assert data["interrupted"] is True
    assert 1 <= len(data["layers"]) < 183


def test_a_device_may_be_a_name_or_a_file(gpu, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text("{}")
    for device in ("h200", str(file)):
        options = ("--backend", "cuda", "--device", device, "--plan-only")
        data = json_of("tune", *PROBLEM, *options)
        assert data["backend"] == f"cuda:{device}"
        assert data["fingerprint"] == f"cuda/{device}"
        assert data["layers"][0]["batches"][0]["algorithms"] == 52


def test_benchmark_devices_play_no_part_in_a_survey(gpu, monkeypatch):
    survey = ("tune", *PROBLEM, "--backend", "cuda", "--device", "h200", "--plan-only")
    expected = done(*survey)
    assert "cuda:h200: cuda/h200; numerics: tf32" in expected.splitlines()
    monkeypatch.setenv("MUCUDNN_BENCHMARK_DEVICES", "0,3")
    assert done(*survey) == expected


def test_a_device_that_makes_no_sense_is_one_line(gpu, tmp_path):
    cuda = ("tune", *PROBLEM, "--backend", "cuda")
    plan = (*cuda, "--plan-only", "--device")
    for args, message in (
        ((*plan, str(tmp_path / "gone.json")), "gone.json: there is no such file"),
        ((*plan, "gone.json"), "gone.json: there is no such file"),
        ((*plan, str(tmp_path)), "there is no such file"),
        ((*plan, "gtx9"), "no description 'gtx9'"),
        ((*cuda, "--device", "h200"), "add --plan-only, or run without --device"),
        (("tune", *PROBLEM, "--backend", "cuda:h200"), "add --plan-only"),
        (
            ("tune", *PROBLEM, "--backend", "cuda:h200", "--device", "h100"),
            "needs --backend cuda, not --backend cuda:h200",
        ),
    ):
        assert message in refused(*args)


@pytest.mark.parametrize("command", ["tune", "explain"])
def test_a_backend_that_is_missing_is_one_line(gpu, command):
    line = refused(command, *PROBLEM, "--backend", "cuda")
    assert line == "mucudnn: error: no NVIDIA driver was found"


def test_info_says_what_is_missing_and_describes_what_is_there(gpu):
    data = json_of("info")
    found = {entry["name"]: entry for entry in data["backends"]}
    assert found["cuda"]["status"] == "unavailable: no NVIDIA driver was found"
    assert found["cuda"]["description"] == {}
    described = found["cpu"]["description"]
    assert described == dict(get_backend("cpu").device.description())
    shown = done("info").splitlines()
    for name, value in described.items():
        assert f"             {name}: {value}" in shown


def test_doctor_tries_what_is_there_and_advises_on_the_rest(gpu, monkeypatch):
    module = importlib.import_module("mucudnn.cli.doctor")
    monkeypatch.setattr(module, "_torch_step", lambda: "takes seconds")
    data = json_of("doctor", "--cache", "none")
    found = {check["name"]: check for check in data["checks"]}
    assert found["convolution on the CPU"]["status"] == "works"
    assert found["NVIDIA GPU"]["status"] == "missing"
    assert "no NVIDIA driver" in found["NVIDIA GPU"]["detail"]
    assert found["images of digits (--data digits)"]["detail"] == "sklearn"
    assert all((c["status"] == "works") == (not c["advice"]) for c in data["checks"])

    def wrong(x, w, *, tuner):
        return np.zeros((len(x), len(w), 4, 4))

    monkeypatch.setattr(mucudnn, "conv2d", wrong)
    result = run("doctor", "--cache", "none")
    assert result.exit_code == ExitCode.FAILED
    assert "fails    convolution on the CPU" in result.output


@pytest.mark.filterwarnings("ignore:.*in memory only")
def test_doctor_fails_if_nothing_can_be_stored(monkeypatch):
    module = importlib.import_module("mucudnn.cli.doctor")
    monkeypatch.setattr(module, "_torch_step", lambda: "takes seconds")
    monkeypatch.setenv("MUCUDNN_DATABASE", "/dev/null/cache.sqlite")
    result = run("doctor")
    assert result.exit_code == ExitCode.FAILED
    assert "fails    cache" in result.stdout


def test_numerics_reach_the_tuner_and_the_report(tmp_path, monkeypatch):
    crowd = Backend(
        "crowd", VirtualDevice("crowd"), Crowded(get_backend("null").conv, 60)
    )
    crowd.conv.run = lambda *operands, **options: crowd.device.advance(1.0)
    monkeypatch.setattr(tuner_module, "get_backend", lambda name: crowd)
    page = tmp_path / "out.html"
    words = ("--numerics", "strict,deterministic")
    options = ("--batch-policy", "undivided", "--report", str(page))
    data = json_of("tune", *PROBLEM, *NULL, *words, *options)
    assert data["numerics"] == "strict,deterministic"
    assert "numerics: strict,deterministic" in page.read_text()
    used = {s["algo"] for x in data["layers"] for p in x["plans"] for s in p["steps"]}
    assert {int(a[1:]) % 3 == 2 or int(a[1:]) % 5 == 4 for a in used} == {False}
    told = json_of("explain", *PROBLEM, *NULL, *words)
    assert told["numerics"] == "strict,deterministic"
    (layer,) = told["layers"]
    assert layer["text"].count("not accepted") == 1


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
@pytest.mark.parametrize("cache", ["none", "kept"])
def test_a_recording_gives_the_same_plans(tmp_path, name, cache):
    file = tmp_path / name
    limits = ("--workspace-limit", "2KiB,5KiB,1MiB", "--batch-policy", "all")
    where = "none" if cache == "none" else str(tmp_path / "mine.sqlite")
    here = (*PROBLEM, "--backend", "null", "--cache", where, *limits)
    if cache == "kept":  # what the run takes from the cache is recorded, too
        done("tune", *here)
    expected = plans(*here, "--record", str(file))
    assert plans(*PROBLEM, "--backend", f"recorded:{file}", *limits) == expected
    assert any(len(plan) > 1 for plan in expected)


def test_a_recording_holds_the_problems_of_the_run_only(tmp_path):
    kept = ("--backend", "null", "--cache", str(tmp_path / "mine.sqlite"))
    done("tune", "alexnet", *kept)
    file = tmp_path / "r.json"
    result = run(
        "tune", *PROBLEM, *kept, "--batch-policy", "undivided", "--record", str(file)
    )
    rows = read_recording(file.read_bytes()).measurements
    assert {(m.problem.x_shape, m.perf.algo) for m in rows} == {
        ((8, 4, 9, 9), "FAST"),
        ((8, 4, 9, 9), "SLOW"),
    }
    assert f"6 measurements written to {file}" in result.stderr


def test_a_recording_describes_its_device_and_replays_the_description(tmp_path):
    file = tmp_path / "r.json"
    done("tune", *PROBLEM, "--cache", "none", "--batch", "1", "--record", str(file))
    device = get_backend("cpu").device
    known = recorded_environments(file.read_bytes())
    assert known == {device.fingerprint: dict(device.description())}
    assert get_backend(f"recorded:{file}").device.description() == dict(
        device.description()
    )
    assert {p.name for p in tmp_path.iterdir() if "r.json" in p.name} == {"r.json"}


def test_failed_measurements_are_recorded(tmp_path, monkeypatch):
    backend = get_backend("null")
    usual = backend.conv.run

    def run_or_fail(problem, algo, *operands, **options):
        if algo == "FAST":
            raise ValueError("illegal address")
        usual(problem, algo, *operands, **options)

    backend.conv.run = run_or_fail
    monkeypatch.setattr(tuner_module, "get_backend", lambda name: backend)
    file = tmp_path / "r.json"
    done("tune", *PROBLEM, *NULL, "--record", str(file))
    rows = read_recording(file.read_bytes()).measurements
    errors = {m.perf.algo: m.perf.error for m in rows}
    assert errors == {"FAST": "ValueError: illegal address", "SLOW": None}


def test_a_recording_of_nothing_is_an_error_and_no_file(tmp_path):
    file = tmp_path / "r.json"
    options = ("--memory-limit", "1 B", "--record", str(file))
    result = run("tune", *PROBLEM, *NULL, *options)
    assert result.exit_code == 2
    assert "the memory limit is 1 B" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line == (f"mucudnn: error: nothing was measured, so {file} was not written")
    assert not file.exists()


def test_an_error_half_way_still_writes_the_recording(tmp_path, monkeypatch):
    backend = get_backend("null")
    usual = backend.conv.algorithms

    def lost(problem):
        if problem.direction.value == "backward_filter":
            raise BackendUnavailableError("the device is lost")
        return usual(problem)

    backend.conv.algorithms = lost
    monkeypatch.setattr(tuner_module, "get_backend", lambda name: backend)
    file = tmp_path / "r.json"
    result = run("tune", *PROBLEM, *NULL, "--record", str(file))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "mucudnn: error: the device is lost"
    ways = {
        m.problem.direction.value
        for m in read_recording(file.read_bytes()).measurements
    }
    assert ways == {"forward", "backward_data"}
