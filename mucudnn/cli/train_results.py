"""What a training came to, in figures and in the last lines of `mucudnn train`."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mucudnn.ir.tiers import TierPlacement
    from mucudnn.passes.planning.place_step import PlacedStep
    from mucudnn.runtime.training.history import EpochReport
    from mucudnn.runtime.training.trainer import Trainer

__all__ = ["results_to_json", "show_results"]


def results_to_json(
    trainer: "Trainer", reports: "Mapping[int, EpochReport]"
) -> dict[str, Any]:
    """Every figure of a training."""
    return {
        "epochs": [
            _finite({**asdict(report), "epoch": report.epoch + 1})
            for _, report in sorted(reports.items())
        ],
        "step_ms": trainer.step_ms,
        "peak_bytes": trainer.peak_bytes,
        "budget_bytes": None if trainer.budget is None else trainer.budget.nbytes,
        "memory": _memory_to_json(trainer.placed),
        "segments": [segment.to_json() for segment in trainer.segments],
        "splitting": (
            None if trainer.splitting is None else trainer.splitting.to_json()
        ),
        "steps": trainer.steps,
        "backend": trainer.backend.name,
        "fingerprint": trainer.backend.device.fingerprint,
    }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold: a test loss that is no number is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def show_results(trainer: "Trainer") -> None:
    """The last lines: what a step takes."""
    from mucudnn.report.words import bytes_text, ms_text

    click.echo(
        f"{trainer.steps:,} steps, {ms_text(trainer.step_ms)} ms each; "
        f"{bytes_text(trainer.peak_bytes)} of memory"
    )
    placed = trainer.placed
    if placed is not None and placed.plan.prediction.placement is not None:
        click.echo(str(placed.plan.prediction.placement))
    if trainer.splitting is not None:
        click.echo(trainer.splitting.reason)
    for segment in trainer.segments:
        click.echo(str(segment))


def _memory_to_json(placed: "PlacedStep | None") -> dict[str, Any] | None:
    """How a step keeps its budget, in figures; None without one."""
    if placed is None:
        return None
    plan = placed.plan
    return {
        "policy": plan.policy,
        "scheduler": plan.scheduler,
        "nbytes": placed.nbytes,
        "predicted_ms": plan.prediction.step_ms,
        "offloaded_bytes": plan.prediction.out_bytes,
        "recomputed_nodes": plan.recomputed,
        "mapped_chunks": placed.layout.mapped_chunks,
        "tiers": _tiers_to_json(plan.prediction.placement),
    }


def _tiers_to_json(placement: "TierPlacement | None") -> list[dict[str, Any]] | None:
    """What goes where, the fastest tier first; None where there is only the host."""
    if placement is None:
        return None
    return [
        {
            "name": tier.name,
            "used_bytes": placement.used[i],
            "out_bytes_per_ms": tier.out_bytes_per_ms,
            "in_bytes_per_ms": tier.in_bytes_per_ms,
            "tensors": placement.names(i),
        }
        for i, tier in enumerate(placement.tiers)
    ]
