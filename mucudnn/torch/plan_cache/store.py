"""What was measured and decided before, in this process or another.

Measurements of a graph are one entry: they serve every budget. What was decided for one
request is another: the residencies, and who timed the copies. A schedule follows from
these in no time, and is taken only if it is, instruction by instruction, the one that
was decided then. So whatever became of an entry, a plan keeps its promise.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import platformdirs

from mucudnn.arguments import a_path
from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Role
from mucudnn.ir.profile import Profile
from mucudnn.passes.planning.evaluate import plan_residency
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.environment import USERS, Users
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.measurement.surroundings import surroundings_of
from mucudnn.torch.plan_cache.encoding import (
    Decision,
    decision_from,
    decision_to,
    profile_from,
    profile_to,
    refuse_fronts,
    schedule_digest,
)
from mucudnn.torch.plan_cache.entries import Entries
from mucudnn.torch.plan_cache.structure import (
    Places,
    Unnameable,
    digest_of,
    structure_of,
)
from mucudnn.version import installed_version

__all__ = ["PlanCacheChoice", "PlanStore", "default_folder", "open_plans"]

logger = logging.getLogger(__name__)

PlanCacheChoice = str | os.PathLike[str] | Users | None


def default_folder() -> Path:
    """The folder in the user's cache directory, as the platform defines it."""
    return platformdirs.user_cache_path("mucudnn") / "torch-plans-v1"


def open_plans(choice: PlanCacheChoice) -> "PlanStore":
    """What a `cache` argument stands for.

    Raises:
        TypeError: It is none of the things that a cache can be told by.
        ValueError: The path is empty, or has a null character.
    """
    if choice is None:
        return PlanStore()
    if choice is USERS:
        return PlanStore(Entries(default_folder()))
    return PlanStore(Entries(a_path("cache", choice).expanduser()))


class PlanStore:
    """Measures and plans what is not remembered.

    Args:
        entries: What is; None remembers nothing.
    """

    def __init__(self, entries: Entries | None = None) -> None:
        self._entries = entries

    def profile(
        self,
        lowered: Lowered,
        measured: Callable[[Lowered], Profile],
        settings: str = "",
        check: Callable[[Profile], None] = refuse_fronts,
    ) -> Profile:
        """What a graph costs on this machine, as it is set up.

        Args:
            lowered: The graph.
            measured: What measures it.
            settings: What else it measures by.
            check: Raises `ValueError` for remembered ways to run convolutions that the
                graph or its backend does not have.
        """
        places = Places(lowered)
        key = self._key(f"times, 2 {settings}", lowered, places)
        if self._entries is None or key is None:
            return measured(lowered)
        data = self._entries.get(key)
        if data is not None:
            try:
                profile = profile_from(data, places)
                check(profile)
            except ValueError as e:
                self._entries.refused(key, str(e))
            else:
                return profile
        profile = measured(lowered)
        self._entries.put(key, profile_to(profile, places))
        return profile

    def plan(self, lowered: Lowered, request: StepRequest) -> StepPlan:
        """The plan of a request about a graph.

        Raises:
            PlanningError: It cannot fit.
        """
        places = Places(lowered)
        key = self._key("plan", lowered, places, request)
        if self._entries is None or key is None:
            return plan_step(request)
        data = self._entries.get(key)
        if data is not None:
            try:
                return _replayed(decision_from(data, places), request, places)
            except (PlanningError, ValueError) as e:
                self._entries.refused(key, str(e))
        plan = plan_step(request)
        digest = schedule_digest(plan.schedule, places)
        decision = Decision(plan.residency, plan.scheduler, digest)
        try:
            data = decision_to(decision, places)
            _replayed(decision_from(data, places), request, places)
        except (PlanningError, ValueError) as e:
            logger.debug("a plan is not remembered: %s", e)
        else:
            self._entries.put(key, data)
        return plan

    def _key(
        self,
        kind: str,
        lowered: Lowered,
        places: Places,
        request: StepRequest | None = None,
    ) -> str | None:
        """A hash of all that a measurement, or a plan, depends on."""
        if self._entries is None:
            return None
        try:
            structure = structure_of(lowered, places)
        except Unnameable as e:
            logger.info("a graph is not remembered: %s", e)
            return None
        parts = [kind, installed_version(), structure]
        if request is None:
            return digest_of([*parts, surroundings_of(lowered)])
        if not isinstance(request.policy, str) or request.plans is not None:
            return None
        hosted = request.hosted
        lent = request.graph.with_role(Role.BORROWED)
        asked = [
            [places.tensor(spec.name) for spec in lent],
            repr(float(request.budget)),
            request.policy,
            str(request.scheduler),
            request.convolutions,
            None if hosted is None else sorted(str(places.tensor(n)) for n in hosted),
        ]
        return digest_of([*parts, profile_to(request.profile, places), asked])


def _replayed(decision: Decision, request: StepRequest, places: Places) -> StepPlan:
    """The schedule that follows from a decision.

    Raises:
        ValueError: It is another one than then.
        PlanningError: It does not fit.
    """
    plan = plan_residency(request.scheduled(decision.scheduler), decision.residency)
    if schedule_digest(plan.schedule, places) != decision.schedule:
        raise ValueError("another schedule follows from it than was decided")
    return plan
