"""`study_memory`: one network's training step under a budget, by every policy.

Costs are measured on the CPU. For other devices they are estimated from published
figures, except for convolutions covered by recordings. Ctrl-C ends a study with the
results so far.
"""

import functools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mucudnn.arguments import check_number
from mucudnn.errors import PlanningError
from mucudnn.ir.devices import get_device
from mucudnn.ir.graph import Graph
from mucudnn.ir.sizes import format_bytes, parse_bytes
from mucudnn.ir.tensor import Role
from mucudnn.models import IMAGE
from mucudnn.passes.planning.bound import lower_bound
from mucudnn.passes.planning.cutting import WHOLE, Cutting, Split, check_split, cuttings
from mucudnn.passes.planning.place_step import (
    place_step,
    place_tiered_step,
    placeable_budget,
)
from mucudnn.passes.planning.plan_step import (
    DescribedStep,
    PolicyResult,
    batches_to_compare,
    best_technique,
    budget_for_slowdown,
    fastest_form,
    largest_batch_within,
    minimum_budget,
    try_technique,
    unbounded,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.split_search import SplitDecision, plan_splitting
from mucudnn.passes.registry import by_name, name_of
from mucudnn.passes.residency import (
    PLANNED,
    ResidencyPolicy,
    check_policy,
    policy_names,
)
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.runtime.executor.tiers import TierChoice, parse_tiers
from mucudnn.studies.memory_results import (
    CostedStep,
    MemoryStudy,
    SlowdownBudget,
    StepSpec,
    with_layouts,
)
from mucudnn.studies.step_costs import CPU, Measured


def study_memory(
    step: Graph | StepSpec | DescribedStep,
    *,
    policies: Sequence[str | ResidencyPolicy] | None = None,
    schedulers: Sequence[str | Scheduler] = (),
    budget: int | str | None = None,
    device: str | None = None,
    curve: bool = False,
    max_batch: bool = False,
    min_budget: bool = False,
    slowdown: float | None = None,
    profile: Measured | None = None,
    recordings: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
    split: Split = WHOLE,
    tiers: str | TierChoice | Sequence[str | TierChoice] = (),
) -> MemoryStudy:
    """Plan a training step by every policy and scheduler.

    What does a step of ResNet-18 take on an H100, and what does half of that cost?::

        network = mucudnn.models.get_model("resnet18")(batch=32)
        study = mucudnn.study_memory(network, budget="500MiB", device="h100")
        study.unbounded.peak_bytes, study.minimum
        study.best.policy, study.slowdown(study.best)

    Args:
        step: A network with its loss, a `StepSpec`, or a step of another framework with
            its own costs.
        policies: Names in `policy_names()`, or functions; by default all of them.
        schedulers: Names in `SCHEDULERS`, or functions; by default each policy's own.
        budget: Bytes, or "1.5GiB"; by default the memory of the device.
        device: `cpu`, or a name in `DEVICES`; by default the step's own.
        curve: Whether to plan for several budgets, too.
        max_batch: Whether to search the largest mini-batch of every policy, and to
            predict the throughput of smaller ones.
        min_budget: Whether to search the minimum feasible budget of every policy.
        slowdown: Wanted step time relative to that without a budget, such as 1.05, to
            search about the least budget that keeps it.
        profile: Measured profile of `StepSpec.graph()`, or a function that measures a
            graph; required for the CPU. A function also serves the step without fusion,
            which may fit smaller budgets.
        recordings: Files with measurements of the device, used instead of estimates for
            the convolutions they cover.
        progress: Called with the current activity, the work done, and its total.
        split: Whether the step may run in slices of its batch, as one more technique:
            "none", "auto", the number of parts of its largest layers, "height" for
            spatial tiles, or "height:4" for so many; not on the CPU, where it would
            have to be measured.
        tiers: Offload targets: `host`, `disk:FOLDER`, `peer:DEVICE`, each optionally
            with `=SIZE` and `@RATE` in bytes per second; by default all free memory and
            the measured or published rate. The best step's tensors fill the fastest
            first. Without tiers, host memory is unlimited.

    Raises:
        TypeError: The step is neither a graph nor a `StepSpec`.
        ValueError: A name is unknown, a size out of range, the profile missing, the
            graph cannot be trained, or recordings do not cover the step.
        BackendUnavailableError: A recording is missing or invalid.
    """
    # Refuse contradictions and unknown names before the step is built.
    described = isinstance(step, DescribedStep)
    if described and (device, profile, recordings) != (None, None, ()):
        raise ValueError(
            "a described step has its own costs; pass no profile or recordings"
        )
    spec = step if isinstance(step, DescribedStep) else _as_spec(step, device)
    if max_batch and isinstance(spec, StepSpec) and isinstance(spec.model, Graph):
        raise ValueError(
            f"max_batch needs other batch sizes than {spec.batch}, and a graph has "
            "only one; pass StepSpec(model=…, batch=…) with a name or a function of "
            "the batch"
        )
    if policies is None:
        policies = sorted(policy_names(), key=PLANNED.__eq__)  # the slowest last
    for policy in policies:
        check_policy(policy)
    for scheduler in schedulers:
        SCHEDULERS.resolve(scheduler)
    check_split(split)
    if slowdown is not None:
        check_number("slowdown", slowdown, 1.0)
    if split != WHOLE and not described and spec.device == CPU:
        raise ValueError(
            "on the CPU a divided step has to be measured; use Trainer(…, split='auto')"
        )
    choices = parse_tiers(tiers)
    nbytes = None if budget is None else parse_bytes(budget)
    say = progress or (lambda what, done, total: None)
    say("building the step", 0, 1)
    if isinstance(spec, StepSpec):
        spec = with_layouts(spec, recordings)
    costed = CostedStep(spec, profile, recordings, choices, say, split)
    return MemoryTrials(spec, costed, policies, schedulers, nbytes, say, split).run(
        curve=curve, max_batch=max_batch, min_budget=min_budget, slowdown=slowdown
    )


def _as_spec(step: object, device: str | None) -> StepSpec:
    if isinstance(step, StepSpec):
        return step if device is None else replace(step, device=device)
    if not isinstance(step, Graph):
        raise TypeError(
            f"a step must be a Graph or a StepSpec, got {step!r}; create networks "
            "with mucudnn.models.get_model(NAME)(batch)"
        )
    found = [spec.name for spec in step.with_role(Role.INPUT)]
    if IMAGE not in found:
        raise ValueError(
            f"the graph has the inputs {', '.join(found) or 'none'}; it must have "
            f"{IMAGE!r}, whose first axis is the batch"
        )
    if step.gradients:
        raise ValueError(
            "the graph computes gradients already; pass the network with its loss"
        )
    spec = StepSpec(model=step, batch=step.tensors[IMAGE].shape[0])
    return spec if device is None else replace(spec, device=device)


# Try techniques on a step under a budget: plans, lower bound, placement, limits.
#
# Ctrl-C ends the trials with the results so far.


IN_PARTS = "planned, in parts"
"""PolicyResult that also decides whether a step runs in slices of its batch."""

_SHARES = (1.0, 0.7, 0.5, 0.3)
"""Budgets of the curve, as shares of the unbounded peak; the minimum is added."""

_MOST_ABSENCES = 4000
"""Absences up to which the bound is found: a Llama of 48 layers, in eight seconds."""

_WIDER = (0.0, 0.01, 0.04, 0.16, 1.0)
"""Bytes beyond the unbounded peak with which everything may be placed, as shares."""


class MemoryTrials:
    """The trials of one step by every requested policy and scheduler.

    Without schedulers, each policy uses its own. Without a budget, it is the device's
    memory.
    """

    def __init__(
        self,
        spec: StepSpec | DescribedStep,
        costed: CostedStep,
        policies: Sequence[str | ResidencyPolicy],
        schedulers: Sequence[str | Scheduler],
        budget: int | None,
        say: Callable[[str, int, int], None],
        split: Split,
    ) -> None:
        self._spec, self._costed, self._split, self._say = spec, costed, split, say
        self._policies = by_name("policies", policies)
        self._schedulers = by_name("schedulers", schedulers)
        say("the step without a budget", 0, 1)
        whole, *_ = costed.forms(math.inf)
        self._unbounded = unbounded(whole.graph, whole.profile)
        if budget is None and spec.device != CPU:
            budget = int(get_device(spec.device).memory.value)
        elif budget is None:
            budget = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._budget = budget
        self._found = MemoryStudy(
            spec=spec,
            image=costed.image,
            parameters=costed.parameters,
            budget=budget,
            unbounded=self._unbounded,
            figures=costed.figures,
            convolutions=costed.convolutions,
        )
        self._least_of: dict[tuple[int, str, str], tuple[Graph, int]] = {}
        self._least_of_cutting: dict[tuple[int, Cutting], int | None] = {}
        self._planned: dict[int, list[Graph]] = defaultdict(list)
        self._least_in_parts: int | None = None

    def run(
        self, *, curve: bool, max_batch: bool, min_budget: bool, slowdown: float | None
    ) -> MemoryStudy:
        """Run all trials; Ctrl-C ends them with the results so far."""
        try:
            # What every study has comes first, as Ctrl-C keeps what is complete.
            self._try_techniques()
            if self._splits:
                self._say(IN_PARTS, 0, 1)
                technique, splitting = self._in_parts(self._budget)
                self._keep(splitting=splitting)
                self._keep(techniques=(*self._found.techniques, technique))
            self._bound(self._budget)
            self._place_best()
            self._say("the least budget of any policy", 0, 1)
            self._keep(minimum=self._least_of_all())
            if min_budget:
                self._find_min_budgets()
            if slowdown is not None:
                self._keep(for_slowdown=self._find_budget_for(slowdown))
            if max_batch:
                self._find_max_batches()
                self._compare_batches()
            if curve:
                self._try_budgets()
            if isinstance(self._spec, DescribedStep) and self._spec.scaling:
                self._say("other numbers of devices", 0, 1)
                self._keep(scaling=tuple(self._spec.scaling(self._budget)))
        except KeyboardInterrupt:
            self._keep(interrupted=True)
        return self._found

    def _keep(self, **results: Any) -> None:
        """Add results to the study."""
        self._found = replace(self._found, **results)

    @property
    def _splits(self) -> bool:
        """True if the step may run in parts, and something in it can be cut."""
        return self._split != WHOLE and bool(self._costed.in_parts(self._budget))

    def _trials(
        self, forms: Sequence[StepRequest], policy: str
    ) -> list[list[StepRequest]]:
        """Return the forms of a step for every scheduler, or for the policy's own."""
        asked = [form.planned_by(self._policies[policy]) for form in forms]
        schedulers = self._schedulers.values()
        return [[form.scheduled(s) for form in asked] for s in schedulers] or [asked]

    @property
    def _fastest_policies(self) -> Sequence[str]:
        """Policies that may be fastest: `planned` alone if requested, otherwise all."""
        return [PLANNED] if PLANNED in self._policies else list(self._policies)

    def _try_techniques(self) -> None:
        trials = [
            forms
            for policy in self._policies
            for forms in self._trials(self._costed.forms(self._budget), policy)
        ]
        for i, forms in enumerate(trials):
            self._say(_describe_request(forms[0]), i, len(trials))
            self._keep(techniques=(*self._found.techniques, self._try(forms)))

    def _try(self, forms: Sequence[StepRequest]) -> PolicyResult:
        """Plan the form of a step that `Trainer` runs."""

        def results() -> Iterator[PolicyResult]:
            fastest_ms = math.inf
            for request in forms:
                if math.isfinite(fastest_ms) and request.compute_ms({}) >= fastest_ms:
                    continue  # slower under any plan
                technique = self._as_placed(try_technique(request))
                if request is not forms[-1] and not self._fits(request, technique):
                    technique = replace(technique, plan=None)
                if technique.step_ms is not None:
                    self._planned[technique.budget].append(request.graph)
                    fastest_ms = technique.step_ms
                yield technique

        compare = not self._costed.tiers
        found = fastest_form(results(), lambda one: one.plan, compare=compare)
        assert found is not None, "a step has a form"
        if not found.fits and found.least_bytes is not None:
            found = replace(found, least_bytes=min(map(self._least, forms)))
        return found

    def _as_placed(self, found: PolicyResult) -> PolicyResult:
        """Return a technique whose plan is the step with offsets, as `Trainer` runs it.

        Steps with tiers are placed for the best technique only, and PyTorch's never.
        """
        arena = self._costed.placed and not self._costed.tiers
        if found.plan is None or found.request is None or not arena:
            return found
        try:
            placed = place_step(found.request, found.plan)
        except PlanningError as e:
            self._keep(placement_error=str(e))
            return replace(found, plan=None, least_bytes=e.least_bytes)
        return replace(found, plan=placed.plan, placed=placed)

    def _fits(self, request: StepRequest, found: PolicyResult) -> bool:
        """Return whether a step that could be planned can be placed, too."""
        if not found.fits or not self._costed.tiers:
            return found.fits  # it is placed already
        try:
            if self._least(request) <= request.budget:
                return True
            place_step(request)  # it may fit less than the budget that surely suffices
        except PlanningError:
            return False
        return True

    def _least(self, request: StepRequest) -> int:
        """Return the least budget of a request, in an arena if the step has one."""
        scheduler = "" if request.scheduler is None else name_of(request.scheduler)
        key = id(request.graph), name_of(request.policy), scheduler
        if key not in self._least_of:
            least = placeable_budget if self._costed.placed else minimum_budget
            # The graph is held, as the identity of a freed one could be reused.
            self._least_of[key] = request.graph, least(request)
        return self._least_of[key][1]

    def _bound(self, budget: int) -> None:
        """Find the lower bound on the step time within a budget."""
        least_ms, notes = self._found.least_ms, self._found.bound_note
        if budget in least_ms or budget in notes:
            return
        self._say("the bound of any plan", 0, 1)
        forms, planned = self._costed.forms(budget), self._planned[budget]
        used = [f for f in forms if any(f.graph is graph for graph in planned)]
        bounds = [lower_bound(form, _MOST_ABSENCES) for form in used or forms]
        found = min(bounds, key=lambda bound: bound.step_ms)
        if math.isfinite(found.step_ms):
            self._keep(least_ms={**least_ms, budget: found.step_ms})
        if found.reason:
            self._keep(bound_note={**notes, budget: found.reason})

    def _in_parts(self, budget: int) -> tuple[PolicyResult, SplitDecision | None]:
        """Plan the step in parts, or whole if that is faster."""
        least: list[int] = []

        def results() -> Iterator[tuple[PolicyResult, SplitDecision]]:
            for i, step in enumerate(self._costed.in_parts(budget)):
                try:
                    found = plan_splitting(step, self._split)
                except PlanningError as e:
                    least.extend([] if e.least_bytes is None else [e.least_bytes])
                    continue
                for tried in found.tried:
                    if tried.request is not None and tried.least_bytes is None:
                        continue  # slower under any plan
                    self._least_of_cutting[i, tried.cutting] = tried.least_bytes
                plan = found.chosen.plan
                name = "any" if plan is None else plan.scheduler
                request = found.chosen.request
                technique = PolicyResult(IN_PARTS, name, budget, plan, None, request)
                yield self._as_placed(technique), found

        compare = not self._costed.tiers
        chosen = fastest_form(results(), lambda one: one[0].plan, compare=compare)
        if chosen is not None:
            return chosen
        self._least_in_parts = min(least, default=self._least_in_parts)
        refused = PolicyResult(IN_PARTS, "any", budget, None, min(least, default=None))
        return refused, None

    def _least_of_parts(self) -> int:
        """Return the least budget of all splits, untried ones included."""
        known = self._least_of_cutting
        for i, step in enumerate(self._costed.in_parts(self._budget)):
            for cutting in cuttings(step.graph, self._split):
                if (i, cutting) not in known:
                    self._say(f"the least budget of {cutting}", 0, 1)
                    graph = step.in_parts(cutting)
                    if (costs := step.costs(graph)) is not None:
                        known[i, cutting] = minimum_budget(step.request(graph, costs))
        return min(nbytes for nbytes in known.values() if nbytes is not None)

    def _place_best(self) -> None:
        if (best := self._found.best) is None:
            return
        self._say("places in the arena", 0, 1)
        # The best technique may have been placed when it was planned.
        placed, request = best.placed, best.request
        assert request is not None, "a technique with a plan has a request"
        try:
            if self._costed.tiers:
                placed = place_tiered_step(request, self._costed.tiers)
            elif placed is None:
                placed = place_step(request, best.plan)
            self._keep(placed=placed, placement_error="")
        except PlanningError as e:
            self._keep(placement_error=str(e))

    def _try_budgets(self) -> None:
        most = self._unbounded.peak_bytes
        shares = [int(share * most) for share in _SHARES]
        least = self._found.minimum or 0
        budgets = sorted({*(b for b in shares if b > least), least}, reverse=True)
        done, total = 0, len(budgets) * len(self._policies)
        for budget in budgets:
            for policy in self._policies:
                self._say(f"{policy} within {budget / most:.0%}", done, total)
                forms, *_ = self._trials(self._costed.forms(budget), policy)
                self._keep(curve=(*self._found.curve, self._try(forms)))
                done += 1
            self._bound(budget)
        for budget in budgets if self._splits else ():
            self._say(f"{IN_PARTS} within {budget / most:.0%}", 0, 1)
            self._keep(curve=(*self._found.curve, self._in_parts(budget)[0]))

    def _least_of_policy(self, forms: Sequence[StepRequest], policy: str) -> int:
        """Return the least budget of a policy with any of its schedulers."""
        trials = self._trials(forms, policy)
        return min(self._least(request) for trial in trials for request in trial)

    def _least_of_all(self) -> int:
        """Return the least budget; the planner's own search needs the least."""
        forms, ours = self._costed.forms(0), self._fastest_policies
        whole = min(self._least_of_policy(forms, policy) for policy in ours)
        if self._found.splitting is not None:
            self._least_in_parts = self._least_of_parts()
        return min(whole, self._least_in_parts or whole)

    def _find_min_budgets(self) -> None:
        forms, least = self._costed.forms(0), dict[str, int]()
        for i, policy in enumerate(self._policies):
            self._say(f"least budget of {policy}", i, len(self._policies))
            least[policy] = self._least_of_policy(forms, policy)
            self._keep(min_budget=dict(least))
        if self._least_in_parts is not None:
            self._keep(min_budget={**least, IN_PARTS: self._least_in_parts})

    def _find_max_batches(self) -> None:
        forms = functools.cache(self._costed.at)
        for i, policy in enumerate(self._policies):

            def least(batch: int, policy: str = policy, i: int = i) -> int:
                self._say(f"{policy} at batch {batch}", i, len(self._policies))
                return self._least_of_policy(forms(batch), policy)

            most = largest_batch_within(least, self._budget, start=self._spec.batch)
            self._keep(max_batch={**self._found.max_batch, policy: most})

    def _find_budget_for(self, slowdown: float) -> SlowdownBudget:
        """Find about the least budget in which a step is no slower than wanted."""
        known: dict[int, PolicyResult] = {}

        def slowdown_at(budget: int) -> float:
            self._say(f"the slowdown within {format_bytes(budget)}", 0, 1)
            found = self._fastest_of(self._costed.forms(budget))
            if self._splits:
                parts, _ = self._in_parts(budget)
                found = best_technique(filter(None, (found, parts)))
            if found is None or found.step_ms is None:
                return math.inf
            known[budget] = found
            return found.step_ms / self._unbounded.prediction.step_ms

        try:
            budget = budget_for_slowdown(
                slowdown, self._found.minimum or 0, self._most(slowdown), slowdown_at
            )
        except PlanningError as e:
            return SlowdownBudget(slowdown, None, str(e))
        return SlowdownBudget(slowdown, known[budget])

    def _most(self, slowdown: float) -> int:
        """Return a budget in which everything is kept, and placed without more time."""
        nbytes = self._unbounded.peak_bytes
        if not self._costed.placed:
            return nbytes
        enough_ms = slowdown * self._unbounded.prediction.step_ms
        for share in _WIDER:
            budget = int((1 + share) * nbytes)
            whole, *_ = self._costed.forms(budget)
            kept = self._try([whole.planned_by("keep_all")])
            if kept.step_ms is not None and kept.step_ms <= enough_ms:
                break
        return budget

    def _compare_batches(self) -> None:
        """Plan batches up to the largest one, to compare their throughput."""
        most = max(self._found.max_batch.values(), default=0)
        if self._spec.device == CPU and self._costed.placed:
            return  # every batch would have to be measured
        for batch in batches_to_compare(most):
            self._say(f"the throughput at batch {batch}", 0, 1)
            try:
                forms = self._costed.at(batch, self._budget, timed=True)
            except PlanningError:  # too large to be divided into micro-batches
                continue
            found = self._fastest_of(forms)
            if found is not None:
                self._keep(by_batch={**self._found.by_batch, batch: found})

    def _fastest_of(self, forms: Sequence[StepRequest]) -> PolicyResult | None:
        """Return the fastest technique that fits, of a step in several forms."""
        return best_technique(
            self._try(trial)
            for policy in self._fastest_policies
            for trial in self._trials(forms, policy)
        )


def _describe_request(request: StepRequest) -> str:
    free = request.policy == PLANNED and request.scheduler is None
    return f"{name_of(request.policy)}, " + (
        "any scheduler" if free else name_of(request.timing)
    )
