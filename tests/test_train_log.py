"""Logs of training: every line at once, none twice, and evaluation between epochs."""

import csv
import json
import math
import signal
import struct
import sys

import numpy as np
import pytest

from mucudnn.cli.train import results_to_json
from mucudnn.errors import CheckpointError
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.runtime.training.history import (
    EpochReport,
    LogEntry,
    LogFile,
    Position,
    read_resumption,
)
from mucudnn.runtime.training.loop import fit
from tests.commands import python, run
from tests.training_cases import Epochs, trainer, weights

SUFFIXES = ("csv", "jsonl")


class Killed(BaseException):
    """Ends training anywhere, as a signal would."""


def trained(path, *, folder=None, killed_at=None, made=None, **options):
    """Two epochs of five steps; as a command resumes them if there is a checkpoint."""
    made = made or trainer()
    checkpoints = None if folder is None else Checkpoints(folder)
    found = None if checkpoints is None else checkpoints.load({})
    since = None if found is None else read_resumption(found).position
    log = LogFile(path, since=since)

    def progress(at, report):
        if at.steps == killed_at and report is None:
            raise Killed

    try:
        fit(
            made,
            Epochs(40, 8),
            Epochs(16, 8),
            epochs=2,
            checkpoints=checkpoints,
            resume=found,
            progress=progress,
            log=log,
            **options,
        )
    except Killed:
        pass
    finally:
        log.close()
    return made


def lines(path):
    """What a log holds but how fast it was."""
    text = path.read_text()
    if path.suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
    else:
        rows = [json.loads(line) for line in text.splitlines()]
        rows = [
            {k: "" if v is None else str(v) for k, v in row.items()} for row in rows
        ]
    return [{k: v for k, v in row.items() if k != "images_per_s"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Logs of runs that nothing ended."""
    folder = tmp_path_factory.mktemp("whole")
    for suffix in SUFFIXES:
        trained(folder / f"log.{suffix}", eval_every=3)
    return folder


def test_there_is_a_line_for_everything(whole):
    rows = lines(whole / "log.csv")
    assert [(row["kind"], int(row["step"])) for row in rows] == [
        *(("step", 1), ("step", 2), ("step", 3), ("evaluation", 3)),
        *(("step", 4), ("step", 5), ("epoch", 5)),
        *(("step", 6), ("evaluation", 6), ("step", 7), ("step", 8)),
        *(("step", 9), ("evaluation", 9), ("step", 10), ("epoch", 10)),
    ]
    assert [int(row["epoch"]) for row in rows] == [1] * 7 + [2] * 8
    for row in rows:
        assert bool(row["test_loss"]) == (row["kind"] != "step")
        assert bool(row["loss"]) == (row["kind"] != "evaluation")
    steps = [float(row["loss"]) for row in rows if row["kind"] == "step"]
    epochs = [float(row["loss"]) for row in rows if row["kind"] == "epoch"]
    assert epochs == pytest.approx([np.mean(steps[:5]), np.mean(steps[5:])])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("killed_at", "every"), [(1, 2), (3, 5), (6, 2), (10, 5)])
def test_a_run_that_is_killed_goes_on_without_double_lines(
    whole, tmp_path, suffix, killed_at, every
):
    path, folder = tmp_path / f"log.{suffix}", tmp_path / "checkpoints"
    options = {"folder": folder, "checkpoint_every": every, "eval_every": 3}
    trained(path, killed_at=killed_at, **options)
    with path.open("a") as file:
        file.write('{"kind": "st')  # what a kill leaves of a line
    trained(path, **options)
    assert lines(path) == lines(whole / f"log.{suffix}")
    done = path.read_bytes()
    trained(path, **options)  # nothing is left to do
    assert path.read_bytes() == done


def test_an_interrupted_run_evaluates_what_was_due(whole, tmp_path):
    path, folder = tmp_path / "log.csv", tmp_path / "checkpoints"

    checkpoints = Checkpoints(folder)
    fit(trainer(), Epochs(40, 8), epochs=2, max_steps=3, checkpoints=checkpoints)
    log = LogFile(path)
    for row in lines(whole / "log.csv")[:3]:
        log(LogEntry("step", int(row["step"]), 1, *(float(row["loss"]), 0.0)))
    log.close()
    trained(path, folder=folder, eval_every=3)
    told = [(row["kind"], row["step"]) for row in lines(path)]
    assert told == [(r["kind"], r["step"]) for r in lines(whole / "log.csv")]
    assert lines(whole / "log.csv") == lines(whole / "log.jsonl")


def test_evaluation_changes_no_bit():
    plain, evaluated = trainer(), trainer()
    fit(plain, Epochs(40, 8), Epochs(16, 8), epochs=2)
    fit(evaluated, Epochs(40, 8), Epochs(16, 8), epochs=2, eval_every=2)
    for name, values in weights(plain).items():
        np.testing.assert_array_equal(values, weights(evaluated)[name])


def test_evaluation_at_the_end_of_an_epoch_is_done_once(monkeypatch):
    made, told = trainer(), []
    evaluate, calls = made.evaluate, []
    monkeypatch.setattr(
        made, "evaluate", lambda batches: calls.append(1) or evaluate(batches)
    )
    options = {"epochs": 1, "eval_every": 5, "log": told.append}
    (report,) = fit(made, Epochs(40, 8), Epochs(16, 8), **options)
    assert len(calls) == 1
    assert [entry.kind for entry in told[-2:]] == ["evaluation", "epoch"]
    assert told[-2].test_loss == told[-1].test_loss == report.test_loss


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_line_is_there_at_once(tmp_path, suffix):
    """Another process sees it, and so what is left by one that is killed."""
    path = tmp_path / f"log.{suffix}"
    code = (
        "import os, signal, sys\n"
        "from mucudnn.runtime.training.history import LogEntry, LogFile\n"
        "log = LogFile(sys.argv[1])\n"
        "for step in range(1, 8): log(LogEntry('step', step, 1, loss=0.5))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    python("-c", code, path, status=-signal.SIGKILL)
    assert [row["step"] for row in lines(path)] == [*"1234567"]


def test_what_is_no_number_is_told(tmp_path):
    for suffix in SUFFIXES:
        log = LogFile(tmp_path / f"log.{suffix}")
        log(LogEntry("evaluation", 1, 1, test_loss=math.inf, test_accuracy=0.0))
        log.close()
    assert lines(tmp_path / "log.csv")[0]["test_loss"] == "inf"
    text = (tmp_path / "log.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["test_loss"] is None
    report = EpochReport(0, 1.0, 0.5, math.nan, 0.1, 9.0, 0.1)
    (epoch,) = results_to_json(trainer(), {0: report})["epochs"]
    assert epoch["test_loss"] is None
    assert (epoch["epoch"], epoch["test_accuracy"]) == (1, 0.1)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        *(("csv", "a,b\n1,2\n"), ("csv", "step,1,1\n"), ("csv", "kind\n\n")),
        *(("jsonl", "[1]\n"), ("jsonl", "hello\n"), ("jsonl", '{"step": 1}\n')),
        ("jsonl", '{"kind": "step", "step": "x", "epoch": 1}\n'),
    ],
)
def test_another_files_lines_are_not_lost(tmp_path, suffix, text):
    path = tmp_path / f"mine.{suffix}"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="is not a log of this training"):
        LogFile(path, since=Position(epoch=1, steps=5))
    assert path.read_text() == text


def test_what_cannot_be_written_costs_the_log_only(tmp_path):
    log = LogFile(tmp_path / "no" / "log.csv")
    with pytest.warns(UserWarning, match="training continues without it"):
        reports = fit(trainer(), Epochs(16, 8), epochs=1, log=log)
    assert len(reports) == 1
    with pytest.raises(ValueError, match="eval_every needs the argument test"):
        fit(trainer(), Epochs(16, 8), epochs=1, eval_every=1)


def train(*arguments):
    common = ("digits", "--data", "synthetic:length=96,classes=10", "--epochs", 1)
    common += ("--batch-policy", "undivided", "--cache", "none")
    return run("train", *common, *arguments)


def test_the_command_logs_and_says_what_it_tested(tmp_path):
    log = tmp_path / "log.csv"
    done = train("--eval-every", 2, "--log", log)
    assert done.exit_code == 0, done.output
    kinds = [row["kind"] for row in lines(log)]
    assert kinds == ["step", "step", "evaluation", "step", "epoch"]
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("step 2  test loss ")
    assert second.startswith("epoch 1/1  ")


def test_without_a_writer_event_files_are_refused(tmp_path, monkeypatch):
    for name in ("tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    done = train("--tensorboard", tmp_path / "runs")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("--tensorboard needs tensorboardX: pip install tensorboardX")
    assert not (tmp_path / "runs").exists()


def events(folder):
    """(tag, step, value) of all event files: length, sum, data, sum each."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def test_event_files_hold_the_same(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX: mucudnn[dev]")
    runs, log = tmp_path / "runs", tmp_path / "log.csv"
    done = train("--eval-every", 2, "--log", log, "--tensorboard", runs)
    assert done.exit_code == 0, done.output
    names = {"step": "train", "evaluation": "test", "epoch": "epoch"}
    wanted = {
        (f"{names[row['kind']]}/{name}", int(row["step"])): np.float32(value)
        for row in lines(log)
        for name, value in row.items()
        if name not in ("kind", "step", "epoch") and value
    }
    found = {
        (tag, step): np.float32(value)
        for tag, step, value in events(runs)
        if not tag.endswith("/images_per_s")
    }
    assert found == wanted
