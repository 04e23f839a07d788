"""Inputs and results of a memory study: `StepSpec` and `MemoryStudy`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mucudnn.ir.channels_last import AUTO
from mucudnn.ir.conv import Ints
from mucudnn.ir.devices import get_device
from mucudnn.ir.graph import Graph
from mucudnn.ir.optimizers import Optimizer, optimizer_of
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import STATIC
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import IMAGE, get_model, network_name
from mucudnn.notebook import html_of
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.layouts import stored
from mucudnn.passes.graph.precision import LOSS_SCALES, lowered
from mucudnn.passes.graph.training_step import answers_of, up_to
from mucudnn.passes.graph.updates import with_computed_gradients, with_updates
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.planning.cutting import SplitStep
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
from mucudnn.studies.step_costs import CPU, Coverage, StepCosts, fastest_layouts


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

    @property
    def title(self) -> str:
        """Name of the network."""
        return "graph" if isinstance(self.model, Graph) else network_name(self.model)

    def graph(self, batch: int | None = None) -> Graph:
        """Return the training step with updates, or the network for inference.

        Raises:
            ValueError: A name is not known, or a size out of range.
        """
        return self.finished(self.gradients(batch))

    def gradients(self, batch: int | None = None) -> Graph:
        """Return the network with its backward pass, before updates are added.

        Raises:
            ValueError: A name is not known, or a size out of range.
        """
        forward = stored(self.network(batch), self.layout, self.channels_last)
        if self.inference:
            return forward
        return training_graph(forward, loss_scale=self._loss_scale)

    def network(self, batch: int | None = None) -> Graph:
        """Return the network in its precision, cut at its answers for inference.

        Raises:
            ValueError: A name is not known, or a size out of range.
        """
        if isinstance(self.model, Graph):
            forward = self.model
        else:
            forward = get_model(self.model)(
                batch or self.batch, image=self.image, training=not self.inference
            )
        if self.inference:
            forward = _cut_at_answers(forward)
        return forward if self.precision is None else lowered(forward, self.precision)

    def finished(self, gradients: Graph) -> Graph:
        """Add updates to a graph with gradients, and order its nodes."""
        if self.inference:
            return ordered(self.order, gradients)
        step = with_updates(
            with_computed_gradients(gradients),
            optimizer_of(self.optimizer),
            gradient_scale=1 / self._loss_scale,
        )
        return ordered(self.order, step)

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.precision is None else LOSS_SCALES[self.precision]


def _cut_at_answers(forward: Graph) -> Graph:
    """Return a network up to the tensor that the loss compares with labels."""
    answers = answers_of(forward)
    if answers is None:
        raise ValueError(
            "nothing is compared with the labels: which tensors are answers is not "
            "known"
        )
    return up_to(forward, answers)


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
        unplaced: Why placement of the best one failed.
        least_ms: Budget -> lower bound on the step time of any plan.
        loose: Budget -> why its bound is only the compute time, if it is.
        curve: Results for several budgets, with the first scheduler.
        max_batch: Policy -> largest mini-batch within the budget, if requested.
        min_budget: Policy -> minimum feasible budget, if requested.
        splitting: Decision whether to split the step within the budget; None if not
            requested or nothing fits.
        interrupted: Whether Ctrl-C ended the study early.
    """

    spec: StepSpec | DescribedStep
    image: tuple[int, ...]
    parameters: int
    budget: int
    unbounded: StepPlan
    minimum: int | None
    figures: Mapping[str, str]
    convolutions: Coverage
    techniques: tuple[PolicyResult, ...]
    placed: PlacedStep | None = None
    unplaced: str = ""
    least_ms: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    loose: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    curve: tuple[PolicyResult, ...] = ()
    max_batch: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    min_budget: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    splitting: SplitDecision | None = None
    interrupted: bool = False

    @property
    def measured(self) -> bool:
        """Whether all times are measurements, none estimates."""
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
        """Whether the step is inference only."""
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
        return {
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


@dataclass(frozen=True, slots=True)
class CostedStep:
    """A step with its costs.

    Attributes:
        step: The step at its own batch, without a budget.
        at: Batch -> the step at another batch, precise enough to decide what fits.
        in_parts: Budget -> request to choose a split of its batch; None if it runs
            whole.
        image: Shape of a sample.
        parameters: Number of elements of all parameters.
        figures: Sources of the costs in words.
        convolutions: Number of measured convolutions.
    """

    step: StepRequest
    at: Callable[[int], StepRequest]
    in_parts: Callable[[int], SplitStep] | None
    image: tuple[int, ...]
    parameters: int
    figures: Mapping[str, str]
    convolutions: Coverage


def costed_step(
    spec: StepSpec | DescribedStep,
    profile: Profile | None = None,
    recordings: Sequence[str] = (),
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> CostedStep:
    """Return a step with its costs: measured, recorded, estimated, or its own."""
    if isinstance(spec, DescribedStep):
        return CostedStep(
            spec.request(spec.batch),
            spec.request,
            None,
            spec.image,
            spec.parameters,
            spec.figures,
            Coverage(0, 0),
        )
    graph = spec.graph()
    progress("what its operations cost", 0, 1)
    costs = StepCosts(graph, spec.device, profile, recordings)

    def at(batch: int) -> StepRequest:
        other = spec.graph(batch)
        return StepRequest(other, costs.at_another_batch(other))

    def in_parts(budget: int) -> SplitStep:
        return SplitStep(
            spec.gradients(),
            spec.finished,
            costs.of,
            lambda graph, costs: StepRequest(
                graph, costs, budget=budget, placement=spec.placement
            ),
        )

    return CostedStep(
        StepRequest(graph, costs.profile, placement=spec.placement),
        at,
        in_parts,
        tuple(graph.tensors[IMAGE].shape[1:]),
        graph.parameter_count,
        {**_precision_words(spec), **_layout_words(spec, graph), **costs.figures},
        costs.coverage,
    )


def with_layouts(spec: StepSpec, recordings: Sequence[str] = ()) -> StepSpec:
    """Decide which images of a step have channels last, if its layout is `auto`."""
    if spec.layout != AUTO or spec.channels_last is not None:
        return spec
    trains = not spec.inference
    nodes = fastest_layouts(spec.network(), spec.device, recordings, trains=trains)
    return replace(spec, channels_last=nodes)


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
