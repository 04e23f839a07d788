"""One training step in PyTorch's eager mode, with the meaning of a planned step.

Results are those of a planned `TrainStep` call, bit for bit: the parts of the batch,
the scaler, the clipping and the update come in the same order, and every parameter's
`grad` is afterwards what it was before. Clipping and scaling are PyTorch's own
functions, so that a planned step can be checked against them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.torch.capture.step import leaves_of, loss_of, pair_of
from mucudnn.torch.capture.step_tensors import Batch, StepSettings, called
from mucudnn.torch.optimizer_update import own_gradients, scaled_closure_error


def run_eager_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    settings: StepSettings,
) -> Any:
    """Train on one batch in eager mode; return its loss, or a pair of loss and extras.

    Gradients of the step start from none. Afterwards, also behind an exception, `grad`
    of parameters, of the batch and of whatever else the loss depends on is as before.

    The optimizer is given a closure if it cannot do without one.

    Raises:
        UnsupportedError: The optimizer needs a closure, and there is a scaler.
    """
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    modules = [m for m in (model, loss_fn) if isinstance(m, torch.nn.Module)]
    parameters = dict.fromkeys(
        [*(p for m in modules for p in m.parameters()), *updated]
    )
    known = set(map(id, updated))
    others = [p for p in parameters if id(p) not in known]
    scaler: Any = settings.scaler if settings.scales else None
    skipped = False
    result: Any = None

    def run_passes() -> tuple[torch.Tensor, list[Any]]:
        """Run forward and backward; leave the gradients that the optimizer needs."""
        nonlocal skipped, result
        for leaf in before:
            leaf.grad = None
        # What computed the batch is not trained by this step, nor is the batch.
        given = [
            t.detach().requires_grad_() if t.requires_grad else t for t in batch.tensors
        ]
        total: Any = None
        extras = []
        for tensors, divisor in batch.parts(given, settings.accumulate):
            torch.clear_autocast_cache()  # of casts before the last update
            args, kwargs = batch.arguments(tensors)
            result = loss_fn(called(model, args, kwargs), *args[1:])
            loss, found = loss_of(result)
            extras.append(
                pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, found)
            )
            loss = loss / divisor if divisor != 1 else loss
            goal = loss if scaler is None else scaler.scale(loss)
            for leaf in leaves_of(goal):
                if leaf not in before:
                    before[leaf], leaf.grad = leaf.grad, None
            with torch.autocast(loss.device.type, enabled=False):
                goal.backward()
            total = loss.detach() if total is None else total + loss.detach()
        if scaler is not None:
            scaler.unscale_(optimizer)
            if unscaled := [p for p in others if p.grad is not None]:
                scaler.unscale_(torch.optim.SGD(unscaled, lr=0.0))
                # As in a planned step, these gradients count, too.
                skipped = not all(p.grad.isfinite().all() for p in unscaled)
        if settings.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, settings.clip_value)
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        return total, extras

    def update() -> None:
        """Have the optimizer make its update, unless the scaler skips it."""
        # Updates are not cast: users call them outside of autocast.
        with torch.autocast(updated[0].device.type, enabled=False):
            if scaler is None:
                optimizer.step()
                return
            if not skipped:
                scaler.step(optimizer)
            scaler.update()

    def run_with_closure(*made: tuple[torch.Tensor, list[Any]]) -> Any:
        """Have the optimizer run the passes, from the second on if some are made."""
        if scaler is not None:
            raise scaled_closure_error(optimizer)
        ready, results = list(made), list(made)

        def closure() -> torch.Tensor:
            found = ready.pop() if ready else run_passes()
            if not results:
                results.append(found)
            return found[0]

        optimizer.step(closure)
        return results[0]

    def run() -> Any:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            return run_with_closure()
        made, versions = run_passes(), [p._version for p in updated]
        try:
            update()
        except Exception:
            # An optimizer whose closure is optional by its signature alone refuses to
            # go on without one before it changes anything.
            if closure is None or versions != [p._version for p in updated]:
                raise
            return run_with_closure(made)
        return made

    with own_gradients(parameters) as before, torch.enable_grad():
        try:
            loss, extras = run()
        finally:
            torch.clear_autocast_cache()  # of parameters that the update has changed
    optimizer._opt_called = True  # what schedulers look for
    found: Any = tuple(extras) if settings.accumulate > 1 else extras[0]
    if all(part is None for part in extras):
        found = None
    return pair_of(loss, found, type(result))
