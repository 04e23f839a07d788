"""`compile_layers`: equal layers of a model, compiled one by one under one budget.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    mt.compile_layers(model.layers, budget="8GiB")

Dynamo compiles equal layers to one graph, which runs once for every layer. At the end
of the forward pass every layer holds what its backward pass needs, so a plan of the
graph alone says nothing about the memory of all of them. Here the graph is planned with
two limits: on its own peak, and on the bytes that it holds between its passes, of which
there are as many as there are layers.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mucudnn.arguments import check_type
from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.planning.cutting import WHOLE
from mucudnn.runtime.environment import USERS
from mucudnn.runtime.executor.tiers import TierChoice
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.compile_backend import CompileBackend
from mucudnn.torch.lowering.lowered import NOTHING, Lowered
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_program import (
    LoweredStep,
    PlannedProgram,
    PlanOptions,
    least_budget,
    plan_program,
)
from mucudnn.torch.plan_store import PlanCacheChoice
from mucudnn.torch.planning import Planner, parse_budget, too_small

_BETWEEN = "between the passes"
"""Node whose scratch memory limits what a graph holds between its passes."""

_NOTHING_ELSE = 1 << 50
"""Scratch bytes beside which only the least is held."""

_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Peaks of the graph to try, between its least and what it has without a budget."""

_BUFFERS = 3
"""Unsharded layers that FSDP2 holds beside the one that runs: the layer that it gathers
ahead, twice while that is copied out of the gathered buffer, and the gradients that it
reduces."""


def compile_layers(
    layers: Iterable[torch.nn.Module],
    *,
    budget: float | str | None = None,
    tuner: Tuner | None = None,
    cache: PlanCacheChoice = USERS,
    inductor: bool = False,
    tiers: str | TierChoice | Sequence[str | TierChoice] = (),
) -> CompileBackend:
    """Compile equal layers of a model in place, under one budget for all of them.

    The budget counts the parameters of the layers, their gradients, and everything
    between the first layer's forward pass and its backward pass. Under `fully_shard`
    these are the shards of this rank, and the budget includes the buffers in which
    FSDP2 gathers a layer ahead and reduces gradients. What is outside of the layers
    (embeddings, a head, the loss, the optimizer's state) is not counted.

    All ranks compile equal layers under equal budgets; each plans for itself.

    Args:
        layers: Modules that run one after the other in every step, each once, all of
            one class with parameters of the same shapes; sharded all, or none.
        budget: Bytes, or a size such as "8GiB"; None plans without a limit.
        tuner: As `backend` takes it.
        cache: As `backend` takes it.
        inductor: As `backend` takes it.
        tiers: As `backend` takes it.

    Returns:
        The backend: `plans` has the plan of one layer, `peak_bytes` counts all layers.

    Raises:
        ValueError: There are no layers, or they differ; otherwise as `backend`.
        TypeError: An argument has the wrong type.
    """
    found = list(layers)
    for layer in found:
        check_type("layers", layer, torch.nn.Module, "torch.nn.Module objects")
    if not found:
        raise ValueError("layers is empty; pass the model's layers, model.layers")
    kinds = {_kind(layer) for layer in found}
    if len(kinds) != 1:
        raise ValueError(
            "layers must be equal in class, parameters and fully_shard, and there "
            f"are {len(kinds)} kinds; compile each kind with a share of the budget"
        )
    limit = parse_budget(budget)
    options = PlanOptions.of(
        "backend", limit, tuner=tuner, cache=cache, inductor=inductor, tiers=tiers
    )
    sharded = isinstance(found[0], FSDPModule)
    copies = _Layers(len(found), sharded, _held_by_fsdp(found) if sharded else 0)
    compiled = CompileBackend(limit, options, planned=partial(_plan_layers, copies))
    for layer in found:
        layer.compile(backend=compiled)
    return compiled


@dataclass(frozen=True)
class _Layers:
    """The number of layers that run one graph.

    Attributes:
        count: Number of layers.
        sharded: Whether FSDP2 frees a layer's parameters behind each of its passes.
        held: Bytes that FSDP2 holds: the shards, their gradients, and its buffers.
    """

    count: int
    sharded: bool
    held: int

    def total(self, peak: int, between: int, parameters: int, passed: int) -> int:
        """Return the peak of all layers.

        The worst moment is in the last layer, while all others wait for their backward
        passes, or in the first, while all others have gradients.

        Args:
            peak: Peak of one layer.
            between: Bytes that it holds between its passes, parameters included.
            parameters: Bytes of its parameters.
            passed: Bytes that layers pass to one another.
        """
        others = (self.count - 1) * (between - parameters)
        if not self.sharded and self.count > 1:
            # In the first layer's backward pass its incoming gradient is there, too.
            others = (self.count - 1) * max(between, 2 * parameters) + passed
        return peak + others + self.held

    def between(self, budget: float, peak: int, parameters: int, passed: int) -> float:
        """Return the most that a layer may hold between its passes; see `total`."""
        left = budget - self.held - peak
        if not self.sharded and self.count > 1:
            left -= passed
        if self.count == 1 or left < 0:
            return peak if left >= 0 else -1
        other = left / (self.count - 1)
        if self.sharded:
            return other + parameters
        return other if other >= 2 * parameters else -1


def _plan_layers(
    layers: _Layers, step: LoweredStep, options: PlanOptions, budget: float
) -> tuple[PlannedProgram, int]:
    """Plan the graph of equal layers; return it with the peak of all of them."""
    planner = _marked(step.planner(options))
    parameters, passed = planner.resident_bytes, planner.caller_bytes

    def limited(scratch: int) -> LoweredStep:
        known = replace(
            planner,
            profile=replace(
                planner.profile,
                workspaces={**planner.profile.workspaces, _BETWEEN: scratch},
            ),
        )
        planners = {replace(options, split=WHOLE): known}
        return replace(step, lowered=planner.lowered, planners=planners)

    def planned(peak: float, between: float) -> tuple[PlannedProgram, int]:
        scratch = max(0, int(peak - between)) if between < peak else 0
        found = plan_program(limited(scratch), options, peak)
        # A peak that is only the scratch memory is not the layer's.
        own = found.plan.peak_bytes
        return found, layers.total(own, _held_between(found.plan), parameters, passed)

    # Without a limit, a layer runs at full speed: done if all layers fit so.
    free, total = planned(float("inf"), float("inf"))
    if total <= budget:
        return free, total
    # Else trade the peak of one layer against what all hold between their passes.
    least = least_budget(limited(0), options)
    peaks = [int(least + s * (free.plan.peak_bytes - least)) for s in _SHARES]
    found = []
    for peak in peaks:
        between = layers.between(budget, peak, parameters, passed)
        if between >= 0:
            with suppress(PlanningError):
                found.append(planned(peak, between))
    if found:
        return min(found, key=lambda row: row[0].plan.plan.prediction.step_ms)
    # Nothing fits: find the least budget for the message.
    held = least_budget(limited(_NOTHING_ELSE), options) - _NOTHING_ELSE
    for peak in reversed(peaks):
        try:
            planned(peak, held)
        except PlanningError:
            continue
        needed = layers.total(peak, held, parameters, passed)
        raise too_small(
            f"{layers.count} layers do not fit into {exact_bytes(int(budget))}: each "
            f"holds {exact_bytes(held)} between its passes; the least budget that "
            f"works is {exact_bytes(needed)}",
            *(budget, needed),
        )
    raise PlanningError("the layers cannot be planned under any budget")


def _held_between(plan: TorchPlan) -> int:
    """Return the bytes that a plan holds between its passes, without the caller's."""
    graph = plan.plan.schedule.graph
    at = graph.positions[_BETWEEN]
    inputs = {graph.storages[name] for name in graph.inputs}
    return plan.resident_bytes + sum(
        i.nbytes
        for i in plan.plan.intervals
        if i.start <= at <= i.stop and i.storage not in inputs
    )


def _marked(planner: Planner) -> Planner:
    """Return a planner of the graph with a node between its passes."""
    lowered: Lowered = planner.lowered
    graph = lowered.graph
    cut = next(
        (i for i, n in enumerate(graph.nodes) if n.phase is not Phase.FORWARD),
        len(graph.nodes),
    )
    node = Node(_BETWEEN, "nothing", (), (), phase=Phase.FORWARD)
    marked = Graph(
        graph.tensors, (*graph.nodes[:cut], node, *graph.nodes[cut:]), graph.outputs
    )
    calls = MappingProxyType({**lowered.calls, _BETWEEN: NOTHING})
    return replace(
        planner,
        lowered=replace(lowered, graph=marked, calls=calls),
        profile=replace(
            planner.profile, node_ms={**planner.profile.node_ms, _BETWEEN: 0.0}
        ),
    )


def _kind(layer: torch.nn.Module) -> object:
    """Return what is equal for equal layers."""
    shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in layer.named_parameters())
    return type(layer), isinstance(layer, FSDPModule), shapes


def _held_by_fsdp(layers: Sequence[torch.nn.Module]) -> int:
    """Return the bytes of all shards and their gradients, and of FSDP2's buffers."""
    shards: int = sum(
        p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes
        for layer in layers
        for p in layer.parameters()
    )
    whole: int = sum(p.numel() * p.element_size() for p in layers[0].parameters())
    return 2 * shards + _BUFFERS * whole
