"""What is shown of progress: a bar in a terminal, lines or nothing elsewhere."""

import io
import re
import sys
import threading
from contextlib import contextmanager, redirect_stderr, suppress

import pytest

from mucudnn.cli import progress
from mucudnn.cli.progress import (
    Remaining,
    TrainingWords,
    every_ten_seconds,
    left_text,
    progress_display,
)
from mucudnn.runtime.training.history import Position
from tests.commands import Terminal, done

ERASED = "\x1b[2K"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def shown(work, **options):
    """What a terminal is sent; the error that ends the work is nobody's concern."""
    with redirect_stderr(Terminal()) as terminal:
        with (
            suppress(KeyboardInterrupt, ValueError),
            progress_display(5, **options) as show,
        ):
            work(show)
        assert sys.stderr is terminal
    return terminal.getvalue()


def last_frame(written: str) -> str:
    """The last thing before it was erased, the bar as a stroke and the time as T."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    plain = re.sub(r"\d+:\d\d:\d\d", "T", plain)
    lines = [line for line in re.split(r"[\r\n]+", plain) if line.strip()]
    return re.sub(r" *[━╸╺]+ *", " | ", lines[-1]).strip()


CUT = "loss 0.1234  accuracy 82.29%  12,520 images/s and more"
FULL = {"title": "now [1]", "result": "heavy"}


@pytest.mark.parametrize(
    ("told", "titled", "expected"),
    [
        ((("weigh [it]", 3, 7), FULL), False, "3/7 | T weigh [it]"),
        ((("weigh [it]", 3, 7), FULL), True, "now [1] | 3/7 T weigh [it]"),
        (None, False, "0/5 | T"),
        ((("looking", 0, 0), {}), False, "0/1 | T looking"),
        (
            ((CUT, 24, 100), {"title": "epoch 2/3"}),
            True,
            "epoch 2/3 | 24/100 T loss 0.1234  accuracy 82.29% …",
        ),
    ],
)
def test_a_terminal_gets_a_bar_and_no_lines(told, titled, expected, monkeypatch):
    def work(show):
        if told is not None:
            show(*told[0], **told[1])

    if expected.endswith("…"):  # where it is narrow, figures are whole
        monkeypatch.setenv("COLUMNS", "80")
    written = shown(work, titled=titled, lines=True)
    assert last_frame(written) == expected
    assert "heavy" not in written


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_nothing_is_left_of_a_bar_however_the_work_ends(error):
    def work(show):
        show("weighing", 1, 5)
        if error is not None:
            raise error

    written = shown(work)
    assert "weighing" in written
    assert written.endswith(ERASED)


@pytest.mark.parametrize(
    ("lines", "expected"), [(True, "[2/3] b: fine\n"), (False, "")]
)
def test_a_pipe_gets_a_line_a_result_on_request(capsys, lines, expected):
    with progress_display(3, lines=lines) as show:
        show("a", 1, 3)
        show("b", 2, 3, title="of it", result="fine")
    assert capsys.readouterr() == ("", expected)


class Ticks:
    """Stands for ten seconds, again and again: a test says when they are over."""

    def __init__(self):
        self.now = 0.0
        self.tick = None

    def __call__(self):
        return self.now

    @contextmanager
    def repeat(self, tick):
        self.tick = tick
        yield
        self.tick = None

    def pass_by(self):
        self.now += 10
        self.tick()


def piped(capsys, work, **options):
    """What a pipe is sent by work that lets time pass."""
    ticks = Ticks()
    with progress_display(4, repeat=ticks.repeat, clock=ticks, **options) as show:
        work(show, ticks.pass_by)
    assert ticks.tick is None
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_pipe_gets_a_line_every_ten_seconds(capsys):
    def work(show, pass_by):
        pass_by()
        show("weigh [it]", 1, 4)
        show("bake", 2, 4, title="now", result="brown")
        for _ in range(6):
            pass_by()

    def soon_over(show, pass_by):
        for i in range(100):
            show("weigh", i, 100, result="light")

    def with_results(show, pass_by):
        show("weigh", 1, 4, result="light")
        pass_by()
        pass_by()

    assert piped(capsys, work) == [
        "mucudnn: 0:10 starting",
        *(f"mucudnn: {t // 60}:{t % 60} now, bake, 2 of 4" for t in range(20, 60, 10)),
        *(f"mucudnn: 1:{t}0 now, bake, 2 of 4" for t in range(2)),
    ]
    assert piped(capsys, soon_over) == []
    lines = ["[1/4] weigh: light", "mucudnn: 0:20 weigh, 1 of 4"]  # one is enough
    assert piped(capsys, with_results, lines=True) == lines


def test_a_pipe_that_nobody_reads_ends_no_work():
    tried = []

    class Closed(io.StringIO):
        def write(self, text):
            tried.append(text)
            raise BrokenPipeError

    ticks = Ticks()
    with (
        redirect_stderr(Closed()),
        progress_display(1, repeat=ticks.repeat, clock=ticks, lines=True) as show,
    ):
        show("weigh", 0, 1, result="light")
        ticks.pass_by()
        ticks.pass_by()
    assert tried == ["[0/1] weigh: light\n", "mucudnn: 0:20 weigh\n"]


def test_the_thread_calls_again_and_again_until_the_end(monkeypatch):
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    called = threading.Semaphore(0)
    before = set(threading.enumerate())
    with every_ten_seconds(called.release):
        for _ in range(3):
            assert called.acquire(timeout=300)
    assert before >= set(threading.enumerate())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune", "alexnet"], ["conv1 forward", "conv5 backward filter"]),
        (["tune", "alexnet", "--plan-only"], ["conv1 forward"]),
        (["explain", "alexnet"], ["conv1 forward", "conv5 forward"]),
        (
            [
                *("memory", "lenet", "--policy", "keep_all,lru"),
                *("--max-batch", "--min-budget"),
            ],
            [
                *("building the step", "what its operations cost"),
                *("the step without a budget", "keep_all, "),
                *("the least budget of any policy", "least budget of keep_all"),
                "keep_all at batch 1",
            ],
        ),
        (
            ["train", "lenet", "--steps", "2", "--batch", "4", "--budget", "64MiB"],
            ["reading the data", "planning the step", "measuring "],
        ),
    ],
    ids=lambda x: "-".join(x)[:30],
)
def test_long_commands_say_what_they_are_at(monkeypatch, arguments, words):
    seen = []

    def shown(self, text, done, total, **more):
        assert 0 <= done <= max(1, total)
        seen.append(text)

    monkeypatch.setattr(progress.Show, "__call__", shown)
    options = [] if arguments[0] == "memory" else ["--backend", "null"]
    done(*arguments, *options, "--cache", "none")
    for word in words:
        assert any(text.startswith(word) for text in seen), word


def test_sharing_a_cache_says_what_it_is_at(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        progress.Show, "__call__", lambda self, text, *_, **more: seen.append(text)
    )
    cache, file = tmp_path / "c.sqlite", tmp_path / "c.json"
    for name in ("export", "import"):
        done("cache", name, file, "--cache", cache)
    assert seen == [f"writing {file}", f"reading {file}"]


def test_a_pipe_is_told_how_long_the_rest_takes(capsys):
    def work(show, pass_by):
        show("weigh", 0, 9)
        pass_by()
        show("weigh", 1, 9)
        pass_by()
        show("bake", 0, 1, left_s=4000)
        pass_by()

    assert piped(capsys, work) == [
        "mucudnn: 0:10 weigh, 0 of 9",
        "mucudnn: 0:20 weigh, 1 of 9, about 1 min left",
        "mucudnn: 0:30 bake, about 1 h 10 min left",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((None, ""), (0, ""), (-3, ""), (0.2, "about 10 s left")),
        *((52, "about 50 s left"), (57, "about 1 min left")),
        *((119, "about 2 min left"), (3500, "about 58 min left")),
        *((3599, "about 1 h left"), (1e6, "about 278 h left")),
    ],
)
def test_how_long_it_takes_is_told_roughly(seconds, words):
    assert left_text(seconds) == words
    ticks = Ticks()

    def work(show):
        show("weigh", 0, 5)
        ticks.now += 40
        show("weigh", 2, 5)

    assert last_frame(shown(work, clock=ticks)) == "2/5 | T about 1 min left, weigh"


def test_the_rest_is_known_by_parts_of_the_same_work():
    ticks = Ticks()
    rest = Remaining(ticks)
    assert rest.left_s() is None
    rest.at(2, 6)  # these were over before
    assert rest.left_s() is None
    ticks.now = 10
    rest.at(3, 6)
    assert rest.left_s() == 30
    ticks.now = 15
    assert rest.left_s() == 25
    ticks.now = 45  # this part takes longer: two are still to come
    assert rest.left_s() == 20
    rest.at(0, 6)
    assert rest.left_s() is None
    ticks.now += 10
    rest.at(1, 7)
    assert rest.left_s() is None
    rest = Remaining(ticks, limit_s=60)  # which ends it at the latest
    assert rest.left_s() == 60
    ticks.now += 20
    rest.at(0, 9)
    ticks.now += 20
    rest.at(1, 9)
    assert rest.left_s() == 20
    ticks.now += 30
    assert rest.left_s() == 0


def test_training_knows_what_steps_take():
    lefts = []

    def show(*stage, left_s, **more):
        lefts.append(left_s)

    words = TrainingWords(show, 2, 10, steps=15, quiet=True)
    words(Position(epoch=0, batch=4, steps=4, ms=2000.0), None)
    words(Position(epoch=1, batch=5, steps=15, ms=2000.0), None)
    assert lefts == [5.5, 0.0]
