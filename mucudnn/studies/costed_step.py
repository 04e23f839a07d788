"""A training step with its costs: measured, recorded, estimated, or supplied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.channels_last import AUTO
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import IMAGE
from mucudnn.passes.planning.described_step import DescribedStep
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting.choice import SplitStep
from mucudnn.studies.memory_findings import StepSpec
from mucudnn.studies.step_costs import Coverage, StepCosts, fastest_layouts

__all__ = ["CostedStep", "costed_step", "with_layouts"]


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
