"""Planning request: the frozen input of all passes that plan or place a step.

Without a budget, the budget is infinity.
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
    """A training step with its costs and the way it is to be planned.

    Residency policies are functions of a request.

    Attributes:
        graph: A training graph before in-place rewriting.
        profile: Costs of all nodes of the graph.
        budget: Bytes for everything, parameters and state included; a size such as
            "1.5GiB" is parsed. Infinity means no budget.
        policy: What is offloaded and recomputed: one of `policy_names`, or a function
            of this request.
        scheduler: When copies run: a name or a function. None means `on_demand` for
            vDNN's dynamic policy, any scheduler for the search, else `timed`.
        convolutions: How convolutions get their workspace: `dynamic` (free bytes at
            each), `fastest` (as much as they want), `least`, or `fixed`.
        plans: Plan of each convolution node, for `fixed`.
        hosted: Names of exactly those parameters and state that are host-resident, if
            another step that shares them has decided. Unknown names are ignored.
        seed: Further residencies that the search of `planned` starts from, such as
        those
            of a previous plan. Other policies ignore it.
        placement: One of `PLACEMENTS`; `virtual` needs the profile of a device with
            mappable memory.

    Raises:
        ValueError: A name or a size is invalid, the profile or the plans are of another
            graph, or the device cannot map memory.
        TypeError: A field has another type.
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
        """The scheduler, by default that of the policy."""
        if self.scheduler is not None:
            return self.scheduler
        return "on_demand" if self.policy == VDNN_DYN else "timed"

    @cached_property
    def persistent(self) -> frozenset[str]:
        """Names of the parameters and state that may be host-resident."""
        names = frozenset(spec.name for spec in self.graph.with_role(*PERSISTENT))
        return names - self.graph.immovable

    @property
    def grows(self) -> bool:
        """True if convolutions may use free gaps of the layout."""
        return self.convolutions == "dynamic" and self.policy != VDNN_DYN

    def rewritten(self, residency: Mapping[str, Residency]) -> Rewritten:
        """Return the step rewritten for residencies, before copies are scheduled."""
        return self._rewriter(residency, self.hosted)

    def nodes(self, residency: Mapping[str, Residency]) -> tuple[Node, ...]:
        """Return the nodes of the step with residencies; cheaper than `rewritten`."""
        return self._rewriter.nodes(residency)

    def compute_ms(self, residency: Mapping[str, Residency]) -> float:
        """Return the compute time with residencies, each node at its fastest."""
        return self._rewriter.compute_ms(residency)

    def need(self, residency: Mapping[str, Residency]) -> tuple[int, str]:
        """Return the least bytes that residencies need, and the critical node."""
        return self._rewriter.need(
            residency, self.hosted, self.convolutions, self.plans
        )

    def within(self, budget: float) -> "StepRequest":
        """Return the request with another budget."""
        return self._sharing(replace(self, budget=budget))

    def scheduled(self, scheduler: str | Scheduler) -> "StepRequest":
        """Return the request with another scheduler."""
        return self._sharing(replace(self, scheduler=scheduler))

    def convolving(
        self, convolutions: str, plans: Mapping[str, ConvPlan] | None = None
    ) -> "StepRequest":
        """Return the request with convolutions chosen in another way."""
        return self._sharing(replace(self, convolutions=convolutions, plans=plans))

    def hosting(self, hosted: frozenset[str] | None) -> "StepRequest":
        """Return the request with these host-resident parameters and state."""
        return self._sharing(replace(self, hosted=hosted))

    @cached_property
    def _rewriter(self) -> Rewriter:
        return Rewriter(self.graph, self.profile)

    def _sharing(self, other: "StepRequest") -> "StepRequest":
        """Let another request for the same graph share this one's cached rewriter."""
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
