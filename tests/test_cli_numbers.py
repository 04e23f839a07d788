"""No number ends a command in a traceback: every option of every command is tried."""

import sys

import click
import pytest
from click.testing import CliRunner

from mucudnn.cli import main
from mucudnn.cli.app import ExitCode

pytestmark = pytest.mark.usefixtures("short_searches")

NINES = "9" * 400
ODD = [
    *(NINES, f"-{NINES}", "9" * 5000, "1e400", "-1e400", "nan", "inf", "-inf"),
    *("-1", "0", "", " ", "٣", "²", "1_000", "0x10", "1e300", "1e-300", "x y"),
    *(f"{NINES}MiB", "1e400GiB", "\udcff", f"1x1x{NINES}", f"step:{NINES}"),
]
NEVER = ["", "٣", "²", "1_000", "0x10", "nan", "inf", "-inf", "-1", f"-{NINES}"]
"""What is no number of anything here."""
NAMES = [NINES, "-1", "nan", "", " ", "٣", "x y", "\udcff"]
"""Of the same, what differs where any word may be a name."""
NAMED = {"text", "choice", "directory", "read", "_parse_directions", "_parse_numerics"}
NAMED |= {"output_file", "recording_file", "log_file"}
"""Types of options whose values are names, of files or in a table."""
NUMBERS = {"integer", "number", "byte_size", "byte_sizes", "image_size"}
PROBLEM = "n=8,c=4,h=9,w=9,k=8,r=3,s=3,pad=1"
NULL = ["--backend", "null", "--cache", "none"]
COMMANDS = {
    "tune": ["--problem", PROBLEM, "--directions", "forward", *NULL],
    "explain": ["--problem", PROBLEM, *NULL],
    "memory": ["lenet", "--batch", "2", "--policy", "keep_all"],
    "train": [*("lenet", "--steps", "1", "--batch", "2", "--seed", "1"), *NULL],
    "fleet": ["lenet", "--devices", "k80,p100", "--batch", "4"],
    "info": ["--cache", "none"],
    "doctor": ["--cache", "none"],
    "cache list": ["--cache", "none"],
    "cache export": ["out.json", "--cache", "none"],
    "cache import": ["out.json", "--cache", "none"],
    "cache clear": ["--cache", "none"],
    "cache path": ["--cache", "none"],
}


def command(name):
    found = main
    for word in name.split():
        found = found.commands[word]
    return found


OPTIONS = [
    (name, parameter)
    for name in COMMANDS
    for parameter in command(name).params
    if isinstance(parameter, click.Option) and not parameter.is_flag
]


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """What an odd name makes a command write lies here; `doctor` makes no step."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUCUDNN_DATABASE", str(tmp_path / "cache.sqlite"))


def ended(arguments):
    """How it ends; a traceback fails the test."""
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code in {
        0,
        ExitCode.BAD_INPUT,
        ExitCode.FAILED,
        ExitCode.NOTHING_FITS,
    }, arguments
    if done.exit_code == ExitCode.BAD_INPUT:
        errors = [x for x in done.stderr.splitlines() if "mucudnn: warning" not in x]
        (line,) = errors
        assert line.startswith("mucudnn: error: ")
        assert len(line) < 1500
        assert line.isprintable()
    return done.exit_code


@pytest.mark.parametrize(
    ("name", "option"), OPTIONS, ids=lambda x: x if isinstance(x, str) else x.opts[0]
)
def test_an_odd_value_is_taken_or_refused_in_one_line(name, option):
    for value in NAMES if option.type.name in NAMED else ODD:
        code = ended([*name.split(), *COMMANDS[name], f"{option.opts[0]}={value}"])
        if value in NEVER and option.type.name in NUMBERS:
            assert code == ExitCode.BAD_INPUT, value


def test_every_command_is_tried():
    leaves = {
        name if not isinstance(found, click.Group) else f"{name} {inner}"
        for name, found in main.commands.items()
        for inner in (found.commands if isinstance(found, click.Group) else [""])
    }
    assert leaves == {*COMMANDS, "demo"}  # which is told a file only, and takes long
    numeric = {(n, o.opts[0]) for n, o in OPTIONS if o.type.name in NUMBERS}
    assert {
        *(("tune", "--batch"), ("tune", "--time-limit"), ("tune", "--total-workspace")),
        *(("explain", "--workspace-limit"), ("memory", "--budget"), ("train", "--lr")),
        *(("train", "--loss-scale"), ("train", "--seed"), ("train", "--image")),
    } <= numeric


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("key", ["n", "pad", "groups"])
def test_an_odd_size_of_a_problem_is_one_line(key, value):
    sizes = dict(part.split("=") for part in PROBLEM.split(",")) | {key: value}
    text = ",".join(f"{k}={v}" for k, v in sizes.items())
    code = ended(["explain", "--problem", text, *NULL])
    if value in NEVER:
        assert code == ExitCode.BAD_INPUT


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("column", ["n", "pad", "count"])
def test_an_odd_cell_of_a_table_is_one_line(tmp_path, column, value):
    row = {"n": "8", "c": "4", "w": "9", "k": "8", "s": "3", "pad": "0", "count": "1"}
    row[column] = value
    file = tmp_path / "layers.csv"
    text = f"{','.join(row)}\n{','.join(row.values())}\n"
    file.write_text(text, encoding="utf-8", errors="replace")
    code = ended(["tune", str(file), "--directions", "forward", *NULL])
    if value in NEVER and value:  # an empty cell is one that is not given
        assert code == ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    "arguments",
    [
        ["memory", "lenet", "--batch", "2147483647"],
        ["explain", "--problem", "n=2147483647,c=4,w=9,k=8,s=3", *NULL],
        ["tune", "alexnet", "--batch", "2147483647", *NULL],
        ["memory", f"resnet:{NINES},1,1,1"],
        ["memory", "resnet:1,1,1,1_0"],
        ["memory", "resnet:1,1,1"],
        ["train", "lenet", "--data", f"synthetic:length={NINES}", *NULL],
        ["train", "lenet", "--data", "synthetic:length=0", *NULL],
        ["train", "lenet", "--data", f"synthetic:classes={NINES}", *NULL],
        ["train", "lenet", "--data", "synthetic:classes=٣", *NULL],
        ["train", "lenet", "--data", "synthetic:noise=nan", *NULL],
        ["train", "lenet", "--data", "synthetic:noise=1e400", *NULL],
        ["train", "lenet", "--lr-schedule", "step:-1", *NULL],
        ["train", "lenet", "--lr-schedule", f"step:{NINES},{NINES}", *NULL],
        ["train", "lenet", "--lr-schedule", "step:", *NULL],
    ],
    ids=lambda x: " ".join(x)[:40],
)
def test_an_odd_number_inside_a_word_is_refused(arguments):
    assert ended(arguments) == ExitCode.BAD_INPUT


@pytest.mark.parametrize("value", [NINES, "1e400", "", "٣", "1_000", "-1"])
@pytest.mark.parametrize(
    "name",
    [
        *("MUCUDNN_WORKSPACE_LIMIT", "MUCUDNN_TOTAL_WORKSPACE_SIZE"),
        "MUCUDNN_BENCHMARK_DEVICES",
    ],
)
def test_an_odd_variable_is_one_line(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    code = ended(["tune", "--problem", PROBLEM, *NULL])
    assert code == ExitCode.BAD_INPUT or not value  # empty is not set
