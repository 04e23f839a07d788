"""What is missing, from wheels if there are any; and a folder of such wheels.

`packages.py install SITE WHEELS BACKEND [PART …]` fills SITE with what is missing.
`packages.py download WHEELS [PYTHON …]` fills WHEELS where there is a network, for
machines of x86-64 with Linux and these versions of Python.

Run as a file, before anything that it looks for is imported.
"""

import importlib
import platform
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

_BASE = {
    "numpy": "numpy",
    "click": "click",
    "platformdirs": "platformdirs",
    "pulp": "pulp<4",
    "rich": "rich",
    "threadpoolctl": "threadpoolctl",
}
_COMMAND = {name: name for name in ("cloup", "jinja2", "markupsafe", "safetensors")}
"""Of the command and of a Trainer: timing kernels needs none of them."""

_TESTS = {"pytest": "pytest", "hypothesis": "hypothesis"}
_HALVES = {"ml_dtypes": "ml_dtypes"}
_DRIVER = {"cuda.bindings.driver": "cuda-bindings>=13,<14"}
_GPU = {"cupy": "cupy-cuda13x[ctk] (or cupy-cuda12x[ctk])"}
_WORKS = {"pulp": "; assert int(pulp.__version__.split('.')[0]) < 4, 'it is too new'"}
"""What more there is to a package than that it can be imported."""

_USERS_OF_COMMAND = {"probe", "tests", "steps"}
_PYTHONS = ("3.11", "3.12", "3.13")
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")
_MOST_BYTES = 60 << 20


def lacking() -> dict[str, str]:
    """What a GPU's steps use and this machine lacks -> why, and what it costs."""
    wanted = {**_BASE, **_COMMAND, **_HALVES, **_DRIVER, **_GPU}
    missing = _missing(wanted)
    return {wanted[m]: f"{_without(m)}: {why}" for m, why in missing.items()}


def main(arguments: Sequence[str]) -> int:
    """0 where all is well."""
    if arguments[0] == "download":
        return _download(Path(arguments[1]), arguments[2:] or _PYTHONS)
    _, site, wheels, backend, *parts = arguments
    return _provide(site, wheels, backend, parts)


def _provide(site: str, wheels: str, backend: str, parts: Sequence[str]) -> int:
    """1 where what every part needs is missing; what only some need is told."""
    needed = dict(_BASE)
    if backend == "cuda":
        needed |= _HALVES | _DRIVER
    if not parts or _USERS_OF_COMMAND & {*parts}:
        needed |= _COMMAND
    if not parts or "tests" in parts:
        needed |= _TESTS
    missing = _missing(needed)
    if missing and Path(wheels).is_dir():
        _install(site, wheels, [needed[module] for module in missing])
        importlib.invalidate_caches()
        sys.path.insert(0, site)
        missing = _missing(missing, site)
    if backend == "cuda":
        missing |= _missing(_GPU)
    if not missing:
        return 0
    needed |= _GPU
    for module, reason in missing.items():
        note = "" if module in _BASE else f" ({_without(module)})"
        print(f"gpu.sh: {needed[module]} is missing{note}: {reason}", file=sys.stderr)
    wanted = [needed[module] for module in missing if module not in _GPU]
    if wanted:
        print(_advice(wanted, wheels), file=sys.stderr)
    return int(any(module in _BASE for module in missing))


def _without(module: str) -> str:
    if module in _TESTS:
        return "part tests cannot run"
    if module in _COMMAND:
        return "the command, training steps and part tests cannot run"
    if module in _HALVES:
        return "nothing is converted to or from bfloat16"
    if module in _DRIVER:
        return "no virtual addressing"
    if module in _BASE:
        return "nothing can run"
    return "nothing on the GPU can run; probe tells what is here"


def _advice(wanted: Sequence[str], wheels: str) -> str:
    """One line to type, on a machine that has a network."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    looked = f"{wheels} lacks them; " if Path(wheels).is_dir() else ""
    packages = " ".join(shlex.quote(p) for p in wanted)
    return (
        f"gpu.sh: install them (python3 -m pip install {packages}); without a network: "
        f"{looked}run `make gpu-wheels GPU_PYTHON={version}` where there is one, and "
        "bring the folder along: --wheels DIR"
    )


def _missing(
    needed: Mapping[str, str] | Sequence[str], site: str = ""
) -> dict[str, str]:
    """Modules that cannot be imported, in a process that is thrown away, and why."""
    if _why_not(list(needed), site) is None:
        return {}
    reasons = {module: _why_not([module], site) for module in needed}
    return {module: why for module, why in reasons.items() if why is not None}


def _why_not(modules: Sequence[str], site: str = "") -> str | None:
    code = [f"import sys; sys.path.insert(0, {site!r})"] if site else []
    code += [f"import {module}{_WORKS.get(module, '')}" for module in modules]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"importing it ended with {done.returncode}"


def _install(site: str, wheels: str, packages: Sequence[str]) -> None:
    """With what they need; where that is not among the wheels, without.

    What they need may well be installed, but pip does not look there for a --target.
    Where there is no pip, every wheel for this machine is unpacked.
    """
    pip = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index"),
        *("--disable-pip-version-check", "--no-cache-dir"),
        *("--find-links", wheels, "--target", site),
    ]
    if not _has_pip():
        _unpack(Path(site), Path(wheels))
        return
    for package in packages:
        # ml_dtypes needs NumPy, which is here and must stay the one that it is.
        ways: list[list[str]] = [[], ["--no-deps"]]
        for more in ways[1:] if package in _HALVES else ways:
            done = subprocess.run(
                [*pip, "--upgrade", *more, package],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                break


def _has_pip() -> bool:
    """Told by its metadata: a process that looks the module up loses setuptools."""
    try:
        metadata.distribution("pip")
    except metadata.PackageNotFoundError:
        return False
    return True


def _unpack(site: Path, wheels: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        if _fits(wheel.name):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)


def _fits(wheel: str) -> bool:
    """Whether a wheel is for this Python and machine, by its name."""
    python, abi, where = wheel.removesuffix(".whl").split("-")[-3:]
    minor = sys.version_info.minor
    if where == "any":
        return "py3" in python.split(".")
    stable = re.fullmatch(r"cp3(\d+)", python) if abi == "abi3" else None
    fits = int(stable[1]) <= minor if stable else python == f"cp3{minor}" == abi
    return fits and where.endswith(platform.machine()) and "linux" in where


def _download(wheels: Path, pythons: Sequence[str]) -> int:
    """All that a machine with NumPy and CuPy may lack."""
    for python in pythons:
        if not re.fullmatch(r"3\.\d+", python):
            print(f"{python!r} is no version of Python such as 3.12", file=sys.stderr)
            return 2
        pip = [
            *(sys.executable, "-m", "pip", "download", "--quiet"),
            *("--disable-pip-version-check", "--only-binary=:all:"),
            *("--implementation", "cp", "--python-version", python),
            *("--dest", str(wheels)),
        ]
        for name in _PLATFORMS:
            pip += ["--platform", f"{name}_x86_64"]
        base = [package for name, package in _BASE.items() if name != "numpy"]
        alone = [*_HALVES.values(), *_DRIVER.values(), "cuda-pathfinder"]
        whole = [*base, *_COMMAND.values(), *_TESTS.values()]
        for packages in (whole, ["--no-deps", *alone]):
            done = subprocess.run([*pip, *packages], check=False)
            if done.returncode:
                return done.returncode
    sizes = {file.name: file.stat().st_size for file in wheels.glob("*.whl")}
    print(f"{wheels}: {len(sizes)} wheels, {sum(sizes.values()) / 2**20:.1f} MiB")
    if sum(sizes.values()) > _MOST_BYTES:
        print(
            f"that is more than {_MOST_BYTES >> 20} MiB: name one Python",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
