"""A budget of device memory, as a user gives it.

The budget is of parameters, state, activations and workspaces. What leaves goes to host
memory, or to other tiers where some are named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mucudnn.arguments import a_path, of_type, one_of
from mucudnn.backends.base import Device
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import parse_bytes
from mucudnn.passes.residency import PLANNED, ResidencyPolicy, check_policy
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.passes.scheduling.costs import CONVOLUTIONS
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.executor.tier_choice import TierChoice, parse_tiers

__all__ = ["DEVICE", "MemoryBudget"]

DEVICE = "device"
"""Stands for all memory that the device has free."""


@dataclass(frozen=True, slots=True, init=False)
class MemoryBudget:
    """How much device memory a step may take, and who decides how.

    Attributes:
        nbytes: Bytes for everything; may be given as "1.5GiB".
        policy: What leaves and what is computed again: `planned`, another of
            `policy_names`, or a function.
        scheduler: When copies run, a name or a function; None is the policy's own.
        convolutions: How convolutions get their workspace: `dynamic` (what is free at
            each), `fixed` (as planned under the workspace limit: then results are bit
            for bit those of a step without a budget), `fastest` or `least`.
        disk: Folder for what leaves: short for `tiers="disk:FOLDER"`.
        tiers: Where to: `host`, `disk:FOLDER`, `peer:DEVICE`, each with `=SIZE` behind
            it where that is not to be all there is; several are filled the fastest
            first. Host memory if none are given.
        measured: A profile of the step, if there is one already.
        found: A plan of the step by that profile, if it was searched for already: what
            it decides about tensors stays.
    """

    nbytes: int
    policy: str | ResidencyPolicy
    scheduler: str | Scheduler | None
    convolutions: str
    disk: Path | None
    tiers: tuple[TierChoice, ...]
    measured: Profile | None = field(repr=False)
    found: StepPlan | None = field(repr=False)

    def __init__(
        self,
        *,
        nbytes: int | str,
        policy: str | ResidencyPolicy = PLANNED,
        scheduler: str | Scheduler | None = None,
        convolutions: str = "dynamic",
        disk: Path | str | None = None,
        tiers: str | TierChoice | Sequence[str | TierChoice] = (),
        measured: Profile | None = None,
        found: StepPlan | None = None,
    ) -> None:
        """Check every field.

        Raises:
            ValueError: A size or a name is not valid; the message says what is.
            TypeError: A field is of another type.
        """
        check_policy(policy)
        if scheduler is not None:
            SCHEDULERS.resolve(scheduler)
        if measured is not None:
            of_type("measured", measured, Profile, "a Profile of the step")
        if found is not None:
            of_type("found", found, StepPlan, "a StepPlan of the step")
        chosen = parse_tiers(tiers)
        if disk is not None:
            short = (TierChoice("disk", str(a_path("disk", disk))),)
            if chosen not in ((), short):
                raise ValueError("disk=FOLDER is short for tiers='disk:FOLDER'")
            chosen = short
        values: dict[str, object] = {
            "nbytes": parse_bytes(nbytes),
            "policy": policy,
            "scheduler": scheduler,
            "convolutions": one_of("convolutions", convolutions, CONVOLUTIONS),
            "disk": None if disk is None else a_path("disk", disk),
            "tiers": chosen,
            "measured": measured,
            "found": found,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls, budget: "MemoryBudget | int | str", device: Device | None = None
    ) -> "MemoryBudget":
        """A budget, from itself, a size such as "1.5GiB", or "device": all it has free.

        Args:
            budget: As a user gives it.
            device: Whose free memory may be meant.

        Raises:
            ValueError: The size is none.
            TypeError: It is something else.
            UnsupportedError: What the device has free is not known.
        """
        if isinstance(budget, MemoryBudget):
            return budget
        if isinstance(budget, str) and budget == DEVICE and device is not None:
            return cls(nbytes=device.available_bytes())
        try:
            return cls(nbytes=budget)
        except TypeError:
            raise TypeError(
                "budget must be a MemoryBudget, or a size in bytes or as text such as "
                f"'1.5GiB', got {budget!r}"
            ) from None
