"""`mucudnn cache`: list, export, import and clear stored measurements and plans."""

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial

import click

from mucudnn.cli.app import BadInputError, Commands
from mucudnn.cli.options import cache_option, group, json_option, open_cache, option
from mucudnn.cli.output import emit, recording_file
from mucudnn.cli.progress import progress_display
from mucudnn.ir.sizes import format_bytes, format_count
from mucudnn.report.text import Table, write_tables

_entries = partial(format_count, one="entry", several="entries")
_rows = partial(format_count, one="measurement")
_options = group(cache_option, json_option)


@click.group(cls=Commands, invoke_without_command=True)
def cache() -> None:
    """List, export, import and clear stored measurements and plans."""


@cache.command("list")
@_options
def list_(cache_path: str | None, json_file: str | None) -> None:
    """List stored measurements by device, and other entries by kind."""
    with open_cache(cache_path) as found:
        devices = found.summary()
        races, entries = len(found.races()), found.entries.summary()
        where = str(found.path or "memory")

    def date(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")

    rows = tuple(
        (str(d.problems), str(d.rows), date(d.oldest), date(d.newest), d.fingerprint)
        for d in devices
    )
    columns = (">convolutions", ">measurements", "oldest", "newest", "device")
    notes = [f"{format_count(races, 'race')} between kernels"] if races else []
    for kind, (count, nbytes) in entries.items():
        notes.append(f"{_entries(count)} of kind {kind}, {format_bytes(nbytes)}")
    table = Table(where, columns, rows, notes=tuple(notes))
    data = {
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
    data = {"file": file, "measurements": rows}
    emit(json_file, data, lambda: click.echo(f"{_rows(rows)} written to {file}"))


@cache.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@_options
def import_(file: str, cache_path: str | None, json_file: str | None) -> None:
    """Add the measurements of FILE; of duplicates the newer one is kept."""
    with open_cache(cache_path) as found, progress_display(1) as show:
        show(f"reading {file}", 0, 1)
        rows = found.import_json(file)
    data = {"file": file, "measurements": rows}
    emit(json_file, data, lambda: click.echo(f"{_rows(rows)} added from {file}"))


@cache.command("clear")
@option("--device FINGERPRINT", "Delete measurements of this device only.")
@_options
def clear(device: str | None, cache_path: str | None, json_file: str | None) -> None:
    """Delete stored measurements and, without --device, also plans."""
    with open_cache(cache_path) as found:
        known = found.fingerprints()
        if device is not None and device not in known and not found.races(device):
            raise BadInputError(
                f"the cache has no measurements of the device {device!r}; it has: "
                f"{'; '.join(known) or 'none'}"
            )
        rows = found.clear(device)
        entries = 0 if device else found.entries.clear()
    data = {"measurements": rows, "entries": entries}
    others = f" and {_entries(entries)} of other kinds" if entries else ""
    emit(json_file, data, lambda: click.echo(f"{_rows(rows)}{others} deleted"))


@cache.command("path")
@_options
def path(cache_path: str | None, json_file: str | None) -> None:
    """Print the path of the cache."""
    with open_cache(cache_path) as found:
        where = str(found.path or "memory")
    emit(json_file, {"path": where}, lambda: click.echo(where))
