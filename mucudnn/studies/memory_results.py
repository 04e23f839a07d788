"""Inputs and results of a memory study: `StepSpec`, `CostedStep`, `MemoryStudy`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mucudnn.arguments import check_bool, check_type
from mucudnn.ir.channels_last import AUTO
from mucudnn.ir.conv import Ints
from mucudnn.ir.devices import device_name, get_device
from mucudnn.ir.fleet import ScalingRow
from mucudnn.ir.graph import Graph
from mucudnn.ir.optimizers import Optimizer, optimizer_of
from mucudnn.ir.profile import MemoryTier, Profile
from mucudnn.ir.schedule import STATIC
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import IMAGE, get_model, network_name
from mucudnn.notebook import html_of
from mucudnn.passes.graph.layouts import with_layout
from mucudnn.passes.graph.precision import copies_of_parameters
from mucudnn.passes.graph.training_step import (
    StepChoices,
    StepRecipe,
    build_gradients,
    build_step,
    can_fuse,
    complete_step,
)
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.planning.cutting import WHOLE, Split, SplitStep
from mucudnn.passes.planning.place_step import fits_resident, over_fastest
from mucudnn.passes.planning.plan_step import (
    DescribedStep,
    PolicyResult,
    best_technique,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.split_search import SplitDecision
from mucudnn.passes.registry import name_of
from mucudnn.passes.scheduling.problem import state_bytes
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.executor.tiers import TierChoice
from mucudnn.runtime.profiling.links import forecast_tiers
from mucudnn.studies.step_costs import (
    CPU,
    Coverage,
    Measured,
    StepCosts,
    fastest_layouts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """A training step, or an inference step, to be studied.

    Attributes:
        model: Model as accepted by `get_model`: a name, or a function of the batch; or
            a graph for that batch.
        batch: Images in a mini-batch.
        image: Image size if not the model's own.
        optimizer: A name in `OPTIMIZERS`, or an optimizer.
        order: A name in `ORDERS`, or a function.
        device: `cpu`, or a name in `DEVICES`.
        inference: Whether to run inference only, up to the tensor that the loss
            compares with labels. A graph is taken as it is.
        placement: A name in `PLACEMENTS`.
        layout: Storage of images, of `LAYOUT_CHOICES`.
        precision: Type of convolutions, products and what follows them: `float16` or
            `bfloat16`; the network's own if not given.
        channels_last: Nodes whose images have channels last, if `auto` is decided.
    """

    model: str | Callable[..., Graph] | Graph
    batch: int
    image: Ints | None = None
    optimizer: str | Optimizer = "momentum"
    order: str | Order = "builder"
    device: str = "h200"
    inference: bool = False
    placement: str = STATIC
    layout: str = "NCHW"
    precision: str | None = None
    channels_last: frozenset[str] | None = None

    def __post_init__(self) -> None:
        check_bool("inference", self.inference)
        if self.channels_last is not None:
            check_type("channels_last", self.channels_last, frozenset, "a frozenset")
        if not isinstance(self.device, str) or self.device != CPU:
            object.__setattr__(self, "device", device_name(self.device))

    @property
    def title(self) -> str:
        """Name of the network."""
        return "graph" if isinstance(self.model, Graph) else network_name(self.model)

    @property
    def recipe(self) -> StepRecipe:
        """Recipe of the step, for `build_step`."""
        return StepRecipe(
            optimizer=optimizer_of(self.optimizer),
            precision=self.precision,
            inference=self.inference,
        )

    @property
    def choices(self) -> StepChoices:
        """Choices for `build_step` without a budget: layouts of images."""
        return StepChoices(
            layout=lambda g, _: with_layout(g, self.layout, self.channels_last)
        )

    def graph(self, batch: int | None = None) -> Graph:
        """Return the step that `Trainer` runs without a budget, its nodes in order.

        Raises:
            ValueError: A name is not known, or a size out of range.
        """
        step = build_step(self.network(batch), self.recipe, self.choices).steps[-1]
        return ordered(self.order, step)

    def network(self, batch: int | None = None) -> Graph:
        """Return the network with its loss.

        Raises:
            ValueError: A name is not known, or a size out of range.
        """
        if isinstance(self.model, Graph):
            return self.model
        return get_model(self.model)(
            batch or self.batch, image=self.image, training=not self.inference
        )


@dataclass(frozen=True, slots=True)
class SlowdownBudget:
    """About the least budget that keeps a slowdown.

    Attributes:
        slowdown: Wanted time relative to the step without a budget.
        technique: The fastest technique within that budget; None if no budget keeps
            the slowdown.
        reason: Why there is none.
    """

    slowdown: float
    technique: PolicyResult | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStudy:
    """Result of `study_memory`.

    Attributes:
        spec: The step.
        image: Shape of an image: (C, *spatial).
        parameters: Number of elements of all parameters.
        budget: Budget in bytes.
        unbounded: Plan of the step without a budget.
        minimum: Minimum feasible budget of all techniques.
        figures: Sources of the costs in words.
        convolutions: Number of measured convolutions.
        techniques: One result per policy and scheduler.
        placed: The best of them with fixed offsets in one arena, if placement
            succeeded.
        placement_error: Why placement of the best one failed.
        least_ms: Budget -> lower bound on the step time of any plan.
        bound_note: Budget -> why its bound is only the compute time, if it is.
        curve: Results for several budgets, with the first scheduler.
        max_batch: Policy -> largest mini-batch within the budget, if requested.
        min_budget: Policy -> minimum feasible budget, if requested.
        for_slowdown: About the least budget that keeps a slowdown, if requested.
        by_batch: Batch -> the fastest technique within the budget, up to the largest
            batch, if that is requested and times are not measured.
        splitting: Decision whether to split the step within the budget; None if not
            requested or nothing fits.
        scaling: The fastest way that fits for several numbers of devices, of a step
            on more than one.
        interrupted: Whether Ctrl-C ended the study early.
    """

    spec: StepSpec | DescribedStep
    image: tuple[int, ...]
    parameters: int
    budget: int
    unbounded: StepPlan
    minimum: int | None = None
    figures: Mapping[str, str]
    convolutions: Coverage
    techniques: tuple[PolicyResult, ...] = ()
    placed: PlacedStep | None = None
    placement_error: str = ""
    least_ms: Mapping[int, float] = field(default_factory=dict)
    bound_note: Mapping[int, str] = field(default_factory=dict)
    curve: tuple[PolicyResult, ...] = ()
    max_batch: Mapping[str, int] = field(default_factory=dict)
    min_budget: Mapping[str, int] = field(default_factory=dict)
    for_slowdown: SlowdownBudget | None = None
    by_batch: Mapping[int, PolicyResult] = field(default_factory=dict)
    splitting: SplitDecision | None = None
    scaling: tuple[ScalingRow, ...] = ()
    interrupted: bool = False

    @property
    def measured(self) -> bool:
        """True if all times are measured and none is estimated."""
        return self.spec.device == CPU

    @property
    def device(self) -> str:
        """Device and source of its costs, in words."""
        if self.measured:
            return "measured on the CPU"
        estimated = f"estimated for {get_device(self.spec.device).title}"
        if not self.convolutions.measured:
            return estimated
        return f"{estimated}, {self.convolutions.words} convolutions measured"

    @property
    def costs(self) -> str:
        """Source of the times: measured, partly measured or estimated."""
        if self.measured:
            return "measured"
        return "partly measured" if self.convolutions.measured else "estimated"

    @property
    def inference(self) -> bool:
        """True if the step is inference only."""
        return isinstance(self.spec, StepSpec) and self.spec.inference

    @property
    def kind(self) -> str:
        """Name of the optimizer, or inference."""
        return "inference" if self.inference else name_of(self.spec.optimizer)

    @property
    def unbounded_ms(self) -> float:
        """Predicted time of the unbounded step."""
        return self.unbounded.prediction.step_ms

    @property
    def best(self) -> PolicyResult | None:
        """Fastest technique that fits."""
        return best_technique(self.techniques)

    @property
    def samples_per_s(self) -> Mapping[int, float]:
        """Predicted throughput of the batches that were compared."""
        found = {batch: t.step_ms for batch, t in self.by_batch.items()}
        return {batch: 1e3 * batch / ms for batch, ms in found.items() if ms}

    @property
    def best_batch(self) -> int | None:
        """Batch with the highest throughput of those that were compared."""
        rates = self.samples_per_s
        return max(rates, key=lambda batch: rates[batch], default=None)

    def slowdown(self, technique: PolicyResult) -> float | None:
        """Return a technique's step time over the unbounded one's."""
        ms = technique.step_ms
        return None if ms is None else ms / self.unbounded_ms

    def gap(self, technique: PolicyResult) -> float | None:
        """Return the relative gap between a step time and its lower bound."""
        least, ms = self.least_ms.get(technique.budget), technique.step_ms
        return None if ms is None or not least else max(0.0, ms / least - 1)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        data: dict[str, Any] = {
            "schema": 1,
            "model": self.spec.title,
            "batch": self.spec.batch,
            "image": list(self.image),
            "parameters": self.parameters,
            "optimizer": name_of(self.spec.optimizer),
            "inference": self.inference,
            "order": name_of(self.spec.order),
            "device": self.spec.device,
            "costs": self.costs,
            "figures": dict(self.figures),
            "convolutions": dataclasses.asdict(self.convolutions),
            "budget_bytes": self.budget,
            "unbounded_bytes": self.unbounded.peak_bytes,
            "minimum_bytes": self.minimum,
            "rows": [self._row(technique) for technique in self.techniques],
            "placed": self.placed and _placement_row(self.placed),
            "curve": [{"budget_bytes": t.budget, **self._row(t)} for t in self.curve],
            "max_batch": dict(self.max_batch),
            "min_budget_bytes": dict(self.min_budget),
            "splitting": None if self.splitting is None else self.splitting.to_json(),
            "interrupted": self.interrupted,
        }
        # What was not asked for is absent.
        if self.scaling:
            data["scaling"] = list(map(dataclasses.asdict, self.scaling))
        if (kept := self.for_slowdown) is not None:
            found = kept.technique
            data["for_slowdown"] = {
                "slowdown": kept.slowdown,
                "budget_bytes": found and found.budget,
                "policy": found and found.policy,
                "scheduler": found and found.scheduler,
                "predicted_slowdown": found and self.slowdown(found),
            }
        if self.by_batch:
            data["throughput"] = [
                {
                    "batch": batch,
                    "policy": self.by_batch[batch].policy,
                    "scheduler": self.by_batch[batch].scheduler,
                    "predicted_ms": self.by_batch[batch].step_ms,
                    "samples_per_s": rate,
                    "best": batch == self.best_batch,
                }
                for batch, rate in self.samples_per_s.items()
            ]
        return data

    _repr_html_ = html_of

    def _row(self, technique: PolicyResult) -> dict[str, Any]:
        plan = technique.plan
        prediction = None if plan is None else plan.prediction
        return {
            "policy": technique.policy,
            "scheduler": technique.scheduler,
            "peak_bytes": technique.peak_bytes,
            "fits": technique.fits,
            "short_bytes": technique.short_bytes,
            "offloaded_bytes": prediction and prediction.out_bytes,
            "hosted_bytes": plan
            and state_bytes(plan.schedule.graph, plan.schedule.hosted),
            "recomputed_nodes": plan and plan.recomputed,
            "predicted_ms": technique.step_ms,
            "unbounded_ms": self.unbounded_ms,
            "bound_ms": prediction and prediction.bound_ms,
            "least_ms": self.least_ms.get(technique.budget),
            "gap": self.gap(technique),
            "slowdown": self.slowdown(technique),
            "stalls_ms": dict(prediction.stalls_ms) if prediction else None,
            "best": technique is self.best,
        }


def _placement_row(placed: PlacedStep) -> dict[str, Any]:
    tiers = placed.plan.prediction.placement
    return {
        "policy": placed.plan.policy,
        "scheduler": placed.plan.scheduler,
        "arena_bytes": placed.layout.nbytes,
        "resident_bytes": placed.state_bytes,
        "live_peak_bytes": placed.layout.live_peak,
        "fragmentation": placed.layout.fragmentation,
        "mapped_chunks": placed.layout.mapped_chunks,
        "map_ms": placed.map_ms,
        "predicted_ms": placed.plan.prediction.step_ms,
        "tiers": tiers and tiers.to_json(),
    }


# A training step with its costs: measured, recorded, estimated, or supplied.


class CostedStep:
    """A step with its costs: measured, recorded, estimated, or its own.

    A budget decides between forms of a step, as it does in `Trainer`: the fused one is
    preferred, the one without fusion may need less or be faster within the budget, and
    converted copies of parameters are kept where everything fits. Forms are listed in
    the order of preference.

    Attributes:
        tiers: Offload targets; none means unlimited host memory.
        placed: Whether the step runs in an arena, which may be larger than its peak.
        image: Shape of a sample.
        parameters: Number of elements of all parameters.
        figures: Sources of the costs in words.
        convolutions: Number of measured convolutions.
    """

    def __init__(
        self,
        spec: StepSpec | DescribedStep,
        measured: Measured | None = None,
        recordings: Sequence[str] = (),
        tiers: Sequence[TierChoice] = (),
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        split: Split = WHOLE,
    ) -> None:
        self._spec, self.placed = spec, isinstance(spec, StepSpec)
        self._known: dict[tuple[int, bool, bool, bool], StepRequest | None] = {}
        if isinstance(spec, DescribedStep):  # a step of another framework
            self._own = spec.request(spec.batch)
            cut = None if split == WHOLE else spec.in_parts
            self._parts = None if cut is None else cut(split)
            profile, self.convolutions = self._own.profile, Coverage(0, 0)
            self.image, self.parameters = spec.image, spec.parameters
            figures = spec.figures
        else:
            self._network_step, graph = spec, spec.graph()
            progress("what its operations cost", 0, 1)
            self._costs = StepCosts(graph, spec.device, measured, recordings)
            profile, self.convolutions = self._costs.profile, self._costs.coverage
            self.image = tuple(graph.tensors[IMAGE].shape[1:])
            self.parameters = graph.parameter_count
            figures = {
                **_precision_words(spec),
                **_layout_words(spec, graph),
                **self._costs.figures,
            }
        self.tiers: tuple[MemoryTier, ...] = ()
        if tiers:
            self.tiers = forecast_tiers(tiers, profile, measured=spec.device == CPU)
        if isinstance(spec, DescribedStep):
            self._own = over_fastest(self._own, self.tiers)
        self.figures = {**figures, **_tier_words(self.tiers)}
        self.forms = functools.cache(functools.partial(self.at, spec.batch, timed=True))

    def at(
        self, batch: int, budget: float = 0, *, timed: bool = False
    ) -> Sequence[StepRequest]:
        """Return the forms of the step at a batch size, within a budget.

        Unless they are `timed`, nothing is measured: costs decide what fits only.
        """
        spec = self._spec
        if isinstance(spec, DescribedStep):
            if batch == spec.batch:
                return [self._own.within(budget)]
            return [over_fastest(spec.request(batch), self.tiers).within(budget)]
        network, found = spec.network(batch), []
        for recipe in self._recipes(network):
            form = functools.partial(self._form, network, recipe, batch, timed)
            request = form(keep_copies=True)
            # Copies of parameters that have no room are left out.
            if (
                request is not None
                and copies_of_parameters(request.graph)
                and not fits_resident(request.within(budget))
            ):
                request = form(keep_copies=False)
            if request is not None:
                found.append(request.within(budget))
        if not found:
            raise ValueError(
                "the profile belongs to another step; pass one of StepSpec.graph(), "
                "or a function that measures a graph"
            )
        return found

    def in_parts(self, budget: float) -> Sequence[SplitStep]:
        """Return the forms within a budget, to choose a split of their batch."""
        spec = self._spec
        if isinstance(spec, DescribedStep):
            return [] if self._parts is None else [self._parts.within(budget)]
        network, costs = spec.network(), self._costs.of

        def request(graph: Graph, profile: Profile) -> StepRequest:
            return self._request(graph, profile).within(budget)

        def fits(step: Graph) -> bool:
            graph = ordered(spec.order, step)
            profile = costs(graph)
            return profile is not None and fits_resident(request(graph, profile))

        choices = replace(spec.choices, keep_copies=fits)

        def step(recipe: StepRecipe) -> SplitStep:
            return SplitStep(
                build_gradients(network, recipe, choices),
                lambda g: ordered(spec.order, complete_step(g, recipe, choices)[-1]),
                costs,
                request,
            )

        return [step(recipe) for recipe in self._recipes(network)]

    def _recipes(self, network: Graph) -> Sequence[StepRecipe]:
        """Return the recipes of the forms of a network's step, the preferred first."""
        recipe = self._network_step.recipe
        return [recipe, *([replace(recipe, fuse=False)] * can_fuse(network, recipe))]

    def _form(
        self,
        network: Graph,
        recipe: StepRecipe,
        batch: int,
        timed: bool,
        *,
        keep_copies: bool,
    ) -> StepRequest | None:
        key = batch, timed, recipe.fuse, keep_copies
        if key not in self._known:
            spec = self._network_step
            choices = replace(spec.choices, keep_copies=lambda step: keep_copies)
            graph = build_step(network, recipe, choices).steps[-1]
            graph = ordered(spec.order, graph)
            costs = self._costs.of if timed else self._costs.at_another_batch
            profile = costs(graph)
            self._known[key] = (
                None if profile is None else self._request(graph, profile)
            )
        return self._known[key]

    def _request(self, graph: Graph, profile: Profile) -> StepRequest:
        placement = self._network_step.placement
        request = StepRequest(graph, profile, placement=placement)
        return over_fastest(request, self.tiers)


def with_layouts(spec: StepSpec, recordings: Sequence[str] = ()) -> StepSpec:
    """Decide which images of a step have channels last, if its layout is `auto`."""
    if spec.layout != AUTO or spec.channels_last is not None:
        return spec
    chosen: frozenset[str] = frozenset()

    def choose(graph: Graph, trains: bool) -> Graph:
        nonlocal chosen
        chosen = fastest_layouts(graph, spec.device, recordings, trains=trains)
        return graph

    build_gradients(spec.network(), spec.recipe, StepChoices(layout=choose))
    return replace(spec, channels_last=chosen)


def _precision_words(spec: StepSpec) -> Mapping[str, str]:
    """Describe the step's types; empty for the network's own."""
    if spec.precision is None:
        return {}
    words = "in convolutions, products and what follows them; parameters and updates "
    return {"precision": f"{spec.precision} {words}in the network's own type"}


def _layout_words(spec: StepSpec, graph: Graph) -> Mapping[str, str]:
    """Describe the step's layouts; empty for channels first."""
    if spec.layout == "NCHW":
        return {}
    kinds = [node.attrs["problem"].layout for node in graph.nodes if node.op == "conv"]
    turned = [node for node in graph.nodes if node.op.startswith("to_channels")]
    moved = sum(graph.tensors[name].nbytes for n in turned for name in n.outputs)
    return {
        "layout": f"channels last in {kinds.count('NHWC')} of {len(kinds)} "
        f"convolutions; {format_bytes(moved)} are turned, in {len(turned)} copies"
    }


def _tier_words(tiers: Sequence[MemoryTier]) -> Mapping[str, str]:
    """Describe tiers, such as `disk:/scratch 1.2 GB/s out, 2.5 GB/s back`."""
    words = (
        f"{tier.name} {tier.out_bytes_per_ms / 1e6:.3g} GB/s out, "
        f"{tier.in_bytes_per_ms / 1e6:.3g} GB/s back"
        for tier in tiers
    )
    return {"tiers": "; ".join(words)} if tiers else {}
