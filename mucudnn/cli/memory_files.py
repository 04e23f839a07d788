"""`mucudnn memory --report --trace --snapshot`: files of a study."""

from typing import TYPE_CHECKING, Any

from mucudnn.cli.app import BadInputError
from mucudnn.cli.output import write_file

if TYPE_CHECKING:
    from mucudnn.studies.memory_study import MemoryStudy

__all__ = ["write_files"]


def write_files(found: "MemoryStudy", settings: dict[str, Any]) -> None:
    """Write the report, the trace and the snapshot, if requested."""
    if settings["report_file"] is not None:
        from mucudnn.report.pages.memory import memory_report

        write_file(settings["report_file"], memory_report(found))
    if found.best is None or found.best.plan is None:
        return
    if settings["trace_file"] is not None:
        from mucudnn.report.trace import trace_json

        write_file(settings["trace_file"], trace_json(found.best.plan))
    path = settings["snapshot_file"]
    if path is not None:
        from mucudnn.report.snapshot import snapshot_bytes

        if found.placed is None:
            why = found.unplaced or "interrupted before places were looked for"
            raise BadInputError(f"--snapshot {path}: {why}")
        write_file(path, snapshot_bytes(found.placed))
