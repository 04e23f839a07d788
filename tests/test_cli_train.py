"""`mucudnn train`, as it is typed."""

import json
import os
import pty
import resource
import subprocess
import time

import pytest

from mucudnn.models import MODELS
from mucudnn.runtime.training.checkpoints import Checkpoints
from tests import commands
from tests.commands import start_python

QUICK = (
    "digits",
    "--data",
    "synthetic:length=96,classes=10",
    "--batch-policy",
    "undivided",
)
NULL = ("--backend", "null", "--cache", "none")

pytestmark = pytest.mark.usefixtures("short_searches")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One for all: measuring anew might choose another algorithm."""
    return tmp_path_factory.mktemp("cache") / "cache.sqlite"


@pytest.fixture
def run(cache):
    def call(*arguments):
        known = () if "--cache" in arguments else ("--cache", cache)
        return commands.run("train", *arguments, *known)

    return call


def figures(result):
    data = json.loads(result.stdout)
    return [
        {k: v for k, v in epoch.items() if k != "images_per_s"}
        for epoch in data["epochs"]
    ]


def test_digits_are_learned(run, tmp_path):
    out = tmp_path / "out.json"
    done = run("digits", "--data", "digits", "--epochs", 3, "--lr", 0.05, "--json", out)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    assert "test accuracy" in lines[2]
    assert "135 steps" in lines[3]
    data = json.loads(out.read_text())
    assert data["schema"] == 1
    assert data["model"] == "digits"
    assert [epoch["epoch"] for epoch in data["epochs"]] == [1, 2, 3]
    assert data["epochs"][-1]["test_accuracy"] > 0.85
    assert data["epochs"][-1]["loss"] < data["epochs"][0]["loss"]
    assert data["budget_bytes"] is None
    assert data["step_ms"] > 0
    assert data["peak_bytes"] > 0


def test_one_seed_one_result(run):
    a, b, c = (
        run(*QUICK, "--epochs", 2, "--seed", seed, "--json", "-") for seed in (3, 3, 4)
    )
    assert figures(a) == figures(b) != figures(c)


def test_stopped_and_resumed(run, tmp_path):
    whole = run(*QUICK, "--epochs", 3, "--lr-schedule", "constant", "--json", "-")
    options = (*QUICK, "--lr-schedule", "constant", "--checkpoint", tmp_path)
    first = run(*options, "--epochs", 2, "--steps", 4, "--resume")
    assert "has no checkpoint; training starts at step 0" in first.stderr
    assert "checkpoint of step 4" in first.stdout
    second = run(*options, "--epochs", 3, "--resume", "--json", "-")
    assert second.exit_code == 0, second.output
    assert "has no checkpoint" not in second.stderr
    assert figures(second) == figures(whole)
    assert Checkpoints(tmp_path).steps()[0] == 9


def test_a_training_is_continued_with_more_steps(run, tmp_path):
    options = ("digits", "--batch-policy", "undivided", "--checkpoint", tmp_path)
    assert run(*options, "--steps", 4).exit_code == 0
    more = run(*options, "--steps", 7, "--resume")
    assert more.exit_code == 0, more.output
    assert "the cosine schedule now ends at step 7 instead of 4" in more.stderr
    assert "7 steps" in more.stdout
    assert Checkpoints(tmp_path).steps()[0] == 7
    other = run(*options, "--steps", 9, "--resume", "--seed", 5)
    assert "its seed is 0, this one's is 5" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        (["lenet"], 0.01),  # with 0.1, the loss is nan after eight steps
        (["lenet", "--optimizer", "nesterov"], 0.01),
        (["lenet", "--optimizer", "adam"], 0.001),
        (["lenet", "--lr", 0.2], 0.2),
        (["resnet20"], 0.1),
    ],
)
def test_the_usual_rate_depends_on_the_network(run, arguments, rate):
    done = run(*arguments, *NULL, "--batch", 2, "--steps", 1, "--json", "-")
    optimizer = json.loads(done.stdout)["settings"]["optimizer"]
    assert f"learning_rate={rate}," in optimizer


def test_state_on_the_host_is_saved_and_loaded_without_computing(run, tmp_path):
    # Momentum and parameters are offloaded, and the null backend has no bytes.
    options = ("resnet20", *NULL, "--batch", 4, "--budget", "3MiB", "--checkpoint")
    options += (tmp_path, "--data", "synthetic:length=8", "--lr-schedule", "constant")
    for more in (["--epochs", 1], ["--epochs", 2, "--resume"]):
        done = run(*options, *more)
        assert done.exit_code == 0, done.output
    assert Checkpoints(tmp_path).steps()[0] == 4


def test_every_option_is_taken(run):
    done = run(
        *("digits", *NULL, "--batch", 12, "--image", "1x16x16", "--classes", 20),
        *("--data", "synthetic", "--augment", "--dtype", "float64", "--epochs", 2),
        *("--steps", 5, "--optimizer", "nesterov", "--lr", 0.1, "--momentum", 0.8),
        *("--lr-schedule", "step:1", "--warmup", 2, "--weight-decay", 1e-4),
        *("--workspace-limit", "1MiB", "--batch-policy", "all", "--seed", 7),
        *("--order", "least_peak", "--update-when", "late", "--accumulate", 3),
        "--no-fuse",
        *("--json", "-"),
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["steps"] == 5
    assert data["settings"]["image"] == [1, 16, 16]
    assert data["settings"]["classes"] == 20
    assert "nesterov=True" in data["settings"]["optimizer"]
    assert "momentum=0.8" in data["settings"]["optimizer"]


def test_a_step_runs_in_parts(run):
    arguments = ("--steps", 2, "--batch", 12, "--epochs", 1)
    whole = run(*QUICK, *arguments, "--json", "-")
    parts = run(*QUICK, *arguments, "--split", 3, "--json", "-")
    assert parts.exit_code == 0, parts.output
    (mine,), (theirs,) = figures(parts), figures(whole)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    segments = json.loads(parts.stdout)["segments"]
    assert {s["parts"] for s in segments} == {3}
    assert {s["phase"] for s in segments} == {"forward", "backward"}
    assert json.loads(whole.stdout)["segments"] == []
    auto = run(*QUICK, *arguments, "--budget", "8MiB", "--split", "auto")
    assert auto.exit_code == 0, auto.output
    assert "whole: nothing in parts is faster" in auto.stdout


def test_tensors_may_lie_in_mapped_memory(run):
    arguments = ("--steps", 2, "--batch", 12, "--epochs", 1, "--json", "-")
    static = run(*QUICK, *arguments)
    budget = ("--budget", "2MiB", "--convolutions", "fixed")
    mapped = run(*QUICK, *arguments, *budget, "--placement", "virtual")
    assert mapped.exit_code == 0, mapped.output
    assert figures(mapped) == figures(static)
    data = json.loads(mapped.stdout)
    assert data["memory"]["nbytes"] <= data["budget_bytes"]
    assert data["memory"]["mapped_chunks"] >= 0


def test_a_huge_network_on_the_virtual_clock(run):
    done = run("vgg16", *NULL, "--batch", 256, "--steps", 1, "--json", "-")
    assert done.exit_code == 0, done.output
    peak = json.loads(done.stdout)["peak_bytes"]
    assert peak > 5 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 < peak


def test_the_networks_are_listed(run):
    done = run("--list")
    for name in MODELS:
        assert f"\n{name} " in f"\n{done.stdout}"
    data = json.loads(run("--list", "--json", "-").stdout)
    sizes = {row["name"]: row["parameters"] for row in data["models"]}
    assert sizes["alexnet_owt"] == 61_100_840


def test_checkpoints_are_never_overwritten_unasked_nor_those_of_others_read(
    run, tmp_path
):
    options = (*NULL, "--steps", 1, "--checkpoint", tmp_path)
    assert run("digits", *options).exit_code == 0
    again, other = run("digits", *options), run("lenet", *options, "--resume")
    assert again.exit_code == other.exit_code == 2
    assert "holds checkpoints already" in again.stderr
    assert "its model is 'digits', this one's is 'lenet'" in other.stderr


def test_a_loss_that_is_no_number(run):
    done = run(*QUICK, "--lr", 1e30, "--epochs", 9)
    assert done.exit_code == 2
    assert "the loss is " in done.stderr


def train(*arguments, cache, **streams):
    command = ("-m", "mucudnn", "train", *arguments, "--cache", cache)
    return start_python(*command, **streams)


@pytest.mark.slow
def test_killed_again_and_again_it_ends_where_it_would_have(run, cache, tmp_path):
    options = (*QUICK, "--epochs", "12")
    whole = run(*options, "--json", "-")
    resumed = (*options, "--checkpoint", str(tmp_path), "--checkpoint-every", "1")
    steps = []
    for _ in range(5):
        process = train(*(*resumed, "--resume"), cache=cache, stdout=subprocess.DEVNULL)
        with process:
            before = Checkpoints(tmp_path).steps()
            while Checkpoints(tmp_path).steps() == before and process.poll() is None:
                time.sleep(0.002)
            process.kill()
        steps.append(Checkpoints(tmp_path).load().step)
    assert steps == sorted(steps)
    assert figures(run(*resumed, "--resume", "--json", "-")) == figures(whole)


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # figures are not cut
    ours, theirs = pty.openpty()
    process = train(*(*QUICK, "--epochs", "2"), cache="none", stderr=theirs)
    os.close(theirs)
    seen = b""
    with process:
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
        lines = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert b"epoch 2/2" in seen
    assert b"loss" in seen
    assert b"images/s" in seen
    assert "epoch 2/2" in lines


def test_fused_steps_take_less_memory(run):
    options = ("resnet18", *NULL, "--batch", 8, "--steps", 1, "--json", "-")
    peaks = [
        json.loads(run(*options, *more).stdout)["peak_bytes"]
        for more in ((), ("--no-fuse",))
    ]
    assert peaks[0] < peaks[1]
