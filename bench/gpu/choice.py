"""Convolutions bound to operands: what plain cuDNN chooses, and rivals in turn."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mucudnn.backends import Backend
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem
from mucudnn.ir.numerics import Numerics
from mucudnn.runtime.tuning.kernel_timer import operands
from mucudnn.runtime.tuning.timing import StoppingRule, Timing

_GRAPH = "eng"
"""Begins the name of every engine of cuDNN's graph API."""


class Bound:
    """A problem with operands of its own.

    Args:
        backend: Where.
        problem: What; its operands are random.

    Raises:
        OutOfMemoryError: They do not fit.
    """

    def __init__(self, backend: Backend, problem: ConvProblem) -> None:
        self.backend, self.problem = backend, problem
        self.a, self.b, self.out = operands(backend, problem, 0, float("inf"))

    def run(self, algo: str, scratch: Any, *, accumulate: bool = False) -> None:
        """One call for the whole problem."""
        self.backend.conv.run(
            self.problem,
            algo,
            self.a,
            self.b,
            self.out,
            scratch,
            accumulate=accumulate,
        )


def first_choice(
    bound: Bound,
    limit: float = float("inf"),
    numerics: Numerics | None = None,
    suffix: str = "",
) -> tuple[str, int] | None:
    """The first algorithm within the limit that is accepted and runs.

    Args:
        bound: The problem and its operands.
        limit: Bytes of workspace.
        numerics: What is accepted; by default what cuDNN and PyTorch accept.
        suffix: What its name must end with.
    """
    backend, problem = bound.backend, bound.problem
    accepted = numerics or Numerics()
    for algo, nbytes in from_graph_api(backend, problem):
        traits = backend.conv.traits(problem, algo)
        wanted = algo.endswith(suffix) if suffix else "+" not in algo
        if nbytes > limit or not wanted or accepted.refusal(traits, whole=not suffix):
            continue
        try:
            bound.run(algo, backend.device.allocate(nbytes))
        except MucudnnError:
            continue
        return algo, nbytes
    return None


def from_graph_api(backend: Backend, problem: ConvProblem) -> list[tuple[str, int]]:
    """Algorithms in the library's order, those of cuDNN's first API left out."""
    rows = backend.conv.algorithms(problem)
    if not backend.name.startswith("cuda"):
        return list(rows)
    return [row for row in rows if row[0].startswith(_GRAPH)]


def plan_of(problem: ConvProblem, algo: str, nbytes: int, parts: int) -> ConvPlan:
    """Equal micro-batches of one algorithm."""
    step = AlgoPerf(
        algo=algo, batch=problem.batch // parts, time_ms=1.0, workspace=nbytes
    )
    return ConvPlan(problem, (step,) * parts)


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
