"""Search and loading of libcudnn 9, without a configured path.

A process can hold one cuDNN only, as its parts find each other by name. So a copy that
is already loaded (by PyTorch) comes first, whatever else is installed. Installed
packages that are not loaded are never imported for the search.
"""

import ctypes
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mucudnn.backends.cuda.stub_driver import load_stub_driver
from mucudnn.errors import BackendUnavailableError

__all__ = ["OLDEST", "TRIED", "LoadedLibrary", "load_library", "release_text"]

_LOGGER = logging.getLogger(__name__)

OLDEST = 91300
"""First release whose engines, workspaces and device descriptions were checked."""

TRIED = 92899
"""Last tested release, with any patch; newer ones are accepted and logged."""

_CUDNN = "libcudnn.so.9"
_INSTALL = (
    "install it with: pip install 'mucudnn[cuda12]' (or 'mucudnn[cuda13]', by the "
    "CUDA version that the driver supports)"
)
_NO_LOAD = os.RTLD_LAZY | getattr(os, "RTLD_NOLOAD", 0)


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """A loaded cuDNN, without prototypes.

    Attributes:
        cdll: The library.
        path: Its file, or its name if only the loader knows the file.
        version: Release as one number: 91900 is 9.19.0.
        found_by: Search method that found it.
    """

    cdll: ctypes.CDLL
    path: str
    version: int
    found_by: str


def load_library(*, without_driver: bool) -> LoadedLibrary:
    """Load cuDNN, after checking for cuBLAS, without which it would abort the process.

    Args:
        without_driver: Whether to work without an NVIDIA driver, for described devices;
            see `stub_driver`.

    Raises:
        BackendUnavailableError: cuDNN or a library it needs is not installed, or its
            release is not supported.
    """
    if sys.platform != "linux":
        raise BackendUnavailableError(
            f"the cuda backend runs on Linux; this system is {sys.platform!r}"
        )
    cdll, path, found_by = _find_cudnn()
    version = _check_version(cdll, path)
    _require_cublaslt(cdll, path)
    if without_driver:
        load_stub_driver()
    _LOGGER.info("cuDNN %s: %s (%s)", release_text(version), path, found_by)
    return LoadedLibrary(cdll=cdll, path=path, version=version, found_by=found_by)


def release_text(version: int) -> str:
    """Return a readable release: 91900 is `9.19.0`."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _find_cudnn() -> tuple[ctypes.CDLL, str, str]:
    """Return the first library found, its path and the search method."""
    tried = []
    for found_by, find in _SEARCHES:
        paths = list(find(_CUDNN))
        for path in paths:
            try:
                cdll = ctypes.CDLL(path)
            except OSError as e:
                tried.append(f"  {found_by}: {path}: {e}")
            else:
                return cdll, next(_mapped(_CUDNN), path), found_by
        if not paths:
            tried.append(f"  {found_by}: nothing")
    looked = "\n".join(tried)
    raise BackendUnavailableError(
        f"cuDNN 9 ({_CUDNN}) was not found; {_INSTALL}. Looked at:\n{looked}"
    )


def _mapped(name: str) -> Iterator[str]:
    """Yield the mapped file called `name`, or `name` and a longer version."""
    pattern = re.compile(rf"/{re.escape(name)}(\.[\d.]+)?$")
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and pattern.search(fields[5]):
                yield fields[5]
                return


def _loaded_by_name(name: str) -> Iterator[str]:
    """Yield the name if a library of that name is loaded (but not in /proc)."""
    with suppress(OSError):
        ctypes.CDLL(name, _NO_LOAD)
        yield name


def _by_pathfinder(name: str) -> Iterator[str]:
    """Yield the result of NVIDIA's search: packages, conda, CUDA's folder."""
    with suppress(ImportError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        package = name.removeprefix("lib").split(".")[0]
        with suppress(RuntimeError, OSError):
            path = load_nvidia_dynamic_lib(package).abs_path
            if path is not None and Path(path).name.startswith(name):
                yield path


def _in_packages(name: str) -> Iterator[str]:
    """Yield files of the `nvidia` namespace package, with one folder per wheel."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        yield from map(str, sorted(Path(root).glob(f"*/lib/{name}")))


def _by_name(name: str) -> Iterator[str]:
    yield name


_SEARCHES: tuple[tuple[str, Callable[[str], Iterator[str]]], ...] = (
    ("mapped by this process", _mapped),
    ("loaded by this process", _loaded_by_name),
    ("cuda.pathfinder", _by_pathfinder),
    ("nvidia packages", _in_packages),
    ("the system's loader", _by_name),
)


def _check_version(cdll: ctypes.CDLL, path: str) -> int:
    version = _number(cdll, path, "cudnnGetVersion")
    if version // 10000 != 9 or version < OLDEST:
        raise BackendUnavailableError(
            f"cuDNN {release_text(version)} was found ({path}), but "
            f"{release_text(OLDEST)} or a later release of 9 is needed; {_INSTALL}"
        )
    if version > TRIED:
        _LOGGER.warning(
            "cuDNN %s is newer than any release tried (%s)",
            release_text(version),
            release_text(TRIED // 100 * 100),
        )
    return version


def _number(cdll: ctypes.CDLL, path: str, name: str) -> int:
    try:
        function = getattr(cdll, name)
    except AttributeError as e:
        raise BackendUnavailableError(
            f"{path} is not cuDNN: it has no function {name}"
        ) from e
    function.restype, function.argtypes = ctypes.c_size_t, ()
    return int(function())


def _require_cublaslt(cdll: ctypes.CDLL, path: str) -> None:
    """Load the cuBLASLt that cuDNN needs, as cuDNN aborts without it.

    cuDNN loads it by a name with CUDA's major version, so any library loaded under that
    name is used.
    """
    cuda = _number(cdll, path, "cudnnGetCudartVersion") // 1000
    name = f"libcublasLt.so.{cuda}"
    for find in (
        _loaded_by_name,
        _beside(path),
        _by_pathfinder,
        _in_packages,
        _by_name,
    ):
        for candidate in find(name):
            with suppress(OSError):
                ctypes.CDLL(candidate)
                return
    package = "nvidia-cublas-cu12" if cuda == 12 else "nvidia-cublas"
    raise BackendUnavailableError(
        f"cuDNN was found ({path}), but not {name}, which it needs; install it with: "
        f"pip install {package}"
    )


def _beside(path: str) -> Callable[[str], Iterator[str]]:
    """Return a search of the folders in which a cuDNN wheel expects other libraries."""

    def find(name: str) -> Iterator[str]:
        here = Path(path).parent
        for folder in (here, here / "../../cublas/lib", here / "../../cu13/lib"):
            if (folder / name).is_file():
                yield str((folder / name).resolve())

    return find
