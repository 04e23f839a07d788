"""The tests that need the GPU, one by one, each ended once.

pytest runs in a process of its own that writes a journal. One test that kills it, or
never ends, costs that test: it is noted, and another process goes on behind it. What
has ended is never run again: the next run goes on where one was cut off.

Only files that have such tests are collected: collecting all takes half a minute.
"""

import ast
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.job import Job, Report, facts, write_json
from bench.gpu.journal import Journal, import_of

_RESULT, _LOG, _JOURNAL = "tests.json", "tests.log", "tests.jsonl"
FILES = (_RESULT, _LOG, _JOURNAL)

_MARKER = "gpu"
_WITHOUT_GPU = ("backend 'cuda' needs CuPy", "no NVIDIA GPU can be used here")
"""What a test says that is skipped because nothing can run on a GPU here."""

_FIRST = (
    *("test_cuda_kernels.py", "test_cuda_training.py", "test_cuda_mapped_memory.py"),
    *("test_cudnn_kernels.py", "test_cuda_gpu.py"),
)
"""What everything else stands on, then whole steps, then what is doubted most."""

_POLL_S = 0.1
_STOPPING_S = 5.0
_SHOWN = 20
_MESSAGE = 500
_MOST_LOG = 1 << 20


def run(job: Job) -> Report:
    """Every test that has not ended yet, as far as the time reaches."""
    files = files_with_marker(job.tests)
    if not files:
        return Report(False, (f"no test is marked {_MARKER!r} in {job.tests}",))
    file = job.out / _JOURNAL
    journal = Journal.read(file)
    journal.settle_repeated()
    journal.forget_skipped()
    troubles: list[str] = []
    whole = False
    while not whole and job.left_s > _STOPPING_S + 1:
        known = Journal.read(file).ended
        before = len(known)
        importable = [one for one in files if import_of(one) not in known]
        if not importable:
            whole = True
            break
        status, why = _one_pass(job, importable)
        journal = Journal.read(file)
        if why == "time":
            break
        if not journal.finished and journal.begun is not None:
            died = f"the process ended with {_status_text(status)}"
            hung = f"it did not end within {job.hang_s:g} s"
            journal.settle("hung" if why else "crashed", hung if why else died)
        whole = journal.finished
        if not whole and len(journal.ended) == before:
            text = _status_text(status)
            troubles.append(f"pytest ended with {text} and no test did; see {_LOG}")
            break
    return _report(job, files, whole, troubles)


def files_with_marker(tests: Path) -> list[Path]:
    """Files in which a test is marked for a GPU, or uses a fixture that is, in order.

    Args:
        tests: A folder, or one file.
    """
    if tests.is_file():
        return [tests]
    marked = _marked_fixtures(tests / "conftest.py")
    found = [
        file
        for file in sorted(tests.glob("**/test_*.py"))
        if _needs_gpu(file.read_text(), marked)
    ]
    order = {name: place for place, name in enumerate(_FIRST)}
    return sorted(found, key=lambda file: (order.get(file.name, len(order)), file))


def _marked_fixtures(conftest: Path) -> set[str]:
    """Fixtures of which a parameter is marked."""
    if not conftest.exists():
        return set()
    tree = ast.parse(conftest.read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(_marks(decorator) for decorator in node.decorator_list)
    }


def _needs_gpu(source: str, fixtures: set[str]) -> bool:
    if not any(word in source for word in (f"mark.{_MARKER}", *fixtures)):
        return False
    tree = ast.parse(source)
    taken = {
        node: {arg.arg for arg in node.args.args}
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    own = {n.name for n in taken if n.decorator_list and n.name not in taken[n]}
    return _marks(tree) or any(
        taken[node] & (fixtures - own - _parametrized(node))
        for node in taken
        if node.name.startswith("test_") or node.decorator_list
    )


def _parametrized(test: ast.FunctionDef) -> set[str]:
    """Arguments that get their values from a test's decorators, not from fixtures."""
    return {
        name.strip()
        for decorator in test.decorator_list
        if isinstance(decorator, ast.Call) and decorator.args
        for text in ast.walk(decorator.args[0])
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for name in text.value.split(",")
    }


def _marks(node: ast.AST) -> bool:
    """Whether `….mark.gpu` stands anywhere in it."""
    return any(
        isinstance(one, ast.Attribute)
        and one.attr == _MARKER
        and isinstance(one.value, ast.Attribute)
        and one.value.attr == "mark"
        for one in ast.walk(node)
    )


def _one_pass(job: Job, files: Sequence[Path]) -> tuple[int, str]:
    """Run pytest; its exit status, and why it was ended: "", "time" or "hang"."""
    command = [
        *(sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-rfE"),
        *("-m", _MARKER, "-p", "no:cacheprovider", "-p", "bench.gpu.remember"),
        *("-o", "filterwarnings=default", "--continue-on-collection-errors"),
        *(f"--journal={job.out / _JOURNAL}", *map(str, files)),
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(job.out / ".hypothesis")
    if find_spec("_hypothesis_pytestplugin"):
        command += ["-p", "_hypothesis_pytestplugin"]
    with (job.out / _LOG).open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            return _watched(job, process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _watched(job: Job, process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    journal, size, moved = job.out / _JOURNAL, -1, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S), ""
        job.keep()
        now = time.monotonic()
        with suppress(OSError):
            if journal.stat().st_size != size:
                size, moved = journal.stat().st_size, now
        if job.left_s < _STOPPING_S:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_STOPPING_S / 2), "time"
            process.kill()
            return process.wait(), "time"
        if now - moved > job.hang_s:
            process.kill()
            return process.wait(), "hang"


def _status_text(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _report(
    job: Job, files: Sequence[Path], whole: bool, troubles: list[str]
) -> Report:
    _shorten(job.out / _LOG)
    journal = Journal.read(job.out / _JOURNAL)
    counts = Counter(entry["outcome"] for entry in journal.ended.values())
    bad = [
        {
            "name": name,
            "outcome": entry["outcome"],
            "message": (entry["message"] or "")[:_MESSAGE],
        }
        for name, entry in journal.ended.items()
        if entry["outcome"] not in ("passed", "skipped")
    ]
    skips = Counter(
        entry["message"]
        for entry in journal.ended.values()
        if entry["outcome"] == "skipped"
    )
    result = {
        "complete": whole,
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "why_skipped": dict(skips),
        "failed": bad,
        "seconds": sum(e["seconds"] or 0.0 for e in journal.ended.values()),
        "files": [file.name for file in files],
    }
    write_json(job.out / _RESULT, {"machine": facts(), **result})
    failures = [f"{t['name']}: {t['outcome']}: {t['message']}" for t in bad]
    failures += troubles
    if whole and not journal.ended:
        failures.append(f"no test is marked {_MARKER!r} in {job.tests}")
    text = (
        f"{counts['passed']} passed, {counts['skipped']} skipped, "
        f"{len(bad)} failed{'' if whole else ', and there are more to run'}"
    )
    if counts["skipped"] and not counts["passed"] and not failures:
        said = f"all {counts['skipped']} tests were skipped: {next(iter(skips))}"
        if job.rehearsal and all(
            any(lack in why for lack in _WITHOUT_GPU) for why in skips
        ):
            text += f"; {said}; in a rehearsal they are complete"
        else:
            failures.append(said)
    return Report(whole, tuple(failures[:_SHOWN]), text)


def _shorten(log: Path) -> None:
    """Keep the end of a log that grew long."""
    with suppress(OSError):
        data = log.read_bytes()
        if len(data) > _MOST_LOG:
            log.write_bytes(data[-_MOST_LOG:])
