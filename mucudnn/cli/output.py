"""Write results to files, which are checked before a command begins to work."""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError
from mucudnn.errors import CacheError
from mucudnn.files import check_writable, descriptor_of, write_whole
from mucudnn.ir.conv import PerfTable
from mucudnn.processes import deferred_interrupt
from mucudnn.report.text import Table, write_tables
from mucudnn.report.trace import snapshot_bytes, trace_json
from mucudnn.runtime.store.recordings import record_run, spare_newer
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.suites import Layer

if TYPE_CHECKING:
    from mucudnn.studies.memory_results import MemoryStudy


STDOUT = "-"
_STDOUT_DESCRIPTOR = 1


def output_file(value: str) -> str:
    """Return a path that can be written, without changing the file there; or `-`.

    Other names of standard output, such as `/dev/stdout`, become `-`.
    """
    if value == STDOUT or descriptor_of(value) == _STDOUT_DESCRIPTOR:
        return STDOUT
    if not value:
        raise click.BadParameter("the name of the file is empty")
    folder = Path(value).parent
    if not folder.is_dir():
        raise click.BadParameter(f"cannot write {value}: no directory {folder}")
    try:
        check_writable(value)
    except OSError as e:
        raise click.BadParameter(f"cannot write {value}: {e.strerror}") from e
    return value


def refuse_unwritable(folder: str) -> None:
    """Check that files can be created in a folder; leave it unchanged."""
    path = Path(folder)
    made = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise BadInputError(f"cannot write to {folder}: {e.strerror}") from e
    finally:
        for created in made:
            with contextlib.suppress(OSError):
                created.rmdir()


def recording_file(value: str) -> str:
    """Return a path for a recording; standard output is refused."""
    path = output_file(value)
    if path == STDOUT:
        raise click.BadParameter("a recording needs a file, such as FILE.json.gz")
    spare_newer(Path(path))
    return path


def refuse_same(files: Mapping[str, str | None]) -> None:
    """Refuse two results for one file, where the later would overwrite the earlier."""
    option_of: dict[str, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        place = file if file == STDOUT else str(Path(file).resolve())
        if place in option_of:
            raise BadInputError(
                f"{option_of[place]} and {option} both write {file}; name two files"
            )
        if file == STDOUT or not Path(file).exists() or Path(file).is_file():
            option_of[place] = option


def write_file(path: str, contents: str | bytes) -> None:
    """Write a file atomically, or standard output."""
    if path == STDOUT:
        click.echo(contents, nl=False)
        return
    if isinstance(contents, str):
        contents = contents.encode(errors="backslashreplace")
    try:
        write_whole(path, contents)
    except OSError as e:
        raise BadInputError(f"cannot write {path}: {e.strerror}") from e


def emit(
    json_file: str | None,
    data: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    show: Callable[[], None],
    *writers: Callable[[], None],
) -> None:
    """Show a result to people, write it as JSON for programs, and call `writers`.

    With JSON on standard output, nothing else is printed there. Everything is
    called, even if one fails or a signal arrives meanwhile: a full disk must not cost
    the table, nor a closed terminal the files. The first error is raised at the end.
    """

    def show_all() -> None:
        if json_file != STDOUT:
            show()
            sys.stdout.flush()

    def write_json() -> None:
        if json_file is not None:
            values = {"schema": 1, **(data() if callable(data) else data)}
            text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
            write_file(json_file, text + "\n")

    failures: list[Exception] = []
    with deferred_interrupt():
        for write in (show_all, write_json, *writers):
            try:
                write()
            except (OSError, click.ClickException) as e:
                failures.append(e)
    if failures:
        raise failures[0]


def publish(
    files: Mapping[str, Any],
    found: Any,
    tables: Callable[[Any], Sequence[Table]],
    page: Callable[[Any], str],
) -> None:
    """Emit a study as `tables`, as JSON, and as an HTML `page`.

    `files` has `json_file` and `report_file`, each None if not requested.
    """
    file = files["report_file"]
    emit(
        files["json_file"],
        found.to_json,
        lambda: write_tables(tables(found), sys.stdout),
        *([] if file is None else [lambda: write_file(file, page(found))]),
    )


@dataclass
class Record:
    """A recording in progress; `complaint` is why no file was written."""

    tables: list[PerfTable] = field(default_factory=list)
    complaint: str | None = None


@contextlib.contextmanager
def recording(
    tuner: Tuner, layers: Sequence[Layer], file: str | None
) -> Iterator[Record]:
    """Write a recording when the block ends, even by an error or Ctrl-C."""
    record, since = Record(), time.time()
    done = False
    try:
        yield record
        done = True
    finally:
        if file is not None:
            problems = [layer.problem for layer in layers]
            with deferred_interrupt():
                try:
                    rows = record_run(file, tuner, problems, record.tables, since)
                    click.echo(f"{rows} measurements written to {file}", err=True)
                except CacheError as e:
                    record.complaint = str(e)
        if record.complaint is not None and not done:
            click.echo(f"mucudnn: warning: {record.complaint}", err=True)


def write_files(found: "MemoryStudy", settings: dict[str, Any]) -> None:
    """Write the report, the trace and the snapshot, if requested."""
    if settings["report_file"] is not None:
        from mucudnn.report.memory import memory_report

        write_file(settings["report_file"], memory_report(found))
    if found.best is None or found.best.plan is None:
        return
    if settings["trace_file"] is not None:
        write_file(settings["trace_file"], trace_json(found.best.plan))
    path = settings["snapshot_file"]
    if path is not None:
        if found.placed is None:
            why = found.placement_error or "interrupted before places were looked for"
            raise BadInputError(f"--snapshot {path}: {why}")
        write_file(path, snapshot_bytes(found.placed))
