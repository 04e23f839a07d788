"""How large a batch, and how deep a ResNet, our planner fits a memory: every byte.

What fits is asked of undivided convolutions, whose smallest algorithms need no
workspace as it is; what the largest batch costs in time is planned as all else is.
"""

from typing import Any

from bench.papers.capacity import GIB
from bench.papers.networks import MODELS, of_library
from bench.papers.planner import estimated, unfused_step
from mucudnn.passes.estimate import estimate
from mucudnn.passes.planning.plan_step import largest_batch_within, minimum_budget
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import PLANNED

DEEPEST = 1000
"""Blocks in the third stage at which the search for the deepest ResNet ends."""

_DEVICE = "k40c"


def planned_batch(name: str, nbytes: int = 12 * GIB) -> dict[str, Any]:
    """The largest batch of one of SuperNeurons' networks. Ready for JSON.

    Args:
        name: A key of `MODELS`.
        nbytes: Memory.

    Returns:
        The batches of our planner and of SuperNeurons' policy in the library, and what
        the former's step costs.
    """
    image = MODELS[name]().data[1]
    model = of_library(name)
    batches = {
        policy: batch_within(model, image, policy, nbytes)
        for policy in (PLANNED, "superneurons")
    }
    step = estimated(model, batches[PLANNED], image, _DEVICE)
    return {
        "batch": batches[PLANNED],
        "superneurons_batch": batches["superneurons"],
        **step.within(nbytes),
    }


def batch_within(model: str, image: int, policy: str, nbytes: int) -> int:
    """The largest batch that a policy runs in some memory.

    Args:
        model: As `get_model` knows it.
        image: Its height and width.
        policy: A name in `policy_names()`.
        nbytes: Memory.
    """

    def least(batch: int) -> int:
        return least_bytes(model, image, batch, policy)

    half = 1
    while least(2 * half) <= nbytes // 2:
        half *= 2
    low, high = least(half), least(2 * half)
    guess = half + half * (nbytes - low) // max(1, high - low)
    return largest_batch_within(least, nbytes, start=max(1, guess))


def planned_depth(batch: int, nbytes: int, most: int = DEEPEST) -> dict[str, Any]:
    """The deepest ResNet with 6, 32, n and 6 blocks; ready for JSON.

    Args:
        batch: Images in a step.
        nbytes: Memory.
        most: The largest n that is tried: where the parameters may leave as well, a
            network can be as deep as the host's memory allows.
    """

    def least(n: int) -> int:
        return least_bytes(f"resnet:6,32,{n},6", 227, batch, PLANNED)

    few, more = least(8), least(16)
    guess = 16 + 8 * (nbytes - more) // max(1, more - few)
    n = largest_batch_within(least, nbytes, start=max(1, guess), most=most)
    return {
        "technique": PLANNED,
        "batch": batch,
        "depth": 3 * n + 134 if n else 0,
        "at_least": n == most,
    }


def least_bytes(model: str, image: int, batch: int, policy: str) -> int:
    """The least budget of a step with momentum on the K40c."""
    graph = unfused_step(model, batch, image)
    profile = estimate(graph, _DEVICE, batch_policy="undivided")
    return minimum_budget(StepRequest(graph, profile, policy=policy))
