"""`mucudnn info`: backends, libraries and cache of this machine."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from mucudnn.backends import backend_names, device_count, get_backend
from mucudnn.cli.app import one_line
from mucudnn.cli.options import cache_option, json_option, open_cache
from mucudnn.cli.output import emit
from mucudnn.errors import MucudnnError
from mucudnn.report.text import bytes_text

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
        "cache": _cache(cache_path),
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


def _cache(cache_path: str | None) -> dict[str, Any]:
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
