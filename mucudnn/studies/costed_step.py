"""A step to be studied with its costs, wherever either is from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.profile import Profile
from mucudnn.models import IMAGE
from mucudnn.passes.planning.described_step import DescribedStep
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting import SplitStep
from mucudnn.studies.memory_findings import StepSpec
from mucudnn.studies.step_costs import Coverage, StepCosts

__all__ = ["CostedStep", "costed_step"]


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
        costs.figures,
        costs.coverage,
    )


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
