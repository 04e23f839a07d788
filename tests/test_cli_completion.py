"""What a shell offers while a command is typed, through click's own interface."""

import pytest
from click.shell_completion import ShellComplete

from mucudnn.backends import backend_names
from mucudnn.cli import main
from mucudnn.data import FORMATS
from mucudnn.ir.devices import DEVICES
from mucudnn.models import model_names
from mucudnn.suites import SUITES, load_suite
from tests.commands import python


def offered(*words):
    *before, typed = words
    shell = ShellComplete(main, {}, "mucudnn", "_MUCUDNN_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions(before, typed)]


def names(*words):
    found = offered(*words)
    assert all(kind == "plain" for kind, _ in found)
    return [name for _, name in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tune", ""), [*SUITES]),
        (("tune", "alexnet", "vg"), [n for n in SUITES if n.startswith("vg")]),
        (("explain", "alex"), ["alexnet"]),
        (
            ("explain", "alexnet", ""),
            [*dict.fromkeys(x.name for x in load_suite("alexnet"))],
        ),
        (("train", ""), [*model_names()]),
        (("memory", "resnet1"), [n for n in model_names() if n.startswith("resnet1")]),
        (("tune", "--batch-policy", ""), ["undivided", "powers_of_two", "all"]),
        (("explain", "--batch-policy", "p"), ["powers_of_two"]),
        (("tune", "--policy", ""), []),
        (("tune", "--planner", "workspace_r"), ["workspace_reuse"]),
        (("tune", "--backend", ""), [*backend_names()]),
        (("tune", "--numerics", "strict,det"), ["strict,deterministic"]),
        (("tune", "--directions", "f"), ["forward"]),
        (("tune", "--layout", "NH"), ["NHWC"]),
        (("memory", "lenet", "--policy", "vdnn_c"), ["vdnn_conv"]),
        (("memory", "--policy", "lru,superneurons_s"), ["lru,superneurons_speed"]),
        (("memory", "--policy", "lru,lr"), []),
        (("memory", "--policy", "al"), ["all"]),
        (("memory", "--scheduler", "t"), ["timed"]),
        (("memory", "--order", "least"), ["least_peak"]),
        (("memory", "--device", ""), ["cpu", *DEVICES]),
        (("memory", "--device", "rtx4"), ["rtx4090"]),
        (("train", "--data", ""), [*FORMATS]),
        (("train", "--policy", "vdnn_d"), ["vdnn_dyn"]),
        (("train", "--batch-policy", "a"), ["all"]),
        (("train", "--optimizer", "adam"), ["adam", "adamw"]),
        (("fleet", "lenet", "--devices", "k80,p1"), ["k80,p100"]),
        (("cache", "ex"), ["export"]),
        (("tune", "--batch-p"), ["--batch-policy"]),
    ],
    ids=lambda x: " ".join(x)[:40],
)
def test_names_are_offered(words, expected):
    assert sorted(names(*words)) == sorted(expected)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("tune", "mine.c"), "file"),
        (("train", "net"), "file"),
        (("tune", "--report", "out"), "file"),
        (("train", "--log", "a"), "file"),
        (("memory", "--recording", "r"), "file"),
        (("train", "--checkpoint", "d"), "dir"),
        (("train", "--tensorboard", "d"), "dir"),
    ],
)
def test_where_no_name_fits_the_shell_looks_for_files(words, kind):
    assert offered(*words) == [(kind, words[-1])]


def bash(line, folder):
    """What a process of its own writes for bash, which asks about the last word."""
    environment = {
        "_MUCUDNN_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    out, err = python("-m", "mucudnn", environment=environment, cwd=folder)
    assert err == ""
    return out.splitlines()


def test_a_shell_gets_it(tmp_path):
    assert bash("mucudnn memory --device h200", tmp_path) == ["plain,h200"]


def test_what_was_imported_is_offered(tmp_path):
    (tmp_path / "own.py").write_text(
        "from mucudnn.strategies import POLICIES\n"
        "@POLICIES.register\n"
        "def longest_absence(graph, costs, budget):\n    raise ValueError\n"
    )
    line = "mucudnn memory --import own.py --policy lo"
    assert bash(line, tmp_path) == ["plain,longest_absence"]


def test_an_old_spelling_on_the_line_says_nothing(tmp_path):
    line = "mucudnn tune --policy all --batch-policy u"
    assert bash(line, tmp_path) == ["plain,undivided"]
