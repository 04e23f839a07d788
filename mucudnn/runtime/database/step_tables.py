"""Read and write step-time tables, to measure on one machine and plan on another."""

from pathlib import Path

from mucudnn.codecs.step_tables import KIND, format_step_table, kind_of, read_step_table
from mucudnn.errors import CacheError
from mucudnn.files import read_whole, write_whole
from mucudnn.ir.fleet import StepTable

__all__ = ["is_step_table", "load_step_table", "save_step_table"]

_MOST_BYTES = 1 << 24


def save_step_table(
    file: Path | str, table: StepTable, memory: int | None = None
) -> None:
    """Write a step-time table to a file, completely or not at all.

    `memory` is the bytes of the device's memory, if known.

    Raises:
        CacheError: The file cannot be written.
    """
    try:
        write_whole(file, format_step_table(table, memory).encode())
    except OSError as e:
        raise CacheError(f"cannot write {file}: {e.strerror or e}") from e


def is_step_table(file: Path | str) -> bool:
    """Return whether a file declares itself a step-time table."""
    try:
        return kind_of(read_whole(file, most=_MOST_BYTES).decode()) == KIND
    except (OSError, ValueError):
        return False


def load_step_table(file: Path | str) -> tuple[StepTable, int | None]:
    """Return a table, and the bytes of its device's memory if known.

    Raises:
        CacheError: The file cannot be read, or is something else.
    """
    try:
        return read_step_table(read_whole(file, most=_MOST_BYTES).decode())
    except OSError as e:
        raise CacheError(f"cannot read {file}: {e.strerror or e}") from e
    except ValueError as e:
        raise CacheError(f"{file}: {e}") from e
