"""Residencies: what a policy decides about, and every policy that ships."""

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
"""The policy that is a search over the others and beyond."""

VDNN_DYN = "vdnn_dyn"
"""The policy that takes the first of vDNN's configurations that fits."""

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
"""What leaves; more join by `register` or by an entry point of the group.

`planned` and `vdnn_dyn` decide more than residencies: see `passes.planning`.
"""


def policy_names() -> tuple[str, ...]:
    """What is taken as a policy, beside functions."""
    return (PLANNED, VDNN_DYN, *POLICIES.names)


def check_policy(policy: str | ResidencyPolicy) -> None:
    """Refuse what is no policy.

    Raises:
        ValueError: A name is not known; the message lists those that are.
        TypeError: It is neither a name nor a function.
    """
    if isinstance(policy, str):
        if policy in (PLANNED, VDNN_DYN) or policy in POLICIES.table:
            return
        names = policy_names()
        if policy not in names:
            valid = ", ".join(sorted(names))
            raise ValueError(f"unknown policy {policy!r}; choose one of: {valid}")
    POLICIES.resolve(policy)


def decide(policy: str | ResidencyPolicy, step: PolicyInput) -> Mapping[str, Residency]:
    """What a policy decides, checked: it may be somebody's own.

    Raises:
        TypeError: It decides on something else than residencies by name.
        ValueError: It is not known, or names a tensor that the step does not have.
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
    """Refuse residencies of what is no tensor of a graph, and what is no residency.

    Raises:
        ValueError: There is no such tensor.
        TypeError: It is something else than a `Residency`.
    """
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
