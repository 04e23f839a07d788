"""The commands as people meet them: results, refusals, interruptions, pipes."""

import errno
import json
import os

import click
import pytest
from click.testing import CliRunner

from mucudnn.cli import main
from mucudnn.suites import SUITES
from tests.commands import done, json_of, python, run

PROBLEM = "n=8,c=4,h=9,w=9,k=8,r=3,s=3,pad=1"
NULL = ("--backend", "null", "--cache", "none")


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MUCUDNN_DATABASE", str(tmp_path / "cache.sqlite"))


def test_without_a_command_there_is_help():
    assert "tune" in done()
    assert "export" in done("cache")


def test_version():
    assert done("--version").split()[0] == "mucudnn"


def test_suites_are_listed():
    assert [line.split()[0] for line in done("tune", "--list").splitlines()] == [
        *SUITES
    ]
    data = json_of("tune", "--list")
    assert {s["name"]: s["layers"] for s in data["suites"]}["deepbench_train"] == 94


def test_tune_writes_table_json_and_report(tmp_path):
    files = [tmp_path / "out.json", tmp_path / "out.html"]
    shown = done(
        *("tune", "alexnet", "--problem", PROBLEM, *NULL),
        *("--workspace-limit", "64KiB,8KiB", "--total-workspace", "1MiB"),
        *("--json", str(files[0]), "--report", str(files[1])),
    )
    data = json.loads(files[0].read_text())
    assert len(data["layers"]) == 18
    limits = [entry["workspace_limit"] for entry in data["summary"]]
    assert limits == [8 << 10, 64 << 10, 1 << 20]
    assert shown.count("backward filter") == 18
    assert "alexnet" in files[1].read_text()


def test_options_change_the_layers():
    data = json_of(
        *("tune", "alexnet", *NULL, "--batch", 12),
        *("--dtype", "float64", "--layout", "NHWC"),
        *("--directions", "backward_filter,forward", "--batch-policy", "undivided"),
    )
    problems = [layer["problem"] for layer in data["layers"]]
    assert {p["x_shape"][0] for p in problems} == {12}
    assert {(p["dtype"], p["layout"]) for p in problems} == {("float64", "NHWC")}
    assert [layer["direction"] for layer in data["layers"][:2]] == [
        "forward",
        "backward_filter",
    ]
    steps = [layer["plans"][0]["steps"] for layer in data["layers"]]
    assert {len(s) for s in steps} == {1}


def test_tune_reads_files(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("name,n,c,w,k,s\nfirst,8,3,20,4,3\n")
    shown = done("tune", str(file), *NULL, "--directions", "forward")
    assert shown.splitlines()[1].startswith("first  forward")


def test_deepbench_format():
    shown = done("tune", "deepbench_train", *NULL, "--format", "deepbench")
    head, *rows = shown.splitlines()
    assert head.split()[:3] == ["w", "h", "c"]
    assert head.split()[-1] == "total_time"
    assert len(rows) == 94
    assert all(len(row.split()) == 16 for row in rows)


def test_the_environment_sets_the_limit(monkeypatch):
    monkeypatch.setenv("MUCUDNN_WORKSPACE_LIMIT", "3KiB")
    data = json_of("tune", "--problem", PROBLEM, *NULL)
    assert data["summary"][0]["workspace_limit"] == 3 << 10


def test_explain_names_the_layer():
    by_number = done("explain", "alexnet", "2", *NULL)
    assert by_number.startswith("conv2, forward: N = 256, 64×27×27 → 192")
    assert by_number == done("explain", "alexnet", "conv2", *NULL)
    data = json_of("explain", "--problem", PROBLEM, *NULL)
    (layer,) = data["layers"]
    assert sum(s["batch"] for s in layer["plan"]["steps"]) == 8
    assert layer["text"]


def test_cache_commands_work_together(tmp_path):
    mine, theirs = (("--cache", str(tmp_path / f"{x}.sqlite")) for x in "ab")
    done("tune", "--problem", PROBLEM, "--backend", "null", *mine)
    listed = json_of("cache", "list", *mine)
    rows = listed["devices"][0]["rows"]
    assert rows > 0
    file = str(tmp_path / "shared.json.gz")
    assert str(rows) in done("cache", "export", file, *mine)
    assert str(rows) in done("cache", "import", file, *theirs)
    replayed = done(
        *("tune", "--problem", PROBLEM, "--backend", f"recorded:{file}", *theirs)
    )
    assert "backward filter" in replayed
    assert done("cache", "path", *theirs).strip() == theirs[1]
    fingerprint = listed["devices"][0]["fingerprint"]
    typo = run("cache", "clear", "--device", fingerprint[:-1], *mine)
    assert typo.exit_code == 2
    assert f"it has: {fingerprint}" in typo.stderr
    cleared = done("cache", "clear", "--device", fingerprint, *mine)
    assert cleared.startswith(f"{rows:,} measurement")
    done("cache", "clear", *mine)
    assert json_of("cache", "list", *mine)["devices"] == []


def test_info_names_backends_and_the_cache(tmp_path):
    data = json_of("info")
    assert {"cpu", "null", "recorded"} <= {b["name"] for b in data["backends"]}
    assert data["cache"]["path"] == str(tmp_path / "cache.sqlite")
    assert data["versions"]["numpy"] in done("info")


def test_a_failing_disk_is_one_line(tmp_path, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "out.json"
    out.write_text("old")
    result = run("tune", "--problem", PROBLEM, *NULL, "--json", str(out))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith("out.json: No space left on device")
    assert out.read_text() == "old"
    assert [*tmp_path.iterdir()] == [out]


def test_a_pipe_gets_plain_text_and_progress_on_request():
    args = ("tune", "--problem", PROBLEM, *NULL, "--verbose")
    out, err = python("-m", "mucudnn", *args)
    assert "\x1b" not in out + err
    assert [line[:5] for line in err.splitlines()] == ["[1/3]", "[2/3]", "[3/3]"]


def test_numpy_waits_for_a_command():
    code = "import sys, mucudnn.cli; sys.exit('numpy' in sys.modules)"
    assert python("-c", code) == ("", "")


# `--help`: sections, words for values, lines that fit; one meaning of `--policy`.


LAYER = ("--problem", PROBLEM)
SECTIONS = {
    "tune": ["What", "Limits", "How", "Without measuring", "Output"],
    "explain": ["What", "Limits", "How", "Output"],
    "memory": ["What", "Limits", "How", "Output"],
    "train": ["What", "Learning", "Limits", "How", "Output"],
    "fleet": ["What", "How", "Output"],
}


def commands(group=main, *words):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *words, name)
        else:
            yield (*words, name), command


def helped(*words):
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, [*words, "--help"]).stdout


@pytest.mark.parametrize(("name", "titles"), SECTIONS.items())
def test_options_are_in_sections(name, titles):
    lines = helped(name).splitlines()
    found = [line[:-1] for line in lines if line.endswith(":") and line[0] != " "]
    assert found == [*titles, "Other options"]


COMMANDS = dict(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_a_terminal_and_is_plain_text(words):
    shown = helped(*words)
    assert shown.startswith(f"Usage: main {' '.join(words)}")
    assert "-h, --help" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_a_value_is_has_a_word_of_its_own(words):
    for option in COMMANDS[words].params:
        if isinstance(option, click.Option) and not option.is_flag:
            assert option.metavar or isinstance(option.type, click.Choice), option.opts
    for word in ("TEXT", "PARSE", "FUNC", "INTEGER", "READ", "COUNT"):
        assert f" {word}" not in helped(*words)


def test_devices_are_a_line_of_text_that_breaks():
    assert "--device NAME " in helped("memory")


@pytest.mark.parametrize("command", ["tune", "explain"])
def test_the_old_spelling_is_hidden_and_warns(command):
    assert " --policy" not in helped(command)
    old = run(command, *LAYER, *NULL, "--policy", "undivided")
    assert old.exit_code == 0
    (line,) = old.stderr.splitlines()
    assert line.startswith("mucudnn: warning: ")
    assert "--batch-policy undivided" in line


def test_the_old_spelling_means_the_same():
    steps = [
        json_of("explain", *LAYER, *NULL, *options)["layers"][0]["plan"]["steps"]
        for options in (
            ("--policy", "undivided"),
            ("--batch-policy", "undivided"),
            ("--batch-policy", "undivided", "--policy", "all"),
        )
    ]
    assert steps[0] == steps[1] == steps[2]
    assert [step["batch"] for step in steps[0]] == [8]
