"""A budget for a step whose optimizer makes its update itself.

Forward and backward are planned in what is left beside what the optimizer holds. The
update finds parameters, buffers, all gradients and what the step returns, and needs
what was measured: the budget has to hold both.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import torch

from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.liveness import rounded
from mucudnn.torch.capture.parts import StepParts
from mucudnn.torch.capture.whole_step import CapturedStep
from mucudnn.torch.execution.own_update import copies_needed, scaled_closure_error
from mucudnn.torch.measurement.own_updates import UpdateBytes, measured_update
from mucudnn.torch.step_plan import TorchPlan
from mucudnn.torch.storages import bytes_in_storages

__all__ = ["OwnUpdate"]

_BoundT = TypeVar("_BoundT")

_UPDATE = "the optimizer's update"


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
        parameters: Mapping[str, torch.Tensor],
        reason: str,
        *,
        foreach: bool | None = None,
    ) -> "OwnUpdate | None":
        """What an optimizer does by itself; None if its update is captured.

        Args:
            optimizer: Stays as it is.
            captured: The step.
            parameters: The optimizer's, by name.
            reason: Why its update is not captured.
            foreach: As `measured_update` takes it.

        Raises:
            UnsupportedError: It cannot be told what that needs; says why.
        """
        if captured.gradients is None:
            return None
        trained = [id(parameters[name]) for name in captured.gradients if name]
        try:
            found = measured_update(optimizer, trained, foreach=foreach)
        except UnsupportedError as e:
            raise UnsupportedError(
                f"the optimizer's update cannot be planned: {reason}. Nor can it be "
                f"left to the optimizer: {e}. A model that is compiled, "
                "torch.compile(model, backend=mt.backend(budget=...)), keeps a budget "
                "of forward and backward with any optimizer"
            ) from e
        if found.closure and "" in captured.gradients:
            raise scaled_closure_error(optimizer)
        return cls(found, reason)

    def planned(
        self,
        captured: CapturedStep,
        parts: StepParts,
        budget: float,
        plan: Callable[[float], tuple[TorchPlan, _BoundT]],
    ) -> tuple[TorchPlan, _BoundT]:
        """The passes in what is left for them.

        Args:
            captured: The passes.
            parts: What the step is made of.
            budget: For both.
            plan: Plans the passes within so many bytes; and what runs them.

        Raises:
            PlanningError: They, or the update, do not fit; says what would do.
        """
        peak = self.peak_bytes(captured, parts)
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

    def peak_bytes(self, captured: CapturedStep, parts: StepParts) -> int:
        """The most that is in use during the update."""
        left = _returned(captured) + _apart(captured, parts)
        return _resident(parts) + left + self.bytes.most

    def behind(
        self, graph: Graph, profile: Profile, captured: CapturedStep, parts: StepParts
    ) -> tuple[Graph, Profile]:
        """The passes' graph and costs with the update as a last node.

        Its time is not known, and none.
        """
        state = TensorSpec(
            f"{_UPDATE}: state", (self.bytes.held,), "uint8", Role.BORROWED
        )
        node = Node(_UPDATE, "own_update", (state.name,), (), phase=Phase.UPDATE)
        scratch = self.bytes.most - self.bytes.held + _apart(captured, parts)
        tensors = MappingProxyType({**graph.tensors, state.name: state})
        return Graph(tensors, (*graph.nodes, node), graph.outputs), replace(
            profile,
            node_ms={**profile.node_ms, node.name: 0.0},
            workspaces={**profile.workspaces, node.name: scratch},
        )

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
    return bytes_in_storages(parts.tensors())


def _results(captured: CapturedStep) -> list[torch.Tensor]:
    """What the passes return, but for what their inputs have become."""
    (output,) = captured.module.graph.find_nodes(op="output")
    values = [node.meta.get("val") for node in output.args[0]]
    return values[: len(values) - len(captured.names)]


def _returned(captured: CapturedStep) -> int:
    """Bytes of what the passes return."""
    return bytes_in_storages(
        [v for v in _results(captured) if isinstance(v, torch.Tensor)]
    )


def _apart(captured: CapturedStep, parts: StepParts) -> int:
    """Bytes of the copies that gradients need."""
    values = _results(captured)
    names = [name for name in captured.gradients or () if name]
    scaled = len(captured.gradients or ()) - len(names)
    gradients = values[len(values) - len(names) - scaled : len(values) - scaled]
    parameters = [parts.parameters[name] for name in names]
    copied = copies_needed(gradients, parameters)
    return sum(
        rounded(gradient.numel() * gradient.element_size())
        for gradient, needed in zip(gradients, copied, strict=True)
        if needed
    )
