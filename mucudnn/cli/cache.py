"""`mucudnn cache`: list, export, import and clear stored measurements and plans."""

import os
import sys
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mucudnn.cli.app import BadInputError, Commands, bad_input
from mucudnn.cli.options import group, json_option, option
from mucudnn.cli.output import emit, recording_file
from mucudnn.cli.progress import progress_display
from mucudnn.ir.sizes import format_bytes
from mucudnn.report.text import Table, write_tables

if TYPE_CHECKING:
    from mucudnn.runtime.store.measurements import BenchmarkCache

_SCHEMA = 1
"""Schema of the JSON output."""

_SQLITE = b"SQLite format 3\0"

cache_option = option(
    "--cache PATH|none",
    "Where measurements are stored; by default your cache directory.",
    name="cache_path",
)
_options = group(cache_option, json_option)


@click.group(cls=Commands, invoke_without_command=True)
def cache() -> None:
    """List, export, import and clear stored measurements and plans."""


@cache.command("list")
@_options
def list_(cache_path: str | None, json_file: str | None) -> None:
    """List stored measurements, one line per device, and all else by its kind."""
    with open_cache(cache_path) as found:
        devices = found.summary()
        races, entries = len(found.races()), found.entries.summary()
        where = str(found.path or "memory")
    rows = tuple(
        (str(d.problems), str(d.rows), _date(d.oldest), _date(d.newest), d.fingerprint)
        for d in devices
    )
    columns = (">convolutions", ">measurements", "oldest", "newest", "device")
    notes = [f"{races} races between kernels"] if races else []
    for kind, (count, nbytes) in entries.items():
        notes.append(f"{count} entries of kind {kind}, {format_bytes(nbytes)}")
    table = Table(where, columns, rows, notes=tuple(notes))
    data = {
        "schema": _SCHEMA,
        "path": where,
        "devices": [asdict(device) for device in devices],
        "races": races,
        "entries": [
            {"kind": kind, "entries": count, "bytes": nbytes}
            for kind, (count, nbytes) in entries.items()
        ],
    }
    emit(json_file, data, lambda: write_tables((table,), sys.stdout))


@cache.command("export")
@click.argument("file", type=recording_file)
@_options
def export(file: str, cache_path: str | None, json_file: str | None) -> None:
    """Write all measurements to FILE (compressed if it ends in .gz).

    Another machine replays them with --backend recorded:FILE.
    """
    with open_cache(cache_path) as found, progress_display(1) as show:
        show(f"writing {file}", 0, 1)
        rows = found.export_json(file)
    data = {"schema": _SCHEMA, "file": file, "measurements": rows}
    emit(json_file, data, lambda: click.echo(f"{rows} measurements written to {file}"))


@cache.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@_options
def import_(file: str, cache_path: str | None, json_file: str | None) -> None:
    """Add the measurements of FILE; of duplicates the newer one is kept."""
    with open_cache(cache_path) as found, progress_display(1) as show:
        show(f"reading {file}", 0, 1)
        rows = found.import_json(file)
    data = {"schema": _SCHEMA, "file": file, "measurements": rows}
    emit(json_file, data, lambda: click.echo(f"{rows} measurements added from {file}"))


@cache.command("clear")
@option("--device FINGERPRINT", "Delete measurements of this device only.")
@_options
def clear(device: str | None, cache_path: str | None, json_file: str | None) -> None:
    """Delete stored measurements and, of all devices, also plans."""
    with open_cache(cache_path) as found:
        rows = found.clear(device)
        entries = 0 if device else found.entries.clear()
    data = {"schema": _SCHEMA, "measurements": rows, "entries": entries}
    others = f" and {entries} entries of other kinds" if entries else ""
    emit(json_file, data, lambda: click.echo(f"{rows} measurements{others} deleted"))


@cache.command("path")
@_options
def path(cache_path: str | None, json_file: str | None) -> None:
    """Print the path of the cache."""
    with open_cache(cache_path) as found:
        where = str(found.path or "memory")
    emit(json_file, {"schema": _SCHEMA, "path": where}, lambda: click.echo(where))


def open_cache(path: str | None) -> "BenchmarkCache":
    """Open the cache at `path`, in memory for `none`, else the user's."""
    from mucudnn.runtime.environment import cache_path
    from mucudnn.runtime.store.measurements import BenchmarkCache
    from mucudnn.runtime.store.sqlite_file import IN_MEMORY_ONLY

    if path is None:
        return BenchmarkCache(cache_path(os.environ))
    if path == "none":
        return BenchmarkCache()
    refuse_foreign_file(Path(path))
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        cache = BenchmarkCache(Path(path))
    if cache.path is None:
        cache.close()
        reasons = (str(w.message).removeprefix(IN_MEMORY_ONLY) for w in complaints)
        raise BadInputError(f"cannot keep a cache in {path}: {'; '.join(reasons)}")
    for complaint in complaints:
        click.echo(f"mucudnn: warning: {complaint.message}", err=True)
    return cache


def refuse_foreign_file(path: Path) -> None:
    """Refuse a file that is no cache: it would be replaced as damaged."""
    with bad_input():
        if not path.is_file():
            return
        with path.open("rb") as file:
            start = file.read(len(_SQLITE))
    if start and start != _SQLITE:
        raise BadInputError(f"{path} is no cache but some other file; name another one")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
