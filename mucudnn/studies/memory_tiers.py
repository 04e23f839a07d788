"""Tiers of memory for a forecast: how fast each is, as given, measured or published.

On the CPU links are measured, as training does. For a device that is not here, host
memory is reached at the rates of its costs, which are published figures of its link;
another device is taken to be as far away, as copies between two go over the same bus at
the worst; a folder is measured here, and no faster than that link. A rate that is given
counts before all of these.
"""

from collections.abc import Sequence
from dataclasses import replace

from mucudnn.backends import get_backend
from mucudnn.ir.profile import Profile
from mucudnn.ir.tiers import MemoryTier
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting.choice import SplitStep
from mucudnn.runtime.executor.tier_choice import TierChoice
from mucudnn.runtime.profiling.cold_timing import LINK_BYTES
from mucudnn.runtime.profiling.tier_rates import measured_tiers, tier_at
from mucudnn.studies.costed_step import CostedStep

__all__ = ["forecast_tiers", "over_links"]

_HERE = "cpu"


def forecast_tiers(
    choices: Sequence[TierChoice], profile: Profile, *, measured: bool
) -> tuple[MemoryTier, ...]:
    """Tiers as planners see them.

    Args:
        choices: Where tensors may go.
        profile: Of the step; its links are those to host memory.
        measured: Whether the step runs on this machine's CPU.

    Raises:
        ValueError: There is no such folder or device.
        OutOfMemoryError: There is no room to measure in.
    """
    here = get_backend(_HERE).device
    if measured:
        return measured_tiers(here, choices, LINK_BYTES)
    link = profile.out_bytes_per_ms, profile.in_bytes_per_ms
    return tuple(
        _slowed(measured_tiers(here, [choice], LINK_BYTES)[0], link)
        if choice.kind == "disk" and choice.bytes_per_ms is None
        else _at(choice, link)
        for choice in choices
    )


def over_links(costed: CostedStep, tiers: Sequence[MemoryTier]) -> CostedStep:
    """The step over the links of its fastest tier, as if that had room for all."""
    tier = min(tiers, key=lambda tier: tier.round_trip_ms)

    def linked(step: StepRequest) -> StepRequest:
        profile = replace(
            step.profile,
            out_bytes_per_ms=tier.out_bytes_per_ms,
            in_bytes_per_ms=tier.in_bytes_per_ms,
        )
        return replace(step, profile=profile)

    def asked_over(step: SplitStep) -> SplitStep:
        return replace(
            step, asked=lambda graph, costs: linked(step.asked(graph, costs))
        )

    parts = costed.in_parts
    return replace(
        costed,
        figures={**costed.figures, "tiers": "; ".join(map(_words, tiers))},
        step=linked(costed.step),
        at=lambda batch: linked(costed.at(batch)),
        in_parts=None if parts is None else lambda nbytes: asked_over(parts(nbytes)),
    )


def _words(tier: MemoryTier) -> str:
    """Such as `disk:/scratch 1.2 GB/s out, 2.5 GB/s back`."""
    out_rate, in_rate = tier.out_bytes_per_ms / 1e6, tier.in_bytes_per_ms / 1e6
    return f"{tier.name} {out_rate:.3g} GB/s out, {in_rate:.3g} GB/s back"


def _at(choice: TierChoice, link: tuple[float, float]) -> MemoryTier:
    """A tier at the rate that is given, or over a link."""
    given = choice.bytes_per_ms
    return tier_at(choice, *(link if given is None else (given, given)))


def _slowed(tier: MemoryTier, link: tuple[float, float]) -> MemoryTier:
    """A tier that is reached over a link."""
    return replace(
        tier,
        out_bytes_per_ms=min(tier.out_bytes_per_ms, link[0]),
        in_bytes_per_ms=min(tier.in_bytes_per_ms, link[1]),
    )
