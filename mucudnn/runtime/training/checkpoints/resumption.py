"""What a checkpoint's training ran with, for going on to the same bits."""

from mucudnn.backends.base import Backend
from mucudnn.errors import CheckpointError
from mucudnn.runtime.training.checkpoints.checkpoint import Checkpoint
from mucudnn.runtime.training.checkpoints.history import read_resumption
from mucudnn.runtime.training.step.convolution_plans import Plans

__all__ = ["plans_of"]


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
