"""What a checkpoint's training ran with, for going on to the same bits."""

from mucudnn.backends.base import Backend
from mucudnn.errors import CheckpointError
from mucudnn.runtime.training.checkpoints.checkpoint import Checkpoint
from mucudnn.runtime.training.checkpoints.history import read_resumption
from mucudnn.runtime.training.step.convolution_plans import Plans
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["plans_of", "recall_races"]


def plans_of(checkpoint: Checkpoint, backend: Backend) -> Plans:
    """The convolution plans that a checkpoint's training ran with.

    With the same plans it goes on to the same bits; on another device none are known.

    Raises:
        CheckpointError: It does not make sense, or the device has no such algorithms.
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
                    f"the checkpoint of step {checkpoint.step} cannot be gone on from: "
                    f"plans[{i}]: {backend.device.fingerprint} has no algorithm "
                    f"{step.algo!r} for {micro}; it has {', '.join(known) or 'none'}"
                )
    return {plan.problem: plan for plan in found.plans}


def recall_races(checkpoint: Checkpoint, tuner: Tuner) -> None:
    """Have a tuner's cache say what a checkpoint's training chose its kernels by.

    What it says otherwise is replaced: a trainer then chooses as that training did.
    Nothing is known of another device.

    Raises:
        CheckpointError: It does not make sense.
    """
    found, device = read_resumption(checkpoint), tuner.backend.device.fingerprint
    if found.device == device:
        for raced, times in found.races.items():
            tuner.cache.put_race(device, raced, times, replace=True)
