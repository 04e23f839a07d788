"""A plan's policy for each forward result, in PyTorch's terms.

The backward pass of a plan reads a result that was saved, offloaded or recomputed.
PyTorch's hints only say which: not when a plan frees a tensor, nor that it recomputes
one more than once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch.utils.checkpoint import CheckpointPolicy

from mucudnn.ir.graph import Node, Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.scheduling.problem import origin
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.torch.plan_program import PlannedProgram

_NO_LINK = 1e-3
"""Bytes per ms of a link so slow that plans recompute whatever they can."""


@dataclass(frozen=True)
class ResultPolicies:
    """Policies of the forward results that have bytes of their own.

    Attributes:
        of: Tensor -> its policy; views follow their base.
        random: Random tensors, which are always saved.
        views: The other forward results.
        again: Results of nodes that the plan computes again.
    """

    of: Mapping[str, CheckpointPolicy]
    random: frozenset[str]
    views: frozenset[str]
    again: frozenset[str]

    @property
    def saved(self) -> frozenset[str]:
        """Tensors that are saved or offloaded for the backward pass."""
        again = CheckpointPolicy.MUST_RECOMPUTE
        return frozenset(name for name, policy in self.of.items() if policy != again)


def policies_of(program: PlannedProgram) -> ResultPolicies:
    """Return the policy of every result of a planned forward pass."""
    lowered, plan = program.lowered, program.plan
    graph = lowered.graph
    read = _read_late(plan.plan)
    planned = plan.plan.schedule.graph
    gone = set(plan.leaving)
    away = {graph.storages[t] for t in read if planned.storages[t] in gone}
    kept = {graph.storages[name] for name in read}
    twice = {origin(node.name) for node in planned.nodes if "~" in node.name}
    found: dict[str, CheckpointPolicy] = {}
    random: set[str] = set()
    views: set[str] = set()
    again: set[str] = set()
    for node in graph.nodes:
        if node.phase is not Phase.FORWARD:
            continue
        if node.name in twice:
            again.update(node.outputs)
        for name in node.outputs:
            if graph.tensors[name].alias is not None:
                views.add(name)
                continue
            drawn = lowered.calls[node.name].random
            if drawn:
                random.add(name)
            policy = CheckpointPolicy.MUST_RECOMPUTE
            if name in away:
                policy = CheckpointPolicy.MUST_CPU_OFFLOAD
            elif name in kept or drawn:
                policy = CheckpointPolicy.MUST_SAVE
            found[name] = policy
    return ResultPolicies(
        MappingProxyType(found), *map(frozenset, (random, views, again))
    )


def without_copies(profile: Profile) -> Profile:
    """Return costs that make plans recompute instead of offload.

    A plan for a budget that recomputation alone does not reach still has copies.
    """
    return replace(profile, out_bytes_per_ms=_NO_LINK, in_bytes_per_ms=_NO_LINK)


def _read_late(plan: StepPlan) -> frozenset[str]:
    """Return the forward results that later nodes read, recomputed ones among them."""
    nodes = plan.schedule.graph.nodes

    def forward(node: Node) -> bool:
        return node.phase is Phase.FORWARD and origin(node.name) == node.name

    last = max((i for i, node in enumerate(nodes) if forward(node)), default=-1)
    made = {
        name for node in nodes[: last + 1] if forward(node) for name in node.outputs
    }
    return frozenset(t for node in nodes[last + 1 :] for t in node.inputs if t in made)
