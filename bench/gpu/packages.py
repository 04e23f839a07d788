"""`packages.py SITE WHEELS BACKEND [PART …]`: what is missing, from wheels if there.

Run as a file, before anything that it looks for is imported.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_BASE = {
    "numpy": "numpy",
    "click": "click",
    "platformdirs": "platformdirs",
    "pulp": "pulp",
    "rich": "rich",
    "threadpoolctl": "threadpoolctl",
}
_TESTS = {"pytest": "pytest", "hypothesis": "hypothesis"}
_GPU = {"cupy": "cupy-cuda13x (or cupy-cuda12x)"}


def main() -> int:
    """0 where nothing is missing in the end."""
    site, wheels, backend, *parts = sys.argv[1:]
    needed = dict(_BASE)
    if not parts or "tests" in parts:
        needed |= _TESTS
    if backend == "cuda":
        needed |= _GPU
    missing = _missing(needed)
    if not missing:
        return 0
    if Path(wheels).is_dir():
        _install(site, wheels, [needed[module] for module in missing])
        importlib.invalidate_caches()
        sys.path.insert(0, site)
        missing = _missing(needed)
    for module, reason in missing.items():
        print(f"gpu.sh: {needed[module]} is missing: {reason}", file=sys.stderr)
    if missing:
        where = f"as wheels in {wheels}" if Path(wheels).is_dir() else "by --wheels DIR"
        print(f"gpu.sh: install them, or give them {where}", file=sys.stderr)
    return 1 if missing else 0


def _missing(needed: dict[str, str]) -> dict[str, str]:
    """Modules that cannot be imported, in a process that is thrown away, and why."""
    found = {}
    for module in needed:
        reason = _why_not(module)
        if reason is not None:
            found[module] = reason
    return found


def _why_not(module: str) -> str | None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
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
    """
    pip = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index"),
        *("--disable-pip-version-check", "--find-links", wheels, "--target", site),
    ]
    for package in packages:
        name = package.partition(" ")[0]
        for more in ([], ["--no-deps"]):
            done = subprocess.run(
                [*pip, "--upgrade", *more, name],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                break


if __name__ == "__main__":
    sys.exit(main())
