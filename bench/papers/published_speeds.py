"""Published speeds and capacities, and ours beside them: estimates, every byte counted.

Nothing was timed: the devices are as their vendors describe them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from bench.papers.cases import VDNN, name_of
from bench.papers.out_of_core import BATCH, HAYAKAWA, THEIRS
from bench.papers.published import EVERY_BYTE, FOUND, Figure

__all__ = ["speeds"]

_VGG = name_of(VDNN, "VGG-16", 256, "12 GiB")
_ROOFLINE = (
    "estimated from data sheets: the shares of peaks that kernels reach are assumed, "
    "and so are the algorithms that stand for cuDNN 4's"
)
_DEVICE = "the paper's device, link and precision were not verified"


def speeds(
    planner: Iterable[Mapping[str, Any]], out_of_core: Iterable[Mapping[str, Any]]
) -> list[Figure]:
    """All of them, by the papers' own techniques as the library has them.

    Args:
        planner: Of `planner.plan_all`.
        out_of_core: Of `out_of_core.windows_on`, one a device.
    """
    made = [
        _loss(row) for row in planner if row["name"] == _VGG and row["theirs"]["fits"]
    ]
    rows = list(out_of_core)
    made += [_times_in_core(row) for row in rows[:1]]
    return made + [_speed(row) for row in rows]


def _loss(row: Mapping[str, Any]) -> Figure:
    slowdown = row["theirs"]["slowdown"]
    return Figure(
        VDNN, "VGG-16 (256), vDNN_dyn in 12 GiB: speed lost against an oracle", "%", 18,
        100 * (1 - 1 / slowdown), FOUND, reason=_ROOFLINE, counted=EVERY_BYTE, at=_VGG,
    )  # fmt: skip


def _times_in_core(row: Mapping[str, Any]) -> Figure:
    return Figure(
        HAYAKAWA, f"ResNet-50, batch {BATCH}: times the largest in core", "", 7.5,
        row["times_in_core"], FOUND,
        reason=f"{row['in_core_batch']} images fit 16 GiB, in single precision; "
        f"{_DEVICE}",
        counted=EVERY_BYTE, at=row["name"],
    )  # fmt: skip


def _speed(row: Mapping[str, Any]) -> Figure:
    """By windows that know no times; 0 where that does not fit."""
    (theirs,) = (
        one for one in row["techniques"] if (one["policy"], one["asked"]) == THEIRS
    )
    return Figure(
        HAYAKAWA, f"ResNet-50, batch {BATCH}: of the speed in core, {row['title']}",
        "%", 55, 100 * theirs["speed"], FOUND,
        reason=f"{row['planned']['speed']:.0%} by our planner; estimated, at "
        f"{row['link_gb_per_s']:g} GB/s a direction; {_DEVICE}",
        counted=EVERY_BYTE, at=row["name"],
    )  # fmt: skip
