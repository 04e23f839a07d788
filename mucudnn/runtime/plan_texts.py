"""Execution plans remembered between processes.

A library that writes its plans as text need not look for the engine again: the text is
kept beside the measurements, under the same key.
"""

import logging

from mucudnn.backends.base import Backend
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import ConvPlan
from mucudnn.runtime.cache import BenchmarkCache

__all__ = ["restore_plans"]

logger = logging.getLogger(__name__)


def restore_plans(backend: Backend, cache: BenchmarkCache, plan: ConvPlan) -> None:
    """Give the backend the texts of a plan's kernels; remember those it had not.

    A text that the library does not take any more is replaced.
    """
    texts = backend.plan_texts
    if texts is None:
        return
    fingerprint = backend.device.fingerprint
    for algo, batch in dict.fromkeys((step.algo, step.batch) for step in plan.steps):
        problem = plan.problem.with_batch(batch)
        known = cache.get_plan_text(fingerprint, problem, algo)
        try:
            if known is not None:
                texts.loads(problem, algo, known)
                continue
        except MucudnnError as e:
            logger.info("rebuilding the plan of %s for %s: %s", algo, problem, e)
        try:
            text = texts.dumps(problem, algo)
        except MucudnnError as e:  # running it will say so, and fall back
            logger.info("%s cannot be planned for %s: %s", algo, problem, e)
            continue
        if text is not None:
            cache.put_plan_text(fingerprint, problem, algo, text)
