"""What people get wrong, and odd places to run in: one line, before any work."""

import json
import os
import shlex
import subprocess

import click
import pytest
from click.shell_completion import ShellComplete

from mucudnn.cli import main
from mucudnn.cli.app import suggesting
from tests.commands import done, finish, python, refused, start_python

PROBLEM = ("--problem", "n=8,c=4,h=9,w=9,k=8,r=3,s=3,pad=1")
NULL = ("--backend", "null", "--cache", "none")
TUNE = ("tune", *PROBLEM, *NULL)
MISTAKES = """
foo | choose one of: cache, demo, doctor, explain, fleet, info, memory, train, tune
tunee | did you mean 'tune'?
cache foo | clear, export, import, list, path
cache exprt | did you mean 'export'?
cache import /nowhere | /nowhere
cache import . | is a directory
cache import file | cannot import
cache import torn.json.gz | torn.json.gz
cache export /nowhere/x | no directory /nowhere
cache clear --cache file | is not a mucudnn cache
cache clear --cache none --device typo | no measurements of the device 'typo'
cache list --cache file | is not a mucudnn cache
cache list --cache /dev/null/x | cannot keep a cache
explain alexnet conv9 | no layer 'conv9'
explain alexnet conv-1 | did you mean 'conv1'?
explain alexnet 1 --workspace-limit -1 | -1
explain alexnet --policy planned | unknown batch policy 'planned'
explain vgg-16 | did you mean 'vgg16'?
fleet lenet | give the devices
fleet --devices p100 | name a network
fleet lenet --devices p10 | did you mean 'p100'
fleet lenet --devices p100= | has no recording
fleet lenet --devices 0xp100 | at least 1
fleet lenet --devices p100=/nowhere.json | /nowhere.json
fleet lenet --devices p100 --link 0 | '0' bytes per second is not a rate above 0
fleet lenet --devices p100 --batch 9-8 | ends before it begins
fleet lenet --devices p100 --batch many | neither a number
fleet lenet --devices 2xp100 --batch 1 --at-least 1 | fewer
memory | name a network
memory lennet | did you mean 'lenet'?
memory nosuch | unknown model 'nosuch'
memory resnet:1,2 | four numbers
memory lenet --json - --trace - | both write -
memory lenet --report a --trace a | both write a
memory lenet --json '' | the name of the file is empty
memory lenet --recording . | cannot be read
memory lenet --device cpu --split 2 | is for estimated devices
memory lenet --split ٣ | is not auto, none, height
memory lenet --device h20 | unknown device 'h20' (did you mean 'h200'?); choose one of
memory lenet --tier tape:1 | 'tape:1'; choose host, disk:FOLDER or peer:DEVICE
memory lenet --budget much | not a size
memory lenet --image 2 | padded input
memory lenet --batch 0 | batch
memory lenet --slowdown 0.9 | '0.9' is not a number from 1
memory lenet --slowdown nan | 'nan' is not a number from 1
memory lenet --slowdown 5% | '5%' is not a number from 1
memory lenet --snapshot - | pickle
memory lenet --cache file | is not a mucudnn cache
train | --list lists them
train --list --policy rubbish | rubbish
train resnet19 | unknown model 'resnet19'
train resnet_50 | did you mean 'resnet50'?
train unet2d | a class for each pixel
train unet3d | images of 3 dimensions
train digits --data photos | unknown data set 'photos'
train digits --data cifar10:/nowhere | /nowhere
train lenet --data cifar-10:dir | did you mean 'cifar10'?
train lenet --data synthetc | did you mean 'synthetic'?
train digits --data mnist | mnist needs a folder
train digits --data synthetic:classes=4,length=100 --classes 3 | --classes 3 is too few
train digits --data digits --classes 3 | --classes 3 is too few
train digits --data digits --batch 2000 | no full batch of 2000
train digits --image 8x | is not an image size
train digits --image 1 | does not fit
train digits --image 1x2x3x4 | at most 3
train digits --batch 0 | --batch
train digits --accumulate 5 | 5 equal parts
train digits --optimizer adam --momentum 0.5 | no --momentum
train digits --lr -1 | above 0
train digits --lr nan | above 0
train digits --momentum 2 | up to 1
train digits --weight-decay x | from 0
train digits --lr-schedule linear | unknown learning-rate schedule
train digits --workspace-limit some | some
train digits --backend null --placement virtual | cannot map memory
train digits --split auto | --split auto needs --budget
train digits --shares ٣,1 | is not auto, equal, or numbers
train lenet --disk . | --disk needs --budget
train digits --precision float16 | for forward of 32 samples, x (32, 1, 8, 8), w
train lenet --policy keep_all | --policy needs --budget
train lenet --scheduler timed | --scheduler needs --budget
train lenet --convolutions fixed | --convolutions needs --budget
train lenet --resume | --resume needs --checkpoint
train lenet --checkpoint-every 2 | --checkpoint-every needs --checkpoint
train lenet --checkpoint file/x | cannot write to file/x
train lenet --checkpoint file | is a file
train lenet --checkpoint new/folder --data mnist:nowhere | nowhere
train lenet --json /no/where | cannot write
train lenet --tier host | --tier needs --budget
train lenet --budget 1MiB --tier ram | unknown tier
train digits --log log.txt | a log must end in .csv, .jsonl, .ndjson
train digits --log - | a log needs a file
train digits --log no/log.csv | no directory no
train digits --log a.csv --json a.csv | --json and --log both write a.csv
train digits --eval-every 0 | the value is
tune | nothing to measure
tune . | nor a file
tune nope | 'nope' is neither a suite (alexnet
tune nope --json file --report new | 'nope' is neither a suite (alexnet
tune alexnat | did you mean 'alexnet'?
tune deepbench-train | did you mean 'deepbench_train'?
tune unet3d --format deepbench | this one is 3-D
tune --problem n=3,q=4 | unknown key 'q'; valid keys: n, c
tune alexnet --bogus | --bogus
tune alexnet --workspace-limit 3XB | unknown unit 'XB'
tune alexnet --workspace-limit '' | --workspace-limit
tune alexnet --backend recorded:/nowhere | /nowhere
tune alexnet --total-workspace 1MiB --planner rubbish | rubbish
tune alexnet --batch 0 | --batch
tune alexnet --time-limit nan | 'nan' is not a number of seconds above 0
tune alexnet --json no/where | no directory no
tune alexnet --json . | it is a directory
tune alexnet --report / | it is a directory
tune alexnet --json a --report a | --json and --report both write a
tune alexnet --json a --record ./a | --json and --record both write
tune alexnet --json - --report - | --json and --report both write -
tune alexnet --record - | a recording needs a file
tune alexnet --record . | it is a directory
tune alexnet --record /nowhere/r.json | no directory /nowhere
tune alexnet --workers 0 | --workers
tune alexnet --workers 257 | --workers
tune alexnet --workers two | --workers
tune alexnet --plan-only --record x.json | be combined with --record
tune alexnet --plan-only --format deepbench | be combined with --format
tune alexnet --plan-only --total-workspace 1MiB | be combined with --total-workspace
tune alexnet --plan-only --planner undivided | be combined with --planner
tune alexnet --plan-only --time-limit 3 | be combined with --time-limit
tune alexnet --plan-only --memory-limit 3GiB | be combined with --memory-limit
tune alexnet --plan-only --exhaustive | be combined with --exhaustive
tune alexnet --plan-only --device h200 | not --backend cpu
"""
"""What is typed, and words of the answer."""


@pytest.mark.parametrize(
    ("typed", "message"),
    [line.split(" | ") for line in MISTAKES.strip().splitlines()],
    ids=lambda text: text[:40],
)
def test_a_mistake_is_one_line_before_any_work(tmp_path, monkeypatch, typed, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "torn.json.gz").write_bytes(bytes.fromhex("1f8b0800000000000003ab"))
    assert message in refused(*shlex.split(typed))
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "torn.json.gz"]


ABOUT = {
    **dict.fromkeys(("explain", "tune"), "alexnet"),
    **dict.fromkeys(("fleet", "memory", "train"), "lenet"),
}


def named_options():
    """Yield commands, options whose values are names, and the names offered."""
    shell = ShellComplete(main, {}, "mucudnn", "_MUCUDNN_COMPLETE")
    for command in ABOUT:
        for option in main.commands[command].params:
            if isinstance(option, click.Option) and not option.is_flag:
                flag = option.opts[-1]
                found = shell.get_completions([command, flag], "")
                names = [item.value for item in found if item.type == "plain"]
                if names:
                    yield pytest.param(command, flag, names, id=f"{command} {flag}")


@pytest.mark.parametrize(("command", "flag", "names"), [*named_options()])
def test_a_wrong_name_is_told_which_there_are(command, flag, names):
    line = refused(command, ABOUT[command], flag, "rubbish")
    assert "rubbish" in line
    assert all(name in line for name in names)
    longest = max(names, key=len)
    if "choose" in line and flag != "--data":  # not where click itself refuses
        near = refused(command, ABOUT[command], flag, longest[:-1])
        assert f"did you mean {longest!r}?" in near


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


CLOSED = "import os, sys; os.close({}); os.execv(sys.executable, [sys.executable, *{}])"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_no_crash_and_costs_no_file(tmp_path, closed):
    file = tmp_path / "out.json"
    arguments = [*("-m", "mucudnn"), *TUNE, "--json", str(file)]
    arguments += ["--cache", str(tmp_path / "cache.sqlite")]
    out, err = python("-c", CLOSED.format(closed, arguments))
    assert err == ""
    assert len(json.loads(file.read_text())["layers"]) == 3
    assert (out == "") is (closed == 1)


def test_a_reader_that_leaves_costs_no_file_and_one_that_stays_takes_json(tmp_path):
    """As shells name a pipe: `--json >(tee FILE)`."""
    file, page = tmp_path / "out.json", tmp_path / "out.html"
    (left, writer), (ours, theirs) = os.pipe(), os.pipe()
    os.close(left)
    options = ("--json", file, "--report", page)
    child = start_python("-m", "mucudnn", *TUNE, *options, stdout=writer)
    os.close(writer)
    assert finish(child, 1)[1] == ""
    assert len(json.loads(file.read_text())["layers"]) == 3
    assert "</html>" in page.read_text()
    tune = ("-m", "mucudnn", *TUNE, "--json", f"/dev/fd/{theirs}")
    with start_python(*tune, stdout=subprocess.DEVNULL, pass_fds=(theirs,)) as child:
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            data = json.load(pipe)
        assert child.wait(300) == 0
    assert len(data["layers"]) == 3


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("memory", "--help")])
def test_help_on_a_full_disk_is_one_line(words):
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        _, err = finish(start_python("-m", "mucudnn", *words, stdout=full), 2)
    assert err == "mucudnn: error: [Errno 28] No space left on device\n"


def test_a_locale_without_our_letters_is_no_crash():
    environment = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    environment |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = """
import shlex, sys
from mucudnn.cli import main
for words in sys.argv[1:]:
    try:
        main(shlex.split(words))
    except SystemExit as e:
        assert not e.code
"""
    shown = shlex.join(TUNE), "tune --list", "memory lenet --policy keep_all"
    for status, arguments in (
        (0, ("-c", code, *shown)),
        (2, ("-m", "mucudnn", "tunee")),
    ):
        out, err = python(*arguments, status=status, environment=environment)
        assert "Traceback" not in err
        assert out or err


def test_a_file_name_that_is_no_text_is_no_crash(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.csv"
    with open(name, "w") as file:  # noqa: PTH123 - a name in bytes
        file.write("n,c,w,k,s\n8,4,9,8,3\n")
    files = [tmp_path / "out.json", tmp_path / "out.html"]
    options = ("--json", files[0], "--report", files[1])
    done("tune", os.fsdecode(name), *NULL, *options)
    assert json.loads(files[0].read_text())["layers"]
    assert "</html>" in files[1].read_text()
