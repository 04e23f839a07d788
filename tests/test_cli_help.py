"""`--help`: sections, words for values, lines that fit; one meaning of `--policy`."""

import click
import pytest
from click.testing import CliRunner

from mucudnn.cli import main
from tests.commands import json_of, run

NULL = ("--backend", "null", "--cache", "none")
PROBLEM = ("--problem", "n=8,c=4,h=9,w=9,k=8,r=3,s=3,pad=1")
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
    old = run(command, *PROBLEM, *NULL, "--policy", "undivided")
    assert old.exit_code == 0
    (line,) = old.stderr.splitlines()
    assert line.startswith("mucudnn: warning: ")
    assert "--batch-policy undivided" in line


def test_the_old_spelling_means_the_same():
    steps = [
        json_of("explain", *PROBLEM, *NULL, *options)["layers"][0]["plan"]["steps"]
        for options in (
            ("--policy", "undivided"),
            ("--batch-policy", "undivided"),
            ("--batch-policy", "undivided", "--policy", "all"),
        )
    ]
    assert steps[0] == steps[1] == steps[2]
    assert [step["batch"] for step in steps[0]] == [8]
