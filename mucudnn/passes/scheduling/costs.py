"""What nodes cost once their convolutions' plans are chosen: times and workspaces.

A profile is of the graph as it was given. Copies of its nodes, which a rewritten graph
has, cost what their originals cost.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.liveness import rounded

__all__ = [
    "CONVOLUTIONS",
    "fastest_of",
    "first_plans",
    "origin",
    "profile_of",
    "state_bytes",
    "timed_by",
    "without_others",
    "workspaces_of",
]

T = TypeVar("T")

CONVOLUTIONS = ("dynamic", "fastest", "least", "fixed")
"""How convolutions get their workspace: what is free, all they want, nothing, or as
planned before."""


def origin(node: str) -> str:
    """The node that a rematerialized one is a copy of; itself if it is none."""
    return node.partition("~")[0]


def without_others(profile: Profile, graph: Graph) -> Profile:
    """A profile of a graph's nodes and no others."""
    names = [node.name for node in graph.nodes]
    if len(names) == len(profile.node_ms):
        return profile
    fronts, workspaces = profile.fronts, profile.workspaces
    return replace(
        profile,
        node_ms={name: profile.node_ms[name] for name in names},
        workspaces={name: workspaces[name] for name in names if name in workspaces},
        fronts={name: fronts[name] for name in names if name in fronts},
    )


def profile_of(graph: Graph, profile: Profile) -> Profile:
    """A profile with entries for the copies in a rematerialized graph.

    Args:
        graph: Rematerialized.
        profile: Of the graph that it is made of, and of no other nodes.
    """
    copies = [node.name for node in graph.nodes if "~" in node.name]
    if not copies:
        return profile
    origins = [(name, origin(name)) for name in copies]
    again = {name: profile.again_ms(node) for name, node in origins}
    return replace(
        profile,
        node_ms={**profile.node_ms, **again},
        workspaces=_with_copies(profile.workspaces, origins),
        fronts=_with_copies(profile.fronts, origins),
    )


def _with_copies(
    known: Mapping[str, T], origins: Iterable[tuple[str, str]]
) -> dict[str, T]:
    return {**known, **{name: known[node] for name, node in origins if node in known}}


def first_plans(
    profile: Profile, convolutions: str, plans: Mapping[str, ConvPlan] | None = None
) -> dict[str, ConvPlan]:
    """Plans to schedule with; `dynamic` ones begin small and grow.

    Args:
        profile: Of the graph that is scheduled.
        convolutions: One of `CONVOLUTIONS`.
        plans: Convolution node -> plan, for `fixed`.
    """
    if convolutions == "fixed":
        known = plans or {}
        return {name: known[origin(name)] for name in profile.fronts}
    if convolutions == "fastest":
        return {name: fastest_of(front) for name, front in profile.fronts.items()}
    return {name: front[0] for name, front in profile.fronts.items()}


def fastest_of(front: Sequence[ConvPlan]) -> ConvPlan:
    """The plan that takes least time, of those the one with least workspace."""
    return min(front, key=lambda plan: (plan.time_ms, plan.workspace))


def workspaces_of(profile: Profile, plans: Mapping[str, ConvPlan]) -> dict[str, int]:
    """Node -> bytes of scratch memory, those of convolutions by their plans."""
    sizes = {name: rounded(size) for name, size in profile.workspaces.items() if size}
    sizes.update((name, rounded(plan.workspace)) for name, plan in plans.items())
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}


def timed_by(profile: Profile, plans: Mapping[str, ConvPlan]) -> Profile:
    """A profile whose convolutions take what their plans take."""
    times = dict(profile.node_ms)
    times.update((name, plan.time_ms) for name, plan in plans.items())
    return replace(profile, node_ms=times)


def state_bytes(graph: Graph, names: Iterable[str] | None = None) -> int:
    """Bytes of parameters and state: of some of them, or of all."""
    chosen = None if names is None else set(names)
    return sum(
        rounded(spec.nbytes)
        for spec in graph.with_role(*PERSISTENT)
        if chosen is None or spec.name in chosen
    )
