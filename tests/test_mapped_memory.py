"""Host memory under several addresses: what is there, what is refused, what is left."""

import contextlib
import gc
import os
import resource
import signal
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mucudnn.backends.cpu.mapped_memory import CpuMapper
from mucudnn.backends.device import runs
from mucudnn.errors import OutOfMemoryError, UnsupportedError
from tests.commands import python

PAGE = 4096
LARGEST_FILE = resource.getrlimit(resource.RLIMIT_FSIZE)
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, where files may have no name"
)


def mapper(available=1 << 30):
    return CpuMapper(lambda: available, PAGE)


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:mucudnn")


def files():
    """Descriptors of such memory that are open."""
    found = 0
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:mucudnn" in str(number.readlink())
    return found


def test_what_is_written_under_one_address_is_read_under_all():
    memory = mapper().allocate(4)
    whole, pieces = memory.map(range(4)), memory.map([3, 0, 3])
    whole[:] = np.repeat(np.arange(4, dtype=np.uint8), PAGE)
    assert pieces.reshape(3, PAGE).tolist() == [[3] * PAGE, [0] * PAGE, [3] * PAGE]
    pieces[:PAGE] = 9
    assert set(whole[3 * PAGE :].tolist()) == set(pieces[2 * PAGE :].tolist()) == {9}
    assert whole.flags.writeable
    assert whole.ctypes.data % PAGE == 0
    # Chunks that follow one another are mapped together.
    assert list(runs([0, 1, 2, 7, 8, 3])) == [(0, 0, 3), (3, 7, 2), (5, 3, 1)]
    assert list(runs([])) == []


def test_addresses_and_memory_live_as_long_as_an_array_over_them():
    gc.collect()  # what other tests have left
    before, opened = mappings(), files()
    memory = mapper().allocate(8)
    part = memory.map([1, 0, 5])[PAGE : 2 * PAGE].view(np.float32)
    del memory
    gc.collect()
    part[:] = 2.5
    assert part.sum() == 2.5 * PAGE / 4
    assert mappings() > before
    del part
    gc.collect()
    assert mappings() == before
    assert files() == opened


def test_nothing_is_there_twice_and_empty_is_empty():
    memory = mapper().allocate(0)
    assert memory.map([]).nbytes == 0
    arrays = [mapper().allocate(1).map([0]) for _ in range(3)]
    for i, array in enumerate(arrays):
        array[:] = i
    assert [int(array[-1]) for array in arrays] == [0, 1, 2]
    starts = sorted(array.ctypes.data for array in arrays)
    assert all(b - a >= PAGE for a, b in pairwise(starts))


def test_what_there_is_no_room_for_is_an_error_and_not_the_end(monkeypatch):
    with pytest.raises(OutOfMemoryError, match=r"no room for .*: .* are available"):
        mapper(available=100 * PAGE).allocate(101)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, LARGEST_FILE[1]))
    try:
        with pytest.raises(OutOfMemoryError, match=r"no room for 2\.0 MiB"):
            mapper().allocate(512)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, LARGEST_FILE)
    with pytest.raises(ValueError, match=f"a multiple of {PAGE}"):
        CpuMapper(lambda: 0, 1000)
    for chunk in (-1, 4):
        with pytest.raises(ValueError, match=f"chunk {chunk} of 4 cannot be mapped"):
            mapper().allocate(4).map([0, chunk])
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(UnsupportedError, match="cannot be mapped on this system"):
        mapper().allocate(1)


def in_child(code, status=0):
    """Return what a process of its own prints until it ends with this status."""
    begin = (
        "from mucudnn.backends.cpu.mapped_memory import CpuMapper\n"
        "from mucudnn.errors import OutOfMemoryError\n"
        f"memory = CpuMapper(lambda: 1 << 40, {PAGE}).allocate(1024)\n"
    )
    return python("-c", begin + code, status=status)[0]


def test_a_limit_on_addresses_is_one_clear_error():
    found = in_child(
        "import resource\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "limit = used + (8 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "first = memory.map(range(1024))\n"
        "try:\n"
        "    memory.map([0] * 4096)\n"
        "except OutOfMemoryError as e:\n"
        "    print(e)\n"
        "first[:] = 1\n"
        "print('alive')\n"
    )
    said, alive = found.splitlines()
    assert "of addresses" in said
    assert "`ulimit -v` limits them" in said
    assert alive == "alive"


def test_more_mappings_than_the_system_allows_is_one_clear_error():
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    if most > 100_000:
        pytest.skip("needs a system that limits mappings to so many")
    memory = mapper().allocate(2)
    with pytest.raises(OutOfMemoryError, match="max_map_count"):
        memory.map([0, 0] * most)
    assert mappings() < 100
    memory.map([1, 0])[:] = 1


def test_a_forked_child_does_not_write_into_its_parents_memory():
    array = mapper().allocate(2).map([1, 0])
    array[:] = 7
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        array[:] = 8
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert set(array.tolist()) == {7}


def test_a_killed_process_leaves_nothing():
    found = in_child(
        "array = memory.map(range(1024)); array[:] = 1\n"
        "import os; print(os.getpid(), flush=True); os.kill(os.getpid(), 9)\n",
        -signal.SIGKILL,
    )
    assert not Path(f"/proc/{int(found)}").exists()
