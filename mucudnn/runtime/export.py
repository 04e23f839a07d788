"""Recordings as files: what a run measured, for other machines to plan with.

What is in a recording is said by `mucudnn.ir.recording`; this module writes one whole
or not at all.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from mucudnn.errors import CacheError
from mucudnn.ir.measurement import Measurement, Verdict
from mucudnn.ir.recording import format_recording

__all__ = ["write_recording"]


def write_recording(
    file: Path | str,
    measurements: Iterable[Measurement],
    environments: Mapping[str, Mapping[str, str]] | None = None,
    *,
    alignments: Mapping[str, int] | None = None,
    verdicts: Iterable[Verdict] = (),
) -> None:
    """Write a recording; a name in `.gz` is compressed.

    The file appears complete or not at all.

    Args:
        file: Where; what is there is replaced.
        measurements: Of any number of devices.
        environments: By fingerprint, what else is known of a device.
        alignments: By fingerprint, bytes that micro-batches are aligned to.
        verdicts: On plans for what was measured.

    Raises:
        CacheError: The file cannot be written.
    """
    target = Path(file)
    zipped = target.suffix == ".gz"
    data = format_recording(
        measurements,
        environments,
        alignments=alignments,
        verdicts=verdicts,
        compress=zipped,
    )
    try:
        _write_whole(target, data)
    except OSError as e:
        raise CacheError(f"cannot write {target}: {e}") from e


def _write_whole(target: Path, data: bytes) -> None:
    """Write beside the target, then rename over it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
