"""A budget for a step whose optimizer makes its update itself.

Forward and backward are planned in what is left beside what the optimizer holds. The
update finds parameters, buffers, all gradients and what the step returns, and needs
what was measured: the budget has to hold both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.liveness import rounded
from mucudnn.torch.capture.parts import StepParts
from mucudnn.torch.capture.whole_step import CapturedStep
from mucudnn.torch.execution.bound_step import BoundStep
from mucudnn.torch.execution.own_update import copies_needed
from mucudnn.torch.measurement.own_updates import UpdateBytes, measured_update
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["OwnUpdate"]

_Planned = tuple[TorchPlan, BoundStep]


@dataclass(frozen=True)
class OwnUpdate:
    """What an optimizer does behind a planned forward and backward pass.

    Attributes:
        bytes: What it has in use.
        reason: Why it is not planned.
    """

    bytes: UpdateBytes
    reason: str

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        captured: CapturedStep,
        parts: StepParts,
        reason: str,
    ) -> "OwnUpdate | None":
        """What an optimizer does by itself; None if its update is captured.

        Raises:
            UnsupportedError: It cannot be told what that needs; says why.
        """
        if captured.gradients is None:
            return None
        trained = [id(parts.parameters[name]) for name in captured.gradients if name]
        try:
            return cls(measured_update(optimizer, trained), reason)
        except UnsupportedError as e:
            raise UnsupportedError(
                f"the optimizer's update cannot be planned: {reason}. Nor can it be "
                f"left to the optimizer: {e}. A model that is compiled, "
                "torch.compile(model, backend=mt.backend(budget=...)), keeps a budget "
                "of forward and backward with any optimizer"
            ) from e

    def planned(
        self,
        captured: CapturedStep,
        parts: StepParts,
        budget: float,
        plan: Callable[[float], _Planned],
    ) -> _Planned:
        """The passes in what is left for them.

        Args:
            captured: The passes.
            parts: What the step is made of.
            budget: For both.
            plan: Plans the passes within so many bytes.

        Raises:
            PlanningError: They, or the update, do not fit; says what would do.
        """
        peak = _resident(parts) + _left(captured, parts) + self.bytes.most
        try:
            found, bound = plan(max(0.0, budget - self.bytes.held))
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            least = max(e.least_bytes + self.bytes.held, peak)
            raise self._refusal(budget, least, e.node) from None
        if peak > budget:
            raise self._refusal(budget, peak, None)
        told = replace(
            found,
            budget=budget,
            resident_bytes=found.resident_bytes + self.bytes.state,
            own_update=self.bytes,
            update_peak_bytes=peak,
            update_reason=self.reason,
        )
        return told, bound

    def _refusal(self, budget: float, least: int, node: str | None) -> PlanningError:
        return PlanningError(
            f"the step does not fit into {exact_bytes(int(budget))}: its optimizer "
            f"makes its update itself ({self.reason}), with all gradients and "
            f"{exact_bytes(self.bytes.most)} more; the least budget that works is "
            f"{exact_bytes(least)}",
            node=node,
            short_by=0 if math.isinf(budget) else least - int(budget),
            least_bytes=least,
        )


def _resident(parts: StepParts) -> int:
    """Bytes of parameters, buffers and rates."""
    return _nbytes(parts.tensors())


def _left(captured: CapturedStep, parts: StepParts) -> int:
    """Bytes of what the passes return, and of the copies that gradients need."""
    (output,) = captured.module.graph.find_nodes(op="output")
    values = [node.meta.get("val") for node in output.args[0]]
    values = values[: len(values) - len(captured.names)]
    names = [name for name in captured.gradients or () if name]
    scaled = len(captured.gradients or ()) - len(names)
    gradients = values[len(values) - len(names) - scaled : len(values) - scaled]
    parameters = [parts.parameters[name] for name in names]
    copied = copies_needed(gradients, parameters)
    apart = sum(
        rounded(gradient.numel() * gradient.element_size())
        for gradient, needed in zip(gradients, copied, strict=True)
        if needed
    )
    return _nbytes([v for v in values if isinstance(v, torch.Tensor)]) + apart


def _nbytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of what tensors lie in, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(rounded(int(storage.nbytes())) for storage in storages.values())
