"""One network's training step under a budget, by every policy asked for.

Costs are measured on the CPU, and estimated from published figures for everything
else, but for convolutions that recordings of the device know. Ctrl-C ends a study with
what is done.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.devices import get_device
from mucudnn.ir.graph import Graph, Role
from mucudnn.ir.optimizers import Optimizer, optimizer_of
from mucudnn.ir.profile import Profile
from mucudnn.ir.shapes import Ints
from mucudnn.ir.sizes import parse_bytes
from mucudnn.models import IMAGE, get_model, network_name
from mucudnn.notebook import drawn
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.optimizer_updates import with_updates
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.planning.comparison import (
    Technique,
    best_technique,
    largest_batch_within,
    least_budget,
    own_scheduler,
    try_technique,
    unbounded,
)
from mucudnn.passes.planning.evaluate import StepPlan, state_bytes
from mucudnn.passes.planning.place_step import PlacedStep, place_step
from mucudnn.passes.planning.plan_step import PLANNED, check_policy, policy_names
from mucudnn.passes.registry import by_name, name_of
from mucudnn.passes.residency import ResidencyPolicy
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.studies.step_costs import CPU, Coverage, StepCosts

__all__ = ["CPU", "SHARES", "MemoryStudy", "StepSpec", "study_memory"]

SHARES = (1.0, 0.7, 0.5, 0.3)
"""Budgets of the curve, as shares of what the unbounded step takes; then the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """Which training step.

    Attributes:
        model: As `get_model` knows it: a name, or a function of the batch; or a graph
            for that batch.
        batch: Images in a mini-batch.
        image: Another size of image than the model's.
        optimizer: A name in `OPTIMIZERS`, or an optimizer.
        order: A name in `ORDERS`, or a function.
        device: `cpu`, or a name in `DEVICES`.
    """

    model: str | Callable[..., Graph] | Graph
    batch: int
    image: Ints | None = None
    optimizer: str | Optimizer = "momentum"
    order: str | Order = "builder"
    device: str = "h200"

    @property
    def title(self) -> str:
        """What the network is called."""
        return "graph" if isinstance(self.model, Graph) else network_name(self.model)

    def graph(self, batch: int | None = None) -> Graph:
        """The training step with its updates, in its order.

        Raises:
            ValueError: A name is not known, or a size out of range.
        """
        if isinstance(self.model, Graph):
            forward = self.model
        else:
            forward = get_model(self.model)(batch or self.batch, image=self.image)
        step = with_updates(training_graph(forward), optimizer_of(self.optimizer))
        return ordered(self.order, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStudy:
    """What came of it.

    Attributes:
        spec: The step.
        image: Shape of an image: (C, *spatial).
        parameters: Elements of all parameters.
        budget: Bytes.
        unbounded: The step with all the memory it could use.
        minimum: The least budget that any of the techniques can run it in.
        figures: What costs are based on, in words.
        convolutions: How many of them are measured.
        techniques: One for every policy and scheduler.
        placed: The best of them with fixed offsets in one arena, if places were found.
        unplaced: Why none were, where there is a best one.
        curve: The same under several budgets, with the first of the schedulers.
        max_batch: Policy -> the largest mini-batch within the budget, if asked for.
        min_budget: Policy -> the least budget, if asked for.
        interrupted: Whether Ctrl-C ended it early.
    """

    spec: StepSpec
    image: tuple[int, ...]
    parameters: int
    budget: int
    unbounded: StepPlan
    minimum: int | None
    figures: Mapping[str, str]
    convolutions: Coverage
    techniques: tuple[Technique, ...]
    placed: PlacedStep | None = None
    unplaced: str = ""
    curve: tuple[Technique, ...] = ()
    max_batch: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    min_budget: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    interrupted: bool = False

    @property
    def measured(self) -> bool:
        """Whether all times are measurements, none estimates."""
        return self.spec.device == CPU

    @property
    def device(self) -> str:
        """The device in words."""
        if self.measured:
            return "measured on the CPU"
        estimated = f"estimated for {get_device(self.spec.device).title}"
        if not self.convolutions.measured:
            return estimated
        return f"{estimated}, {self.convolutions.words} convolutions measured"

    @property
    def costs(self) -> str:
        """In a word or two, what times are."""
        if self.measured:
            return "measured"
        return "partly measured" if self.convolutions.measured else "estimated"

    @property
    def unbounded_ms(self) -> float:
        """Predicted time of the unbounded step."""
        return self.unbounded.prediction.step_ms

    @property
    def best(self) -> Technique | None:
        """The fastest that fits."""
        return best_technique(self.techniques)

    def slowdown(self, technique: Technique) -> float | None:
        """A step's time over the unbounded one's."""
        ms = technique.step_ms
        return None if ms is None else ms / self.unbounded_ms

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "schema": 1,
            "model": self.spec.title,
            "batch": self.spec.batch,
            "image": list(self.image),
            "parameters": self.parameters,
            "optimizer": name_of(self.spec.optimizer),
            "order": name_of(self.spec.order),
            "device": self.spec.device,
            "costs": self.costs,
            "figures": dict(self.figures),
            "convolutions": dataclasses.asdict(self.convolutions),
            "budget_bytes": self.budget,
            "unbounded_bytes": self.unbounded.peak_bytes,
            "minimum_bytes": self.minimum,
            "rows": [self._row(technique) for technique in self.techniques],
            "placed": self.placed and _placed(self.placed),
            "curve": [{"budget_bytes": t.budget, **self._row(t)} for t in self.curve],
            "max_batch": dict(self.max_batch),
            "min_budget_bytes": dict(self.min_budget),
            "interrupted": self.interrupted,
        }

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("memory_study", self)

    def _row(self, technique: Technique) -> dict[str, Any]:
        plan = technique.plan
        prediction = None if plan is None else plan.prediction
        return {
            "policy": technique.policy,
            "scheduler": technique.scheduler,
            "peak_bytes": technique.peak_bytes,
            "fits": technique.fits,
            "short_bytes": technique.short_bytes,
            "offloaded_bytes": prediction and prediction.out_bytes,
            "hosted_bytes": plan and _hosted_bytes(plan),
            "recomputed_nodes": plan and plan.recomputed,
            "predicted_ms": technique.step_ms,
            "unbounded_ms": self.unbounded_ms,
            "bound_ms": prediction and prediction.bound_ms,
            "slowdown": self.slowdown(technique),
            "stalls_ms": dict(prediction.stalls_ms) if prediction else None,
            "best": technique is self.best,
        }


def _placed(placed: PlacedStep) -> dict[str, Any]:
    return {
        "policy": placed.plan.policy,
        "scheduler": placed.plan.scheduler,
        "arena_bytes": placed.layout.nbytes,
        "resident_bytes": placed.state_bytes,
        "live_peak_bytes": placed.layout.live_peak,
        "fragmentation": placed.layout.fragmentation,
        "predicted_ms": placed.plan.prediction.step_ms,
    }


def _hosted_bytes(plan: StepPlan) -> int:
    """Bytes of parameters and state that are at home on the host."""
    return state_bytes(plan.schedule.graph, plan.schedule.hosted)


def study_memory(
    step: Graph | StepSpec,
    *,
    policies: Sequence[str | ResidencyPolicy] | None = None,
    schedulers: Sequence[str | Scheduler] = (),
    budget: int | str | None = None,
    device: str | None = None,
    curve: bool = False,
    max_batch: bool = False,
    min_budget: bool = False,
    profile: Profile | None = None,
    recordings: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> MemoryStudy:
    """Plan a training step by every policy and scheduler.

    What does a step of ResNet-18 take on an H100, and what does half of that cost?::

        network = mucudnn.models.get_model("resnet18")(batch=32)
        study = mucudnn.study_memory(network, budget="500MiB", device="h100")
        study.unbounded.peak_bytes, study.minimum
        study.best.policy, study.slowdown(study.best)

    Args:
        step: A network with its loss, or more about its step.
        policies: Names in `policy_names()`, or functions; if not given, all of them.
        schedulers: Names in `SCHEDULERS`, or functions; if not given, each policy's
            own.
        budget: Bytes, or "1.5GiB"; by default what the device has.
        device: `cpu`, or a name in `DEVICES`; if not given, the step's own.
        curve: Whether to plan for several budgets, too.
        max_batch: Whether to look for the largest mini-batch of every policy.
        min_budget: Whether to look for the least budget of every policy.
        profile: Of the step, if it was measured; necessary for the CPU.
        recordings: Files with measurements of the device: convolutions that they know
            are not estimated.
        progress: Called with what is being done, how much is done, and of how much.

    Raises:
        TypeError: The step is neither a graph nor a `StepSpec`.
        ValueError: A name is not known, a size out of range, the profile missing, the
            recordings know nothing of the step, or the graph is none to be trained.
        BackendUnavailableError: A recording is missing, or is something else.
    """
    spec = _spec_of(step) if device is None else replace(_spec_of(step), device=device)
    if max_batch and isinstance(spec.model, Graph):
        raise ValueError(
            f"max_batch needs other batches than {spec.batch}, and a graph has one; "
            "pass StepSpec(model=…, batch=…) with a name or a function of the batch"
        )
    if policies is None:
        policies = sorted(policy_names(), key=PLANNED.__eq__)  # the slowest comes last
    for policy in policies:
        check_policy(policy)
    for scheduler in schedulers:
        SCHEDULERS.resolve(scheduler)
    nbytes = None if budget is None else parse_bytes(budget)
    say = progress or (lambda what, done, total: None)
    say("building the step", 0, 1)
    graph = spec.graph()
    say("what its operations cost", 0, 1)
    costs = StepCosts(graph, spec.device, profile, recordings)
    return _Study(spec, graph, costs, policies, schedulers, nbytes, say).run(
        curve=curve, max_batch=max_batch, min_budget=min_budget
    )


def _spec_of(step: object) -> StepSpec:
    if isinstance(step, StepSpec):
        return step
    if not isinstance(step, Graph):
        raise TypeError(
            f"a step is a Graph or a StepSpec, got {step!r}; networks are made with "
            "mucudnn.models.get_model(NAME)(batch)"
        )
    found = [spec.name for spec in step.with_role(Role.INPUT)]
    if IMAGE not in found:
        raise ValueError(
            f"the graph has the inputs {', '.join(found) or 'none'}; {IMAGE!r} is "
            "wanted, whose first axis is the batch"
        )
    if step.gradients:
        raise ValueError(
            "the graph computes gradients already; pass the network with its loss"
        )
    return StepSpec(model=step, batch=step.tensors[IMAGE].shape[0])


class _Study:
    def __init__(
        self,
        spec: StepSpec,
        graph: Graph,
        costs: StepCosts,
        policies: Sequence[str | ResidencyPolicy],
        schedulers: Sequence[str | Scheduler],
        budget: int | None,
        say: Callable[[str, int, int], None],
    ) -> None:
        self._spec, self._graph, self._costs = spec, graph, costs
        self._policies = by_name("policies", policies)
        self._schedulers = by_name("schedulers", schedulers)
        self._say = say
        self._profile = costs.profile
        say("the step without a budget", 0, 1)
        self._unbounded = unbounded(self._graph, self._profile)
        self._budget = _memory_of(spec.device) if budget is None else budget
        self._minimum: int | None = None
        self._techniques: list[Technique] = []
        self._placed: PlacedStep | None = None
        self._unplaced = ""
        self._curve: list[Technique] = []
        self._max_batch: dict[str, int] = {}
        self._min_budget: dict[str, int] = {}

    def run(self, *, curve: bool, max_batch: bool, min_budget: bool) -> MemoryStudy:
        interrupted = False
        try:
            self._try_techniques()
            self._place_best()
            self._say("the least budget of any policy", 0, 1)
            self._minimum = self._least_of_all()
            if min_budget:
                self._find_min_budgets()
            if max_batch:
                self._find_max_batches()
            if curve:
                self._try_budgets()
        except KeyboardInterrupt:
            interrupted = True
        return MemoryStudy(
            spec=self._spec,
            image=tuple(self._graph.tensors[IMAGE].shape[1:]),
            parameters=self._graph.parameter_count,
            budget=self._budget,
            unbounded=self._unbounded,
            minimum=self._minimum,
            figures=self._costs.figures,
            convolutions=self._costs.coverage,
            techniques=tuple(self._techniques),
            placed=self._placed,
            unplaced=self._unplaced,
            curve=tuple(self._curve),
            max_batch=self._max_batch,
            min_budget=self._min_budget,
            interrupted=interrupted,
        )

    def _schedulers_of(self, policy: str) -> Sequence[str]:
        return tuple(self._schedulers) or (own_scheduler(policy),)

    def _try(self, policy: str, scheduler: str, budget: int) -> Technique:
        return try_technique(
            self._graph,
            self._profile,
            self._policies[policy],
            self._schedulers.get(scheduler, scheduler),
            budget,
        )

    def _try_techniques(self) -> None:
        pairs = [(p, s) for p in self._policies for s in self._schedulers_of(p)]
        for i, (policy, scheduler) in enumerate(pairs):
            self._say(f"{policy}, {scheduler}", i, len(pairs))
            self._techniques.append(self._try(policy, scheduler, self._budget))

    def _place_best(self) -> None:
        best = best_technique(self._techniques)
        if best is not None:
            self._say("places in the arena", 0, 1)
            try:
                self._placed = place_step(
                    self._graph,
                    self._profile,
                    budget=self._budget,
                    policy=self._policies[best.policy],
                    scheduler=self._schedulers.get(best.scheduler, best.scheduler),
                    plan=best.plan,
                )
            except PlanningError as e:
                self._unplaced = str(e)

    def _try_budgets(self) -> None:
        most = self._unbounded.peak_bytes
        shares = [int(share * most) for share in SHARES]
        least = self._minimum or 0
        budgets = sorted({*(b for b in shares if b > least), least}, reverse=True)
        pairs = [(budget, policy) for budget in budgets for policy in self._policies]
        for i, (budget, policy) in enumerate(pairs):
            self._say(f"{policy} within {budget / most:.0%}", i, len(pairs))
            self._curve.append(
                self._try(policy, self._schedulers_of(policy)[0], budget)
            )

    def _least(self, policy: str) -> int:
        """The least budget of a policy with any of its schedulers."""
        return self._least_of(self._graph, self._profile, policy)

    def _least_of(self, graph: Graph, profile: Profile, policy: str) -> int:
        return min(
            least_budget(
                graph,
                profile,
                self._policies[policy],
                self._schedulers.get(scheduler, scheduler),
            )
            for scheduler in self._schedulers_of(policy)
        )

    def _least_of_all(self) -> int:
        """The least budget of any technique; none needs less than our own search."""
        ours = (PLANNED,) if PLANNED in self._policies else self._policies
        return min(map(self._least, ours))

    def _find_min_budgets(self) -> None:
        for i, policy in enumerate(self._policies):
            self._say(f"least budget of {policy}", i, len(self._policies))
            self._min_budget[policy] = self._least(policy)

    def _find_max_batches(self) -> None:
        @functools.cache
        def step(batch: int) -> tuple[Graph, Profile]:
            graph = self._spec.graph(batch)
            return graph, self._costs.at_another_batch(graph)

        @functools.cache
        def least(batch: int, policy: str) -> int:
            return self._least_of(*step(batch), policy)

        for i, policy in enumerate(self._policies):

            def say(batch: int, policy: str = policy, i: int = i) -> None:
                self._say(f"{policy} at batch {batch}", i, len(self._policies))

            self._max_batch[policy] = largest_batch_within(
                functools.partial(least, policy=policy),
                self._budget,
                start=self._spec.batch,
                progress=say,
            )


def _memory_of(device: str) -> int:
    if device != CPU:
        return int(get_device(device).memory.value)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
