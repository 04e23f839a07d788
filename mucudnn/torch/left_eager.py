"""What Dynamo leaves to eager mode, said where the user asks what was planned.

Dynamo tells a backend of what it has captured alone: a model with full backward hooks,
with recurrent cells or with a function that is not to be compiled runs without it, and
PyTorch logs that at most. But it counts its reasons.
"""

import warnings
from collections.abc import Mapping

from mucudnn.torch.internals import break_reasons

__all__ = ["LeftEager"]

_SHOWN = 3


class LeftEager:
    """Dynamo's reasons from now on, of all compiled functions of this process."""

    def __init__(self) -> None:
        self._before: Mapping[str, int] = break_reasons()
        self._warned = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why something runs in no graph, each reason once; empty if nothing does."""
        now = break_reasons()
        before = self._before
        return tuple(why for why, n in now.items() if n > before.get(why, 0))

    def warn(self) -> None:
        """Say, once, that there is no plan as there was nothing to plan."""
        reasons = self.reasons
        if self._warned or not reasons:
            return
        self._warned = True
        more = f" ({len(reasons) - _SHOWN} more)" if len(reasons) > _SHOWN else ""
        warnings.warn(
            "nothing was planned, so that no budget is kept: Dynamo has left to eager "
            f"mode what it cannot capture: {'; '.join(reasons[:_SHOWN])}{more}. "
            "torch.compile(..., fullgraph=True) raises there and says at which line; "
            "train_step plans without Dynamo",
            stacklevel=3,
        )
