"""Residencies: what a policy decides about, and every policy that ships."""

from collections.abc import Mapping

from mucudnn.passes.registry import ALL, Strategies, name_of
from mucudnn.passes.residency.choice import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED,
    SMALL,
    Residency,
    ResidencyPolicy,
    Saved,
    Step,
    saved_tensors,
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
    "SMALL",
    "VDNN_DYN",
    "Residency",
    "ResidencyPolicy",
    "Saved",
    "Step",
    "decide",
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

`planned` and `vdnn_dyn` decide more than residencies: see `passes.planned`.
"""


def decide(policy: str | ResidencyPolicy, step: Step) -> Mapping[str, Residency]:
    """What a policy decides, checked: it may be somebody's own.

    Raises:
        TypeError: It decides on something else than residencies by name.
        ValueError: It is not known, or names a tensor that the step does not have.
    """
    name = name_of(policy)
    found = POLICIES.resolve(policy)(step)
    _check_mapping(name, found)
    for tensor, choice in found.items():
        if tensor not in step.graph.tensors and tensor not in (EVERYTHING, PERSISTENTS):
            raise ValueError(
                f"residency policy {name!r} names {tensor!r}, which is no tensor of "
                "the step; saved_tensors(step.graph) has those that may leave"
            )
        _check_residency(name, tensor, choice)
    return found


def _check_mapping(name: str, found: object) -> None:
    if not isinstance(found, Mapping):
        raise TypeError(
            f"residency policy {name!r} returned {found!r}; a mapping from names of "
            "tensors to Residency is wanted, such as {} to keep everything"
        )


def _check_residency(name: str, tensor: str, choice: object) -> None:
    if not isinstance(choice, Residency):
        valid = ", ".join(f"Residency.{r.name}" for r in Residency)
        raise TypeError(
            f"residency policy {name!r} has {choice!r} for {tensor!r}; choose one of: "
            f"{valid}"
        )
