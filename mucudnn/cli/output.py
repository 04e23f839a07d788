"""Files that a command writes: refused before the work, not after it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mucudnn.cli.app import BadInputError

__all__ = ["STDOUT", "emit", "output_file", "recording_file", "write_file"]

STDOUT = "-"


def output_file(value: str) -> str:
    """A path, once it has been opened for writing and closed again unharmed; or `-`."""
    path = Path(value)
    if value == STDOUT:
        return value
    if path.is_dir():
        raise click.BadParameter(f"cannot write {value}: it is a directory")
    if not path.parent.is_dir():
        raise click.BadParameter(f"cannot write {value}: no directory {path.parent}")
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as e:
        raise click.BadParameter(f"cannot write {value}: {e.strerror}") from e
    return value


def recording_file(value: str) -> str:
    """A path that can be written; a recording is no text for standard output."""
    if value == STDOUT:
        raise click.BadParameter("a recording needs a file, such as FILE.json.gz")
    return output_file(value)


def write_file(path: str, text: str) -> None:
    """Write a file, or standard output.

    Raises:
        BadInputError: It cannot be written.
    """
    if path == STDOUT:
        click.echo(text, nl=False)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as e:
        raise BadInputError(f"cannot write {path}: {e.strerror}") from e


def emit(json_file: str | None, data: Any, show: Callable[[], None]) -> None:
    """Show a result to people and write it for programs.

    With JSON on standard output nothing else goes there.
    """
    if json_file != STDOUT:
        show()
        sys.stdout.flush()
    if json_file is not None:
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        write_file(json_file, text + "\n")
