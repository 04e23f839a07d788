"""A step to be studied with its costs, wherever either is from."""

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
        step: At its own batch, without a budget.
        at: Batch -> the same at another one, as far as decides what fits.
        in_parts: Budget -> what decides about slices of its batch; None: it runs whole.
        image: Shape of a sample.
        parameters: Elements of all.
        figures: What costs are based on, in words.
        convolutions: How many are measured.
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
    """A step with its costs: measured, recorded, estimated, or those that it brings.

    Args:
        spec: The step.
        profile: Of the step, if it was measured; necessary for the CPU.
        recordings: Files with measurements of the device.
        progress: Called with what is being done, how much is done, and of how much.

    Raises:
        ValueError: The profile is missing, or recordings know nothing of the step.
        BackendUnavailableError: A recording is missing, or is something else.
    """
    if isinstance(spec, DescribedStep):
        return _described(spec)
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
        {**_precision(spec), **_layouts(spec, graph), **costs.figures},
        costs.coverage,
    )


def with_layouts(spec: StepSpec, recordings: Sequence[str] = ()) -> StepSpec:
    """A step in which it is decided which images have channels last.

    Raises:
        ValueError: That would have to be measured, or recordings know nothing of it.
        BackendUnavailableError: A recording is missing, or is something else.
    """
    if spec.layout != AUTO or spec.channels_last is not None:
        return spec
    trains = not spec.inference
    nodes = fastest_layouts(spec.network(), spec.device, recordings, trains=trains)
    return replace(spec, channels_last=nodes)


def _precision(spec: StepSpec) -> Mapping[str, str]:
    """Which types there are, in words; nothing where nobody asked."""
    if spec.precision is None:
        return {}
    words = "in convolutions, products and what follows them; parameters and updates "
    return {"precision": f"{spec.precision} {words}in the network's own type"}


def _layouts(spec: StepSpec, graph: Graph) -> Mapping[str, str]:
    """Which layouts there are, in words; nothing where nobody asked."""
    if spec.layout == "NCHW":
        return {}
    kinds = [node.attrs["problem"].layout for node in graph.nodes if node.op == "conv"]
    turned = [node for node in graph.nodes if node.op.startswith("to_channels")]
    moved = sum(graph.tensors[name].nbytes for n in turned for name in n.outputs)
    return {
        "layout": f"channels last in {kinds.count('NHWC')} of {len(kinds)} "
        f"convolutions; {format_bytes(moved)} are turned, in {len(turned)} copies"
    }


def _described(step: DescribedStep) -> CostedStep:
    return CostedStep(
        step.request(step.batch),
        step.request,
        None,
        step.image,
        step.parameters,
        step.figures,
        Coverage(0, 0),
    )
