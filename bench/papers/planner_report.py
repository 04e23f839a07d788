"""Our planner's part of the reproduced papers as plain tables."""

from collections.abc import Mapping
from typing import Any

from bench.table import render

__all__ = ["out_of_core_table", "planner_table", "times"]


def planner_table(result: Mapping[str, Any]) -> str:
    """A row for every case: ours, then what the paper's policy does there."""
    header = (
        *("paper", "network", "batch", "device", "memory", "MiB", "least", "unbounded"),
        *("planned", "moved out", "again", "theirs", ""),
    )
    rows = [
        (
            *(row[key] for key in ("paper", "network", "batch", "device", "at")),
            *(round(row[f"{key}_mib"]) for key in ("budget", "least", "unbounded")),
            *_outcome(row["planned"]),
            row["theirs"]["policy"],
            _theirs(row["theirs"]),
        )
        for row in result["planner"]
    ]
    return render(header, rows)


def out_of_core_table(result: Mapping[str, Any]) -> str:
    """A row for every device, policy and scheduler."""
    header = (
        *("device", "MiB", "least", "batch", "in core", "times", "policy"),
        *("scheduler", "time", "moved out", "again", "images/s", "of in core"),
    )
    rows = [
        (
            row["device"],
            *(round(row[f"{key}_mib"]) for key in ("budget", "least")),
            row["batch"],
            row["in_core_batch"],
            row["times_in_core"],
            one["policy"],
            _scheduler(one),
            *_outcome(one),
            round(one["images_per_s"]),
            f"{one['speed']:.0%}",
        )
        for row in result["out_of_core"]
        for one in row["techniques"]
    ]
    return render(header, rows)


def times(slowdown: float | None) -> str:
    """A step's time over the unbounded one's."""
    return "does not fit" if slowdown is None else f"{slowdown:.2f}x"


def _scheduler(one: Mapping[str, Any]) -> str:
    """The one asked for, or of any the one that was chosen."""
    asked, chosen = str(one["asked"]), one["scheduler"]
    return asked if chosen in (None, asked) else f"{asked}: {chosen}"


def _outcome(one: Mapping[str, Any]) -> tuple[object, ...]:
    moved = one["moved_out_mib"]
    return (
        times(one["slowdown"]),
        None if moved is None else round(moved),
        one["recomputed_nodes"],
    )


def _theirs(one: Mapping[str, Any]) -> str:
    return times(one["slowdown"]) if one["fits"] else f"needs {one['peak_mib']:.0f}"
