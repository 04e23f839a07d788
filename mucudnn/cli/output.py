"""Files that a command writes: refused before the work, not after it."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from mucudnn.cli.app import BadInputError
from mucudnn.files import check_writable, descriptor_of, write_whole
from mucudnn.runtime.interrupts import deferred_interrupt

__all__ = [
    "STDOUT",
    "emit",
    "output_file",
    "recording_file",
    "refuse_same",
    "refuse_unwritable",
    "save",
    "write_file",
]

STDOUT = "-"
_STDOUT_DESCRIPTOR = 1


def output_file(value: str) -> str:
    """A path that can be written, what is there unharmed; or `-`.

    Other names of standard output, such as `/dev/stdout`, become `-`.
    """
    if value == STDOUT or descriptor_of(value) == _STDOUT_DESCRIPTOR:
        return STDOUT
    folder = Path(value).parent
    if not folder.is_dir():
        raise click.BadParameter(f"cannot write {value}: no directory {folder}")
    try:
        check_writable(value)
    except OSError as e:
        raise click.BadParameter(f"cannot write {value}: {e.strerror}") from e
    return value


def refuse_unwritable(folder: str) -> None:
    """Find out before the work whether files can be kept there; leave it as it is.

    Raises:
        BadInputError: They cannot.
    """
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
    """A path that can be written; a recording is no text for standard output.

    Raises:
        CacheError: A newer version's recording is there.
    """
    path = output_file(value)
    if path == STDOUT:
        raise click.BadParameter("a recording needs a file, such as FILE.json.gz")
    from mucudnn.runtime.database.recordings import spare_newer

    spare_newer(Path(path))
    return path


def refuse_same(files: Mapping[str, str | None]) -> None:
    """Complain about two results for one place, where the later would end the earlier.

    Args:
        files: What was given for each option.

    Raises:
        BadInputError: Names both options.
    """
    taken: dict[str, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        place = file if file == STDOUT else str(Path(file).resolve())
        if place in taken:
            raise BadInputError(
                f"{taken[place]} and {option} both write {file}; name two files"
            )
        if file == STDOUT or not Path(file).exists() or Path(file).is_file():
            taken[place] = option


def write_file(path: str, contents: str | bytes) -> None:
    """Write a file, whole or not at all, or standard output.

    Raises:
        BadInputError: It cannot be written.
    """
    if path == STDOUT:
        click.echo(contents, nl=False)
        return
    data = (
        contents.encode(errors="backslashreplace")
        if isinstance(contents, str)
        else contents
    )
    try:
        write_whole(path, data)
    except OSError as e:
        raise BadInputError(f"cannot write {path}: {e.strerror}") from e


def emit(json_file: str | None, data: Any, show: Callable[[], None]) -> None:
    """Show a result to people and write it for programs.

    With JSON on standard output nothing else goes there.
    """

    def show_all() -> None:
        if json_file != STDOUT:
            show()
            sys.stdout.flush()

    def write() -> None:
        if json_file is not None:
            text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
            write_file(json_file, text + "\n")

    save(show_all, write)


def save(*writers: Callable[[], None]) -> None:
    """Call all of them, whatever becomes of one, and whoever asks to end meanwhile.

    A full disk must not cost the table, nor a terminal that is gone the files; and what
    took minutes is not lost to a signal that comes while it is written.

    Raises:
        OSError: Nobody reads the output.
        BadInputError: A file cannot be written; of several errors the first.
    """
    failures: list[Exception] = []
    with deferred_interrupt():
        for write in writers:
            try:
                write()
            except (OSError, click.ClickException) as e:
                failures.append(e)
    if failures:
        raise failures[0]
