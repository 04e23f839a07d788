"""The device-memory budget of a step, as configured by the user.

The budget covers parameters, state, activations and workspaces. Tensors are offloaded
to host memory, or to other tiers where some are named.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mucudnn.arguments import check_choice, check_path, check_type
from mucudnn.backends import Device
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import parse_bytes, refuse_fraction
from mucudnn.passes.residency import PLANNED, ResidencyPolicy, check_policy
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.passes.scheduling.problem import CONVOLUTIONS
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.executor.tiers import TierChoice, parse_tiers

DEVICE = "device"
"""Name for all free memory of the device."""


@dataclass(frozen=True, slots=True, init=False)
class MemoryBudget:
    """Device memory that a step may use, and the strategies that keep it.

    Attributes:
        nbytes: Budget in bytes; may be given as "1.5GiB".
        policy: Which tensors are offloaded or recomputed: `planned`, another of
            `policy_names`, or a function.
        scheduler: When copies run, a name or a function; None is the policy's own.
        convolutions: How convolutions get their workspace: `dynamic` (free memory at
            each), `fixed` (planned under the workspace limit: results are then
            bit-identical to a step without a budget), `fastest` or `least`.
        disk: Folder to offload to: short for `tiers="disk:FOLDER"`.
        tiers: Offload targets: `host`, `disk:FOLDER`, `peer:DEVICE`; append `=SIZE` to
            limit one. Several are filled fastest first. Host memory if none are given.
        measured: Existing profile of the step, if any.
        plan: Existing plan of the step by that profile, if any; its decisions about
            tensors are kept.
    """

    nbytes: int
    policy: str | ResidencyPolicy
    scheduler: str | Scheduler | None
    convolutions: str
    disk: Path | None
    tiers: tuple[TierChoice, ...]
    measured: Profile | None = field(repr=False)
    plan: StepPlan | None = field(repr=False)

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
        plan: StepPlan | None = None,
        found: StepPlan | None = None,
    ) -> None:
        """Validate all fields.

        Raises:
            ValueError: A size or a name is not valid; lists the valid ones.
            TypeError: A field has a wrong type.
        """
        check_policy(policy)
        if scheduler is not None:
            SCHEDULERS.resolve(scheduler)
        if measured is not None:
            check_type("measured", measured, Profile, "a Profile of the step")
        if found is not None:
            text = "MemoryBudget(found=) is deprecated; the argument is called `plan`"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            plan = found
        if plan is not None:
            check_type("plan", plan, StepPlan, "a StepPlan of the step")
        chosen = parse_tiers(tiers)
        if disk is not None:
            short = (TierChoice("disk", str(check_path("disk", disk))),)
            if chosen not in ((), short):
                raise ValueError(
                    "disk=FOLDER is short for tiers='disk:FOLDER'; pass only one of "
                    "them"
                )
            chosen = short
        values: dict[str, object] = {
            "nbytes": parse_bytes(nbytes),
            "policy": policy,
            "scheduler": scheduler,
            "convolutions": check_choice("convolutions", convolutions, CONVOLUTIONS),
            "disk": None if disk is None else check_path("disk", disk),
            "tiers": chosen,
            "measured": measured,
            "plan": plan,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def found(self) -> StepPlan | None:
        """Deprecated name of `plan`."""
        return self.plan

    @classmethod
    def of(
        cls, budget: "MemoryBudget | int | str", device: Device | None = None
    ) -> "MemoryBudget":
        """Make a budget from a budget, a size such as "1.5GiB", or "device".

        Args:
            budget: A budget, bytes, or "device" for all free memory of `device`.
            device: Device that "device" refers to.

        Raises:
            ValueError: The size is not valid.
            TypeError: `budget` has a wrong type.
            UnsupportedError: The device does not report its free memory.
        """
        if isinstance(budget, MemoryBudget):
            return budget
        if isinstance(budget, str) and budget == DEVICE and device is not None:
            return cls(nbytes=device.available_bytes())
        try:
            found = cls(nbytes=budget)
        except TypeError:
            raise TypeError(
                "budget must be a MemoryBudget, or a size in bytes or as text such as "
                f"'1.5GiB', got {budget!r}"
            ) from None
        # A budget of 0.5 or 8 was meant as a share, or in GiB.
        refuse_fraction(found.nbytes, f"budget={budget!r}")
        return found
