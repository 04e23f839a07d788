"""`mucudnn doctor`: test what is installed; `mucudnn info`: show its properties."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal

import click

from mucudnn.backends import backend_names, device_count, get_backend
from mucudnn.cli.app import ExitCode, one_line
from mucudnn.cli.options import cache_option, json_option, open_cache
from mucudnn.cli.output import emit
from mucudnn.errors import BackendUnavailableError, CacheError, MucudnnError
from mucudnn.report.text import bytes_text

Status = Literal["works", "missing", "fails"]


@dataclass(frozen=True, slots=True)
class Check:
    """Result of testing one part of the installation.

    `detail` is a version, a device, or an error; `advice` is empty if the part works.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""


_OPTIONAL = {
    "pictures in reports and data sets": ("PIL", "images"),
    "several processes (mpiexec)": ("mpi4py", "mpi"),
    "event files for TensorBoard": ("tensorboardX", "tensorboard"),
    "images of digits (--data digits)": ("sklearn", "digits"),
}
"""Purpose of an extra -> its module, and the extra's name."""


@click.command()
@cache_option
@json_option
@click.pass_context
def doctor(
    ctx: click.Context, /, cache_path: str | None, json_file: str | None
) -> None:
    """Test what is installed, and list what to install; for bug reports.

    Exit code: 0 if everything that is installed works, 3 otherwise.
    """
    # Each test is tried by itself: one that fails must not hide the others.
    checks = [
        _tried("convolution on the CPU", _convolution, "reinstall NumPy and mucudnn"),
        _tried(
            "PyTorch step",
            _torch_step,
            "install PyTorch: pip install '.[torch]' in a checkout",
        ),
        _compiler(),
        _tried(
            "NVIDIA GPU",
            _gpu,
            "with a GPU: install its driver, and pip install '.[cuda13]' (or cuda12)",
        ),
        *(
            Check(name, "works", module)
            if find_spec(module)
            else Check(name, "missing", module, f"pip install '.[{extra}]'")
            for name, (module, extra) in _OPTIONAL.items()
        ),
        _tried(
            "cache", lambda: _cache(cache_path), "name another file with --cache FILE"
        ),
    ]

    def show() -> None:
        width = max(len(check.name) for check in checks)
        for check in checks:
            click.echo(f"{check.status:<8} {check.name:<{width}}  {check.detail}")
            if check.advice:
                click.echo(f"{'':<8} {'':<{width}}  -> {check.advice}")

    emit(json_file, {"checks": [asdict(check) for check in checks]}, show)
    if any(check.status == "fails" for check in checks):
        ctx.exit(ExitCode.FAILED)


def _tried(name: str, function: Callable[[], str], advice: str) -> Check:
    """Return what a function returns or raises as a check."""
    try:
        return Check(name, "works", function())
    except (BackendUnavailableError, ImportError) as e:
        return Check(name, "missing", one_line(str(e)), advice)
    except Exception as e:  # whatever is broken is what the command is for
        return Check(name, "fails", f"{type(e).__name__}: {one_line(str(e))}", advice)


def _convolution() -> str:
    """Compare a planned convolution with sums in float64."""
    import numpy as np

    from mucudnn import Tuner, __version__, conv2d

    generator = np.random.default_rng(0)
    x = generator.standard_normal((4, 3, 6, 6)).astype(np.float32)
    w = generator.standard_normal((5, 3, 3, 3)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    expected = np.einsum("nchwrs,kcrs->nkhw", windows, w, dtype=np.float64)
    with Tuner(backend="cpu", workspace_limit="1MiB", cache=None) as tuner:
        error = np.abs(conv2d(x, w, tuner=tuner) - expected).max()
        if not error < 1e-4:
            raise ArithmeticError(f"a result is {error:.1e} from that in float64")
        device = tuner.backend.device.fingerprint
    python = ".".join(map(str, sys.version_info[:3]))
    return f"mucudnn {__version__}, Python {python}, {device}"


def _torch_step() -> str:
    """Run two planned steps that compare themselves with eager mode."""
    import mucudnn.torch as mt

    train_step = mt.train_step  # which imports PyTorch, or says that it is missing
    torch = sys.modules["torch"]
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        )
        batch = torch.randn(4, 8), torch.randn(4, 2)
        loss_fn = torch.nn.functional.mse_loss
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = train_step(model, loss_fn, optimizer, cache=None, verify=1)
        for _ in range(2):
            step(*batch)
    return f"PyTorch {torch.__version__}, equal to eager mode"


def _compiler() -> Check:
    name = "C++ compiler (inductor=True)"
    for command in ("c++", "g++", "clang++"):
        if (path := shutil.which(command)) is not None:
            return Check(name, "works", path)
    return Check(name, "missing", "no c++, g++ or clang++", "install g++ or clang++")


def _gpu() -> str:
    device = get_backend("cuda").device
    return f"{device_count('cuda')} devices, {device.fingerprint}"


def _cache(cache_path: str | None) -> str:
    found = _cache_facts(cache_path)
    if found["path"] == "memory" and cache_path != "none":
        raise CacheError("nothing can be stored on disk, as the warning says")
    return f"{found['path']}: {found['measurements']} measurements"


# Show the backends, libraries and cache of this machine.


_PIN = "OPENBLAS_CORETYPE"
_LIBRARIES = ("mucudnn", "numpy", "pulp", "click", "rich", "platformdirs")


@click.command()
@cache_option
@json_option
def info(cache_path: str | None, json_file: str | None) -> None:
    """Show backends and devices, versions, BLAS kernels, threads, the cache."""
    data: dict[str, Any] = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "versions": {name: _version(name) for name in _LIBRARIES},
        "backends": _backends(),
        "blas": _blas(),
        "cache": _cache_facts(cache_path),
    }
    emit(json_file, data, lambda: _show(data))


def _show(data: dict[str, Any]) -> None:
    click.echo(f"python       {data['python']}")
    for name, number in data["versions"].items():
        click.echo(f"{name:<12} {number}")
    for backend in data["backends"]:
        click.echo(f"backend      {backend['name']}: {backend['status']}")
        for name, value in backend["description"].items():
            click.echo(f"             {name}: {value}")
    for blas in data["blas"]:
        click.echo(
            f"blas         {blas['library']} {blas['version']}, kernels for "
            f"{blas['kernels']}, {blas['threads']} threads"
        )
        if blas["pinned_by"]:
            click.echo(
                f"             {blas['pinned_by']} is set: a faster choice for this "
                "processor may be left out"
            )
    cache = data["cache"]
    click.echo(
        f"cache        {cache['path']}: {cache['measurements']} measurements of "
        f"{cache['devices']} devices, {bytes_text(cache['bytes'])}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _backends() -> list[dict[str, Any]]:
    found = []
    for name in backend_names():
        description: Mapping[str, str] = {}
        if name == "recorded":
            status, devices = "replays a file: --backend recorded:FILE", 0
        else:
            try:
                devices = device_count(name)
                device = get_backend(name).device
                status, description = device.fingerprint, device.description()
                if devices > 1:
                    status += f", {devices} devices"
            except (MucudnnError, ValueError) as e:
                status, devices = f"unavailable: {one_line(str(e))}", 0
        entry = {"name": name, "status": status, "devices": devices}
        found.append({**entry, "description": dict(description)})
    return found


def _blas() -> list[dict[str, Any]]:
    from threadpoolctl import threadpool_info

    return [
        {
            "library": entry["internal_api"],
            "version": entry["version"],
            "kernels": entry.get("architecture", "an unknown processor"),
            "threads": entry["num_threads"],
            "pinned_by": _PIN if os.environ.get(_PIN) else None,
        }
        for entry in threadpool_info()
        if entry["user_api"] == "blas"
    ]


def _cache_facts(cache_path: str | None) -> dict[str, Any]:
    with open_cache(cache_path) as cache:
        devices = cache.summary()
        path = cache.path
    size = path.stat().st_size if path is not None and path.exists() else 0
    return {
        "path": str(path or "memory"),
        "bytes": size,
        "devices": len(devices),
        "measurements": sum(device.rows for device in devices),
    }
