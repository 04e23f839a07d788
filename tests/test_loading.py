"""Which cuDNN is taken, and what is said where there is none.

The libraries found here are fabricated: two functions that answer a given number, so
that a release `v` is linked against CUDA `v // 1000`. Loading happens in processes that
see no installed packages but those in the folder of a test, with a search of its own.
"""

import platform
import struct
import sys
from dataclasses import replace

import pytest

from mucudnn.backends.cuda.loading import MACHINES, release_text, stub_image
from tests.commands import run_code

HERE = MACHINES.get(platform.machine())
FUNCTIONS = ("cudnnGetVersion", "cudnnGetCudartVersion")
LOAD = """
import ctypes, logging, os, sys
from mucudnn.backends.cuda.loading import load_library
from mucudnn.errors import BackendUnavailableError
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
site, *loaded = sys.argv[1:]
sys.path[:] = [site]
kept = [ctypes.CDLL(path) for path in loaded]
try:
    library = load_library(without_driver=False)
except BackendUnavailableError as e:
    print("unavailable:", e)
else:
    print(library.version, os.path.abspath(library.path))
"""
PATHFINDER = """
import ctypes, pathlib, types

def load_nvidia_dynamic_lib(name):
    path = pathlib.Path(__file__).parent.parent / "nvidia/cudnn/lib/libcudnn.so.9"
    ctypes.CDLL(str(path))
    return types.SimpleNamespace(abs_path=str(path))
"""

pytestmark = pytest.mark.skipif(
    HERE is None or sys.platform != "linux", reason="libraries are made for Linux only"
)


def answering(number):
    """The machine whose functions answer `number`."""
    if platform.machine() == "x86_64":
        code = b"\xb8" + struct.pack("<I", number) + b"\xc3"
    else:
        low, high = number & 0xFFFF, number >> 16
        code = struct.pack(
            "<3I", 0x52800000 | low << 5, 0x72A00000 | high << 5, 0xD65F03C0
        )
    return replace(HERE, refuse=code)


def library(path, version, functions=FUNCTIONS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(stub_image(answering(version), functions, path.name))
    return path


def cudnn_wheel(site, version):
    return library(site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9", version)


def cublas_wheel(site, version):
    name = f"libcublasLt.so.{version // 1000}"
    return library(site / "nvidia" / "cublas" / "lib" / name, version, ("cublas",))


def load(site, *loaded):
    (site / "cuda").mkdir(exist_ok=True)
    (site / "cuda" / "pathfinder.py").write_text(PATHFINDER)
    return run_code(LOAD, site, *loaded)


@pytest.mark.parametrize(
    ("version", "text"),
    [(91300, "9.13.0"), (91900, "9.19.0"), (92842, "9.28.42"), (100203, "10.2.3")],
)
def test_releases_are_written_as_people_do(version, text):
    assert release_text(version) == text


def test_it_is_found_among_the_packages(tmp_path):
    path = cudnn_wheel(tmp_path, 91900)
    cublas_wheel(tmp_path, 91900)
    assert load(tmp_path) == f"91900 {path}\n"


def test_a_cublas_that_the_process_has_loaded_serves_it(tmp_path):
    cudnn_wheel(tmp_path, 91900)
    cublas = library(tmp_path / "elsewhere" / "libcublasLt.so.91", 91900, ("cublas",))
    assert load(tmp_path, cublas).startswith("91900 ")


def test_without_cublas_the_error_says_what_would_have_aborted(tmp_path):
    path = cudnn_wheel(tmp_path, 91900)
    said = load(tmp_path)
    assert said.startswith("unavailable: ")
    assert "libcublasLt.so.91" in said
    assert str(path) in said
    assert "pip install nvidia-cublas" in said


@pytest.mark.parametrize("version", [90101, 91299, 100000])
def test_other_releases_are_refused(tmp_path, version):
    path = cudnn_wheel(tmp_path, version)
    cublas_wheel(tmp_path, version)
    said = load(tmp_path)
    assert said.startswith(f"unavailable: cuDNN {release_text(version)} was found")
    assert str(path) in said
    assert "9.13.0" in said


def test_a_release_newer_than_tried_is_taken_and_logged(tmp_path):
    cudnn_wheel(tmp_path, 94000)
    cublas_wheel(tmp_path, 94000)
    warning, found = load(tmp_path).splitlines()
    assert warning == "cuDNN 9.40.0 is newer than any release tried (9.28.0)"
    assert found.startswith("94000 ")


def test_the_real_search_takes_what_the_process_has_loaded(tmp_path):
    pytest.importorskip("cuda.pathfinder")
    loaded = library(tmp_path / "elsewhere" / "libcudnn.so.9", 92100)
    code = LOAD.replace("sys.path[:] = [site]", "")
    library(tmp_path / "libcublasLt.so.92", 92100, ("cublas",))
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    said = run_code(code, tmp_path, loaded, environment=environment)
    assert said == f"92100 {loaded}\n"


def test_nowhere_names_the_extras(tmp_path):
    said = load(tmp_path)
    assert said.startswith("unavailable: cuDNN 9 (libcudnn.so.9) was not found")
    assert ".[cuda12]" in said
    assert ".[cuda13]" in said
    assert "libcudnn.so.9: cannot open shared object file" in said


def test_a_file_that_is_no_library_is_named_with_the_reason(tmp_path):
    path = cudnn_wheel(tmp_path, 91900)
    path.write_bytes(b"not a library")
    said = load(tmp_path)
    assert said.startswith("unavailable: ")
    assert f"{path}: file too short" in said


def test_a_library_of_that_name_without_its_functions_is_refused(tmp_path):
    path = library(tmp_path / "nvidia/cudnn/lib/libcudnn.so.9", 91900, ("other",))
    said = load(tmp_path)
    assert f"{path} is not cuDNN: it has no function cudnnGetVersion" in said
