"""What people get wrong, and odd places to run in: one line, before any work."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mucudnn.cli import main
from mucudnn.cli.app import suggesting

PROBLEM = ("--problem", "n=8,c=4,h=9,w=9,k=8,r=3,s=3,pad=1")
NULL = ("--backend", "null", "--cache", "none")
TUNE = ("tune", *PROBLEM, *NULL)
TRAIN = ("train", "lenet", "--steps", "1", "--batch", "2", *NULL)


def refused(*arguments):
    """The one line that a mistake is answered with."""
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["tunee"], "tune"),
        (["cache", "exprt"], "export"),
        (["tune", "alexnat"], "alexnet"),
        (["tune", "deepbench-train"], "deepbench_train"),
        (["explain", "vgg-16"], "vgg16"),
        (["memory", "lennet"], "lenet"),
        (["train", "resnet_50"], "resnet50"),
        (["train", "lenet", "--data", "cifar-10:dir"], "cifar10"),
        (["train", "lenet", "--data", "synthetc"], "synthetic"),
        (["tune", "alexnet", "--backend", "nul"], "null"),
        ([*TUNE, "--batch-policy", "power_of_two"], "powers_of_two"),
        ([*TUNE, "--planner", "workspace-reuse"], "workspace_reuse"),
        ([*TUNE, "--directions", "backward_filtr"], "backward_filter"),
        (["explain", "alexnet", "conv-1", *NULL], "conv1"),
        (["memory", "lenet", "--policy", "planed"], "planned"),
        (["memory", "lenet", "--scheduler", "timd"], "timed"),
        (["memory", "lenet", "--optimizer", "momentm"], "momentum"),
        (["memory", "lenet", "--order", "least_peek"], "least_peak"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x)[:30],
)
def test_a_mistyped_name_is_answered_with_the_one_meant(arguments, meant):
    assert refused(*arguments).endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize(
    "message",
    [
        "unknown suite 'zzz'; choose one of: a, b",
        "nothing is quoted; choose one of: a, b",
        "unknown thing ''; choose one of: ",
    ],
)
def test_nothing_is_suggested_where_nothing_is_near(message):
    assert suggesting(message) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TUNE, "--json", "a", "--report", "a"], "--json and --report both write a"),
        ([*TUNE, "--json", "a", "--record", "./a"], "--json and --record both write"),
        ([*TUNE, "--json", "-", "--report", "-"], "--json and --report both write -"),
        (["memory", "lenet", "--json", "-", "--trace", "-"], "both write -"),
        (["memory", "lenet", "--report", "a", "--trace", "a"], "both write a"),
        ([*TRAIN, "--disk", "."], "--disk needs --budget"),
        ([*TRAIN, "--policy", "keep_all"], "--policy needs --budget"),
        ([*TRAIN, "--scheduler", "timed"], "--scheduler needs --budget"),
        ([*TRAIN, "--convolutions", "fixed"], "--convolutions needs --budget"),
        ([*TRAIN, "--resume"], "--resume needs --checkpoint"),
        ([*TRAIN, "--checkpoint", "file/x"], "cannot write to file/x"),
        ([*TRAIN, "--checkpoint", "file"], "is a file"),
        ([*TUNE, "--json", "no/where"], "no directory no"),
        ([*TUNE, "--json", "."], "it is a directory"),
        (["cache", "import", "."], "is a directory"),
        (["cache", "import", "torn.json.gz"], "torn.json.gz"),
        (["tune", "."], "nor a file"),
        (["memory", "lenet", "--recording", "."], "cannot be read"),
        (
            ["memory", "lenet", "--device", "cpu", "--split", "2"],
            "is for estimated devices",
        ),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)
def test_a_mistake_is_found_before_the_work(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "torn.json.gz").write_bytes(bytes.fromhex("1f8b0800000000000003ab"))
    assert message in refused(*arguments)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "torn.json.gz"]


def test_a_folder_for_checkpoints_that_is_only_tried_is_not_left(tmp_path):
    folder = tmp_path / "a" / "b"
    data = ("--data", "mnist:nowhere")
    assert "nowhere" in refused(*TRAIN, *data, "--checkpoint", str(folder))
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_with_a_reader_takes_json():
    """As shells name it: `--json >(tee FILE)`."""
    ours, theirs = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "mucudnn", *TUNE, "--json", f"/dev/fd/{theirs}"],
        stdout=subprocess.DEVNULL,
        pass_fds=(theirs,),
    ) as child:
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            data = json.load(pipe)
        assert child.wait(300) == 0
    assert len(data["layers"]) == 3


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert "it is a FIFO" in refused(*TUNE, "--json", str(tmp_path / "fifo"))


CLOSED = "import os, sys; os.close({}); os.execv(sys.executable, [sys.executable, *{}])"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_no_crash_and_costs_no_file(tmp_path, closed):
    file = tmp_path / "out.json"
    arguments = [*("-m", "mucudnn"), *TUNE, "--json", str(file)]
    arguments += ["--cache", str(tmp_path / "cache.sqlite")]
    done = subprocess.run(
        [sys.executable, "-c", CLOSED.format(closed, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(json.loads(file.read_text())["layers"]) == 3
    assert (done.stdout == "") is (closed == 1)


def test_a_reader_that_leaves_costs_no_file(tmp_path):
    file, page = tmp_path / "out.json", tmp_path / "out.html"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mucudnn", *TUNE),
            *("--json", str(file), "--report", str(page)),
        ],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == b""
    assert len(json.loads(file.read_text())["layers"]) == 3
    assert "</html>" in page.read_text()


@pytest.mark.parametrize(
    "arguments",
    [TUNE, ("tune", "--list"), ("memory", "lenet", "--policy", "keep_all"), ("tunee",)],
    ids=lambda x: " ".join(x)[:20],
)
def test_a_locale_without_our_letters_is_no_crash(arguments):
    environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    environment |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "mucudnn", *arguments],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 2)
    assert b"Traceback" not in done.stderr
    assert done.stdout or done.stderr


def test_a_file_name_that_is_no_text_is_no_crash(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.csv"
    with open(name, "w") as file:  # noqa: PTH123 - a name in bytes
        file.write("n,c,w,k,s\n8,4,9,8,3\n")
    files = [tmp_path / "out.json", tmp_path / "out.html"]
    done = CliRunner().invoke(
        main,
        [
            *("tune", os.fsdecode(name), *NULL),
            *("--json", str(files[0]), "--report", str(files[1])),
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(files[0].read_text())["layers"]
    assert "</html>" in files[1].read_text()
