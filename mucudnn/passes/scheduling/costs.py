"""Times and workspaces of nodes for chosen convolution plans.

A profile covers the original graph. Recomputed nodes of a rewritten graph have the
costs of their originals.
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
"""How convolutions get their workspace: free bytes, as much as they want, the least, or
by given plans."""


def origin(node: str) -> str:
    """Return the original of a recomputed node; the node itself if it is none."""
    return node.partition("~")[0]


def without_others(profile: Profile, graph: Graph) -> Profile:
    """Return a profile restricted to a graph's nodes."""
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
    """Return a profile with entries for the recomputed nodes of a graph."""
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
    """Return the plans to schedule with; `dynamic` plans start small and grow later."""
    if convolutions == "fixed":
        known = plans or {}
        return {name: known[origin(name)] for name in profile.fronts}
    if convolutions == "fastest":
        return {name: fastest_of(front) for name, front in profile.fronts.items()}
    return {name: front[0] for name, front in profile.fronts.items()}


def fastest_of(front: Sequence[ConvPlan]) -> ConvPlan:
    """Return the fastest plan; of equally fast ones, the one with least workspace."""
    return min(front, key=lambda plan: (plan.time_ms, plan.workspace))


def workspaces_of(profile: Profile, plans: Mapping[str, ConvPlan]) -> dict[str, int]:
    """Return the workspace of each node in bytes, that of convolutions by plan."""
    sizes = {name: rounded(size) for name, size in profile.workspaces.items() if size}
    sizes.update((name, rounded(plan.workspace)) for name, plan in plans.items())
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}


def timed_by(profile: Profile, plans: Mapping[str, ConvPlan]) -> Profile:
    """Return a profile with the times of convolution plans."""
    times = dict(profile.node_ms)
    times.update((name, plan.time_ms) for name, plan in plans.items())
    return replace(profile, node_ms=times)


def state_bytes(graph: Graph, names: Iterable[str] | None = None) -> int:
    """Return the bytes of some or all parameters and state."""
    chosen = None if names is None else set(names)
    return sum(
        rounded(spec.nbytes)
        for spec in graph.with_role(*PERSISTENT)
        if chosen is None or spec.name in chosen
    )
