"""Whether a PyTorch step runs whole, in slices of its batch or in strips: planned each.

Every candidate is a lowered graph of its own with measurements of its own, planned
under the same budget; what is predicted to be fastest runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting.choice import SplitStep, plan_splitting
from mucudnn.passes.planning.splitting.cutting import AUTO, HEIGHT, Split
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.planning import Planner
from mucudnn.torch.splitting.axes import Axis
from mucudnn.torch.splitting.cut import in_slices
from mucudnn.torch.splitting.norms import with_norms_in_parts
from mucudnn.torch.splitting.prepare import prepared
from mucudnn.torch.splitting.shape_operands import without_shape_operands
from mucudnn.torch.splitting.traits import Batched, with_batches, with_strips
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["PartedStep", "batched_step", "in_parts", "plan_in_parts", "stripped_step"]

_IMAGES = 3
"""Axes that images have at least, (N, C, *spatial)."""


def batched_step(lowered: Lowered, names: Sequence[str]) -> Batched | None:
    """A step of which is known where the batch is.

    Args:
        lowered: The step, without updates in place.
        names: Of its inputs, in order; those of a batch begin with `batch.`.

    Returns:
        None if no tensor of the batch has an axis, or there is one sample only.
    """
    shapes = _batch_shapes(lowered, names)
    samples = next((shape[0] for shape in shapes.values() if shape), 0)
    given = [name for name, shape in shapes.items() if shape[:1] == (samples,)]
    if samples < 2:
        return None
    found = with_batches(prepared(lowered), given, samples)
    return found if found.cuts and set(given) & found.axes.keys() else None


def stripped_step(lowered: Lowered, names: Sequence[str]) -> Batched | None:
    """A step of which is known where the height of its images is, depth of volumes.

    Images are the tensors of the batch with the most axes, (N, C, *spatial); those with
    one less are labels, (N, *spatial).

    Args:
        lowered: The step, without updates in place.
        names: Of its inputs, in order; those of a batch begin with `batch.`.

    Returns:
        None if there are no images, or nothing is computed by their rows.
    """
    shapes = _batch_shapes(lowered, names)
    most = max(map(len, shapes.values()), default=0)
    if most < _IMAGES:
        return None
    images = {
        name: Axis(2 if len(shape) == most else 1)
        for name, shape in shapes.items()
        if len(shape) >= most - 1
    }
    ready = with_norms_in_parts(without_shape_operands(prepared(lowered)))
    found = with_strips(ready, images)
    return found if found.cuts and images.keys() & found.axes.keys() else None


def _batch_shapes(
    lowered: Lowered, names: Sequence[str]
) -> Mapping[str, tuple[int, ...]]:
    """Tensors of the batch, and their sizes."""
    of_name = zip(names, lowered.inputs, strict=True)
    batch = [t for n, t in of_name if t is not None and n.startswith("batch.")]
    return {name: lowered.layouts[name].shape for name in batch}


def in_parts(
    lowered: Lowered,
    names: Sequence[str],
    make: Callable[[Lowered], Planner],
    *,
    strips: bool = False,
) -> "_Candidates | None":
    """What plans a step whole and in parts, or strips; None if none can be cut."""
    batched = stripped_step(lowered, names) if strips else batched_step(lowered, names)
    return None if batched is None else _Candidates(lowered, batched, make)


def plan_in_parts(
    lowered: Lowered,
    names: Sequence[str],
    make: Callable[[Lowered], Planner],
    budget: float,
    split: Split,
) -> tuple[Planner, TorchPlan]:
    """The fastest way to run a step within a budget, whole or in parts.

    Args:
        lowered: The step, without updates in place.
        names: Of its inputs.
        make: Measures a step, with its updates.
        budget: Bytes.
        split: `auto`, a number of parts, `height` or `height:4`.

    Raises:
        PlanningError: Nothing fits; says the least budget that works.
        UnsupportedError: A number of parts was given and nothing can be cut.
    """
    strips = isinstance(split, str) and split.startswith(HEIGHT)
    candidates = in_parts(lowered, names, make, strips=strips)
    if candidates is None and split == AUTO:  # one sample, perhaps a large one
        candidates = in_parts(lowered, names, make, strips=True)
    if candidates is None and strips:
        raise UnsupportedError(
            f"the step was to run in strips, split={split!r}, but its batch has no "
            "images, (N, C, height, width) or with a depth, or no operation on their "
            "rows can be cut; ask for a number of parts of its batch"
        )
    if candidates is None:
        if split == AUTO:
            planner = make(lowered)
            return planner, planner.plan(budget)
        raise UnsupportedError(
            f"the step was to run in {split} parts, but its batch has one sample, or "
            "no operation on it can be cut; split='height' cuts images, split='auto' "
            "runs it whole where nothing can be cut"
        )
    return candidates.planned(budget, split)


@dataclass(frozen=True)
class PartedStep:
    """A step that may run in parts, under any budget.

    Attributes:
        lowered: The step, without updates in place.
        names: Of its inputs.
        make: Costs a step, with its updates.
        split: As `plan_in_parts` takes it.
    """

    lowered: Lowered
    names: Sequence[str]
    make: Callable[[Lowered], Planner]
    split: Split

    def plan(self, budget: float) -> TorchPlan:
        """The fastest way within a budget; raises as `plan_in_parts` does."""
        _, plan = plan_in_parts(self.lowered, self.names, self.make, budget, self.split)
        return plan

    def least_budget(self) -> int:
        """The least bytes that it is planned in, by any of the ways it may run."""
        try:
            return self.plan(0).peak_bytes
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            return e.least_bytes


@dataclass(frozen=True)
class _Planned:
    graph: Graph
    planner: Planner


class _Candidates:
    """A step whole and in parts, each made and measured when it is asked for."""

    def __init__(
        self, whole: Lowered, batched: Batched, make: Callable[[Lowered], Planner]
    ) -> None:
        self._whole, self._batched, self._make = whole, batched, make
        self._made: list[_Planned] = []

    def planned(self, budget: float, split: Split) -> tuple[Planner, TorchPlan]:
        """The fastest within a budget.

        Raises:
            PlanningError: Nothing fits.
        """
        try:
            found = plan_splitting(self.step(budget), split)
        except PlanningError as e:
            given = self._made[0].planner.given_bytes
            if e.least_bytes is None:
                raise
            least = e.least_bytes - given
            raise PlanningError(
                f"neither whole nor in parts does the step fit into "
                f"{exact_bytes(int(budget))}; the least budget that works is "
                f"{exact_bytes(least)}",
                short_by=least - int(budget),
                least_bytes=least,
            ) from None
        chosen = found.chosen
        if chosen.request is None or chosen.plan is None:
            raise PlanningError("the step has no plan")
        planner = self._planner(chosen.request.graph)
        plan = chosen.plan if not planner.tiers else planner.decided(chosen.request)
        told = planner.described(plan, budget)
        return planner, replace(told, splitting=found)

    def step(self, budget: float) -> SplitStep:
        """What is planned, and how it is asked for."""

        def asked(graph: Graph, profile: Profile) -> StepRequest:
            return self._planner(graph).request(budget)

        return SplitStep(self._batched.graph, self._finished, self._costs, asked)

    def _finished(self, graph: Graph) -> Graph:
        """A step with its updates, and a planner of it."""
        whole = graph is self._batched.graph
        planner = self._make(self._whole if whole else in_slices(self._batched, graph))
        self._made.append(_Planned(planner.lowered.graph, planner))
        return planner.lowered.graph

    def _costs(self, graph: Graph) -> Profile:
        return self._planner(graph).profile

    def _planner(self, graph: Graph) -> Planner:
        nodes = graph.nodes
        return next(m.planner for m in self._made if m.graph.nodes is nodes)
