"""Recordings as files: what a run measured, for other machines to plan with.

What is in a recording is said by `mucudnn.codecs.recordings`; this module writes one
whole or not at all.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from mucudnn.codecs.recordings import MOST, SCHEMA, format_recording, recorded_schema
from mucudnn.errors import CacheError
from mucudnn.files import write_whole
from mucudnn.ir.measurement import Measurement, Verdict

__all__ = ["spare_newer", "write_recording"]


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
        file: Where; what is there is replaced, unless a newer version recorded it.
        measurements: Of any number of devices.
        environments: By fingerprint, what else is known of a device.
        alignments: By fingerprint, bytes that micro-batches are aligned to.
        verdicts: On plans for what was measured.

    Raises:
        CacheError: The file cannot be written, or a newer version's is there.
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
        spare_newer(target)
        write_whole(target, data)
    except OSError as e:
        raise CacheError(f"cannot write {target}: {e.strerror or e}") from e


def spare_newer(target: Path) -> None:
    """Raise `CacheError` where a newer version's recording would be lost."""
    if not target.is_file():
        return
    with target.open("rb") as file:
        schema = recorded_schema(file.read(MOST + 1))
    if schema is not None and schema > SCHEMA:
        raise CacheError(
            f"{target} is a recording of a newer version of mucudnn (schema {schema}, "
            f"this one writes {SCHEMA}) and stays as it is; name another file"
        )
