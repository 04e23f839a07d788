"""What a step does with its gradients beside giving them to the optimizer."""

from dataclasses import dataclass
from typing import Any

import torch

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
    """

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    scaler: torch.amp.GradScaler | None = None
    recorded: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int):
            kind = type(self.accumulate).__name__
            raise TypeError(f"accumulate is a {kind}; a number of parts is wanted")
        if self.accumulate < 1:
            raise ValueError(f"accumulate is {self.accumulate}; at least 1 is wanted")
        for name in ("clip_norm", "clip_value"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} is {limit}; a positive number is wanted")
        scaler: Any = self.scaler
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"scaler is a {type(scaler).__name__}; a torch.amp.GradScaler is wanted"
            )

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
