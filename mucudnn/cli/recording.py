"""`mucudnn tune --record`: what a run measured, kept whatever ends the run."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from mucudnn.errors import CacheError
from mucudnn.runtime.interrupts import deferred_interrupt
from mucudnn.suites import Layer

if TYPE_CHECKING:
    from mucudnn.ir.conv import PerfTable
    from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Record", "recording"]


@dataclass
class Record:
    """A recording in the making.

    Attributes:
        tables: What the run used, older measurements of a cache included.
        complaint: Why there is no file.
    """

    tables: list["PerfTable"] = field(default_factory=list)
    complaint: str | None = None


@contextmanager
def recording(
    tuner: "Tuner", layers: Sequence[Layer], file: str | None
) -> Iterator[Record]:
    """Write a recording when the block ends, even by an error or by Ctrl-C."""
    record, since = Record(), time.time()
    done = False
    try:
        yield record
        done = True
    finally:
        if file is not None:
            with deferred_interrupt():
                _write(record, tuner, layers, file, since)
        if record.complaint is not None and not done:
            click.echo(f"mucudnn: warning: {record.complaint}", err=True)


def _write(
    record: Record, tuner: "Tuner", layers: Sequence[Layer], file: str, since: float
) -> None:
    from mucudnn.runtime.database.recordings import record_run

    problems = [layer.problem for layer in layers]
    try:
        rows = record_run(file, tuner, problems, record.tables, since)
    except CacheError as e:
        record.complaint = str(e)
    else:
        click.echo(f"{rows} measurements written to {file}", err=True)
