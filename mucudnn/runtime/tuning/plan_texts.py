"""Execution plans remembered between processes.

A library that writes its plans as text need not look for the engine again: the text is
kept beside the measurements, under the same key.
"""

import logging
from collections.abc import Iterator

from mucudnn.backends.base import Backend, PlanTexts
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.runtime.database.cache import BenchmarkCache

__all__ = ["restore_plans"]

logger = logging.getLogger(__name__)

_ADDING = "+="
"""Ends the name of a plan that adds to its output."""


def restore_plans(backend: Backend, cache: BenchmarkCache, plan: ConvPlan) -> None:
    """Give the backend the texts of a plan's kernels; remember those it had not.

    A text that the library does not take any more is replaced.
    """
    texts = backend.plan_texts
    if texts is None:
        return
    for step in dict.fromkeys(_kernels(plan)):
        _restore(backend.device.fingerprint, texts, cache, step)


_Kernel = tuple[ConvProblem, str, bool]


def _kernels(plan: ConvPlan) -> Iterator[_Kernel]:
    """Problem, algorithm and whether it adds, of every micro-batch."""
    adds_up = plan.problem.direction is Direction.BACKWARD_FILTER
    for window, step in plan.slices():
        add = adds_up and window.start > 0
        yield plan.problem.with_batch(step.batch), step.algo, add


def _restore(
    fingerprint: str, texts: PlanTexts, cache: BenchmarkCache, kernel: _Kernel
) -> None:
    problem, algo, add = kernel
    name = f"{algo}{_ADDING}" if add else algo
    known = cache.get_plan_text(fingerprint, problem, name)
    try:
        if known is not None:
            texts.loads(problem, algo, known, accumulate=add)
            return
    except MucudnnError as e:
        logger.info("rebuilding the plan of %s for %s: %s", name, problem, e)
    try:
        text = texts.dumps(problem, algo, accumulate=add)
    except MucudnnError as e:  # running it will say so, and fall back
        logger.info("%s cannot be planned for %s: %s", name, problem, e)
        return
    if text is not None:
        cache.put_plan_text(fingerprint, problem, name, text)
