"""Apply the link rates of memory tiers to a step's costs."""

from collections.abc import Sequence
from dataclasses import replace

from mucudnn.ir.tiers import MemoryTier
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting.choice import SplitStep
from mucudnn.passes.planning.tiered_step import over_fastest
from mucudnn.studies.costed_step import CostedStep

__all__ = ["over_links"]


def over_links(costed: CostedStep, tiers: Sequence[MemoryTier]) -> CostedStep:
    """Return the step with the rates of its fastest tier, as if it had room for all."""

    def linked(step: StepRequest) -> StepRequest:
        return over_fastest(step, tiers)

    def asked_over(step: SplitStep) -> SplitStep:
        return replace(
            step, asked=lambda graph, costs: linked(step.asked(graph, costs))
        )

    parts = costed.in_parts
    return replace(
        costed,
        figures={**costed.figures, "tiers": "; ".join(map(_describe_tier, tiers))},
        step=linked(costed.step),
        at=lambda batch: linked(costed.at(batch)),
        in_parts=None if parts is None else lambda nbytes: asked_over(parts(nbytes)),
    )


def _describe_tier(tier: MemoryTier) -> str:
    """Return text such as `disk:/scratch 1.2 GB/s out, 2.5 GB/s back`."""
    out_rate, in_rate = tier.out_bytes_per_ms / 1e6, tier.in_bytes_per_ms / 1e6
    return f"{tier.name} {out_rate:.3g} GB/s out, {in_rate:.3g} GB/s back"
