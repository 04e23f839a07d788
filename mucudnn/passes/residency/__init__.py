"""Residency policies: which tensors are kept, offloaded or recomputed."""

from collections.abc import Mapping
from typing import Any

from mucudnn.ir.graph import Graph
from mucudnn.ir.residency import RECOMPUTED, RECOMPUTED_BACKWARD, Residency
from mucudnn.passes.graph.saved_tensors import Saved, saved_tensors
from mucudnn.passes.registry import ALL, Strategies, name_of
from mucudnn.passes.residency.policy import (
    EVERYTHING,
    PERSISTENTS,
    SMALL,
    PolicyInput,
    ResidencyPolicy,
)
from mucudnn.passes.residency.published import (
    cost_based,
    keep_all,
    lru,
    paging,
    superneurons,
    superneurons_memory,
    superneurons_speed,
    vdnn_all,
    vdnn_conv,
)

__all__ = [
    "EVERYTHING",
    "PERSISTENTS",
    "PLANNED",
    "POLICIES",
    "RECOMPUTED",
    "RECOMPUTED_BACKWARD",
    "SMALL",
    "VDNN_DYN",
    "PolicyInput",
    "Residency",
    "ResidencyPolicy",
    "Saved",
    "check_policy",
    "check_residencies",
    "decide",
    "policy_names",
    "saved_tensors",
]

PLANNED = "planned"
"""Policy that searches, starting from all other policies."""

VDNN_DYN = "vdnn_dyn"
"""Policy that uses the first of vDNN's configurations that fits."""

POLICIES: Strategies[ResidencyPolicy] = Strategies(
    "residency policy",
    (
        keep_all,
        vdnn_all,
        vdnn_conv,
        superneurons,
        superneurons_speed,
        superneurons_memory,
        lru,
        paging,
        cost_based,
    ),
    group="mucudnn.policies",
    reserved=(ALL, PLANNED, VDNN_DYN),
)
"""Residency policies by name; `register` or an entry point of the group adds more.

`planned` and `vdnn_dyn` decide more than residencies: see `passes.planning`.
"""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies."""
    return (PLANNED, VDNN_DYN, *POLICIES.names)


def check_policy(policy: str | ResidencyPolicy) -> None:
    """Raise a `ValueError` for an unknown name, a `TypeError` for another value."""
    if isinstance(policy, str):
        if policy in (PLANNED, VDNN_DYN) or policy in POLICIES.table:
            return
        names = policy_names()
        if policy not in names:
            valid = ", ".join(sorted(names))
            raise ValueError(f"unknown policy {policy!r}; choose one of: {valid}")
    POLICIES.resolve(policy)


def decide(policy: str | ResidencyPolicy, step: PolicyInput) -> Mapping[str, Residency]:
    """Run a policy, possibly a user's, and check its residencies.

    Raises:
        TypeError: The policy did not return a mapping of residencies.
        ValueError: The policy is unknown, or names an unknown tensor.
    """
    name = f"residency policy {name_of(policy)!r}"
    found: object = POLICIES.resolve(policy)(step)
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{name} returned {found!r}; a mapping from names of tensors to Residency "
            "is wanted, such as {} to keep everything"
        )
    check_residencies(name, found, step.graph)
    return found


def check_residencies(whose: str, found: Mapping[Any, object], graph: Graph) -> None:
    """Raise a `ValueError` for unknown tensors, a `TypeError` for invalid values."""
    for tensor, choice in found.items():
        if tensor not in graph.tensors and tensor not in (EVERYTHING, PERSISTENTS):
            raise ValueError(
                f"{whose} names {tensor!r}, which is no tensor of the step; "
                "saved_tensors(step.graph) has those that may leave"
            )
        if not isinstance(choice, Residency):
            valid = ", ".join(f"Residency.{r.name}" for r in Residency)
            raise TypeError(
                f"{whose} has {choice!r} for {tensor!r}; choose one of: {valid}"
            )
