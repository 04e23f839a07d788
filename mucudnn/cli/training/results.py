"""Results of a training: JSON and the last lines of `mucudnn train`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mucudnn.cli.training.ranks import Group
    from mucudnn.passes.planning.place_step import PlacedStep
    from mucudnn.runtime.training.checkpoints.history import EpochReport
    from mucudnn.runtime.training.trainer import Trainer

__all__ = [
    "RankResult",
    "ranks_of",
    "ranks_to_json",
    "results_to_json",
    "show_ranks",
    "show_results",
]


@dataclass(frozen=True, slots=True)
class RankResult:
    """Share, step time without waiting, and memory of one of several processes."""

    samples: int
    own_ms: float
    peak_bytes: int
    budget_bytes: int | None

    def __str__(self) -> str:
        from mucudnn.report.words import bytes_text, ms_text

        of = "" if self.budget_bytes is None else f" of {bytes_text(self.budget_bytes)}"
        return (
            f"{self.samples} images, {ms_text(self.own_ms)} ms without waiting; "
            f"{bytes_text(self.peak_bytes)}{of}"
        )


def ranks_of(group: "Group", trainer: "Trainer") -> Sequence[RankResult]:
    """Gather the results of all processes; a collective operation."""
    own = RankResult(
        group.history[-1][group.together.rank],
        trainer.own_ms,
        trainer.peak_bytes,
        None if trainer.budget is None else trainer.budget.nbytes,
    )
    return group.together.all_gather(own)


def ranks_to_json(ranks: Sequence[RankResult]) -> list[dict[str, Any]] | None:
    """Return plain values; None for a single process."""
    return [asdict(rank) for rank in ranks] or None


def show_ranks(ranks: Sequence[RankResult]) -> None:
    """Print one line per process."""
    for number, rank in enumerate(ranks):
        click.echo(f"rank {number}: {rank}")


def results_to_json(
    trainer: "Trainer", reports: "Mapping[int, EpochReport]"
) -> dict[str, Any]:
    """Return all figures of a training as plain values."""
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
    """Replace values that JSON cannot hold, such as a NaN loss, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def show_results(trainer: "Trainer") -> None:
    """Print the last lines: time and memory of a step."""
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
    """Return the plan's figures; None without a budget."""
    if placed is None:
        return None
    plan = placed.plan
    tiers = plan.prediction.placement
    return {
        "policy": plan.policy,
        "scheduler": plan.scheduler,
        "nbytes": placed.nbytes,
        "predicted_ms": plan.prediction.step_ms,
        "offloaded_bytes": plan.prediction.out_bytes,
        "recomputed_nodes": plan.recomputed,
        "mapped_chunks": placed.layout.mapped_chunks,
        "tiers": tiers and tiers.to_json(),
    }
