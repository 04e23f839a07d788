"""What is shown of progress: a bar in a terminal, lines or nothing elsewhere."""

import io
import re
import sys
from contextlib import redirect_stderr, suppress

import pytest

from mucudnn.cli.progress import progress_display

ERASED = "\x1b[2K"


class Terminal(io.StringIO):
    """An error stream that people look at."""

    def isatty(self):
        return True


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


@pytest.mark.parametrize(
    ("titled", "expected"),
    [(False, "3/7 | T weigh [it]"), (True, "now [1] | 3/7 T weigh [it]")],
)
def test_a_terminal_gets_a_bar_and_no_lines(titled, expected):
    def work(show):
        show("weigh [it]", 3, 7, title="now [1]", result="heavy")

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


def test_before_anything_is_known_there_is_the_total():
    assert last_frame(shown(lambda show: None)) == "0/5 | T"


def test_of_no_work_nothing_is_done():
    written = shown(lambda show: show("looking", 0, 0))
    assert last_frame(written) == "0/1 | T looking"


@pytest.mark.parametrize(
    ("lines", "expected"), [(True, "[2/3] b: fine\n"), (False, "")]
)
def test_a_pipe_gets_a_line_a_result_on_request(capsys, lines, expected):
    with progress_display(3, lines=lines) as show:
        show("a", 1, 3)
        show("b", 2, 3, title="of it", result="fine")
    assert capsys.readouterr() == ("", expected)
