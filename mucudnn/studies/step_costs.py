"""Determine a step's costs: measured, recorded, or estimated.

Costs on the CPU are measured node by node. For other devices they are estimated from
published figures, except for convolutions covered by recordings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.devices import get_device
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.layouts import (
    channels_last_nodes,
    cheapest_layouts,
    layout_trials,
)
from mucudnn.runtime.store.recordings import read_fronts

CPU = "cpu"
"""The device that is measured."""

Measured = Profile | Callable[[Graph], Profile]
"""A measured profile of a step, or a function that measures a graph."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Numbers of measured and estimated convolutions of a step.

    `device` is the fingerprint of the recorded device; None without a recording.
    """

    measured: int
    estimated: int
    device: str | None = None

    @property
    def words(self) -> str:
        """Measured ones among all, such as `3 of 12`."""
        return f"{self.measured} of {self.measured + self.estimated}"


class StepCosts:
    """Costs of a step on one device, and their sources.

    The CPU has to be `measured`; `recordings` are of an estimated device.

    Attributes:
        profile: Times, workspaces and Pareto fronts of the graph.
        coverage: Number of measured fronts.
    """

    def __init__(
        self,
        graph: Graph,
        device: str,
        measured: Measured | None = None,
        recordings: Sequence[str] = (),
    ) -> None:
        if device == CPU and measured is None:
            raise ValueError("the CPU is measured: pass a profile of the step")
        if device == CPU and recordings:
            raise ValueError(
                "the CPU is measured: recordings are for estimated devices"
            )
        self._device, self._measured = device, measured
        problems = _conv_problems(graph)
        self._recorded = read_fronts(recordings, problems) if recordings else None
        self.profile = measured if isinstance(measured, Profile) else self._costs(graph)
        self._known = graph
        fronts = self._fronts(problems)
        known = sum(device == CPU or problem in fronts for problem in problems)
        where = None if self._recorded is None else self._recorded.device
        self.coverage = Coverage(known, len(problems) - known, where)

    @property
    def figures(self) -> Mapping[str, str]:
        """Sources of the costs, in words."""
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

    def of(self, graph: Graph) -> Profile | None:
        """Return the costs of a graph of the same step; None without a measurement."""
        if graph == self._known:
            return self.profile
        if isinstance(self._measured, Profile):
            names = {node.name for node in graph.nodes}
            return self._measured if names == self._measured.node_ms.keys() else None
        return self._costs(graph)

    def _costs(self, graph: Graph) -> Profile:
        if callable(self._measured):
            return self._measured(graph)
        fronts = self._fronts(_conv_problems(graph))
        return estimate(graph, self._device, fronts=fronts, tf32=True)

    def at_another_batch(self, graph: Graph) -> Profile:
        """Return estimated costs with exact sizes; nothing is measured."""
        device = "null" if self._device == CPU else self._device
        fronts = self._fronts(_conv_problems(graph))
        return estimate(
            graph, device, fronts=fronts, batch_policy="undivided", tf32=True
        )

    def _fronts(
        self, problems: Sequence[ConvProblem]
    ) -> dict[ConvProblem, tuple[ConvPlan, ...]]:
        return {} if self._recorded is None else self._recorded.fronts(problems)


def fastest_layouts(
    forward: Graph, device: str, recordings: Sequence[str], *, trains: bool
) -> frozenset[str]:
    """Return the nodes that are predicted to be fastest with channels last."""
    if device == CPU:
        raise ValueError(
            "on the CPU layouts have to be measured; use Trainer(…, layout='auto')"
        )
    trials = layout_trials(forward, channels_last_nodes(forward), trains=trains)
    costs = StepCosts(trials.graph, device, recordings=recordings)
    return cheapest_layouts(forward, trials.costs(costs.profile.node_ms))


def _conv_problems(graph: Graph) -> list[ConvProblem]:
    """Return one problem per convolution, with repetitions."""
    return [node.attrs["problem"] for node in graph.nodes if node.op == "conv"]
