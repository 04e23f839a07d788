"""What is asked of a training step: one value for all that plan, schedule or place it.

Whoever decides about a step gets the same frozen request, or the same with another
budget; nobody is handed its parts one by one. No budget is a budget of infinity.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mucudnn.arguments import a_number, of_type, one_of
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Node
from mucudnn.ir.placement import PLACEMENTS, STATIC, VIRTUAL
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import parse_bytes
from mucudnn.passes.planning.rewrite import Rewriter, Rewritten
from mucudnn.passes.residency import (
    PLANNED,
    VDNN_DYN,
    Residency,
    ResidencyPolicy,
    check_policy,
    check_residencies,
)
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.passes.scheduling.costs import CONVOLUTIONS

__all__ = ["StepRequest"]


@dataclass(frozen=True)
class StepRequest:
    """A training step, what it costs, and how it is to be planned.

    It is also what a residency policy is a function of.

    Attributes:
        graph: A training graph that nothing has made in-place yet.
        profile: Its costs: every node is in it.
        budget: Bytes for everything, parameters and state included; a size such as
            "1.5GiB" is parsed. Infinity if there is none.
        policy: What leaves and what is computed again: one of `policy_names`, or a
            function of this request.
        scheduler: When copies run, a name or a function. None is `on_demand` for
            vDNN's dynamic policy, any of them for the search, else `timed`.
        convolutions: How convolutions get their workspace: `dynamic` (what is free at
            each), `fastest` (all they want), `least`, or `fixed`.
        plans: Convolution node -> plan, for `fixed`.
        hosted: Parameters and state that are host-resident, and no others, if that is
            decided: by another step that shares them. It may name some that this step
            does not have.
        seed: Residencies that the search of `planned` tries beside those that the
            other policies decide: of a plan made before, under another budget or with
            other times. Other policies do not look at it.
        placement: Of `PLACEMENTS`; `virtual` needs a profile of a device that can map
            its memory.

    Raises:
        ValueError: A name or a size is not valid, or the profile or the plans are of
            another graph, or its device cannot map memory.
        TypeError: A field is of another type.
    """

    graph: Graph = field(repr=False)
    profile: Profile = field(repr=False)
    budget: float = math.inf
    policy: str | ResidencyPolicy = PLANNED
    scheduler: str | Scheduler | None = None
    convolutions: str = "dynamic"
    plans: Mapping[str, ConvPlan] | None = field(default=None, repr=False)
    hosted: frozenset[str] | None = None
    seed: Mapping[str, Residency] | None = None
    placement: str = STATIC

    def __post_init__(self) -> None:
        of_type("graph", self.graph, Graph, "a Graph, such as training_graph() returns")
        of_type("profile", self.profile, Profile, "a Profile, such as estimate() makes")
        _refuse_missing(
            "profile", "nodes", {n.name for n in self.graph.nodes}, self.profile.node_ms
        )
        object.__setattr__(self, "budget", _budget(self.budget))
        check_policy(self.policy)
        if self.scheduler is not None:
            SCHEDULERS.resolve(self.scheduler)
        one_of("convolutions", self.convolutions, CONVOLUTIONS)
        if self.plans is not None:
            of_type("plans", self.plans, Mapping, "a mapping from nodes to plans")
        if self.convolutions == "fixed":
            if self.plans is None:
                raise ValueError("fixed convolutions need their plans")
            fronts = set(self.profile.fronts)
            _refuse_missing("plans", "convolutions", fronts, self.plans)
        if self.hosted is not None:
            of_type("hosted", self.hosted, frozenset, "a frozenset of names")
        one_of("placement", self.placement, PLACEMENTS)
        if self.placement == VIRTUAL and self.profile.chunks is None:
            raise ValueError(
                "virtual placement needs a device that can map its memory; the "
                "profile is of one that cannot, or does not say in which chunks"
            )
        if self.seed is not None:
            of_type("seed", self.seed, Mapping, "a mapping from tensors to residencies")
            check_residencies("seed", self.seed, self.graph)

    @cached_property
    def timing(self) -> str | Scheduler:
        """Who times the copies unless another is tried."""
        if self.scheduler is not None:
            return self.scheduler
        return "on_demand" if self.policy == VDNN_DYN else "timed"

    @cached_property
    def persistent(self) -> frozenset[str]:
        """Names of parameters and state that may be host-resident."""
        names = frozenset(spec.name for spec in self.graph.with_role(*PERSISTENT))
        return names - self.graph.immovable

    @property
    def grows(self) -> bool:
        """Whether convolutions may have what places leave free."""
        return self.convolutions == "dynamic" and self.policy != VDNN_DYN

    def rewritten(self, residency: Mapping[str, Residency]) -> Rewritten:
        """The step with residencies decided, before its copies are timed."""
        return self._rewriter(residency, self.hosted)

    def nodes(self, residency: Mapping[str, Residency]) -> tuple[Node, ...]:
        """What runs with residencies decided; known sooner than `rewritten`."""
        return self._rewriter.nodes(residency)

    def compute_ms(self, residency: Mapping[str, Residency]) -> float:
        """What all that runs takes with residencies decided, each as fast as it can."""
        return self._rewriter.compute_ms(residency)

    def need(self, residency: Mapping[str, Residency]) -> tuple[int, str]:
        """Bytes that residencies need at the least, and at which node."""
        return self._rewriter.need(
            residency, self.hosted, self.convolutions, self.plans
        )

    def within(self, budget: float) -> "StepRequest":
        """The same under another budget."""
        return self._sharing(replace(self, budget=budget))

    def scheduled(self, scheduler: str | Scheduler) -> "StepRequest":
        """The same with its copies timed by this scheduler and no other."""
        return self._sharing(replace(self, scheduler=scheduler))

    def convolving(
        self, convolutions: str, plans: Mapping[str, ConvPlan] | None = None
    ) -> "StepRequest":
        """The same with convolutions chosen in another way."""
        return self._sharing(replace(self, convolutions=convolutions, plans=plans))

    def hosting(self, hosted: frozenset[str] | None) -> "StepRequest":
        """The same with it decided what is host-resident."""
        return self._sharing(replace(self, hosted=hosted))

    @cached_property
    def _rewriter(self) -> Rewriter:
        return Rewriter(self.graph, self.profile)

    def _sharing(self, other: "StepRequest") -> "StepRequest":
        """Another request for the same graph, which remembers what this one does."""
        other.__dict__["_rewriter"] = self._rewriter
        return other


def _budget(budget: float | str) -> float:
    if isinstance(budget, str):
        return parse_bytes(budget)
    a_number("budget", budget, 0.0, finite=False)
    return budget


def _refuse_missing(
    name: str, kind: str, wanted: set[str], found: Mapping[str, object]
) -> None:
    if missing := sorted(wanted - found.keys()):
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(
            f"the {name} must have all {kind} of the graph; {missing[0]!r}{others} "
            "are missing"
        )
