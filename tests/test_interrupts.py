"""Who asks a command to end, when, and what is kept: Ctrl-C, SIGTERM, SIGHUP."""

import contextlib
import json
import os
import pty
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from mucudnn.processes import Interrupts, deferred_interrupt
from mucudnn.recording_format import read_recording
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.training.checkpoints import Checkpoints
from mucudnn.studies import memory
from tests.commands import python, run
from tests.interrupting import at_import, site, start, usual_signals

ENDINGS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
NULL = ("--backend", "null", "--cache", "none")
TUNE = ("tune", "alexnet", *NULL, "--directions", "forward")

# Acts when the second layer of a comparison begins, or a command saves what it has.
AT_A_LAYER = """
import os, subprocess, sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            sys.setprofile(watch)

def watch(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_qualname == {function!r}:
        watch.calls += 1
        if watch.calls == {calls}:
            sys.setprofile(None)
            {action}

watch.calls = 0
sys.meta_path.insert(0, Hook())
"""


def in_the_work(folder, action, *, calls=2, function="_TimedComparison.layer"):
    """An environment in which a command does something to itself at a given call."""
    return site(
        folder,
        AT_A_LAYER.format(
            module="mucudnn.studies.convolutions",
            function=function,
            calls=calls,
            action=action,
        ),
    )


def kill(number):
    return f"os.kill(os.getpid(), {int(number)})"


def ended(*arguments, **options):
    """Return the exit code, output and errors of a command that something ends."""
    with start(*arguments, **options) as child:
        out, err = child.communicate(timeout=300)
    return child.returncode, out, err


MADE = {"within": "exec({!r})"}  # while one of its dataclasses is made


@pytest.mark.parametrize(
    ("module", "when"),
    [
        *(("mucudnn.processes", {}), ("click", {}), ("mucudnn.cli.app", {})),
        *(("mucudnn.cli.tune", {}), ("mucudnn.runtime.tuning.tuner", {})),
        *(("mucudnn.report.text", {}), ("mucudnn.report.text", MADE)),
        ("mucudnn.cli", MADE),
    ],
)
def test_ctrl_c_while_it_is_imported_is_no_traceback(tmp_path, module, when):
    environment = at_import(tmp_path, module, signal.SIGINT, **when)
    code, _, err = ended(*TUNE, env=environment)
    assert (code, err.strip()) == (130, "")


def test_the_script_is_guarded_as_well(tmp_path):
    script = "import sys; from mucudnn.__main__ import main; sys.exit(main())"
    _, err = python(
        *("-c", script, "tune", "--list"),
        status=129,
        environment=at_import(tmp_path, "mucudnn.cli", signal.SIGHUP),
        preexec_fn=usual_signals,
    )
    assert err.strip() == ""
    settings = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'mucudnn = "mucudnn.__main__:main"\n' in settings


@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_tune_keeps_what_is_measured_whoever_ends_it(tmp_path, number, code):
    files = [tmp_path / name for name in ("out.json", "out.html", "out.json.gz")]
    cache = tmp_path / "cache.sqlite"
    options = (
        *("--json", str(files[0]), "--report", str(files[1])),
        *("--record", str(files[2]), "--cache", str(cache)),
    )
    environment = in_the_work(tmp_path / "x", kill(number))
    found, out, err = ended(*TUNE, *options, env=environment)
    assert found == code
    assert "Traceback" not in err
    data = json.loads(files[0].read_text())
    assert data["interrupted"] is True
    assert len(data["layers"]) == 1
    assert "interrupted: 4 of 5 were not compared" in out
    assert "Interrupted: 1 of 5" in files[1].read_text()
    rows = read_recording(files[2].read_bytes()).measurements
    assert f"{len(rows)} measurements written to {files[2]}" in err
    with BenchmarkCache(cache) as kept:
        assert len(kept.rows()) >= len(rows) > 0


def test_a_first_signal_waits_for_what_is_being_saved(tmp_path):
    file, page = tmp_path / "out.json", tmp_path / "out.html"
    environment = in_the_work(
        tmp_path / "x", kill(signal.SIGTERM), calls=1, function="Comparison.to_json"
    )
    options = ("--json", str(file), "--report", str(page))
    assert ended(*TUNE, *options, env=environment)[0] == 143
    assert json.loads(file.read_text())["interrupted"] is False
    assert "</html>" in page.read_text()


def test_a_second_signal_while_saving_ends_at_once(tmp_path):
    file = tmp_path / "out.json"
    nobody_reads, pipe = os.pipe()
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):  # full: whoever writes to it waits
        while True:
            os.write(pipe, bytes(1 << 16))
    os.set_blocking(pipe, True)
    environment = in_the_work(tmp_path / "x", kill(signal.SIGTERM))
    options = ("--json", str(file), "--report", f"/dev/fd/{pipe}")
    with start(*TUNE, *options, env=environment, pass_fds=(pipe,)) as child:
        while not (file.exists() and file.stat().st_size) and child.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)  # more than what counts as one request
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=300)
    os.close(pipe)
    os.close(nobody_reads)
    assert child.returncode == 143
    assert json.loads(file.read_text())["interrupted"] is True


def test_its_child_processes_end_with_it(tmp_path):
    action = (
        "watch.child = subprocess.Popen(['sleep', '1000']); "
        "print(watch.child.pid, flush=True); "
        f"{kill(signal.SIGTERM)}"
    )
    with start(*TUNE, env=in_the_work(tmp_path, action)) as child:
        pid = int(child.stdout.readline())
        child.communicate(timeout=300)
    assert child.returncode == 143
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} still runs")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_was_ignored_at_the_start_stays_ignored(tmp_path, number):
    def ignore():
        usual_signals()
        signal.signal(number, signal.SIG_IGN)

    file = tmp_path / "out.json"
    environment = in_the_work(tmp_path / "x", kill(number))
    command = (*TUNE, "--json", str(file))
    assert ended(*command, env=environment, before=ignore)[0] == 0
    assert len(json.loads(file.read_text())["layers"]) == 5


def test_a_terminal_that_closes_costs_no_checkpoint(tmp_path):
    ours, theirs = pty.openpty()

    def lead():
        usual_signals()
        os.setsid()
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    file = tmp_path / "out.json"
    with start(
        *("train", "digits", "--data", "digits", "--epochs", "10000", "--cache"),
        *("none", "--checkpoint", str(tmp_path / "c"), "--json", str(file)),
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        before=lead,
    ) as child:
        os.close(theirs)
        seen = b""
        while b"epoch 1/" not in seen:
            seen += os.read(ours, 4096)
        os.close(ours)
        assert child.wait(300) == 129
    data = json.loads(file.read_text())
    assert data["interrupted"] is True
    assert Checkpoints(tmp_path / "c").load().step == data["steps"]


@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_memory_keeps_what_is_planned(monkeypatch, tmp_path, number, code):
    tried = []
    usual = memory.try_technique

    def signalled(*arguments):
        tried.append(arguments)
        if len(tried) == 2:
            signal.raise_signal(number)
        return usual(*arguments)

    monkeypatch.setattr(memory, "try_technique", signalled)
    file = tmp_path / "out.json"
    done = run("memory", "lenet", "--batch", 4, "--json", file)
    assert done.exit_code == code
    assert "interrupted" in done.stdout
    data = json.loads(file.read_text())
    assert data["interrupted"] is True
    (row,) = data["rows"]
    assert row["policy"] in done.stdout


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("number", [n for n, _ in ENDINGS])
def test_the_second_request_ends_and_one_at_once_does_not(number):
    ended, clock = [], Clock()
    with Interrupts(ended.append, clock=clock) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert interrupts.number == number
        assert signal.getsignal(number) is interrupts
        signal.raise_signal(signal.SIGTERM)
        assert ended == []
        clock.now = 1.0
        interrupts._end = lambda n: (ended.append(n), sys.exit(7))
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]


def test_all_is_as_it_was_afterwards():
    before, clock = [signal.getsignal(n) for n, _ in ENDINGS], Clock()
    interrupts = Interrupts(clock=clock)
    with interrupts, interrupts:
        assert signal.getsignal(signal.SIGTERM) is interrupts
        assert interrupts.number is None
        # Without an end of its own, a second Ctrl-C is Python's.
        for clock.now in (0.0, 1.0):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(n) for n, _ in ENDINGS] == before
    assert interrupts.number == signal.SIGINT


def test_a_handler_of_the_callers_own_stays():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with Interrupts(), deferred_interrupt() as interrupted:
            signal.raise_signal(signal.SIGTERM)
            assert not interrupted()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


@pytest.mark.parametrize("number", [n for n, _ in ENDINGS])
def test_a_deferred_request_waits_and_a_second_does_not(number):
    clock = Clock()
    ended = []

    def end(number):
        ended.append(number)
        sys.exit(7)

    with Interrupts(end, clock=clock) as interrupts:
        with deferred_interrupt() as interrupted:
            signal.raise_signal(number)
            assert interrupted()
            assert interrupts.number == number
            clock.now = 1.0
            with pytest.raises(SystemExit):
                signal.raise_signal(number)
        assert ended == [number]


def test_another_thread_changes_no_handler():
    found = []

    def work():
        with Interrupts(), deferred_interrupt() as interrupted:
            found.append(signal.getsignal(signal.SIGTERM))
            found.append(interrupted())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL, False]
