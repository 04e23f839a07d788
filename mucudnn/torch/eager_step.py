"""One training step in PyTorch's eager mode, with the meaning of a planned step.

Results are those of a planned `TrainStep` call, bit for bit: the parts of the batch,
the scaler, the clipping and the update come in the same order, and every parameter's
`grad` is afterwards what it was before. Clipping and scaling are PyTorch's own
functions, so that a planned step can be checked against them.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.torch.capture.batches import Batch, called
from mucudnn.torch.capture.gradients import loss_of
from mucudnn.torch.capture.settings import StepSettings
from mucudnn.torch.execution.own_update import own_gradients, scaled_closure_error


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

    Args:
        model: Called with the first argument of the batch and with those by name.
        loss_fn: Called with the model's result and the rest of the batch.
        optimizer: Makes the update; it is given a closure if it cannot do without.
        batch: As `TrainStep` was called with it.
        settings: How gradients are accumulated, scaled and clipped.

    Raises:
        UnsupportedError: The optimizer needs a closure, and there is a scaler.
    """
    modules = [m for m in (model, loss_fn) if isinstance(m, torch.nn.Module)]
    found = [p for module in modules for p in module.parameters()]
    given = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = list(dict.fromkeys([*found, *given]))
    with own_gradients(parameters) as before, torch.enable_grad():
        step = _EagerStep(model, loss_fn, optimizer, batch, settings, parameters)
        try:
            loss, extras = step.run(before)
        finally:
            torch.clear_autocast_cache()  # of parameters that the update has changed
    optimizer._opt_called = True  # what schedulers look for
    if all(part is None for part in extras):
        return loss
    return loss, (tuple(extras) if settings.accumulate > 1 else extras[0])


@dataclass(frozen=True)
class _EagerStep:
    """The passes and the update of one step.

    Attributes:
        parameters: All of the model, the loss and the optimizer.
    """

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    batch: Batch
    settings: StepSettings
    parameters: Sequence[torch.Tensor]

    def run(self, before: dict[torch.Tensor, Any]) -> tuple[torch.Tensor, list[Any]]:
        """Make the step; return the loss and every part's extras.

        Args:
            before: Gradients to be put back; leaves that get some are added.
        """
        accepted = inspect.signature(self.optimizer.step).parameters
        closure = accepted.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            return self._run_with_closure(before, [])
        made = self._run_passes(before)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        versions = [p._version for p in trained]
        try:
            # Updates are not cast: users call them outside of autocast.
            with torch.autocast(made[0].device.type, enabled=False):
                self._update()
        except Exception:
            # An optimizer whose closure is optional by its signature alone refuses to
            # go on without one before it changes anything.
            if closure is None or versions != [p._version for p in trained]:
                raise
            return self._run_with_closure(before, [made])
        return made

    def _run_with_closure(
        self,
        before: dict[torch.Tensor, Any],
        made: list[tuple[torch.Tensor, list[Any]]],
    ) -> tuple[torch.Tensor, list[Any]]:
        """Have the optimizer run the passes; return the first ones' results.

        Args:
            before: As `run` takes it.
            made: The first passes' results, if they have run already.
        """
        if self.settings.scales:
            raise scaled_closure_error(self.optimizer)
        ready = list(made)

        def closure() -> torch.Tensor:
            if ready:
                return ready.pop()[0]
            found = self._run_passes(before)
            if not made:
                made.append(found)
            return found[0]

        self.optimizer.step(closure)
        return made[0]

    def _run_passes(
        self, before: dict[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, list[Any]]:
        """Run forward and backward; leave the gradients that the optimizer needs."""
        for leaf in before:
            leaf.grad = None
        scaler = self.settings.scaler if self.settings.scales else None
        # What computed the batch is not trained by this step, nor is the batch.
        tensors = [
            t.detach().requires_grad_() if t.requires_grad else t
            for t in self.batch.tensors
        ]
        total: Any = None
        extras: list[Any] = []
        for part, divisor in self.batch.parts(tensors, self.settings.accumulate):
            torch.clear_autocast_cache()
            args, kwargs = self.batch.arguments(part)
            result = self.loss_fn(called(self.model, args, kwargs), *args[1:])
            loss, found = loss_of(result)
            extras.append(
                pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, found)
            )
            loss = loss / divisor if divisor != 1 else loss
            goal = loss if scaler is None else scaler.scale(loss)
            for leaf in _leaves_of(goal):
                if leaf not in before:
                    before[leaf], leaf.grad = leaf.grad, None
            with torch.autocast(loss.device.type, enabled=False):
                goal.backward()
            total = loss.detach() if total is None else total + loss.detach()
        self._unscale_and_clip()
        return total, extras

    def _unscale_and_clip(self) -> None:
        """Treat all gradients as `GradScaler.unscale_` and `clip_grad_*` do."""
        scaler, trained = self.settings.scaler, self._trained()
        if scaler is not None and self.settings.scales:
            scaler.unscale_(self.optimizer)
            if others := self._not_updated():
                scaler.unscale_(torch.optim.SGD(others, lr=0.0))
        if self.settings.clip_value is not None:
            torch.nn.utils.clip_grad_value_(trained, self.settings.clip_value)
        if self.settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, self.settings.clip_norm)

    def _update(self) -> None:
        """Have the optimizer make its update, unless the scaler skips it."""
        scaler = self.settings.scaler
        if scaler is None or not self.settings.scales:
            self.optimizer.step()
            return
        # As in a planned step, gradients that the optimizer is not given count, too.
        if all(torch.isfinite(p.grad).all() for p in self._not_updated()):
            scaler.step(self.optimizer)
        scaler.update()

    def _trained(self) -> list[torch.Tensor]:
        return [p for p in self.parameters if p.grad is not None]

    def _not_updated(self) -> list[torch.Tensor]:
        """Return the parameters with a gradient that the optimizer does not have."""
        groups = self.optimizer.param_groups
        updated = {id(p) for group in groups for p in group["params"]}
        return [p for p in self._trained() if id(p) not in updated]


def _leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves that a backward pass gives gradients to.

    A loss may close over modules, such as a discriminator, whose gradients are none of
    the step's. `backward(inputs=...)` would spare them, and refuses checkpoints.
    """
    pending, seen = [loss.grad_fn], {loss.grad_fn}
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                pending.append(following)
