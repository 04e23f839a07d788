"""`mucudnn cache`: what is remembered, to look at, to share, to forget."""

import sys
from datetime import UTC, datetime

import click

from mucudnn.cli.app import Commands
from mucudnn.cli.options import cache_option, json_option, open_cache
from mucudnn.cli.output import emit, recording_file
from mucudnn.cli.progress import progress_display
from mucudnn.report.text import Table, write_tables

__all__ = ["cache"]


@click.group(cls=Commands, invoke_without_command=True)
def cache() -> None:
    """Look at remembered measurements, share them, forget them."""


@cache.command("list")
@cache_option
@json_option
def list_(cache_path: str | None, json_file: str | None) -> None:
    """What is known, one line a device."""
    with open_cache(cache_path) as found:
        devices = found.summary()
        where = str(found.path or "memory")
    rows = tuple(
        (
            str(d.problems),
            str(d.rows),
            _date(d.oldest),
            _date(d.newest),
            d.fingerprint,
        )
        for d in devices
    )
    columns = (">convolutions", ">measurements", "oldest", "newest", "device")
    table = Table(where, columns, rows)
    data = {
        "path": where,
        "devices": [
            {
                "fingerprint": d.fingerprint,
                "problems": d.problems,
                "rows": d.rows,
                "oldest": d.oldest,
                "newest": d.newest,
            }
            for d in devices
        ],
    }
    emit(json_file, data, lambda: write_tables((table,), sys.stdout))


@cache.command("export")
@click.argument("file", type=recording_file)
@cache_option
@json_option
def export(file: str, cache_path: str | None, json_file: str | None) -> None:
    """Write all measurements to FILE (compressed if it ends in .gz).

    Another machine replays them with --backend recorded:FILE.
    """
    with open_cache(cache_path) as found, progress_display(1) as show:
        show(f"writing {file}", 0, 1)
        rows = found.export_json(file)
    data = {"file": file, "measurements": rows}
    emit(json_file, data, lambda: click.echo(f"{rows} measurements written to {file}"))


@cache.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@cache_option
@json_option
def import_(file: str, cache_path: str | None, json_file: str | None) -> None:
    """Add the measurements of FILE; of two of the same thing the newer one stays."""
    with open_cache(cache_path) as found, progress_display(1) as show:
        show(f"reading {file}", 0, 1)
        rows = found.import_json(file)
    data = {"file": file, "measurements": rows}
    emit(json_file, data, lambda: click.echo(f"{rows} measurements added from {file}"))


@cache.command("clear")
@click.option("--device", metavar="FINGERPRINT", help="Forget this device only.")
@cache_option
@json_option
def clear(device: str | None, cache_path: str | None, json_file: str | None) -> None:
    """Forget everything."""
    with open_cache(cache_path) as found:
        rows = found.clear(device)
    emit(
        json_file,
        {"measurements": rows},
        lambda: click.echo(f"{rows} measurements gone"),
    )


@cache.command("path")
@cache_option
@json_option
def path(cache_path: str | None, json_file: str | None) -> None:
    """Where the cache is."""
    with open_cache(cache_path) as found:
        where = str(found.path or "memory")
    emit(json_file, {"path": where}, lambda: click.echo(where))


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
