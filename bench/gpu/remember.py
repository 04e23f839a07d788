"""`pytest -p bench.gpu.remember --journal FILE`: write down how each test ends.

What the journal knows to have ended is not run again. A module that kills the process
while it is imported counts as a test of its own, and must not be named again. After a
failure the GPU is asked whether it still answers; where it does not, the process ends,
since no later test in it could pass.
"""

import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from bench.gpu.journal import Journal, import_of

_MESSAGE = 2000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--journal", type=Path, help="of tests that have ended")


def pytest_configure(config: pytest.Config) -> None:
    """Begin, if there is a journal."""
    file: Path | None = config.getoption("--journal")
    if file is not None:
        config.pluginmanager.register(Remember(file), "journal")


class Remember:
    """Hooks of one pass.

    Args:
        file: The journal.
    """

    def __init__(self, file: Path) -> None:
        self._journal = Journal.read(file)
        self._journal.add(started=True)
        self._worst: dict[str, tuple[str, str]] = {}
        self._seconds: dict[str, float] = {}
        self._selected = self._done = 0
        self._stop = ""

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """A module may take the process with it."""
        if isinstance(collector, pytest.File):
            self._journal.add(begun=import_of(collector.path))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Failures are told; all else may be imported again by the next pass."""
        begun = self._journal.begun
        if begun is None or not report.nodeid.endswith(".py"):
            return
        if report.failed:
            self._journal.settle("failed", _told(report))
        else:
            self._journal.add(imported=begun)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what has ended."""
        known = [item for item in items if item.nodeid in self._journal.ended]
        if known:
            config.hook.pytest_deselected(items=known)
            items[:] = [i for i in items if i.nodeid not in self._journal.ended]
        self._selected = len(items)
        self._journal.add(selected=len(items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """It begins."""
        self._journal.add(begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of setup, call and teardown counts."""
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.failed:
            self._worst[name] = "failed", _told(report)
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._worst.setdefault(name, ("skipped", _told(report)))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It has ended."""
        outcome, message = self._worst.get(nodeid, ("passed", ""))
        self._done += 1
        self._journal.add(
            ended=nodeid,
            outcome=outcome,
            message=message,
            seconds=self._seconds.get(nodeid, 0.0),
        )
        if outcome == "failed":
            self._stop = _unusable()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        """End the pass where the GPU no longer answers."""
        result = yield
        if self._stop:
            item.session.shouldstop = f"the GPU no longer answers: {self._stop}"
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Say whether anything is left."""
        left = self._selected - self._done
        self._journal.add(finished=left == 0 and not self._stop, left=left)


def _told(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:_MESSAGE]
    lines: Sequence[str] = report.longreprtext.splitlines()
    told = [line[1:].strip() for line in lines if line.startswith("E ")]
    return "\n".join(told or lines)[:_MESSAGE]


def _unusable() -> str:
    """Why CUDA answers no more in this process; nothing if it does, or is not used."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return ""
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except Exception as e:  # whatever it is, a later test would meet it
        return f"{type(e).__name__}: {e}"
    return ""
