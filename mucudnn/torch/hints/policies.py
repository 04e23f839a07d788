"""What a plan does with each forward result, in PyTorch's words.

The backward pass of a plan reads a result where it lies, has it back from the host, or
reads one that was computed again. PyTorch's hints are as coarse as that: what the plan
frees when, and what it computes again more than once, they cannot say.
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
"""Bytes a ms: whatever can be computed again is."""


@dataclass(frozen=True)
class ResultPolicies:
    """What becomes of the forward results that have bytes of their own.

    Attributes:
        of: Tensor -> its policy; views follow what they are views of.
        random: Tensors that were drawn: they are always saved.
        views: The other forward results.
    """

    of: Mapping[str, CheckpointPolicy]
    random: frozenset[str]
    views: frozenset[str]

    @property
    def saved(self) -> frozenset[str]:
        """Tensors that are kept for the backward pass, wherever."""
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
    found: dict[str, CheckpointPolicy] = {}
    random, views = set(), set()
    for node in graph.nodes:
        if node.phase is not Phase.FORWARD:
            continue
        for name in node.outputs:
            if graph.tensors[name].alias is not None:
                views.add(name)
                continue
            drawn = lowered.calls[node.name].random
            if drawn:
                random.add(name)
            found[name] = _policy(name in kept or drawn, name in away)
    return ResultPolicies(MappingProxyType(found), frozenset(random), frozenset(views))


def without_copies(profile: Profile) -> Profile:
    """Costs by which hardly anything leaves: for hints that cannot say so.

    A budget that is not reached by computing again alone still has copies in its plan.
    """
    return replace(profile, out_bytes_per_ms=_NO_LINK, in_bytes_per_ms=_NO_LINK)


def _policy(kept: bool, away: bool) -> CheckpointPolicy:
    if away:
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    if kept:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


def _read_late(plan: StepPlan) -> frozenset[str]:
    """What the forward pass has made and nodes after it read, copies of nodes too."""
    nodes = plan.schedule.graph.nodes

    def forward(node: Node) -> bool:
        return node.phase is Phase.FORWARD and origin(node.name) == node.name

    last = max((i for i, node in enumerate(nodes) if forward(node)), default=-1)
    made = {
        name for node in nodes[: last + 1] if forward(node) for name in node.outputs
    }
    return frozenset(t for node in nodes[last + 1 :] for t in node.inputs if t in made)
