"""The driver that is not one: loaders and readers of ELF take it for a library.

Loading happens in processes of its own: a stub stays for the rest of a process.
"""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mucudnn.backends.cuda import loading
from mucudnn.backends.cuda.loading import MACHINES, SYMBOLS, stub_image
from mucudnn.errors import BackendUnavailableError
from tests.commands import run_code

HERE = MACHINES.get(platform.machine())
loads = pytest.mark.skipif(
    HERE is None or sys.platform != "linux", reason="no stub for this machine"
)
reads = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")


def in_a_process(code, *arguments):
    return run_code(code, *arguments).splitlines()


def read(path, *options):
    done = subprocess.run(
        ["readelf", "--wide", *options, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@loads
def test_every_function_says_that_there_is_no_device(tmp_path):
    library = tmp_path / "stub.so"
    library.write_bytes(stub_image(HERE))
    code = (
        "import ctypes, sys\n"
        "stub = ctypes.CDLL(sys.argv[1])\n"
        "for name in sys.argv[2:]:\n"
        "    print(name, getattr(stub, name)(None, 1, None, 2))\n"
    )
    refusing = [name for name in SYMBOLS if name != "cuDriverGetVersion"]
    answers = in_a_process(code, library, *refusing)
    assert answers == [f"{name} 100" for name in refusing]


@loads
def test_its_version_is_written_where_asked_and_nowhere_else(tmp_path):
    library = tmp_path / "stub.so"
    library.write_bytes(stub_image(HERE))
    code = (
        "import ctypes, sys\n"
        "numbers = (ctypes.c_int * 3)(-1, -1, -1)\n"
        "where = ctypes.byref(numbers, ctypes.sizeof(ctypes.c_int))\n"
        "print(ctypes.CDLL(sys.argv[1]).cuDriverGetVersion(where), *numbers)\n"
    )
    assert in_a_process(code, library) == ["0 -1 13000 -1"]


@loads
def test_afterwards_the_driver_resolves_by_name_and_no_file_is_left(tmp_path):
    code = (
        "import ctypes, tempfile, sys\n"
        "from mucudnn.backends.cuda.loading import load_stub_driver\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "load_stub_driver()\n"
        "load_stub_driver()\n"
        "print(ctypes.CDLL('libcuda.so.1').cuInit(0) in (0, 100))\n"
        "print(ctypes.CDLL(None).cuInit(0) in (0, 100))\n"
    )
    assert in_a_process(code, tmp_path) == ["True", "True"]
    assert list(tmp_path.iterdir()) == []


@loads
def test_a_driver_that_is_there_is_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda *a: asked.append(a))
    loading.load_stub_driver()
    assert asked == [("libcuda.so.1", ctypes.RTLD_GLOBAL)]


def refuse_to_load(path, mode):
    raise OSError(f"{Path(path).name}: no")


def test_another_processor_is_named(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", refuse_to_load)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(BackendUnavailableError, match=r"riscv64.*x86_64, aarch64"):
        loading.load_stub_driver()


def test_a_loader_that_refuses_is_quoted(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", refuse_to_load)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(BackendUnavailableError, match=r"libcuda.so.1: no.*TMPDIR"):
        loading.load_stub_driver()


@reads
@pytest.mark.parametrize(
    ("machine", "called"),
    [("x86_64", "Advanced Micro Devices X86-64"), ("aarch64", "AArch64")],
)
def test_readelf_understands_it(tmp_path, machine, called):
    library = tmp_path / "stub.so"
    library.write_bytes(stub_image(MACHINES[machine]))
    headers = read(library, "--file-header", "--segments")
    assert called in headers
    assert "DYN (Shared object file)" in headers
    assert "GNU_STACK" in headers
    assert " RWE " not in headers
    assert "soname: [libcuda.so.1]" in read(library, "--dynamic")
    rows = [line.split() for line in read(library, "--use-dynamic", "-s").splitlines()]
    functions = {row[7]: row for row in rows if len(row) == 8 and row[3] == "FUNC"}
    assert functions.keys() == set(SYMBOLS)
    assert {row[4] for row in functions.values()} == {"GLOBAL"}
    assert len({row[1] for row in functions.values()}) == 2
