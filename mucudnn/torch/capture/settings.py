"""What a step does with its gradients beside giving them to the optimizer."""

from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.arguments import a_number, an_integer, of_type
from mucudnn.torch.capture.python_state import Read

__all__ = ["PLAIN", "StepSettings"]


@dataclass(frozen=True)
class StepSettings:
    """How gradients are made and treated before the optimizer has them.

    Attributes:
        accumulate: Parts a batch is cut into along its first axis; their gradients are
            summed, each part's loss weighed by its share of the batch.
        clip_norm: The norm that all gradients together have at most.
        clip_value: The magnitude that no entry of a gradient exceeds.
        scaler: Scales the loss and skips steps whose gradients are not finite.
        recorded: Whether the optimizer's update is part of a captured step; else the
            optimizer makes it itself, behind one.
        floats: Python numbers that change from step to step: inputs of the graph, as
            learning rates are.
    """

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    scaler: torch.amp.GradScaler | None = None
    recorded: bool = True
    floats: tuple[Read, ...] = ()

    def __post_init__(self) -> None:
        parts = an_integer("accumulate", self.accumulate, 1)
        object.__setattr__(self, "accumulate", parts)
        for name in ("clip_norm", "clip_value"):
            if (limit := getattr(self, name)) is not None:
                a_number(name, limit, 0, above=True, finite=False)
        if self.scaler is not None:
            scaler = "a torch.amp.GradScaler or None"
            of_type("scaler", self.scaler, torch.amp.GradScaler, scaler)

    @property
    def scales(self) -> bool:
        """Whether a scaler is at work."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def key(self) -> tuple[Any, ...]:
        """What of the scaler is decided when a step is captured."""
        if self.scaler is None or not self.scales:
            return ()
        return (
            self.scaler.get_growth_factor(),
            self.scaler.get_backoff_factor(),
            self.scaler.get_growth_interval(),
        )


PLAIN = StepSettings()
"""One batch, one backward pass, gradients as they are."""
