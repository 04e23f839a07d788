"""Rivals that are timed in turn, each by its own way of taking one sample."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mucudnn.backends import Backend
from mucudnn.runtime.tuning.timing import StoppingRule, Timing

__all__ = ["in_turn", "sampler"]

Sampler = Callable[[], float]
"""One timed run, in ms."""


def sampler(backend: Backend, run: Callable[[], Any]) -> Sampler:
    """Time one run between two events."""
    device = backend.device

    def sample() -> float:
        start = device.begin()
        run()
        return device.elapsed_ms(start, device.record())

    return sample


def in_turn(
    samplers: Mapping[str, Sampler], rule: StoppingRule, deadline: float
) -> dict[str, Timing]:
    """Warm each up, then A B C A B C …; who satisfies the rule drops out.

    A deadline that passes ends it after one round at the earliest.
    """
    for sample in samplers.values():
        sample()
    taken: dict[str, list[float]] = {name: [] for name in samplers}

    def settled(samples: Sequence[float]) -> bool:
        return len(samples) >= rule.min_samples and rule.enough(samples)

    going = list(samplers)
    while going:
        for name in going:
            taken[name].append(samplers[name]())
        late = time.monotonic() >= deadline
        going = [] if late else [n for n in going if not settled(taken[n])]
    return {name: Timing.of(samples) for name, samples in taken.items()}
