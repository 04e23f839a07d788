"""Restore the plans and races of a checkpoint, to resume with bit-identical results."""

from mucudnn.backends.base import Backend
from mucudnn.errors import CheckpointError
from mucudnn.runtime.training.checkpoints.checkpoint import Checkpoint
from mucudnn.runtime.training.checkpoints.history import read_resumption
from mucudnn.runtime.training.step.convolution_plans import Plans
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["plans_of", "recall_races"]


def plans_of(checkpoint: Checkpoint, backend: Backend) -> Plans:
    """Return the convolution plans that a checkpoint's training used.

    The same plans give bit-identical results. On another device none apply.

    Raises:
        CheckpointError: The progress is not valid, or the device lacks an algorithm.
    """
    found = read_resumption(checkpoint)
    if found.device != backend.device.fingerprint:
        return {}
    for i, plan in enumerate(found.plans):
        for step in plan.steps:
            micro = plan.problem.with_batch(step.batch)
            known = [name for name, _ in backend.conv.algorithms(micro)]
            if step.algo not in known:
                raise CheckpointError(
                    f"the checkpoint of step {checkpoint.step} cannot be resumed from: "
                    f"plans[{i}]: {backend.device.fingerprint} has no algorithm "
                    f"{step.algo!r} for {micro}; it has {', '.join(known) or 'none'}"
                )
    return {plan.problem: plan for plan in found.plans}


def recall_races(checkpoint: Checkpoint, tuner: Tuner) -> None:
    """Write the races of a checkpoint's training to a tuner's cache.

    They replace other results, so that a trainer makes the same choices. On another
    device none apply.

    Raises:
        CheckpointError: The progress is not valid.
    """
    found, device = read_resumption(checkpoint), tuner.backend.device.fingerprint
    if found.device == device:
        for raced, times in found.races.items():
            tuner.cache.put_race(device, raced, times, replace=True)
