"""Where a step's costs are from: measured here, recorded elsewhere, or estimated.

The CPU is measured, node by node. Any other device is estimated from its published
figures, but for the convolutions that recordings of it know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.devices import get_device
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.layouts.channels_last import able
from mucudnn.passes.graph.layouts.choice import cheapest_layouts
from mucudnn.passes.graph.layouts.trials import layout_trials
from mucudnn.runtime.database.recordings import read_fronts

__all__ = ["CPU", "Coverage", "StepCosts", "fastest_layouts"]

CPU = "cpu"
"""The device that is measured."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of a step's convolutions are measured, and how many estimated.

    Attributes:
        measured: Nodes whose Pareto fronts are of measurements.
        estimated: All others.
        device: Fingerprint of the device that was recorded; None without a recording.
    """

    measured: int
    estimated: int
    device: str | None = None

    @property
    def words(self) -> str:
        """Measured ones among all."""
        return f"{self.measured} of {self.measured + self.estimated}"


class StepCosts:
    """What a step costs on one device, and why.

    Args:
        graph: Of the step.
        device: `cpu`, or a name in `DEVICES`.
        profile: Of the step, if it was measured; necessary for the CPU.
        recordings: Files with measurements of the device, where it is estimated.

    Attributes:
        profile: Times, workspaces and Pareto fronts.
        coverage: How many of the fronts are measured.

    Raises:
        ValueError: The profile is missing, or recordings know nothing of the step.
        BackendUnavailableError: A recording is missing, or is something else.
    """

    def __init__(
        self,
        graph: Graph,
        device: str,
        profile: Profile | None = None,
        recordings: Sequence[str] = (),
    ) -> None:
        if device == CPU and profile is None:
            raise ValueError("the CPU is measured: pass a profile of the step")
        if device == CPU and recordings:
            raise ValueError(
                "the CPU is measured: recordings are for devices that are estimated"
            )
        self._device = device
        problems = _problems(graph)
        self._recorded = read_fronts(recordings, problems) if recordings else None
        fronts = self._fronts(problems)
        self.profile = profile or estimate(graph, device, fronts=fronts)
        known = problems if device == CPU else [p for p in problems if p in fronts]
        measured = len(known)
        where = None if self._recorded is None else self._recorded.device
        self.coverage = Coverage(measured, len(problems) - measured, where)

    @property
    def figures(self) -> Mapping[str, str]:
        """What costs are based on, in words."""
        if self._device == CPU:
            return {"times": "measured on this machine's CPU, every node"}
        sources = get_device(self._device).sources()
        if self._recorded is None:
            return sources
        share = (
            f"{self.coverage.words} measured on {self.coverage.device}, each kernel "
            f"repeated by itself; {self.coverage.estimated} estimated"
        )
        return {"convolutions": share, **sources}

    def of(self, graph: Graph) -> Profile:
        """The same step as another graph: in parts.

        Raises:
            ValueError: The device is the CPU, where that would have to be measured.
        """
        if self._device == CPU:
            raise ValueError(
                "a step in parts has to be measured on the CPU; a Trainer does it: "
                "Trainer(…, split='auto')"
            )
        fronts = self._fronts(_problems(graph))
        return estimate(graph, self._device, fronts=fronts)

    def at_another_batch(self, graph: Graph) -> Profile:
        """Sizes alone decide what fits; of the CPU they are known unmeasured, too."""
        device = "null" if self._device == CPU else self._device
        fronts = self._fronts(_problems(graph))
        return estimate(graph, device, fronts=fronts, batch_policy="undivided")

    def _fronts(
        self, problems: Sequence[ConvProblem]
    ) -> dict[ConvProblem, tuple[ConvPlan, ...]]:
        return {} if self._recorded is None else self._recorded.fronts(problems)


def fastest_layouts(
    forward: Graph, device: str, recordings: Sequence[str], *, trains: bool
) -> frozenset[str]:
    """Nodes of a network that have channels last where that is predicted to be fastest.

    Raises:
        ValueError: The device is the CPU, where layouts would have to be measured, or
            recordings know nothing of the network.
        BackendUnavailableError: A recording is missing, or is something else.
    """
    if device == CPU:
        raise ValueError(
            "layouts have to be measured on the CPU; a Trainer does it: "
            "Trainer(…, layout='auto')"
        )
    trials = layout_trials(forward, able(forward), trains=trains)
    costs = StepCosts(trials.graph, device, recordings=recordings)
    return cheapest_layouts(forward, trials.costs(costs.profile.node_ms))


def _problems(graph: Graph) -> list[ConvProblem]:
    """One a convolution: equal ones count."""
    return [node.attrs["problem"] for node in graph.nodes if node.op == "conv"]
