import ast
import gc
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.cuda.loading import LoadedLibrary, load_library
from mucudnn.cli import progress
from mucudnn.errors import BackendUnavailableError
from mucudnn.runtime.profiling import links
from tests.examples import register_profiles

register_profiles()

IMPORTS_TORCH = re.compile(r"^(from|import) (torch|tests\.torch_marks)\b", re.MULTILINE)


def pytest_configure() -> None:
    """Keep `tmp_path` in memory: a cache file waits seven times for a disk.

    Until all tests are collected, next to nothing is garbage.
    """
    gc.set_threshold(1_000_000)
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK) or os.statvfs(memory).f_flag & os.ST_NOEXEC:
        return
    if shutil.disk_usage(memory).free > 1 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory)


def imports_torch(path: Path) -> bool:
    """Return whether a file imports PyTorch at its top."""
    text = path.read_text("utf-8")
    if not IMPORTS_TORCH.search(text):
        return False  # like most, and sooner than by parsing
    top = ast.parse(text).body
    modules = {n.module for n in top if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
    return bool(modules & {"torch", "torch.nn", "tests.torch_marks"})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests of PyTorch alone where none runs: each worker would compile them."""
    if "not torch" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    marked = "\npytestmark = " in collection_path.read_text("utf-8")
    return True if marked and imports_torch(collection_path) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collections of garbage pass over the tests themselves, and are rarer.

    A worker reports each test to pytest-rerunfailures in two small messages. The second
    one would wait 40 ms for the first one's acknowledgement, in each of 6,000 tests.
    """
    gc.freeze()
    gc.set_threshold(10_000)
    reports = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if reports is not None:
        reports.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class WithoutTorch(pytest.Module):
    """A file that imports PyTorch, where PyTorch is not installed."""

    def collect(self):
        pytest.skip("needs PyTorch", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if find_spec("torch") is None and imports_torch(module_path):
        return WithoutTorch.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test, and no process that one starts, touches the user's own cache.

    A command that a busy machine is slow at writes nothing of that it would not. Before
    every sample on the CPU a profile would write as much as a cache holds, for ten
    times as long as all else of a trainer with a roomy budget takes.
    """
    folder = str(tmp_path_factory.mktemp("users-cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        if sys.platform == "darwin":
            patch.setenv("HOME", folder)
        patch.delenv("MUCUDNN_DATABASE", raising=False)
        patch.setattr(progress, "_EVERY_S", 3600.0)
        patch.setattr(links, "EVICTING_BYTES", 1 << 20)
        patch.setattr(links, "LINK_BYTES", 4 << 20)
        patch.setattr(links.ColdBench.link, "__defaults__", (4 << 20,))
        yield


@pytest.fixture(scope="session", autouse=True)
def usual_signals() -> Iterator[None]:
    """What a shell's background or `nohup` has ignored, and children would inherit."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    ignored = [n for n in usual if signal.getsignal(n) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(params=["cpu", "null", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return get_backend(request.param)


@pytest.fixture
def cpu() -> Backend:
    return get_backend("cpu")


@pytest.fixture
def null() -> Backend:
    return get_backend("null")


@pytest.fixture
def copying_threads() -> Callable[[], list[threading.Thread]]:
    """Those that copy now and were started since the test began."""
    before = set(threading.enumerate())
    return lambda: [
        t for t in set(threading.enumerate()) - before if "mucudnn copies" in t.name
    ]


@pytest.fixture(scope="session")
def cuda() -> Backend:
    try:
        return get_backend("cuda")
    except BackendUnavailableError as e:
        pytest.skip(str(e).split("; ")[0])


@pytest.fixture(scope="session")
def cudnn_library() -> LoadedLibrary:
    try:
        return load_library(without_driver=True)
    except BackendUnavailableError as e:
        pytest.skip(str(e).split("; install")[0])


@pytest.fixture
def fresh_compiler():
    """Nothing that Dynamo has compiled before, nor what it compiles now."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_thread():
    """PyTorch's sums in a fixed order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_LINKS = []


@pytest.fixture(autouse=True)
def links_measured_once(request, monkeypatch):
    """Copies of every PyTorch step are as fast as beside the first of a process.

    Each step would measure them for a fifth of a second, on two cores.
    """
    if request.node.get_closest_marker("torch") is None or "torch" not in sys.modules:
        return
    from mucudnn.torch.costs.meters import CpuMeter

    measure = CpuMeter.links

    def links(meter, prepared):
        if not _LINKS:
            _LINKS.append(measure(meter, prepared))
        return _LINKS[0]

    monkeypatch.setattr(CpuMeter, "links", links)


@pytest.fixture
def free_copies(monkeypatch, tmp_path):
    """Every call takes as long as any other, and copies no time: tensors leave.

    What other tests have measured is not remembered within.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from mucudnn.torch.costs.meters import CpuMeter, Links

    monkeypatch.setattr(CpuMeter, "time_ms", lambda meter, call: 1.0)
    monkeypatch.setattr(CpuMeter, "links", lambda meter, step: Links(1e12, 1e12))


def _shorten_search(patch):
    search = "mucudnn.passes.planning.search"
    patch.setattr(f"{search}._ROUNDS", ((1, 1),))
    patch.setattr(f"{search}._LEAST_TRIALS", 1)


@pytest.fixture
def short_search(monkeypatch):
    """Plans are found soon: they may be slower, and promise no less."""
    _shorten_search(monkeypatch)


@pytest.fixture(scope="module")
def short_searches():
    """The same for all tests of a file, properties of random steps among them."""
    with pytest.MonkeyPatch.context() as patch:
        _shorten_search(patch)
        yield
