"""Hayakawa & Narihira's largest step, ResNet-50 at N=1440, by our planner.

Their figures are relative to the largest batch that fits the device unmoved ("in
core"). Which device, link and precision they used was not verified, so that two devices
of 16 GiB stand here, in single precision, one on PCI Express and one on NVLink. Bytes
and times are those of `planner`.
"""

from typing import Any

from bench.papers.cases import name_of
from bench.papers.planner import estimated
from bench.papers.reach import batch_within
from bench.papers.superneurons import MIB
from mucudnn.ir.devices import get_device
from mucudnn.passes.residency import PLANNED

HAYAKAWA = "Hayakawa & Narihira"
BATCH = 1440
DEVICES = ("v100_pcie", "v100_nvlink")

THEIRS = ("paging", "adaptive_window")
"""What is nearest to theirs: whatever a node does not use may leave, in two windows
that know bytes and no times."""

_OURS = ((PLANNED, "adaptive_window"), (PLANNED, None))
TRIED = (THEIRS, ("paging", "timed"), *_OURS)
"""Policies and schedulers; None: any scheduler."""

_MODEL, _IMAGE = "resnet50", 224


def windows_on(
    device: str, tried: tuple[tuple[str, str | None], ...] = TRIED
) -> dict[str, Any]:
    """One device. Ready for JSON.

    Args:
        device: A name in `DEVICES`.
        tried: Policies and schedulers.
    """
    figures = get_device(device)
    nbytes = int(figures.memory.value)
    fitting = batch_within(_MODEL, _IMAGE, "keep_all", nbytes)
    inside = estimated(_MODEL, fitting, _IMAGE, device).within(nbytes, "keep_all")
    step = estimated(_MODEL, BATCH, _IMAGE, device)
    in_core = _rate(fitting, inside)
    rows = []
    for policy, scheduler in tried:
        row = step.within(nbytes, policy, scheduler)
        rate = _rate(BATCH, row)
        rows.append(row | {"images_per_s": rate, "speed": rate / in_core})
    return {
        "name": name_of(HAYAKAWA, "ResNet-50", BATCH, device),
        "paper": HAYAKAWA,
        "model": _MODEL,
        "image": _IMAGE,
        "batch": BATCH,
        "device": device,
        "title": figures.title,
        "link_gb_per_s": figures.d2h.value / 1e9,
        "figures": dict(figures.sources()),
        "budget_mib": nbytes / MIB,
        **step.sizes,
        "in_core_batch": fitting,
        "in_core_images_per_s": in_core,
        "times_in_core": BATCH / fitting,
        "techniques": rows,
        "planned": max(rows, key=_preference),
    }


def _preference(row: dict[str, Any]) -> tuple[bool, float]:
    """Our planner's rows before all others, then by speed."""
    return row["policy"] == PLANNED, row["speed"]


def _rate(batch: int, row: dict[str, Any]) -> float:
    """Images a second; 0 where there is no plan."""
    return 1e3 * batch / row["step_ms"] if row["fits"] else 0.0
